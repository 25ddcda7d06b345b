"""Sampling from the pair, and how often the draft's token is the target's under the same noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from training.data import END_ID
from training.model import Llama, Past


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Standard Gumbel noise from 32 random bits a token, as Baton's sampler makes it."""
    bits = torch.randint(2**32, shape, generator=generator, dtype=torch.int64)
    v = (bits.double() + 0.5) * 2.0**-32
    return (-torch.log(-torch.log1p(-v))).float()


@torch.no_grad()
def generate(model: Llama, prompts: Tensor, count: int, temperature: float, generator: torch.Generator) -> Tensor:
    """Continues prompts of one length by `count` tokens: argmax(logits + T * noise). Nothing stops at `<|end|>`."""
    rows, length = prompts.shape
    past = [Past(length + count) for _ in model.layers]
    out = [prompts]
    ids, start = prompts, 0
    for position in range(length, length + count):
        logits = model.logits(ids, past, start)[:, -1]
        if temperature > 0:
            logits = logits + temperature * gumbel((rows, logits.shape[-1]), generator)
        ids, start = logits.argmax(-1, keepdim=True), position
        out.append(ids)
    return torch.cat(out, 1)


def until_end(tokens: list[int]) -> list[int]:
    """The tokens before the first `<|end|>`."""
    return tokens[: tokens.index(END_ID)] if END_ID in tokens else tokens


def target_documents(
    target: Llama, documents: list[np.ndarray], count: int, length: int, seed: int, rows: int = 64
) -> list[np.ndarray]:
    """About `count` tokens written by the target itself, from the beginnings of training documents."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    made: list[np.ndarray] = []
    while len(made) * length < count:
        head = int(rng.choice([8, 16, 32, 64]))
        chosen = rng.choice([i for i, document in enumerate(documents) if len(document) > head], rows)
        prompts = torch.from_numpy(np.stack([documents[i][:head] for i in chosen]).astype(np.int64))
        temperature = float(rng.choice([0.3, 0.8, 0.8, 1.0]))
        written = generate(target, prompts, length - head, temperature, generator).numpy().astype(np.int32)
        made.extend(written)
    return made


@dataclass(frozen=True)
class Acceptance:
    """Shares of positions at one temperature; `acceptable` is what the best possible coupling could accept."""

    coupled: float
    acceptable: float
    tokens_per_check: float
    positions: int


@torch.no_grad()
def acceptance(
    target: Llama, draft: Llama, rows: Tensor, first: int, temperature: float, seed: int, k: int = 4
) -> Acceptance:
    """How often both models take the same token with the same noise, at positions from `first` on, on given text.

    `tokens_per_check` is what one verification of `k` draft tokens yields along this text: the accepted run, plus one.
    """
    generator = torch.Generator().manual_seed(seed)
    equal, acceptable = [], 0.0
    for row in rows:
        theirs, ours = target.logits(row[None])[0, first:], draft.logits(row[None])[0, first:]
        noise = gumbel(tuple(theirs.shape), generator) * temperature if temperature else torch.zeros_like(theirs)
        equal.append((theirs + noise).argmax(-1) == (ours + noise).argmax(-1))
        if temperature:
            p, q = torch.softmax(theirs / temperature, -1), torch.softmax(ours / temperature, -1)
            acceptable += torch.minimum(p, q).sum(-1).mean().item()
    same = torch.stack(equal)
    share = same.float().mean().item()
    runs = same.unfold(1, k, 1).float().cumprod(-1).sum(-1)
    return Acceptance(share, acceptable / len(rows) if temperature else share, 1 + runs.mean().item(), same.numel())

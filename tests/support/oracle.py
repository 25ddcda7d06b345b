"""Reference output by transformers: greedy tokens of a checkpoint on CPU in float32, and where they are nearly tied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

TIE = 1e-4


@dataclass(frozen=True)
class Greedy:
    """`decided` counts the tokens before the first position at which the two best logits are within TIE."""

    tokens: tuple[int, ...]
    decided: int


@lru_cache(maxsize=8)
def _model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy(path: Path, prompt: Sequence[int], count: int, likely: Sequence[int] = ()) -> Greedy:
    """Returns `count` greedy tokens after `prompt`, without stopping at EOS. The result does not depend on the `likely`
    ones: as far as they equal it, one pass computes them all, and not one pass each."""
    model, ahead = _model(path), list(likely[: count - 1])
    tokens: list[int] = []
    decided = count

    def choose(logits: torch.Tensor) -> None:
        nonlocal decided
        best = torch.topk(logits, 2)
        if float(best.values[0] - best.values[1]) < TIE:
            decided = min(decided, len(tokens))
        tokens.append(int(best.indices[0]))

    for logits in model(torch.tensor([[*prompt, *ahead]])).logits[0, len(prompt) - 1 :]:
        choose(logits)
        if tokens != ahead[: len(tokens)]:
            break
    inputs, cache = [*prompt, *tokens], None
    while len(tokens) < count:
        out = model(torch.tensor([inputs]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        choose(out.logits[0, -1])
        inputs = tokens[-1:]
    return Greedy(tuple(tokens), decided)

"""Text that the target writes for its draft to learn on, with the target's own distribution at every position.

Each row is one context from its first position on, as a client's would be: a head of real text, then the target's
continuation of it. Writing it computes the distributions, so they are kept: the likeliest tokens and their
probabilities, from which the draft learns for many passes without computing the target again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.data import BOS_ID
from training.model import Llama, Past
from training.sample import gumbel

# The temperature at which the draft learns; probabilities are stored at it.
TEMPERATURE = 0.8
# Tokens kept of each distribution; the draft learns the mass of all others as one.
KEPT = 48
# Lengths of heads, in turn: most of a row of 384 tokens is the target's own.
HEADS = (8, 16, 32, 64, 96, 128)
WRITTEN, LONG = 384, 2048
# One of these for each row: greedy text runs into loops, so it is a quarter of all.
TEMPERATURES = (0.0, 0.0, 0.3, 0.8, 0.8, 0.8, 1.0, 1.0)


@dataclass(frozen=True)
class Taught:
    """Rows of one length. `ids` [rows, length] int16; at each position the likeliest next tokens, `likeliest` [rows,
    length, KEPT] int16, and their probabilities at TEMPERATURE, `probabilities` [rows, length, KEPT] float16."""

    ids: np.ndarray
    likeliest: np.ndarray
    probabilities: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def length(self) -> int:
        """Tokens in a row."""
        return int(self.ids.shape[1])

    def save(self, path: Path) -> None:
        """Writes the rows so that a file under `path` is always complete."""
        unfinished = path.with_suffix(".tmp.npz")
        np.savez(unfinished, ids=self.ids, likeliest=self.likeliest, probabilities=self.probabilities)
        unfinished.rename(path)

    @staticmethod
    def load(paths: list[Path]) -> Taught:
        """The rows of several files of one length."""
        files = [np.load(path) for path in paths]
        return Taught(*(np.concatenate([f[name] for f in files]) for name in ("ids", "likeliest", "probabilities")))


def likeliest(logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Of each row of logits [n, vocabulary], the KEPT likeliest tokens and their probabilities at TEMPERATURE."""
    scaled = logits / TEMPERATURE
    values, ids = scaled.topk(KEPT, sorted=False)
    return ids.numpy().astype(np.int16), (values - scaled.logsumexp(-1, keepdim=True)).exp().half().numpy()


@torch.no_grad()
def written_rows(target: Llama, heads: Tensor, length: int, temperatures: Tensor, generator: torch.Generator) -> Taught:
    """Continues heads [rows, n] to `length` tokens, each row at its temperature: argmax(logits + T * noise)."""
    rows = len(heads)
    past = [Past(length) for _ in target.layers]
    ids, known, probable = [heads], [], []
    latest, position = heads, 0
    while position < length:
        logits = target.logits(latest, past, position)
        for part in (logits[:, i] for i in range(logits.shape[1])):
            tokens, probabilities = likeliest(part)
            known.append(tokens)
            probable.append(probabilities)
        position += latest.shape[1]
        noised = logits[:, -1] + temperatures[:, None] * gumbel((rows, logits.shape[-1]), generator)
        latest = noised.argmax(-1, keepdim=True)
        ids.append(latest)
    whole = torch.cat(ids, 1)[:, :length]
    return Taught(whole.numpy().astype(np.int16), np.stack(known, 1), np.stack(probable, 1))


@torch.no_grad()
def read_rows(target: Llama, ids: Tensor) -> Taught:
    """The target's distributions over given text, ids [rows, length]."""
    kept = [likeliest(target.logits(row[None])[0]) for row in ids]
    return Taught(ids.numpy().astype(np.int16), np.stack([f[0] for f in kept]), np.stack([f[1] for f in kept]))


def heads_of(documents: list[np.ndarray], length: int, rows: int, rng: np.random.Generator) -> Tensor:
    """Beginnings of contexts: one half are beginnings of documents, the other pieces from anywhere after `<|bos|>`."""
    long_enough = [document for document in documents if len(document) > length]
    sizes = np.array([len(document) for document in long_enough], dtype=np.float64)
    pieces = []
    for row in range(rows):
        if row % 2 == 0:
            pieces.append(long_enough[rng.integers(len(long_enough))][:length])
        else:
            document = long_enough[rng.choice(len(long_enough), p=sizes / sizes.sum())]
            at = int(rng.integers(1, len(document) - length + 1))
            pieces.append(np.concatenate([[BOS_ID], document[at : at + length - 1]]))
    return torch.from_numpy(np.stack(pieces).astype(np.int64))


def write(target: Llama, documents: list[np.ndarray], folder: Path, tokens: int, seed: int, rows: int = 256) -> None:
    """Fills `folder` with about `tokens` tokens in rows of WRITTEN, and a quarter as many of real text in rows of LONG.

    Each file depends on the seed and its number alone, so an interrupted run continues after its last file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(max(1, tokens // 4 // (16 * LONG))):
        path = folder / f"long-{number:03}.npz"
        if not path.exists():
            rng = np.random.default_rng((seed, LONG, number))
            read_rows(target, heads_of(documents, LONG, 16, rng)).save(path)
    for number in range(max(1, tokens // (rows * WRITTEN))):
        path = folder / f"written-{number:03}.npz"
        if path.exists():
            continue
        began = time.perf_counter()
        rng = np.random.default_rng((seed, WRITTEN, number))
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        heads = heads_of(documents, HEADS[number % len(HEADS)], rows, rng)
        temperatures = torch.from_numpy(rng.choice(TEMPERATURES, rows)).float()
        written_rows(target, heads, WRITTEN, temperatures, generator).save(path)
        speed = rows * WRITTEN / (time.perf_counter() - began)
        print(f"{path.name}: {rows} rows of {WRITTEN} tokens, {speed:.0f} tokens/s", flush=True)


class TaughtBatches:
    """An endless, seeded stream of batches of taught rows, reshuffled in each epoch."""

    def __init__(self, folder: Path, seed: int) -> None:
        sets = [Taught.load(sorted(folder.glob(f"{kind}-*.npz"))) for kind in ("written", "long")]
        self.sets = {taught.length: taught for taught in sets}
        self.seed, self.epoch, self.cursor, self.length = seed, 0, 0, 0
        self.order = np.zeros(0, dtype=np.int64)

    def state(self) -> tuple[int, int, int]:
        """The state that `restore` needs to continue at the same place."""
        return self.epoch, self.cursor, self.length

    def restore(self, state: tuple[int, int, int]) -> None:
        """Continues where `state` was taken."""
        self.epoch, cursor, length = state
        self._shuffle(length)
        self.cursor = cursor

    def next(self, rows: int, length: int) -> tuple[np.ndarray, ...]:
        """The next rows of `length` tokens: ids, likeliest tokens, probabilities, shaped as in `Taught`."""
        if length != self.length or self.cursor + rows > len(self.order):
            self.epoch += 1
            self._shuffle(length)
        chosen = self.order[self.cursor : self.cursor + rows]
        self.cursor += rows
        taught = self.sets[length]
        return taught.ids[chosen], taught.likeliest[chosen], taught.probabilities[chosen]

    def _shuffle(self, length: int) -> None:
        self.order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.sets[length]))
        self.cursor, self.length = 0, length

"""Ranks as processes that share host memory, in place of GPUs that reach each other's: run as a program, one rank.

    python -m tests.support.symmetric_ranks RANK RANKS DIRECTORY

`DIRECTORY/work.pt` has the sums to compute, as (shape, dtype, seed, shared); `DIRECTORY/RANK.pt` gets the results.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from baton.engine.kernels.symmetric_sum import SymmetricMemory, flag_bytes, symmetric_sum

HALF_BYTES = 24 << 10


def partial(shape: tuple[int, ...], dtype: torch.dtype, seed: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def block_bytes(ranks: int) -> int:
    return flag_bytes(ranks) + 2 * HALF_BYTES


def main() -> None:
    rank, ranks, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    blocks = [
        torch.from_file(str(directory / f"block-{r}"), shared=True, size=block_bytes(ranks), dtype=torch.uint8)
        for r in range(ranks)
    ]
    memory = SymmetricMemory(
        rank, torch.tensor([block.data_ptr() for block in blocks]), torch.zeros(2, dtype=torch.int64), HALF_BYTES
    )
    dice, found = random.Random(rank), []
    barrier = InterpreterBuilder.create_barrier

    def late(self: InterpreterBuilder) -> object:
        """Ranks fall behind each other before they tell the others, and before they read."""
        time.sleep(dice.choice((0.0, 0.01)))
        return barrier(self)

    InterpreterBuilder.create_barrier = late
    for shape, dtype, seed, shared in torch.load(directory / "work.pt", weights_only=False):
        found.append(symmetric_sum(partial(shape, dtype, seed, rank), memory, shared))
    torch.save(found, directory / f"{rank}.pt")


if __name__ == "__main__":
    main()

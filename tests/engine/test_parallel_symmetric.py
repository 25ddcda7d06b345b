"""The sum over ranks in one kernel, run by processes that share host memory in Triton's interpreter."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from baton.engine.parallel import _sum_by_rank
from tests.support.forks import start
from tests.support.limits import HANG_S
from tests.support.symmetric_ranks import HALF_BYTES, block_bytes, partial

pytest.importorskip("triton")
Work = tuple[tuple[int, ...], torch.dtype, int, bool]
INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="with a GPU the kernel is compiled: see tests/gpu"
)


def sums_of(ranks: int, work: list[Work], directory: Path) -> list[list[torch.Tensor]]:
    torch.save(work, directory / "work.pt")
    for rank in range(ranks):
        (directory / f"block-{rank}").write_bytes(bytes(block_bytes(ranks)))
    command = [sys.executable, "-m", "tests.support.symmetric_ranks"]
    processes = [start([*command, str(r), str(ranks), str(directory)], env={**os.environ}) for r in range(ranks)]
    try:
        assert [process.wait(4 * HANG_S) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


@INTERPRETED
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 4))])
def test_all_ranks_have_the_bits_of_the_reference(ranks: int, tmp_path: Path) -> None:
    """Sums of one tile, of several programs, of several pieces, whole and by shares, in turn: halves are reused while
    some ranks are behind."""
    most = HALF_BYTES // 4
    single, half = torch.float32, torch.float16  # the interpreter truncates to bfloat16 where a GPU rounds
    several = (2 * most + 7,)
    work: list[Work] = [
        ((3, 5), single, 1, False),
        (several, single, 2, True),
        ((2, 1024), half, 3, False),
        (several, half, 4, True),
        (several, single, 5, False),
        ((1,), single, 6, True),
        (several, single, 7, True),
    ]
    found = sums_of(ranks, work, tmp_path)
    for index, (shape, dtype, seed, shared) in enumerate(work):
        expected = _sum_by_rank(torch.stack([partial(shape, dtype, seed, rank) for rank in range(ranks)]))
        for rank in range(ranks):
            assert torch.equal(found[rank][index], expected), (rank, shape, dtype, shared)

"""Pages of a KV pool are there before its blocks are used, no more of them than a head start, and no byte changes."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from baton.core.kv_layout import KVLayout, LayerKV
from baton.engine import kv_pool
from baton.engine.kv_pool import KVPool, PagesAhead

BLOCK = 64 << 10
MANY = 1024  # blocks


def resident(tensor: torch.Tensor, blocks: range) -> float:
    """Share of pages that are in memory, by mincore."""
    start, size = tensor.data_ptr() + blocks.start * BLOCK, len(blocks) * BLOCK
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (start + size - first) // mmap.PAGESIZE
    seen = (ctypes.c_ubyte * count)()
    where = ctypes.c_void_p(first), ctypes.c_size_t(count * mmap.PAGESIZE)
    assert ctypes.CDLL(None, use_errno=True).mincore(*where, seen) == 0
    return sum(page & 1 for page in seen) / count


def tensors() -> list[torch.Tensor]:
    """Memory that is mapped for them alone: malloc's may have its pages from whoever had it before."""
    maps = [mmap.mmap(-1, MANY * BLOCK) for _ in range(2)]
    for memory in maps:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return [torch.frombuffer(memory, dtype=torch.uint8).view(MANY, BLOCK) for memory in maps]


def test_a_head_start_and_no_more() -> None:
    pool = tensors()
    pages = PagesAhead(pool, MANY, ahead_bytes=2 * 64 * BLOCK)
    assert pages.ahead_blocks == 64 and resident(pool[0], range(1, 64)) < 0.1

    pages.expect(9)
    assert pages.wait(30.0)

    assert pages.blocks_warm == 74
    for tensor in pool:
        assert resident(tensor, range(74)) == 1.0
        assert resident(tensor, range(80, MANY)) < 0.1


def test_it_goes_on_when_a_quarter_is_used() -> None:
    pages = PagesAhead(tensors(), MANY, ahead_bytes=2 * 64 * BLOCK)
    for block, warm in ((0, 65), (16, 65), (17, 82), (5, 82), (500, 565), (MANY - 1, MANY)):
        pages.expect(block)
        assert pages.wait(30.0) and pages.blocks_warm == warm, block


def test_blocks_that_are_needed_now_come_without_a_head() -> None:
    pages = PagesAhead(tensors(), MANY, ahead_bytes=2 * 64 * BLOCK)
    for block, warm in ((0, 1), (40, 41), (20, 41)):
        pages.expect(block, ahead=False)
        assert pages.wait(30.0) and pages.blocks_warm == warm, block


def test_no_byte_changes() -> None:
    pool = [torch.randint(0, 255, (64, BLOCK), dtype=torch.uint8)]
    before = pool[0].clone()
    pages = PagesAhead(pool, 64)
    pages.expect(63)
    assert pages.wait(30.0) and pages.blocks_warm == 64
    assert torch.equal(pool[0], before)


def test_a_system_that_cannot_is_told_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_pool, "_POPULATE_WRITE", 9999)
    pages = PagesAhead(tensors(), MANY)
    for block in (0, 900):
        pages.expect(block)
        assert pages.wait(30.0)
    assert pages.blocks_warm == 0
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "madvise" in caplog.text


def test_a_pool_is_warm_ahead_of_the_blocks_that_are_named() -> None:
    layout = KVLayout(16, (LayerKV(8, 128, "float32"),))
    pool = KVPool(layout, 600, torch.device("cpu"))
    assert pool.pages is not None and pool.pages.blocks_warm == 0
    pool.expect([])
    pool.expect([3, 20, 7])
    assert pool.pages.wait(30.0)
    assert pool.pages.blocks_warm == 21 + pool.pages.ahead_blocks < 600

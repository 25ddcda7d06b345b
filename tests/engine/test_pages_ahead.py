"""Pages of a KV pool are allocated before its blocks are used, no further ahead than the limit, and no byte changes."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from baton.core.kv_layout import KVLayout, LayerKV
from baton.engine import kv_pool
from baton.engine.kv_pool import KVPool, PagePrefaulter

BLOCK = 64 << 10
MANY = 1024  # blocks


def resident(tensor: torch.Tensor, blocks: range) -> float:
    """The share of pages that are in memory, from mincore."""
    start, size = tensor.data_ptr() + blocks.start * BLOCK, len(blocks) * BLOCK
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (start + size - first) // mmap.PAGESIZE
    seen = (ctypes.c_ubyte * count)()
    where = ctypes.c_void_p(first), ctypes.c_size_t(count * mmap.PAGESIZE)
    assert ctypes.CDLL(None, use_errno=True).mincore(*where, seen) == 0
    return sum(page & 1 for page in seen) / count


def tensors() -> list[torch.Tensor]:
    """Allocates tensors in memory of their own: memory from malloc may have pages from an earlier use."""
    maps = [mmap.mmap(-1, MANY * BLOCK) for _ in range(2)]
    for memory in maps:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return [torch.frombuffer(memory, dtype=torch.uint8).view(MANY, BLOCK) for memory in maps]


def test_pages_are_allocated_ahead_up_to_the_limit() -> None:
    pool = tensors()
    pages = PagePrefaulter(pool, MANY, ahead_bytes=2 * 64 * BLOCK)
    assert pages.ahead_blocks == 64 and resident(pool[0], range(1, 64)) < 0.1

    pages.expect(9)
    assert pages.wait(30.0)

    assert pages.blocks_warm == 74
    for tensor in pool:
        assert resident(tensor, range(74)) == 1.0
        assert resident(tensor, range(80, MANY)) < 0.1


def test_allocation_resumes_when_a_quarter_of_the_pages_ahead_is_used() -> None:
    pages = PagePrefaulter(tensors(), MANY, ahead_bytes=2 * 64 * BLOCK)
    for block, warm in ((0, 65), (16, 65), (17, 82), (5, 82), (500, 565), (MANY - 1, MANY)):
        pages.expect(block)
        assert pages.wait(30.0) and pages.blocks_warm == warm, block


def test_blocks_needed_now_are_allocated_without_pages_ahead() -> None:
    pages = PagePrefaulter(tensors(), MANY, ahead_bytes=2 * 64 * BLOCK)
    for block, warm in ((0, 1), (40, 41), (20, 41)):
        pages.expect(block, ahead=False)
        assert pages.wait(30.0) and pages.blocks_warm == warm, block


def test_allocating_pages_changes_no_byte() -> None:
    pool = [torch.randint(0, 255, (64, BLOCK), dtype=torch.uint8)]
    before = pool[0].clone()
    pages = PagePrefaulter(pool, 64)
    pages.expect(63)
    assert pages.wait(30.0) and pages.blocks_warm == 64
    assert torch.equal(pool[0], before)


def test_unsupported_system_warns_once_and_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_pool, "_POPULATE_WRITE", 9999)
    pages = PagePrefaulter(tensors(), MANY)
    for block in (0, 900):
        pages.expect(block)
        assert pages.wait(30.0)
    assert pages.blocks_warm == 0
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "madvise" in caplog.text


def test_pool_allocates_pages_ahead_of_the_expected_blocks() -> None:
    layout = KVLayout(16, (LayerKV(8, 128, "float32"),))
    pool = KVPool(layout, 600, torch.device("cpu"))
    assert pool.pages is not None and pool.pages.blocks_warm == 0
    pool.expect([])
    pool.expect([3, 20, 7])
    assert pool.pages.wait(30.0)
    assert pool.pages.blocks_warm == 21 + pool.pages.ahead_blocks < 600

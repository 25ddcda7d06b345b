"""For tests of edges: changes what one sends, between packing and the wire; counts the keys of its store; packs and
unpacks KV by blocks and tokens; runs both ends on threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.transfer.gloo import GlooEdge
from baton.transfer.rendezvous import EdgeStore
from baton.transfer.staging import Layers, PagedLayers, locate, pack, unpack

Sums = tuple[int, ...]
Change = Callable[[GlooEdge, torch.Tensor, Sums], tuple[torch.Tensor, Sums]]


def on_the_wire(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Packs each transfer completely, and sends the result of `change` on its bytes and checksums instead."""
    original = GlooEdge.send

    def send(
        edge: GlooEdge,
        buf: torch.Tensor,
        timeout_s: float,
        ends: Sequence[int] = (),
        ready: Callable[[int], int] = lambda _: 0,
    ) -> None:
        sums = tuple(ready(index) for index in range(len(ends)))
        changed, words = change(edge, buf, sums)
        original(edge, changed, timeout_s, ends, words.__getitem__)

    monkeypatch.setattr(GlooEdge, "send", send)


def flipped(buf: torch.Tensor, at: int) -> torch.Tensor:
    """A copy with one bit of byte `at` flipped."""
    copy = buf.clone()
    copy[at] ^= 1
    return copy


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Runs each call on its own thread; returns the results, or the exceptions raised, in order."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as e:
            results[index] = e

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def num_keys(store: EdgeStore) -> int:
    """Returns the number of keys that edges have set and not deleted."""
    assert store._store is not None
    return len([key for key in store._store.list_keys() if key.startswith(store.nonce)])


def pack_tokens(layers: Layers, block_ids: Sequence[int], block_size: int, start: int, end: int) -> Tensor:
    paged = PagedLayers.of(layers)
    return pack(paged, locate(paged, block_ids, block_size, start, end))


def unpack_tokens(buf: Tensor, layers: Layers, block_ids: Sequence[int], block_size: int, start: int, end: int) -> None:
    paged = PagedLayers.of(layers)
    unpack(buf, paged, locate(paged, block_ids, block_size, start, end))

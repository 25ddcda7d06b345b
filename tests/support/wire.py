"""Changes what an edge sends, between packing and the wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from baton.transfer.gloo import GlooEdge

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

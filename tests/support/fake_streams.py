"""torch.cuda's streams without a GPU: 32 for each priority, handed out in turn, like torch's."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from baton.transfer import stream_pool, streams

IN_A_POOL = 32


@dataclass
class FakeStream:
    cuda_stream: int
    idle: bool = True

    def query(self) -> bool:
        return self.idle


@dataclass
class FakeStreams:
    """Complete state: the streams by priority, how many were taken, and the current one of each thread."""

    pools: dict[int, list[FakeStream]] = field(default_factory=dict)
    taken: Counter[int] = field(default_factory=Counter)
    current: threading.local = field(default_factory=threading.local)

    def take(self, device: object = None, priority: int = 0) -> FakeStream:
        pool = self.pools.setdefault(
            priority, [FakeStream(1000 * (1 - priority) + number) for number in range(IN_A_POOL)]
        )
        self.taken[priority] += 1
        return pool[(self.taken[priority] - 1) % IN_A_POOL]

    @contextmanager
    def enter(self, stream: FakeStream) -> Iterator[None]:
        before = getattr(self.current, "stream", None)
        self.current.stream = stream
        yield
        self.current.stream = before


@contextmanager
def _nothing(_: object) -> Iterator[None]:
    yield


def install(patch: pytest.MonkeyPatch) -> FakeStreams:
    """Replaces torch.cuda's streams until the patch is undone."""
    made: Any = FakeStreams()
    patch.setattr(torch.cuda, "Stream", made.take)
    patch.setattr(torch.cuda, "stream", made.enter)
    patch.setattr(torch.cuda, "device", _nothing)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: getattr(made.current, "stream", None))
    patch.setattr(stream_pool, "_POOLS", {})
    patch.setattr(streams, "_STAGING", {})
    return made  # type: ignore[no-any-return]

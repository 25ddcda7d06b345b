"""A model whose next token is a hash of its prefix, computed through the paged KV.

The KV of position p holds the hash of tokens[0..p], which is computed from the KV of position p - 1: so a sequence
continues correctly only if its KV arrived intact.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from baton.core.errors import RankLost
from baton.core.kv_layout import KVLayout
from baton.core.reshard import local_heads
from baton.core.step import StepOutcome, StepPlan
from baton.engine.lockstep import FollowerChannel, LeaderChannel
from baton.runtime.edge_ranks import FollowerEndpoints, WorkerEndpoints
from baton.transfer.edge_endpoint import LocalEndpoints, MakeEndpoint
from baton.transfer.staging_buffers import StagingBuffers
from tests.support.builders import make_layout
from tests.support.dict_store import DictStore

_MODULUS = 1 << 20  # float32 represents smaller integers exactly


def _mix(state: int, token: int) -> int:
    return (state * 1103 + token * 7919 + 12345) % _MODULUS


def _token(state: int) -> int:
    return 1 + state % 997


def oracle(prompt: Sequence[int], count: int) -> list[int]:
    """Returns the first `count` tokens that follow a prompt."""
    state = 0
    for token in prompt:
        state = _mix(state, token)
    out: list[int] = []
    for _ in range(count):
        out.append(_token(state))
        state = _mix(state, out[-1])
    return out


def local_ends(runner: FakeRunner) -> LocalEndpoints:
    """Returns the ends of edges at one rank, with reused staging buffers; every layer is a section."""
    kept = StagingBuffers(1 << 20)
    return LocalEndpoints(runner.kv.layers, runner.layout.block_size, "127.0.0.1", buffers=kept, section_bytes=1)


class FakeRunner:
    """The part of `baton.engine.runner.Runner` that a worker needs. A rank of several has the KV of its own heads; each
    rank computes the same tokens by itself."""

    launches_ahead = False

    def __init__(self, num_blocks: int = 16, layout: KVLayout | None = None, rank: int = 0, size: int = 1) -> None:
        self.layout = layout or make_layout(4)
        self.num_blocks = num_blocks
        first = self.layout.layers[0]
        heads = local_heads(first.num_kv_heads, size, rank)
        shape = (num_blocks, self.layout.block_size, len(heads), first.head_dim)
        self.kv = SimpleNamespace(layers=[(torch.zeros(shape), torch.zeros(shape)) for _ in self.layout.layers])
        self.make_endpoint: MakeEndpoint = local_ends(self)
        whole = torch.arange(first.num_kv_heads * first.head_dim).view(first.num_kv_heads, first.head_dim).float()
        self._pattern = whole[heads.start : heads.stop]

    def step(self, plan: StepPlan, layers: slice = slice(None)) -> StepOutcome:
        """Writes only the KV of `layers`: a step may be computed in several calls, with the last layers last."""
        sampled: list[tuple[int, ...]] = []
        for row in plan.rows:
            state = 0 if row.start == 0 else self._read(row.block_ids, row.start - 1)
            for position, token in enumerate(row.tokens, row.start):
                state = _mix(state, token)
                self._write(row.block_ids, position, state, layers)
            sampled.append((_token(state),) * row.num_sampled)
        return StepOutcome(plan.step_id, tuple(sampled))

    def _slot(self, blocks: tuple[int, ...], position: int) -> tuple[int, int]:
        size = self.layout.block_size
        return blocks[position // size], position % size

    def _read(self, blocks: tuple[int, ...], position: int) -> int:
        values = self.kv.layers[-1][1][self._slot(blocks, position)] - self._pattern
        state = int(values[0, 0].item())
        return state if values.min() == values.max() else state + 1  # heads of different sequences give wrong tokens

    def _write(self, blocks: tuple[int, ...], position: int, state: int, layers: slice) -> None:
        for index, (k, v) in list(enumerate(self.kv.layers))[layers]:
            k[self._slot(blocks, position)] = self._pattern + (state + index + 1)
            v[self._slot(blocks, position)] = self._pattern + state


class FakeRanks(FakeRunner):
    """The runner of the leader of `size` ranks: its followers are threads that follow over real lockstep channels, each
    with its own KV, and operate their ends of edges as real followers do."""

    def __init__(self, size: int, num_blocks: int = 16, layout: KVLayout | None = None, pause_s: float = 0.0) -> None:
        super().__init__(num_blocks, layout, 0, size)
        self.lost: list[str] = []
        self.ranks: list[FakeRunner] = [self]
        self.follower_endpoints: list[FollowerEndpoints] = []
        self.followers: list[FollowerChannel] = []
        self.threads: list[threading.Thread] = []
        store = DictStore()
        for rank in range(1, size):
            self.ranks.append(FakeRunner(num_blocks, layout, rank, size))
            self.threads.append(threading.Thread(target=self._follow, args=(store, rank, pause_s)))
            self.threads[-1].start()
        self.channel = LeaderChannel.open(store, size, "127.0.0.1", lambda error: self.lost.append(error.message))
        self.make_endpoint = WorkerEndpoints(local_ends(self), self.channel)

    def step(self, plan: StepPlan) -> StepOutcome:
        self.channel.send(plan)
        return super().step(plan)

    def close(self) -> None:
        self.channel.stop("the test ends")
        for thread in self.threads:
            thread.join(5.0)
            assert not thread.is_alive()

    def _follow(self, store: DictStore, rank: int, pause_s: float) -> None:
        channel = FollowerChannel.open(store, rank)
        runner = self.ranks[rank]
        ends = FollowerEndpoints(local_ends(runner), channel.report, lambda error: self.lost.append(str(error)))
        channel.set_order_handler(ends.execute_order)
        self.follower_endpoints.append(ends)
        self.followers.append(channel)

        def step(plan: StepPlan) -> StepOutcome:
            time.sleep(pause_s)
            return runner.step(plan)

        with contextlib.suppress(RankLost):
            channel.follow(step)
        ends.close()
        channel.close()

"""No two edges share a stream, although torch has only 32 and hands them out in turn."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.transfer import nccl
from baton.transfer.edge import EdgeSpec
from baton.transfer.nccl import NcclEdge
from baton.transfer.stream_pool import NCCL_PRIORITY, StreamPool, know_streams, stream_pool
from baton.transfer.streams import own_stream
from tests.support.fake_streams import IN_A_POOL, FakeStreams, install

CUDA = torch.device("cuda", 0)
SPEC = EdgeSpec("127.0.0.1", 1, "x", 1, "prefill")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    made = install(monkeypatch)
    install_nccl(monkeypatch, made)
    return made


class Group:
    """A group of torch's: it takes its stream when the first operation creates its communicator."""

    takes: Any

    def __init__(self, *_: object) -> None:
        self.stream: Any = None

    def send(self, *_: object) -> Any:
        self.stream = self.stream or Group.takes()
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: True)

    recv = send

    def abort(self) -> None:
        pass


def install_nccl(patch: pytest.MonkeyPatch, streams: FakeStreams) -> None:
    @contextmanager
    def meet(self: object) -> Iterator[tuple[object, float]]:
        yield None, float("inf")

    Group.takes = staticmethod(lambda: streams.take(priority=0))
    Group.Options = lambda is_high_priority_stream: SimpleNamespace(config=SimpleNamespace())  # type: ignore[attr-defined]
    patch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(nccl.Meeting, "meet", meet)


class Live:
    """An edge as its thread has it: the thread's own stream and the group."""

    def __init__(self, fake: FakeStreams) -> None:
        self.closing = ExitStack()
        self.closing.enter_context(own_stream(CUDA))
        self.edge = NcclEdge(replace(SPEC, device="cpu"))
        self.closing.callback(self.edge.close)
        self.edge.connect()
        self.streams = {fake.current.stream.cuda_stream, self.edge._group.stream.cuda_stream}


@pytest.mark.parametrize("live", [1, 4, 8, 30])
def test_edges_that_are_rebuilt_never_share_a_stream(live: int, fake: FakeStreams) -> None:
    stream_pool(torch.device("cpu"), NCCL_PRIORITY)  # the edges' own device here
    engine = fake.take(priority=0)  # the stream of a tensor-parallel group
    dice, edges = random.Random(live), [Live(fake) for _ in range(live)]
    for _ in range(200):
        used = [stream for edge in edges for stream in edge.streams]
        assert len(used) == len(set(used)) == 2 * live and engine.cuda_stream not in used
        place = dice.randrange(live)
        edges[place].closing.close()
        edges[place] = Live(fake)
    for edge in edges:
        edge.closing.close()


def test_group_connected_before_the_first_edge_keeps_its_stream(fake: FakeStreams) -> None:
    know_streams(CUDA)
    group = fake.take(priority=NCCL_PRIORITY)
    pool, seen = stream_pool(CUDA, NCCL_PRIORITY), set()
    for _ in range(100):
        with pool.taken_by_torch() as handles:
            seen.add(fake.take(priority=NCCL_PRIORITY).cuda_stream)
        assert handles
        pool.give_back(*handles)
    assert group.cuda_stream not in seen and pool.in_use() == {group.cuda_stream}


def test_streams_whose_work_has_not_ended_are_not_handed_out(fake: FakeStreams) -> None:
    pool = StreamPool(fake.take)
    busy = pool.take()
    busy.idle = False
    pool.give_back(busy.cuda_stream)
    assert busy not in [pool.take() for _ in range(IN_A_POOL - 1)]
    busy.idle = True
    assert pool.take() is busy


def test_more_users_than_streams_share_the_least_used_one(fake: FakeStreams) -> None:
    pool = StreamPool(fake.take)
    taken = [pool.take().cuda_stream for _ in range(2 * IN_A_POOL)]
    assert sorted(taken) == sorted([*set(taken), *set(taken)]) and len(set(taken)) == IN_A_POOL


def test_groups_that_connect_at_the_same_time_get_different_streams(fake: FakeStreams) -> None:
    """Threads enter and leave in any order; what torch hands out while several are inside counts for each."""
    pool, dice = StreamPool(fake.take), random.Random(1)
    inside: list[list[Any]] = []  # open block, handles, what torch took
    connected: list[tuple[list[int], int]] = []
    for step in range(3000):
        choice = dice.random()
        if choice < 0.3 and len(inside) < 5 and len(connected) < 6:
            block = pool.taken_by_torch()
            inside.append([block, block.__enter__(), None])
        elif choice < 0.6 and inside:
            entry = dice.choice(inside)
            if entry[2] is None:
                entry[2] = fake.take().cuda_stream
                others = [e[2] for e in inside if e is not entry] + [handle for _, handle in connected]
                assert entry[2] not in others, step
        elif choice < 0.8 and inside:
            entry = inside.pop(dice.randrange(len(inside)))
            entry[0].__exit__(None, None, None)
            if entry[2] is None:  # the group was not created
                pool.give_back(*entry[1])
            else:
                assert entry[2] in entry[1]
                connected.append((entry[1], entry[2]))
        elif connected:
            handles, _ = connected.pop(dice.randrange(len(connected)))
            pool.give_back(*handles)


def test_pool_serves_threads_at_the_same_time(fake: FakeStreams) -> None:
    pool, failed = StreamPool(fake.take), []
    users: dict[int, int] = {}
    guard = threading.Lock()

    def work() -> None:
        for _ in range(200):
            stream = pool.take()
            with guard:
                if users.get(stream.cuda_stream):
                    failed.append(stream)
                users[stream.cuda_stream] = 1
            with guard:
                users[stream.cuda_stream] = 0
            pool.give_back(stream.cuda_stream)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and not pool.in_use()

"""An NCCL edge over a fake group: which calls it makes to torch, in which order, and how it ends. The real group needs
GPUs (tests/gpu)."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.core.errors import HandoffError
from baton.engine import parallel
from baton.transfer import nccl
from baton.transfer.edge import EdgeSpec
from baton.transfer.nccl import NEVER, NcclEdge, edge_options
from tests.support.limits import HANG_S


class FakeWork:
    """An operation that is complete when its group's `done` is set. As with torch 2.11, only `wait` reports its
    error."""

    def __init__(self, group: FakeGroup) -> None:
        self.group, self.waited = group, False

    def is_completed(self) -> bool:
        self.group.polled.append(self.group.aborting.is_set())
        return self.group.done

    def exception(self) -> Exception | None:
        raise TypeError("Unregistered type : std::exception_ptr")

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def wait(self) -> bool:
        if self.group.error is not None:
            raise self.group.error
        self.waited = True
        return True


class FakeGroup:
    """Records what is launched. Sent tensors go into `wires`, where the peer's group receives them."""

    def __init__(self, wires: list[Tensor]) -> None:
        self.wires, self.launched, self.works = wires, [], []
        self.done, self.error = True, None
        self.polled: list[bool] = []
        self.aborting, self.aborted_by = threading.Event(), ""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> FakeWork:
        (tensor,) = tensors
        self.launched.append(("send", tensor.numel()))
        self.wires.append(tensor.clone())
        return self._work()

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> FakeWork:
        (tensor,) = tensors
        self.launched.append(("recv", tensor.numel()))
        if self.wires:
            tensor.copy_(self.wires.pop(0))
        return self._work()

    def _work(self) -> FakeWork:
        self.works.append(FakeWork(self))
        return self.works[-1]

    def abort(self) -> None:
        self.aborting.set()
        self.aborted_by = threading.current_thread().name


def edge(side: str = "prefill", wires: list[Tensor] | None = None) -> tuple[NcclEdge, FakeGroup]:
    made = NcclEdge(EdgeSpec("127.0.0.1", 1, "x", 1, side))  # type: ignore[arg-type]
    made._group = FakeGroup([] if wires is None else wires)
    return made, made._group


def test_all_sections_and_one_message_of_their_words_are_queued_before_the_first_wait() -> None:
    wires: list[Tensor] = []
    (sender, out), (receiver, into) = edge("prefill", wires), edge("decode", wires)
    buf, got = torch.arange(12, dtype=torch.uint8), torch.zeros(12, dtype=torch.uint8)
    words = [7, -3, 1 << 40]
    packed: list[tuple[int, int]] = []

    def ready(index: int) -> Tensor:
        packed.append((index, len(out.launched)))
        return torch.tensor([words[index]])

    sender.send(buf, 1, (4, 8, 12), ready)
    assert out.launched == [("send", 4), ("send", 4), ("send", 4), ("send", 24)]
    assert packed == [(0, 0), (1, 1), (2, 2)], "a section is packed while the one before it moves"
    assert len(out.polled) == 1, "one wait for all of it"
    came: list[tuple[int, int]] = []
    posted: list[int] = []
    receiver.recv(got, 1, lambda: posted.append(len(into.launched)), (4, 8, 12), lambda i, w: came.append((i, int(w))))
    assert posted == [4], "the receive of everything is open when the peer hears of it"
    assert came == list(enumerate(words)) and torch.equal(got, buf)
    assert all(work.waited for work in into.works), "the thread's stream follows what arrived"


@pytest.mark.parametrize("error", [None, RuntimeError("NCCL error: remote process exited")])
def test_a_failed_operation_is_detected_with_every_torch_version(error: Exception | None) -> None:
    """`Work.exception` raises TypeError before torch 2.13, and NCCL's `is_success` always raises, whether or not the
    operation failed."""
    made, group = edge()
    group.error = error
    if error is None:
        made.send(torch.zeros(4, dtype=torch.uint8), 1)
        return
    with pytest.raises(HandoffError, match="NCCL"):
        made.send(torch.zeros(4, dtype=torch.uint8), 1)
    assert group.aborting.is_set()
    with pytest.raises(HandoffError, match="has ended"):
        made.send(torch.zeros(4, dtype=torch.uint8), 1)


def test_an_abort_stops_the_polling_and_is_executed_by_the_edge_thread() -> None:
    """`is_completed` waits for a lock that an abort may hold, and holds the GIL meanwhile."""
    made, group = edge()
    group.done = False
    failed: list[HandoffError] = []

    def send() -> None:
        try:
            made.send(torch.zeros(4, dtype=torch.uint8), HANG_S)
        except HandoffError as e:
            failed.append(e)

    thread = threading.Thread(target=send, name="edge")
    thread.start()
    while not group.polled:
        time.sleep(0.001)
    made.abort()
    thread.join(HANG_S)
    assert "aborted" in failed[0].message and group.aborted_by == "edge"
    assert group.polled == [False] * len(group.polled), "nobody asked once the abort had begun"


def test_an_edge_whose_thread_is_stuck_is_aborted_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_ABORT_GRACE_S", 0.01)
    made, group = edge()
    made.abort()
    assert group.aborting.wait(HANG_S) and group.aborted_by == "edge-abort"


def test_an_operation_without_a_peer_times_out_and_aborts_the_edge() -> None:
    made, group = edge()
    group.done = False
    with pytest.raises(HandoffError, match=r"send of 4 bytes failed after 0\.\d+ s: timed out"):
        made.send(torch.zeros(4, dtype=torch.uint8), 0.02)
    assert group.aborting.is_set()


class FakeOptions(SimpleNamespace):
    def __init__(self, is_high_priority_stream: bool) -> None:
        super().__init__(config=SimpleNamespace(blocking=None), high=is_high_priority_stream)


def options_of_tensor_parallel_group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The options of a tensor-parallel group."""
    found: list[Any] = []

    class Nccl:
        Options = FakeOptions

        def __new__(cls, store: object, rank: int, size: int, options: object) -> Any:
            found.append(options)
            return "group"

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    parallel._nccl(None, SimpleNamespace(rank=0, size=2), torch.device("cuda", 0), "127.0.0.1")
    return found[0]


def test_tensor_parallel_communicator_outlives_graphs_that_captured_its_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch aborts a communicator when its group is freed, and NCCL waits there until the last graph that captured its
    operations is freed. A rank that has drained frees its runner, the group before the graphs."""
    freed: list[str] = []

    class Nccl:
        Options = FakeOptions

        def __init__(self, *_: object) -> None:
            pass

        def __del__(self) -> None:
            freed.append("communicator")

    class Graph:
        def __del__(self) -> None:
            freed.append("graph")

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(parallel, "_NCCL_GROUPS", kept := [])
    where = (None, SimpleNamespace(rank=1, size=2), torch.device("cuda", 1), "127.0.0.1")
    # As in a runner: attributes are freed in the order in which they were set.
    runner: Any = SimpleNamespace(group=parallel.TPGroup(1, 2, parallel._nccl(*where), "cuda:1"), graphs=[Graph()])
    del runner
    assert freed == ["graph"] and len(kept) == 1


def test_only_edge_groups_are_non_blocking_and_no_group_has_a_torch_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's watchdog sleeps with its lock held when an operation times out; a non-blocking group starts a thread
    inside NCCL for every collective."""
    options, group = edge_options(SimpleNamespace(Options=FakeOptions)), options_of_tensor_parallel_group(monkeypatch)
    assert (options.config.blocking, group.config.blocking) == (0, 1)
    assert options._timeout == group._timeout == NEVER


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch has no NCCL")
def test_the_torch_options_class_accepts_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    options = edge_options(torch.distributed.ProcessGroupNCCL)  # type: ignore[attr-defined]
    assert options.config.max_ctas == nccl.MAX_CTAS and options._timeout == NEVER

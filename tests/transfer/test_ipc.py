"""Edges within a host: the receiver copies from the sender's memory. Here shared memory replaces a GPU's."""

from __future__ import annotations

import _posixshmem
import json
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.core.errors import HandoffError, StartupError
from baton.core.ranks import Ranks
from baton.engine.options import EngineOptions
from baton.runtime import worker_ranks
from baton.transfer import ipc, shared_buffers, streams
from baton.transfer.edge import EdgeSpec
from baton.transfer.edge_endpoint import make_buffers
from baton.transfer.ipc import IpcEdge
from baton.transfer.shared_buffers import NO_COUNTER, allocate_shared, export, map_exported
from tests.support.edges import in_threads
from tests.support.end_pair import LAYER_BYTES, LAYERS, Pair, equal
from tests.support.limits import HANG_S

MakeSpec = Callable[..., EdgeSpec]
Connected = Callable[..., tuple[IpcEdge, IpcEdge]]
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_thread_left")


def filled(num_bytes: int) -> torch.Tensor:
    return allocate_shared(num_bytes, CPU).copy_(torch.randint(0, 256, (num_bytes,), dtype=torch.uint8))


def test_sections_arrive_in_order_with_their_words(connected: Connected) -> None:
    prefill, decode = connected(kind=IpcEdge)
    sent, got, ends = filled(3_000_001), torch.zeros(3_000_001, dtype=torch.uint8), (10, 2_000_000, 3_000_001)
    words, came = [5, (1 << 64) - 1, 0], []

    def arrived(index: int, word: Any) -> None:
        came.append((index, word, torch.equal(got[: ends[index]], sent[: ends[index]])))

    for _ in range(3):
        came.clear()
        moved = in_threads(
            lambda: prefill.send(sent, 5, ends, words.__getitem__), lambda: decode.recv(got, 5, None, ends, arrived)
        )
        assert moved == [None, None] and came == [(i, word, True) for i, word in enumerate(words)]
        got.zero_()


def test_the_sender_keeps_its_buffer_until_the_receiver_has_copied(connected: Connected) -> None:
    prefill, decode = connected(kind=IpcEdge)
    sent, got, copied, go = filled(64), torch.zeros(64, dtype=torch.uint8), threading.Event(), threading.Event()

    def arrived(index: int, word: Any) -> None:
        copied.set()
        assert go.wait(HANG_S)

    ended: list[str] = []

    def send() -> None:
        prefill.send(sent, HANG_S)
        ended.append("sender")

    threads = [
        threading.Thread(target=send),
        threading.Thread(target=lambda: decode.recv(got, HANG_S, None, (), arrived)),
    ]
    for thread in threads:
        thread.start()
    assert copied.wait(HANG_S) and not ended
    go.set()
    for thread in threads:
        thread.join(HANG_S)
    assert ended == ["sender"] and torch.equal(sent, got)


def test_a_new_buffer_with_a_reused_descriptor_is_mapped_again(connected: Connected) -> None:
    """A buffer too large to keep is dropped, and the next one of its size may reuse its descriptor's number."""
    prefill, decode = connected(kind=IpcEdge)
    for value in (1, 2, 3):
        sent, got = allocate_shared(64, CPU).fill_(value), torch.zeros(64, dtype=torch.uint8)
        assert in_threads(lambda s=sent: prefill.send(s, HANG_S), lambda g=got: decode.recv(g, HANG_S)) == [None, None]
        assert torch.equal(sent, got)
        del sent


def test_buffers_that_a_sender_uses_in_turn_stay_mapped(connected: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = connected(kind=IpcEdge)
    mapped: list[bytes] = []
    map_one = ipc.map_exported
    monkeypatch.setattr(ipc, "map_exported", lambda handle, device: (mapped.append(handle), map_one(handle, device))[1])
    buffers = [filled(64) for _ in range(ipc.MOST_MAPPED + 1)]
    got = torch.zeros(64, dtype=torch.uint8)

    def move(number: int) -> None:
        sent = buffers[number]
        assert in_threads(lambda: prefill.send(sent, HANG_S), lambda: decode.recv(got, HANG_S)) == [None, None]
        assert torch.equal(sent, got)

    for number in (*range(ipc.MOST_MAPPED), *range(ipc.MOST_MAPPED)):
        move(number)
    assert len(mapped) == ipc.MOST_MAPPED, "each was mapped once"
    move(ipc.MOST_MAPPED)  # takes the place of buffer 0
    move(1)
    assert len(mapped) == ipc.MOST_MAPPED + 1
    move(0)
    assert len(mapped) == ipc.MOST_MAPPED + 2 and len(decode._mapped) == ipc.MOST_MAPPED


def test_buffers_that_a_queued_copy_reads_stay_mapped_after_the_edge_is_closed(
    connected: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = connected(kind=IpcEdge)
    sent, got = filled(64), torch.zeros(64, dtype=torch.uint8)
    assert in_threads(lambda: prefill.send(sent, HANG_S), lambda: decode.recv(got, HANG_S)) == [None, None]
    held = streams.HeldBuffer()
    done: list[bool] = []
    event = SimpleNamespace(record=lambda stream: None, query=lambda: bool(done))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(ipc, "HELD", held)

    def hang(device: torch.device, timeout_s: float) -> None:
        raise HandoffError("cuda:0 did not finish")

    monkeypatch.setattr(ipc, "finish", hang)
    (mapped,) = map(weakref.ref, decode._mapped.values())
    decode.close()
    held.release()
    assert mapped() is not None and len(held) == 1
    done.append(True)
    held.release()
    assert mapped() is None


async def test_a_part_is_copied_between_blocks_and_a_damaged_section_is_detected(
    spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = make_buffers("ipc", CPU, 1 << 16)
    ends = await Pair(spec, kind="ipc", kept=(kept, kept)).connect()
    mapped = ipc.map_exported

    def damaged(handle: bytes, device: torch.device) -> torch.Tensor:
        copy = mapped(handle, device).clone()
        copy[LAYER_BYTES] ^= 1
        return copy

    with monkeypatch.context() as patch:
        patch.setattr(ipc, "map_exported", damaged)
        assert not await ends.hand_over() and equal(ends.source, ends.target) == [True, False, True, True]
    ends.decode.worker._edge._mapped.clear()  # type: ignore[union-attr]
    assert await ends.hand_over() and equal(ends.source, ends.target) == [True] * LAYERS
    assert kept.reused
    await ends.close()


def test_workers_on_different_hosts_are_refused_at_both_ends(spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter([b"one cpu", b"other cpu"])
    monkeypatch.setattr(ipc, "host_identity", lambda device: next(hosts))
    prefill, decode = IpcEdge(spec("prefill")), IpcEdge(spec("decode"))
    for error in in_threads(prefill.connect, decode.connect):
        assert isinstance(error, HandoffError) and "needs both workers on one host" in error.message
        assert "one cpu" in error.message and "other cpu" in error.message


def test_abort_unblocks_the_receiver_and_an_unshared_buffer_is_refused(connected: Connected) -> None:
    prefill, decode = connected(kind=IpcEdge)
    got, posted = torch.zeros(64, dtype=torch.uint8), threading.Event()

    def abort() -> None:
        assert posted.wait(HANG_S)
        decode.abort()

    error, _ = in_threads(lambda: decode.recv(got, HANG_S, posted.set), abort)
    assert isinstance(error, HandoffError)
    with pytest.raises(HandoffError, match="not in shared memory"):
        prefill.send(torch.zeros(64, dtype=torch.uint8), 1)


def test_another_process_maps_an_exported_buffer_and_freeing_it_leaves_nothing_open(
    spec: MakeSpec, peers: Callable[[EdgeSpec], Any]
) -> None:
    buf = filled(1000)
    handle, peer = export(buf[:500]), peers(spec("decode"))
    peer.send_command("map", handle=handle.hex())
    assert peer.read_reply() == {"sum": int(buf[:500].long().sum())}
    before = len(os.listdir("/proc/self/fd"))
    del buf
    assert len(os.listdir("/proc/self/fd")) == before - 2, "the descriptor, and that of the mapping"
    with pytest.raises(HandoffError, match="cannot be mapped"):
        map_exported(handle, CPU)


def test_a_file_that_is_not_an_exported_buffer_is_neither_mapped_nor_changed(tmp_path: Path) -> None:
    """In another PID namespace the same path names another file: it must be neither written nor extended."""
    with (tmp_path / "file").open("w+") as other:
        other.write("abc")
        other.flush()
        handle = json.dumps([4096, os.getpid(), other.fileno(), 4096]).encode()
        with pytest.raises(HandoffError, match="cannot be mapped"):
            map_exported(handle, CPU)
    assert (tmp_path / "file").read_text() == "abc"
    assert os.readlink("/proc/self/ns/pid").encode() in ipc.host_identity(CPU)


def test_gpu_memory_is_exported_once_and_its_ipc_counter_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch wraps a storage anew at each export, and keeps its memory until a receiver decrements a counter."""
    calls: list[tuple[str, object]] = []

    class Storage:
        def _share_cuda_(self) -> tuple[object, ...]:
            calls.append(("share", None))
            return (0, b"handle", 64, 0, b"counter", 5, b"event", True)

    class Buffer:
        device = torch.device("cuda", 0)

        def __init__(self, num_bytes: int) -> None:
            self.num_bytes = num_bytes

        def untyped_storage(self) -> Storage:
            return Storage()

        def data_ptr(self) -> int:
            return 4096

        def storage_offset(self) -> int:
            return 256

        def numel(self) -> int:
            return self.num_bytes

    release = lambda counter, offset: calls.append(("release", (counter, offset)))  # noqa: E731
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", release, raising=False)
    monkeypatch.setattr(shared_buffers, "_HANDLES", {})
    first, second = export(Buffer(10)), export(Buffer(20))  # type: ignore[arg-type]
    assert calls == [("share", None), ("release", (b"counter", 5))]
    size, offset, serial, *handle = shared_buffers._decoded(second)
    assert [size, offset, *handle] == [20, 256, b"handle", 64, 0, NO_COUNTER, 5, b"event", True] and serial > 0
    assert shared_buffers._decoded(first)[1:] == shared_buffers._decoded(second)[1:]


class TorchCounters:
    """How torch counts the receivers of exported memory: unsigned, 1 at the export, one less for each that unmaps it,
    in a file that receivers open by name. What is above 0 when its owner frees the memory is never given back."""

    def __init__(self) -> None:
        self.counts: dict[bytes, int] = {}

    def share(self) -> tuple[object, ...]:
        name = f"/torch_{len(self.counts)}".encode()
        self.counts[name] = 1
        return (0, b"handle", 64, 0, name, 0, b"event", True)

    def decrement(self, name: bytes, number: int) -> None:
        if name in self.counts:  # else torch ignores it: "already warned inside of producer process"
            self.counts[name] = (self.counts[name] - 1) % (1 << 64)


@pytest.mark.parametrize("receivers", [0, 1, 3])
def test_exported_memory_is_given_back_however_many_receivers_unmapped_it(
    receivers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = TorchCounters()
    buffer = SimpleNamespace(
        device=torch.device("cuda", 0),
        data_ptr=lambda: 4096,
        storage_offset=lambda: 0,
        numel=lambda: 64,
        untyped_storage=lambda: SimpleNamespace(_share_cuda_=counters.share),
    )
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", counters.decrement, raising=False)
    monkeypatch.setattr(shared_buffers, "_HANDLES", {})
    handle = shared_buffers._decoded(export(buffer))  # type: ignore[arg-type]
    for _ in range(receivers):
        counters.decrement(handle[6], handle[7])  # as torch does when a receiver unmaps it
    assert list(counters.counts.values()) == [0]


def test_no_counter_of_torch_can_have_the_name_that_receivers_get() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        _posixshmem.shm_open(NO_COUNTER.decode(), os.O_RDWR | os.O_CREAT, mode=0o600)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("max_split_size_mb:64,expandable_segments:True", ["max_split_size_mb:64,expandable_segments:False"]),
        ("expandable_segments : true", ["expandable_segments : False"]),
        ("expandable_segments:False", []),
        ("", []),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.filterwarnings("error::FutureWarning")  # of what torch will remove
def test_memory_for_other_processes_is_not_in_expandable_segments(
    name: str, settings: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", chosen.append)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(worker_ranks, "choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(worker_ranks, "know_streams", lambda device: None)
    monkeypatch.setenv(name, settings)
    for kind in ("nccl", "ipc"):
        worker_ranks._prepare_device(EngineOptions(model_dir=Path("model"), device="cuda", edge_kind=kind), Ranks())
        assert chosen == (expected if kind == "ipc" else [])


def test_an_allocator_that_exports_nothing_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(worker_ranks, "choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(worker_ranks, "know_streams", lambda device: None)
    options = EngineOptions(model_dir=Path("model"), device="cuda", edge_kind="ipc")
    with pytest.raises(StartupError, match="edge-kind ipc: CUDA's cudaMallocAsync allocator cannot share memory"):
        worker_ranks._prepare_device(options, Ranks())
    worker_ranks._prepare_device(replace(options, edge_kind="nccl"), Ranks())

"""Which backend an edge uses, on which device its buffers are, and the error of an NCCL edge without a GPU."""

from __future__ import annotations

import os
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from baton.core.edge_kinds import EDGE_KINDS, choose_edges
from baton.core.errors import HandoffError, StartupError
from baton.runtime.config import WorkerConfig
from baton.transfer import nccl
from baton.transfer.edge import EdgeSpec, buffer_device, make_edge
from baton.transfer.nccl import NcclEdge

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


def test_the_device_decides_the_edge_kind_unless_it_is_configured() -> None:
    assert choose_edges("auto", "cpu") == choose_edges("gloo", "cpu") == choose_edges("gloo", "cuda") == "gloo"
    assert choose_edges("auto", "cuda") == choose_edges("nccl", "cuda") == "nccl"
    assert make_edge("nccl") is NcclEdge
    assert choose_edges("ipc", "cpu") == choose_edges("ipc", "cuda") == "ipc"


@pytest.mark.parametrize(("name", "device"), [("nccl", "cpu"), ("mpi", "cpu"), ("mpi", "cuda")])
def test_an_unsupported_edge_kind_is_refused(name: str, device: str) -> None:
    with pytest.raises(StartupError, match="edge-kind"):
        choose_edges(name, device)


def test_buffers_are_on_the_device_that_the_backend_uses() -> None:
    assert buffer_device("nccl", CUDA) == CUDA and buffer_device("gloo", CUDA) == CPU == buffer_device("gloo", CPU)
    assert (buffer_device("ipc", CUDA), buffer_device("ipc", CPU)) == (CUDA, CPU)


def test_the_option_offers_every_kind_that_is_registered() -> None:
    choices = next(f.metadata["choices"] for f in fields(WorkerConfig) if f.name == "edge_kind")
    assert set(choices) == {"auto", *EDGE_KINDS}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_an_nccl_edge_without_a_gpu_fails_with_the_reason() -> None:
    edge = NcclEdge(EdgeSpec("127.0.0.1", 1, "x", 1, "prefill", device="cuda:0"))
    with pytest.raises(HandoffError, match="no NCCL or no GPU"):
        edge.connect()
    edge.abort()
    edge.close()


@pytest.mark.parametrize(
    ("host", "interface", "family"),
    [
        ("127.0.0.1", "=lo", "AF_INET"),
        ("127.0.0.9", "=lo", "AF_INET"),  # no interface lists it, but the loopback interface has all of 127.0.0.0/8
        ("localhost", "=lo", "AF_INET"),
        ("10.1.2.3", "=ib0", "AF_INET"),
        ("fd00::7", "=eth0", "AF_INET6"),
        ("0.0.0.0", None, None),
        ("10.9.9.9", None, None),
    ],
)
def test_nccl_listens_on_the_interface_of_the_workers_host(
    host: str, interface: str | None, family: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = [("lo", "127.0.0.1"), ("eth0", "10.0.0.5"), ("eth0", "fd00::7"), ("ib0", "10.1.2.3"), ("lo", "::1")]
    monkeypatch.setattr(nccl, "interface_addresses", lambda: iter(machine))
    monkeypatch.setattr(nccl.os, "environ", dict[str, str]())
    nccl.configure_nccl(host)
    assert nccl.os.environ.get("NCCL_SOCKET_IFNAME") == interface
    assert nccl.os.environ.get("NCCL_SOCKET_FAMILY") == family


def test_interfaces_that_the_environment_names_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl.os, "environ", {"NCCL_SOCKET_IFNAME": "bond"})
    nccl.configure_nccl("127.0.0.1")
    assert nccl.os.environ["NCCL_SOCKET_IFNAME"] == "bond" and "NCCL_SOCKET_FAMILY" not in nccl.os.environ


def test_gpus_are_named_as_nccl_compares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """MIG instances have their own UUIDs, but NCCL sees one GPU; a host id of its own makes a rank another host."""

    def facts(number: int) -> SimpleNamespace:
        return SimpleNamespace(name="H100", uuid="u", pci_domain_id=0, pci_bus_id=0x1B + number, pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", facts)
    monkeypatch.setattr(nccl.os, "environ", dict[str, str]())
    first, second, third = nccl.local_gpus(3)
    assert first == third != second and first.startswith("H100 PCI 0000:1b:00 of ")
    monkeypatch.setattr(nccl.os, "environ", {"NCCL_HOSTID": "a"})
    assert nccl.local_gpus(1) == ("H100 PCI 0000:1b:00 of a",)
    older = SimpleNamespace(name="H100", uuid="5a-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: older)
    assert nccl.local_gpus(1) == ("H100 GPU-5a-1 of a",)
    monkeypatch.setattr(nccl.os, "environ", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    assert nccl.local_gpus(1) == ()


def test_interfaces_of_this_machine_are_found() -> None:
    assert ("lo", "127.0.0.1") in nccl.interface_addresses()
    assert nccl.interface_of("127.0.0.1") == "lo"


def test_the_watchdog_cannot_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "unchanged")
    for name in nccl.NCCL_ENVIRONMENT:
        monkeypatch.setenv(name, "changed")
    level = torch.distributed.get_debug_level()
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    try:
        nccl.configure_nccl("127.0.0.1")
        assert torch.distributed.get_debug_level() == torch.distributed.DebugLevel.INFO
    finally:
        torch.distributed.set_debug_level(level)
    for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DESYNC_DEBUG", "BLOCKING_WAIT", "HIGH_PRIORITY"):
        assert os.environ[f"TORCH_NCCL_{name}"] == "0"
    assert "TORCH_NCCL_USE_COMM_NONBLOCKING" not in nccl.NCCL_ENVIRONMENT, "it would speak for tensor parallelism, too"


def test_variables_that_training_jobs_set_do_not_reach_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first an allocation registers its memory with every communicator: it waits for one that is being
    created, and fails with one that has failed. Without the second the ends of an edge do not share an id. NCCL lets
    the third decide which communicators block: those of edges, which must not, and those of sums, which must."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "unchanged")
    for name in nccl.NCCL_ENVIRONMENT:  # restored at the end
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "1")
    monkeypatch.setenv("TORCH_NCCL_BCAST_UNIQUEID", "0")
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "1")
    nccl.configure_nccl("127.0.0.1")
    assert os.environ["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"] == "0"
    assert os.environ["TORCH_NCCL_BCAST_UNIQUEID"] == "1"
    assert os.environ["NCCL_COMM_BLOCKING"] not in ("0", "1")

"""Which GPUs a launcher assigns, and how much of a GPU's memory a rank takes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from baton.core.errors import StartupError
from baton.engine.memory import default_kv_bytes
from launch import gpus
from launch.gpus import parse_listing, visible_gpus
from launch.plan import local_topology, make_plan
from launch.plan_checks import check_plan
from launch.up_config import UpConfig
from tests.launch.test_topology import file, plan, words

PLAIN = """\
GPU 0: NVIDIA H200 (UUID: GPU-5f3a0000-0000-0000-0000-000000000001)
GPU 1: NVIDIA H200 (UUID: GPU-5f3a0000-0000-0000-0000-000000000002)
"""
DIVIDED = """\
GPU 0: NVIDIA H100 (UUID: GPU-a)
  MIG 3g.40gb     Device  0: (UUID: MIG-1)
  MIG 3g.40gb     Device  1: (UUID: MIG-2)
GPU 1: NVIDIA H100 (UUID: GPU-b)
"""


def test_visible_gpus_are_read_from_the_environment_or_from_nvidia_smi() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == ()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,-1,0"}) == ("1",)
    assert parse_listing(PLAIN) == ("0", "1")
    assert parse_listing(DIVIDED) == ("MIG-1", "MIG-2", "GPU-b") and parse_listing("No devices found.") == ()


@pytest.mark.parametrize(
    ("named", "seen"),
    [
        ("2,0", "2,0"),
        ("0,0,1", ""),
        ("GPU-a,GPU-a", ""),
        ("0,abc,1", "0"),
        ("NoDevFiles", ""),
        ("all", ""),
        ("0-3", "0"),
        ("0;1", "0"),
        ("0,,1", "0"),
        ("GPU-a,1", "GPU-a"),
        ("MIG-a,GPU-b", "MIG-a"),
        (" 1, 0", "1,0"),
    ],
)
def test_cuda_visible_devices_is_parsed_as_cuda_parses_it(named: str, seen: str) -> None:
    assert ",".join(visible_gpus({"CUDA_VISIBLE_DEVICES": named})) == seen


def test_container_with_only_the_sixth_device_file_has_gpu_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus.os, "listdir", lambda path: ["nvidia5", "nvidiactl", "nvidia-uvm", "null"])
    monkeypatch.setattr(gpus, "_nvidia_smi", lambda: None)
    assert visible_gpus({}) == ("0",)
    monkeypatch.setattr(gpus, "_nvidia_smi", lambda: PLAIN)
    assert visible_gpus({}) == ("0", "1")
    monkeypatch.setattr(gpus.os, "listdir", lambda path: ["null"])
    assert visible_gpus({}) == ()


@pytest.mark.parametrize("devices", [[1], ["MIG-1f"], ["GPU-5a"], ["3"]])
def test_a_topology_names_gpus_by_number_or_uuid(devices: list[int | str]) -> None:
    tables = file()
    tables["decode"][0]["devices"] = devices
    assert next(p for p in plan(tables).parts if p.name == "d").gpus == str(devices[0])
    assert "--device cuda" in words(plan(tables), "d")


def test_invalid_device_is_refused_by_name() -> None:
    tables = file()
    tables["decode"][0]["devices"] = ["gpu0"]
    with pytest.raises(StartupError, match=r"decode\[0\]: 'devices' must be numbers or UUIDs .*not 'gpu0'"):
        plan(tables)
    tables["decode"][0] |= {"devices": [0, "0"], "tensor_parallel": 2}
    with pytest.raises(StartupError, match=r"decode\[0\]: GPU '0' is named twice"):
        plan(tables)
    tables["decode"][0]["devices"] = [1.5]
    with pytest.raises(StartupError, match=r"'devices' must be a list of int \| str"):
        plan(tables)


@pytest.mark.parametrize("gpus", ["0-3", "-1", "banana", "0 1", "0;rm -rf x", "0\0", "0,0", True])
def test_gpus_of_a_node_are_numbers_or_uuids(gpus: object) -> None:
    tables = file()
    tables["nodes"][0]["gpus"] = gpus
    with pytest.raises(StartupError, match=r"nodes\[0\].*(gpus|GPU '0' is named twice)"):
        plan(tables)


def test_ranks_on_one_gpu_share_it_evenly_or_as_configured() -> None:
    config = UpConfig(device="cuda")
    shared = local_topology(config, [0, 1], ["0"])
    for share, shown in ((0.0, "--gpu-share 0.5000"), (0.3, "--gpu-share 0.3000")):
        workers = tuple(replace(w, options={**w.options, "gpu_share": share}) for w in shared.workers)
        made = make_plan(replace(shared, workers=workers), "builtin", "m")
        for part in made.parts:
            line = " ".join(made.worker_command(part))
            assert line.count("--gpu-share") == 1 and shown in line
        check_plan(made, {})
    workers = tuple(replace(w, options={**w.options, "gpu_share": 0.7}) for w in shared.workers)
    with pytest.raises(
        StartupError,
        match=r"decode-0: --gpu-share: the shares of the ranks on GPU 0 of node 'local' add up to 1.40",
    ):
        check_plan(make_plan(replace(shared, workers=workers), "builtin", "m"), {})


GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "mine", "local_size", "share", "kv"),
    [
        (124, 16, 1, 0.0, 0.85 * 124),  # alone: of the free memory
        (10, 130, 1, 0.0, 0.85 * 10),  # alone, and nearly filled by weights
        (124, 16, 1, 0.5, 0.85 * 70 - 16),  # the first of two workers
        (60, 16, 1, 0.5, 0.85 * 70 - 16),  # the second one, after the first has allocated its share
        (20, 16, 1, 0.5, 0.85 * 20),  # another process uses the GPU, too
        (100, 16, 4, 0.0, 0.85 * 70 - 16),  # two ranks of one worker on each of two GPUs
    ],
)
def test_kv_memory_of_a_rank_is_limited_to_its_share_of_a_gpu(
    free: int, mine: int, local_size: int, share: float, kv: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "cuda", fake_cuda(free, mine))
    found = default_kv_bytes(torch.device("cuda", 0), local_size, share)
    assert found == pytest.approx(kv * GIB, abs=2)


def test_weights_that_fill_the_share_are_a_start_up_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", fake_cuda(100, 36))
    with pytest.raises(StartupError, match=r"weights take 36\.0 GiB of this rank's share of 35\.0 GiB.*--gpu-share"):
        default_kv_bytes(torch.device("cuda", 0), 1, 0.25)


def fake_cuda(free: int, mine: int) -> SimpleNamespace:
    """A GPU of 140 GiB."""
    return SimpleNamespace(
        device_count=lambda: 2,
        mem_get_info=lambda device: (free * GIB, 140 * GIB),
        memory_reserved=lambda device: mine * GIB,
    )

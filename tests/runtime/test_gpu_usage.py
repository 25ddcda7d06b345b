"""What NVML reports about a worker's GPUs: a fake NVML, and the real one with and without a driver."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, ClassVar

import pynvml
import pytest
import torch

from baton.core.events import GpuUsage
from baton.engine.device import gpu_uuids
from baton.runtime.gpu_usage import read_usage, watching_gpus

GIB = 1 << 30


class NvmlError(Exception): ...


class NotSupported(NvmlError): ...


class Nvml:
    """Two GPUs and a MIG instance. Calls fail from number `fails_at` on."""

    NVMLError, NVMLError_NotSupported = NvmlError, NotSupported
    devices: ClassVar = {"GPU-a": (10, 80, 30), "GPU-b": (20, 80, 90), "MIG-c": (5, 20, None)}

    def __init__(self, fails_at: float = float("inf")) -> None:
        self.calls, self._fails_at = 0, fails_at

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.calls += 1
        if self.calls >= self._fails_at or uuid not in self.devices:
            raise NvmlError("GPU is lost")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        used, total, _ = self.devices[handle]
        return SimpleNamespace(used=used * GIB, total=total * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if (share := self.devices[handle][2]) is None:
            raise NotSupported
        return SimpleNamespace(gpu=share)


def test_usage_is_combined_over_all_gpus() -> None:
    nvml: Any = Nvml()
    assert read_usage(["GPU-a", "GPU-b"], nvml) == GpuUsage(30 * GIB, 160 * GIB, 0.6)
    assert read_usage(["MIG-c"], nvml) == GpuUsage(5 * GIB, 20 * GIB, 0.0)
    with pytest.raises(NvmlError, match="lost"):
        read_usage(["GPU-a", "GPU-x"], nvml)


async def test_usage_is_reported_until_nvml_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("baton.runtime.gpu_usage.INTERVAL_S", 0.0)
    nvml: Any = Nvml(fails_at=4)
    seen: list[GpuUsage | None] = []
    async with asyncio.timeout(30), watching_gpus(["GPU-a"], seen.append, nvml):
        while not caplog.records:
            await asyncio.sleep(0.01)
    assert seen == [GpuUsage(10 * GIB, 80 * GIB, 0.3)] * 3 + [None]  # an old reading is not kept
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "cannot read memory and utilisation of the GPU: NVML: GPU is lost"
    ]


def test_a_worker_on_the_cpu_has_no_gpu_uuids() -> None:
    assert gpu_uuids("cpu", 2) == []


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-0", "GPU-1"]),
        ("3,1", ["GPU-0", "GPU-1"]),
        ("GPU-a,GPU-b", ["GPU-0", "GPU-1"]),
        ("MIG-a, MIG-b,MIG-c", ["MIG-a", "MIG-b"]),
    ],
)
def test_gpus_are_named_as_nvml_names_them(
    visible: str | None, uuids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a MIG instance torch reports a UUID without its kind."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=number))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_uuids("cuda", 2) == uuids


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
async def test_a_missing_driver_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(30), watching_gpus(["GPU-a"], lambda usage: None):
        while not caplog.records:
            await asyncio.sleep(0.01)
    assert "NVML Shared Library Not Found" in caplog.records[0].getMessage()


@pytest.mark.gpu
def test_the_real_nvml_reports_usage_in_range() -> None:
    uuids = gpu_uuids("cuda", 1)
    pynvml.nvmlInit()
    usage = read_usage(uuids, pynvml)
    assert 0 < usage.memory_used_bytes <= usage.memory_total_bytes and 0 <= usage.utilisation <= 1

"""Memory and utilisation of a worker's GPUs for its heartbeats, from NVML: once a second, on a thread, because a driver
takes milliseconds to reply, and sometimes many."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from types import ModuleType

import pynvml

from baton.core.events import GpuUsage

log = logging.getLogger("baton.worker")
INTERVAL_S = 1.0


@contextlib.asynccontextmanager
async def watching_gpus(
    uuids: Sequence[str], report: Callable[[GpuUsage | None], None], nvml: ModuleType = pynvml
) -> AsyncIterator[None]:
    """Reports usage during the block; once NVML has failed, reports None and logs a warning."""
    watching = asyncio.create_task(_watch(uuids, report, nvml), name="GPU usage")
    try:
        yield
    finally:
        watching.cancel()


async def _watch(uuids: Sequence[str], report: Callable[[GpuUsage | None], None], nvml: ModuleType) -> None:
    try:
        await asyncio.to_thread(nvml.nvmlInit)
        while True:
            report(await asyncio.to_thread(read_usage, uuids, nvml))
            await asyncio.sleep(INTERVAL_S)
    except nvml.NVMLError as error:
        report(None)
        log.warning("cannot read memory and utilisation of the GPU: NVML: %s", error)


def read_usage(uuids: Sequence[str], nvml: ModuleType) -> GpuUsage:
    """Returns the usage of GPUs or MIG instances. The driver reports no utilisation of an instance: it counts as 0.

    Raises:
        nvml.NVMLError: the driver does not find one of them, or does not reply.
    """
    used = total = busy = 0
    for uuid in uuids:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        used, total = used + memory.used, total + memory.total
        with contextlib.suppress(nvml.NVMLError_NotSupported):
            busy += nvml.nvmlDeviceGetUtilizationRates(handle).gpu
    return GpuUsage(used, total, busy / 100 / len(uuids))

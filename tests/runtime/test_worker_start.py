"""In which order a worker prepares its process, without a GPU."""

from __future__ import annotations

import asyncio

import pytest
import torch

from baton.core.errors import StartupError
from baton.core.ranks import Ranks
from baton.engine import device
from baton.runtime import worker_main
from baton.runtime.config import WorkerConfig
from baton.transfer import nccl


@pytest.mark.parametrize("leads", [True, False])
def test_the_environment_is_set_before_cuda_is_used(leads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver reads CUDA_DEVICE_MAX_CONNECTIONS once, when a device is first asked for."""
    order: list[str] = []

    def choose(*_: object) -> torch.device:
        order.append("device")
        raise StartupError("the test ends here")

    monkeypatch.setattr(nccl, "configure_nccl", lambda host: order.append(f"environment for {host}"))
    monkeypatch.setattr(device, "choose_device", choose)
    config, ranks = WorkerConfig(model="/nonexistent"), Ranks.from_environment({})
    with pytest.raises(StartupError, match="the test ends here"):
        if leads:
            asyncio.run(worker_main._serve("prefill", config, ranks, lambda: pytest.fail))
        else:
            worker_main._follow("prefill", config, ranks)
    assert order == ["environment for 127.0.0.1", "device"]

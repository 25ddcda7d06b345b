"""The coordinator's process as a whole, without workers."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.errors import InvariantError, StartupError
from baton.runtime.config import CoordinatorConfig
from baton.runtime.model_source import builtin_directory
from coordinator.cluster import Cluster
from coordinator.serving import run_coordinator


async def test_a_coordinator_that_a_bug_ends_drains_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that drain exit with 0 and count as left: the next coordinator, which they dial, would have none."""
    drained: list[float] = []

    async def fails(cluster: Cluster) -> None:
        await asyncio.sleep(0)
        raise InvariantError("a bug")

    async def drain(cluster: Cluster, timeout_s: float) -> None:
        drained.append(timeout_s)

    monkeypatch.setattr(Cluster, "tick", fails)
    monkeypatch.setattr(Cluster, "drain", drain)
    config = CoordinatorConfig(model=str(builtin_directory("target")), port=0, grpc_port=0, control_port=0)
    with pytest.raises(StartupError, match="cluster tick failed: a bug"):
        await asyncio.wait_for(run_coordinator(config), 60)
    assert not drained

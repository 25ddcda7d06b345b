"""Regression tests for attacks by clients and mistakes by operators that once harmed a running cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client, body
from tests.support.cluster import Cluster, cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hostile") / "m", arch="llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Cluster]:
    with cluster(model, dtype="float32", served_model_name="m") as started:
        yield started


async def test_a_request_id_can_be_reused_after_its_client_disconnected(running: Cluster) -> None:
    """Workers keep tombstones of aborted sequences; a retry with the same request id is a new request."""
    named = {"x-request-id": "mine"}
    async with Client(running, timeout_s=20) as client:
        alone = await client.tokens([5] * 10, 40)
        for leave_after_s in (0.3, 0.05, 0.3):
            sent = body([7] * 30, 3000, stream=True)
            leaving = asyncio.create_task(client.http.post("/v1/completions", json=sent, headers=named))
            await asyncio.sleep(leave_after_s)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await client.idle(running)
            answer = await client.http.post("/v1/completions", json=body([5] * 10, 40), headers=named)
            assert tuple(answer.json()["choices"][0]["token_ids"]) == alone
        await client.idle(running)

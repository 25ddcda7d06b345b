"""`baton up --autoscale`: from zero to several workers under load, and back to zero."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.runtime.streams import NO_PROXY
from sim.scale.costs import DecodeCosts, PrefillCosts
from tests.support.checkpoints import make_checkpoint
from tests.support.client import body
from tests.support.cluster import Cluster, cluster
from tests.support.forks import start
from tests.support.scale import CALIBRATION

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

WORKERS = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
HOLD_S = 45.0  # and a request waits no longer for workers that start
PAUSE_S = 0.5  # after each request, so that clients do not slow down the workers that start


def _calibration(tmp_path: Path) -> str:
    """Costs of a machine so slow that a few short prompts are work for two workers of each role."""
    slow = replace(
        CALIBRATION,
        prefill=PrefillCosts(base_s=0.5, token_s=0.1),
        decode=DecodeCosts(base_s=0.05, row_s=0.05),
        prefill_worker=replace(CALIBRATION.prefill_worker, start_s=20.0),
        decode_worker=replace(CALIBRATION.decode_worker, start_s=20.0),
    )
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(slow.as_json()))
    return str(file)


def _ready(running: Cluster) -> set[str]:
    return {name for name, row in running.workers().items() if row["state"] == "ready"}


async def test_workers_follow_the_load_from_zero_and_back(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", arch="llama")
    flags = {"prefill": 2, "decode": 2, "autoscale": _calibration(tmp_path), "autoscale_min": 0, "hold_s": 200.0}
    with cluster(model, run_dir=tmp_path / "run", **flags, autoscale_idle_s=4.0, served_model_name="m") as running:
        assert running.workers() == {}, "it was ready without a worker"
        stop, answers = asyncio.Event(), list[int]()

        async def client(http: httpx.AsyncClient, number: int) -> None:
            while not stop.is_set():
                answer = await http.post("/v1/completions", json=body([number + 3] * 40, 16))
                assert answer.status_code == 200, answer.text
                answers.append(len(answer.json()["choices"][0]["token_ids"]))
                await asyncio.sleep(PAUSE_S)

        async with httpx.AsyncClient(base_url=running.url, timeout=300.0) as http:
            clients = [asyncio.create_task(client(http, number)) for number in range(12)]
            try:
                await asyncio.to_thread(running.wait_until, lambda c: _ready(c) == WORKERS, "all four workers", 200.0)
            finally:
                stop.set()
            await asyncio.gather(*clients)
            metrics = (await http.get("/metrics")).text
            computed = {name: row["prompt_tokens_computed"] for name, row in running.workers().items()}
            await asyncio.to_thread(running.wait_until, lambda c: not c.workers(), "no worker", 60.0)
            assert (await http.post("/v1/completions", json=body([1, 2, 3], 2))).status_code == 200  # and up again
        assert len(answers) >= 12 and set(answers) == {16}
        assert not [line for line in metrics.splitlines() if line.startswith("baton_requests_failed_total")]
        assert 'baton_http_responses_total{status="503"}' not in metrics
        assert sum(computed.values()) >= 12 * 40
        output = running.output.read_text()
        assert output.count("left") >= 4 and "0 prefill + 0 decode" in output
        assert "2 prefill + 2 decode: prefill" in output and "uncached tokens" in output


async def test_a_balancer_that_asks_for_readiness_wakes_a_cluster_without_workers(tmp_path: Path) -> None:
    """It is ready before it has had a worker, and for longer than `--hold-s` after the last one."""
    model = make_checkpoint(tmp_path / "m", arch="llama")
    flags = {"autoscale": _calibration(tmp_path), "autoscale_min": 0, "autoscale_idle_s": 2.0, "hold_s": HOLD_S}
    with cluster(model, run_dir=tmp_path / "run", **flags, served_model_name="m") as running:
        async with (
            httpx.AsyncClient(base_url=running.url, timeout=300.0) as http,
            grpc.aio.insecure_channel(running.grpc, options=[NO_PROXY]) as channel,
        ):

            async def ready() -> bool:
                health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                answers = {(await http.get(path)).status_code for path in ("/ready", "/health", "/v2/health/ready")}
                assert answers in ({200}, {503})
                serving = health.status == health_pb2.HealthCheckResponse.SERVING
                assert serving is (answers == {200})
                return serving

            assert running.workers() == {} and await ready(), "before it had any"
            assert (await http.post("/v1/completions", json=body([1, 2, 3], 2))).status_code == 200
            await asyncio.to_thread(running.wait_until, lambda c: not c.workers(), "no worker", 60.0)
            end = time.monotonic() + HOLD_S + 2.0
            while time.monotonic() < end:
                assert await ready(), "no balancer sends a request any more"
                await asyncio.sleep(0.5)
            assert running.workers() == {}
            assert (await http.post("/v1/completions", json=body([1, 2, 3], 2))).status_code == 200


async def test_a_fixed_number_of_workers_changes_roles_with_the_load(tmp_path: Path) -> None:
    """Prompts of one token ask for decode workers, so that of two prefill workers one becomes a decode worker."""
    model = make_checkpoint(tmp_path / "m", arch="llama")
    with cluster(model, run_dir=tmp_path / "run", prefill=2, decode=1, served_model_name="m") as running:
        command = ["autoscale", running.url, "--calibration", _calibration(tmp_path), "--slo", "ttft=60,tpot=200ms"]
        token = ["--cluster-token-file", str(running.run_dir / "cluster.token")]
        log = (tmp_path / "autoscale.log").open("w")
        words = [sys.executable, "-m", "launch.cli", *command, "--flip", *token]
        scaler = start(words, env={**os.environ}, stdout=log, stderr=log)
        stop = asyncio.Event()

        async def client(http: httpx.AsyncClient, number: int) -> None:
            while not stop.is_set():
                answer = await http.post("/v1/completions", json=body([number + 3] * 2, 60))
                assert answer.status_code == 200, answer.text
                await asyncio.sleep(PAUSE_S)

        def flipped(running: Cluster) -> bool:
            rows = running.workers()
            return _ready(running) == set(rows) and [row["role"] for row in rows.values()].count("decode") == 2

        async with httpx.AsyncClient(base_url=running.url, timeout=300.0) as http:
            clients = [asyncio.create_task(client(http, number)) for number in range(8)]
            try:
                await asyncio.to_thread(running.wait_until, flipped, "two decode workers", 120.0)
                reported = lambda _: "joined as decode" in (tmp_path / "autoscale.log").read_text()  # noqa: E731
                await asyncio.to_thread(running.wait_until, reported, "its report")
            finally:
                stop.set()
                scaler.send_signal(signal.SIGINT)
                assert scaler.wait(30) == 0, (tmp_path / "autoscale.log").read_text()
                log.close()
            await asyncio.gather(*clients)
            assert (await http.get("/workers")).json()["flips"] == {"decode": 1}

"""Triton's own client, over HTTP and gRPC, against a running cluster (support/triton_client.py)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.cluster import cluster
from tests.support.packages import pip_install

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(400)]
PACKAGE = "tritonclient[grpc,http]==2.73.0"
SCRIPT = Path(__file__).parents[1] / "support" / "triton_client.py"


def test_triton_s_client_infers_streams_and_reads_metadata(tmp_path: Path) -> None:
    python = pip_install(tmp_path / "env", PACKAGE)
    with cluster("builtin", exact=True) as running:
        addresses = [running.url.removeprefix("http://"), running.grpc, "builtin"]
        ran = subprocess.run([python, SCRIPT, *addresses], capture_output=True, text=True, timeout=200)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert ran.stdout.split() == ["ok", "infer", "ok", "stream", "ok", "errors"]
        running.wait_until(lambda _: not sum(row["running"] for row in running.workers().values()), "idle cluster")

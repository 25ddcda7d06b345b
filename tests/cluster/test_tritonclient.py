"""Triton's own client, over HTTP and gRPC, against a running cluster (support/triton_client.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import cluster

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(400)]
PACKAGE = "tritonclient[grpc,http]==2.73.0"
SCRIPT = Path(__file__).parents[1] / "support" / "triton_client.py"


def test_triton_s_client_infers_streams_and_reads_metadata(tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True, timeout=60)
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", PACKAGE]
    done = subprocess.run(install, capture_output=True, text=True, timeout=180)
    if done.returncode:
        pytest.skip(f"pip cannot install {PACKAGE}: {done.stderr.strip()[-200:]}")
    with cluster("builtin", exact=True) as running:
        addresses = [running.url.removeprefix("http://"), running.grpc, "builtin"]
        ran = subprocess.run([python, SCRIPT, *addresses], capture_output=True, text=True, timeout=200)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert ran.stdout.split() == ["ok", "infer", "ok", "stream", "ok", "errors"]
        running.wait_until(lambda _: not sum(row["running"] for row in running.workers().values()), "idle cluster")

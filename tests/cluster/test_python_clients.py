"""instructor, openai-agents and LiteLLM against a running cluster (support/python_clients.py)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.cluster import cluster
from tests.support.packages import pip_install

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]
PACKAGES = ("instructor==1.17.0", "openai-agents==0.24.0", "litellm==1.110.2")
SCRIPT = Path(__file__).parents[1] / "support" / "python_clients.py"


def test_python_s_clients_get_what_they_ask_for(tmp_path: Path) -> None:
    python = pip_install(tmp_path / "env", *PACKAGES)
    with cluster("builtin", exact=True) as running:
        ran = subprocess.run(
            [python, SCRIPT, f"{running.url}/v1", "builtin"], capture_output=True, text=True, timeout=200
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
        assert ran.stdout.split() == ["ok", "instructor", "ok", "agents", "ok", "litellm"]

"""Anthropic's packages of npm against a running cluster: the SDK (support/anthropic_client.mjs), and Claude Code, which
calls a tool and answers, with two variables set."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent_model import ANSWER, agent_model
from tests.support.cluster import Cluster, cluster
from tests.support.packages import npm_install

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(400)]
SDK = "@anthropic-ai/sdk@1.14.0"
CLAUDE_CODE = "@anthropic-ai/claude-code@2.1.332"
SCRIPT = Path(__file__).parents[1] / "support" / "anthropic_client.mjs"
CHECKS = ("models", "message", "stream", "tools", "errors", "leaving")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(agent_model(tmp_path_factory.mktemp("m") / "agent"), dtype="float32") as started:
        yield started


def test_the_npm_package_passes_every_check(running: Cluster, tmp_path: Path) -> None:
    node = npm_install(tmp_path, SDK)
    ran = subprocess.run([node, str(SCRIPT), running.url, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.split() == [word for name in CHECKS for word in ("ok", name)]
    running.wait_until(lambda _: not sum(row["running"] for row in running.workers().values()), "idle cluster")


def test_claude_code_calls_a_tool_and_answers(running: Cluster, tmp_path: Path) -> None:
    npm_install(tmp_path, CLAUDE_CODE)
    programs = sorted(tmp_path.glob("node_modules/@anthropic-ai/claude-code-linux-*/claude"))
    if not programs:
        pytest.skip("Claude Code has no program for this machine")
    home = tmp_path / "home"
    (home / "project").mkdir(parents=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ANTHROPIC_BASE_URL": running.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
    }
    asked = [str(programs[0]), "-p", "Run it: [[call]]", "--allowedTools", "Bash", "--output-format", "json"]
    ran = subprocess.run(
        asked,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=home / "project",
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(ran.stdout)
    assert (result["result"], result["num_turns"], result["is_error"]) == (ANSWER, 2, False), ran.stdout
    running.wait_until(lambda _: not sum(row["running"] for row in running.workers().values()), "idle cluster")

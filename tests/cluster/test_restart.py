"""A restarted worker works as before, whether its rank or its agent was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import Cluster, cluster, command_line

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def answer(running: Cluster) -> str:
    body = {"model": "m", "prompt": "def read_lines(path):", "max_tokens": 24, "temperature": 0}
    done = httpx.post(running.url + "/v1/completions", json=body, timeout=60)
    assert done.status_code == 200, done.text
    return str(done.json()["choices"][0]["text"])


def agent(running: Cluster, name: str) -> int:
    (found,) = (pid for pid in running.processes() if "launch.agent" in (c := command_line(pid)) and name in c)
    return found


def kill_and_await(running: Cluster, name: str, victim: int) -> None:
    """Kills a process of that worker and waits until the supervisor reports the restarted worker."""
    line = f"{name:<12}  joined"
    before, joined = running.pids(name), running.output.read_text().count(line)
    running.kill(victim)
    running.wait_until(lambda c: c.output.read_text().count(line) > joined, f"restart of {name}", 60.0)
    assert running.pids(name) != before


def test_a_restarted_worker_serves_as_before_and_drains_on_sigterm(tmp_path: Path) -> None:
    flags = {"exact": True, "draft": "ngram", "prefill": 2}
    with cluster(make_checkpoint(tmp_path / "m"), run_dir=tmp_path / "run", **flags) as running:
        first = answer(running)
        parent, rank = agent(running, "decode-0"), running.pids("decode-0")[0]
        assert command_line(rank)[1:3] == ["-m", "decode"] and os.getsid(rank) == rank != os.getsid(parent)
        kill_and_await(running, "decode-0", rank)
        assert not {parent, rank} & set(running.processes()) and answer(running) == first

        kill_and_await(running, "prefill-1", running.pids("prefill-1")[0])
        parent = agent(running, "prefill-1")
        running.kill(parent, signal.SIGTERM)
        running.wait_until(lambda c: parent not in c.processes(), "an end of the agent")
        running.wait_until(lambda c: "prefill-1     left" in c.output.read_text(), "the leaving")

        parent, rank = agent(running, "prefill-0"), running.pids("prefill-0")[0]
        kill_and_await(running, "prefill-0", parent)  # the rank of a killed agent dies with it
        assert not {parent, rank} & set(running.processes()) and answer(running) == first

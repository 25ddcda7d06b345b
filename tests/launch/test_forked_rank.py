"""A rank that is a fork is what exec would have made of it, and dies with its agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# An agent with handlers, a file of its own and words not yet written; then a rank.
AGENT = """
import os, signal, sys
from launch.forked_rank import forked
from launch.lone_rank import LoneRank
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda *_: print("the agent's handler", os.getpid(), flush=True))
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
own = os.open("/dev/null", os.O_RDONLY)
sys.stdout = os.fdopen(1, "w", buffering=8192, closefd=False)
print("said once")
rank = forked(LoneRank("the_rank", ("--flag", "ä b")), {"TOLD": "yes"}, [own])
print(rank.wait(), "TOLD" in os.environ, flush=True)
"""

RANK = """
import faulthandler, json, os, signal, sys
told = {
    "argv": sys.argv[1:],
    "told": os.environ["TOLD"],
    "handlers": {n.name: repr(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "open": [f for f in os.listdir("/proc/self/fd") if int(f) > 2 and os.path.lexists(f"/proc/self/fd/{f}")],
    "command": open("/proc/self/cmdline", "rb").read().rstrip(b"\\0").decode().split("\\0")[1:],
    "group": os.getpgrp() == os.getsid(0) == os.getpid(),
}
with open("told.json", "w") as file:
    json.dump(told, file)
os.kill(os.getpid(), signal.SIGTERM)
"""


def environment(where: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{where}", "PYTHONUNBUFFERED": "1"}


def test_it_is_as_if_executed(tmp_path: Path) -> None:
    (tmp_path / "the_rank.py").write_text(RANK)
    done = subprocess.run(
        [sys.executable, "-P", "-c", AGENT], cwd=tmp_path, env=environment(tmp_path), capture_output=True, timeout=60
    )
    assert done.stdout.decode() == f"said once\n{-signal.SIGTERM} False\n", done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["argv"] == ["--flag", "ä b"] and told["told"] == "yes" and told["group"]
    assert told["handlers"] == {
        "SIGTERM": "<Handlers.SIG_DFL: 0>",
        "SIGHUP": "<Handlers.SIG_DFL: 0>",
        "SIGUSR2": "<Handlers.SIG_IGN: 1>",
    }
    assert told["blocked"] == [] and told["open"] == []
    assert told["command"] == ["-u", "-m", "the_rank", "--flag", "ä b"]


def test_what_the_agent_has_not_written_yet_is_written_once(tmp_path: Path) -> None:
    (tmp_path / "the_rank.py").write_text("print('the rank')")
    agent = [sys.executable, "-P", "-c", AGENT]
    done = subprocess.run(agent, cwd=tmp_path, env=environment(tmp_path), capture_output=True, timeout=60)
    assert done.stdout.decode() == "said once\nthe rank\n0 False\n", done.stderr


def test_it_dies_with_its_agent_before_it_has_read_a_line_of_its_module(tmp_path: Path) -> None:
    (tmp_path / "the_rank.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    agent = subprocess.Popen(
        [sys.executable, "-P", "-c", AGENT], cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None and agent.stdout.readline() == "said once\n"
    rank = int(agent.stdout.readline())
    agent.kill()
    agent.wait(10)
    agent.stdout.close()
    stat, deadline = Path(f"/proc/{rank}/stat"), time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.02)


@pytest.mark.parametrize("length", [1, 5000])
def test_a_command_is_shown_as_far_as_there_is_room(length: int) -> None:
    words = ["-c", "y" * length]
    code = f"from launch.forked_rank import show_command; show_command(['-c', 'y' * {length}]); "
    code += "raw = open('/proc/self/cmdline', 'rb').read(); print(len(raw), raw[-1])\n"
    code += "print(raw.rstrip(b'\\0').decode().replace('\\0', ' '))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    room = len(os.fsencode(sys.executable)) + len("-c") + len(code) + 3
    assert shown.stdout == f"{room} 0\n{' '.join(words)[: room - 1]}\n", shown.stderr


@pytest.fixture(autouse=True)
def linux_only() -> None:
    if sys.platform != "linux":
        pytest.skip("lone ranks are forked on Linux only")

"""Which shapes of a job are refused before torch is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launch.job_flags import refusal

WORKER = ["-m", "prefill", "--nnodes", "0", "--nproc-per-node", "x"]


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--nnodes 2 --node-rank 1 --nproc-per-node 4",
        "--nnodes=1:4 --node_rank=3 --nproc_per_node=gpu",
        "--standalone --nproc-per-node 2",
        "--no-python --node-rank 0",
        "script.py --nproc-per-node x",
    ],
)
def test_a_job(flags: str) -> None:
    assert refusal([*flags.split(), *WORKER], {"PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"}) == ""


@pytest.mark.parametrize(
    ("flags", "variables", "name", "value"),
    [
        ("--nproc-per-node 0", {}, "RANKS", "0"),
        ("--nproc_per_node=x", {}, "RANKS", "x"),
        ("--nnodes 1 --nproc-per-node -1", {}, "RANKS", "-1"),
        ("", {"PET_NPROC_PER_NODE": "0"}, "RANKS", "0"),
        ("--nnodes 0", {}, "NNODES", "0"),
        ("--nnodes 2:x", {}, "NNODES", "2:x"),
        ("--nnodes 2 --node-rank 2", {}, "NODE_RANK", "2"),
        ("--nnodes 2 --node-rank x", {}, "NODE_RANK", "x"),
        ("--standalone --node-rank 1", {}, "NODE_RANK", "1"),
        ("--nnodes 2", {"PET_NODE_RANK": "5"}, "NODE_RANK", "5"),
    ],
)
def test_no_job(flags: str, variables: dict[str, str], name: str, value: str) -> None:
    assert f"({name} of the scripts) is {value!r}: " in refusal([*flags.split(), *WORKER], variables)


def test_the_agent_refuses_it_in_one_line_without_torch() -> None:
    code = (
        "import atexit, sys; sys.argv = 'agent --nnodes 2 --node-rank 5 -m prefill'.split()\n"
        "atexit.register(lambda: print('torch' in sys.modules)); from launch.agent import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "False\n", 1)
    assert done.stderr.startswith("error: --node-rank (NODE_RANK of the scripts) is '5'")

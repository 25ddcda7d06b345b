"""Which jobs need no torchrun, and that a rank without it is told what torchrun's are told and ends as they do, whether
it is executed or a fork."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.lone_rank import LoneRank, RankEnd, lone_rank
from launch.plan import local_topology, make_plan
from launch.up_config import UpConfig

ROOT = Path(__file__).parents[2]
WORKER = ["-m", "prefill", "--nnodes", "2", "-m", "x"]
ALONE = LoneRank("prefill", ("--nnodes", "2", "-m", "x"))


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--nnodes 1 --node-rank 0 --nproc-per-node 1 --max-restarts 0",
        "--nnodes=1:1 --nproc_per_node=1",
        "--master-addr 10.0.0.2 --master-port 9000",
    ],
)
def test_a_lone_rank(flags: str) -> None:
    assert lone_rank([*flags.split(), *WORKER], {}) == ALONE


@pytest.mark.parametrize(
    "flags",
    [
        "--nproc-per-node 2",
        "--nproc-per-node gpu",
        "--nnodes 2 --node-rank 0",
        "--nnodes 1:2",
        "--max-restarts 3",
        "--rdzv-backend c10d",
        "--standalone",
        "--log-dir logs",
        "--no-python",
        "--nproc-per-node",
        "--master-addr",
        "script.py",
    ],
)
def test_all_else_is_torchruns(flags: str) -> None:
    assert lone_rank([*flags.split(), *WORKER], {}) is None


def test_what_torchrun_is_told_by_its_environment_is_torchruns() -> None:
    assert lone_rank(WORKER, {"PET_NPROC_PER_NODE": "2"}) is None and lone_rank(WORKER, {"PYTHON_EXEC": "x"}) is None
    assert lone_rank(["-m"], {}) is None and lone_rank(["script.py"], {}) is None


def test_the_plan_and_the_scripts_ask_for_nothing_else() -> None:
    made = make_plan(local_topology(UpConfig(prefill_tp=2, decode_tp=1), [0, 1], ()), "/m", "m")
    alone = {p.name: lone_rank([*made.torchrun_flags(p), *WORKER], {}) is not None for p in made.parts}
    assert alone == {"prefill-0": False, "decode-0": True}
    for role in ("prefill", "decode"):
        environment = {"PATH": os.environ["PATH"], "PYTHON": "echo"}
        script = ["bash", str(ROOT / "launch" / f"{role}.sh"), "--host", "h"]
        said = subprocess.run(script, env=environment, capture_output=True, text=True, check=True, timeout=20).stdout
        assert lone_rank(shlex.split(said)[2:], {}) == LoneRank(role, ("--host", "h"))


DRIVER = """
import dataclasses, json, os, sys
from launch.forked_rank import forked
from launch.lone_rank import LoneRank, executed, run
end = run(LoneRank("the_rank", ("a", "b c")), sys.argv[1], {"executed": executed, "forked": forked}[sys.argv[2]])
with open("end.json", "w") as file:
    json.dump(dataclasses.asdict(end), file)
"""


@pytest.fixture(params=["executed", "forked"])
def start(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ends(code: str, where: Path, start: str) -> RankEnd:
    """How a rank with that code ends; what it says is in `said`."""
    (where / "the_rank.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{where}", "PYTHONUNBUFFERED": "1"}
    with (where / "said").open("w") as said:
        driver = [sys.executable, "-P", "-c", DRIVER, str(where), start]
        subprocess.run(driver, cwd=where, env=environment, stdout=said, stderr=said, check=True, timeout=60)
    return RankEnd(**json.loads((where / "end.json").read_text()))


def test_it_is_told_what_torchrun_tells(tmp_path: Path, start: str) -> None:
    code = f"""
import os, sys
from baton.core.ranks import Ranks
assert Ranks.from_environment(os.environ) == Ranks()
assert sys.argv[1:] == ["a", "b c"] and sys.argv[0].endswith("the_rank.py") and os.getsid(0) == os.getpid()
assert __name__ == "__main__" and sys.modules["__main__"].sys is sys
names = [n for n in os.environ if "RANK" in n or "WORLD_SIZE" in n or n.startswith("TORCHELASTIC_")]
open({str(tmp_path / "names")!r}, "w").write(" ".join(sorted(names)))
"""
    end = ends(code, tmp_path, start)
    assert (end.code, end.reason) == (0, "")
    assert (tmp_path / "names").read_text() == (
        "GROUP_RANK GROUP_WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE RANK ROLE_RANK ROLE_WORLD_SIZE "
        "TORCHELASTIC_ERROR_FILE TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RESTART_COUNT TORCHELASTIC_RUN_ID WORLD_SIZE"
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import baton.process as p, sys; p.record_error('no tensor x'); sys.exit(3)", (3, "no tensor x")),
        ("import os; os.kill(os.getpid(), 9)", (-signal.SIGKILL, "")),
        ("import sys; sys.exit()", (0, "")),
        ("import sys; sys.exit('no such thing')", (1, "")),
        ("raise RuntimeError('it breaks')", (1, "")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", (-signal.SIGTERM, "")),
        ("import os; open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{\"mess'); os._exit(1)", (1, "")),
    ],
)
def test_its_end(code: str, expected: tuple[int, str], tmp_path: Path, start: str) -> None:
    end = ends(code, tmp_path, start)
    said = (tmp_path / "said").read_text()
    assert (end.code, end.reason) == expected and end.pid > 0
    assert all(words in said for words in ("no such thing", "it breaks") if words in code)


def test_what_a_rank_that_failed_had_started_ends_too(tmp_path: Path, start: str) -> None:
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, file=open('pid', 'w')); sys.exit(1)"
    assert ends(code, tmp_path, start).code == 1
    stat, deadline = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat"), time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.02)

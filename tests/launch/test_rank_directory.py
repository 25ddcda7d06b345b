"""What an agent leaves when it is killed, the next one removes, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.rank_directory import PREFIX, make_rank_directory, remove_left_behind

HOLDS = (
    "import time; from launch.rank_directory import make_rank_directory as m; print(m(), flush=True); time.sleep(60)"
)


def aged(path: Path) -> Path:
    os.utime(path, times=(time.time() - 3600,) * 2)
    return path


def test_what_a_killed_agent_left_is_removed_by_the_next_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    agent = subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert agent.stdout is not None
        held = Path(agent.stdout.readline().strip())
        (held / "error.json").write_text("{}")
        assert aged(held).is_dir() and held.parent == tmp_path
        first = Path(make_rank_directory())
        assert held.exists()
    finally:
        agent.kill()
        agent.communicate(timeout=10)
    second = Path(make_rank_directory())
    assert sorted(tmp_path.iterdir()) == sorted([first, second])


def test_what_is_young_or_a_link_or_called_otherwise_stays(tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "file").touch()
    temporary = tmp_path / "tmp"
    (temporary / (PREFIX + "young")).mkdir(parents=True)
    (temporary / "baton-ranks-x").mkdir()
    aged(temporary / "baton-ranks-x")
    (temporary / (PREFIX + "link")).symlink_to(aged(elsewhere))
    remove_left_behind(temporary)
    assert len(list(temporary.iterdir())) == 3 and (elsewhere / "file").exists()
    aged(temporary / (PREFIX + "young"))
    remove_left_behind(temporary)
    assert len(list(temporary.iterdir())) == 2 and (elsewhere / "file").exists()

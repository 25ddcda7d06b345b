"""What an agent leaves when it is killed, the next one removes, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import rank_directory
from launch.rank_directory import held_prefix, make_rank_directory, remove_left_behind

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
    (temporary / (held_prefix() + "young")).mkdir(parents=True)
    (temporary / "baton-ranks-x").mkdir()
    aged(temporary / "baton-ranks-x")
    (temporary / (held_prefix() + "link")).symlink_to(aged(elsewhere))
    remove_left_behind(temporary)
    assert len(list(temporary.iterdir())) == 3 and (elsewhere / "file").exists()
    aged(temporary / (held_prefix() + "young"))
    remove_left_behind(temporary)
    assert len(list(temporary.iterdir())) == 2 and (elsewhere / "file").exists()


def test_what_another_kernel_holds_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system shared by hosts that keep locks to themselves: here nobody seems to hold it."""
    (here := tmp_path / "boot_id").write_text("6d2517e3-d585-4bcd-bfa0-938544d3613c\n")
    (there := tmp_path / "other_boot_id").write_text("0f8a11c2-7d4e-4c55-9a39-2f3c5b1a7788\n")
    (shared := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(rank_directory, "_BOOT_ID", there)
    (held := shared / f"{held_prefix()}x").mkdir()
    aged(held)
    monkeypatch.setattr(rank_directory, "_BOOT_ID", here)
    assert held_prefix() == "baton-ranks-held-6d2517e3d585-"
    remove_left_behind(shared)
    assert list(shared.iterdir()) == [held]
    monkeypatch.setattr(rank_directory, "_BOOT_ID", there)
    remove_left_behind(shared)
    assert not list(shared.iterdir())


def test_a_kernel_without_a_name_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"{held_prefix()}old").mkdir()
    aged(tmp_path / f"{held_prefix()}old")
    monkeypatch.setattr(rank_directory, "_BOOT_ID", tmp_path / "absent")
    made = Path(make_rank_directory())
    assert made.is_dir() and not made.name.startswith(rank_directory.PREFIX) and len(list(tmp_path.iterdir())) == 2

"""The file that `baton roll` and `baton up` exchange, when one of them ends, or when it cannot be written."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from baton.core.errors import StartupError
from launch.console import Console
from launch.roll import REQUESTED, RUNNING, Roll, roll
from launch.run_directory import ROLL, run_directory


class NoProcesses:
    """A cluster of which nothing runs on this host."""

    coordinator = batches = None

    def groups(self) -> dict[str, list[object]]:
        return {"prefill": [], "decode": []}


@pytest.mark.parametrize("state", ["", REQUESTED, RUNNING])
def test_without_its_launcher_a_roll_is_refused_whatever_the_file_says(tmp_path: Path, state: str) -> None:
    with run_directory(str(tmp_path / "run")) as path:
        pass
    if state:
        (path / ROLL).write_text(json.dumps({"state": state, "replaced": ["prefill-0"]}))
    with pytest.raises(StartupError, match=r"^no `baton up` runs in .*/run; name its directory with --run-dir$"):
        roll(path, Console())


@pytest.mark.timeout(30)
@pytest.mark.parametrize("killed", [True, False])
def test_a_roll_whose_launcher_ends_is_an_error(tmp_path: Path, killed: bool) -> None:
    errors: list[str] = []

    def request() -> None:
        try:
            roll(path, Console())
        except StartupError as error:
            errors.append(error.message)

    with run_directory(str(tmp_path / "run")) as path:
        client = threading.Thread(target=request, daemon=True)
        client.start()
        while not (path / ROLL).exists():
            time.sleep(0.01)
        running = json.dumps({"state": RUNNING, "replaced": [], "now": "prefill-0"})
        (path / ROLL).write_text(running)
    if killed:  # then the file stays
        (path / ROLL).write_text(running)
    client.join(timeout=10.0)
    assert not client.is_alive() and len(errors) == 1
    assert errors[0].startswith(f"the roll left no result in {path / ROLL}: `baton up` has ended")


def test_a_result_that_cannot_be_written_ends_the_roll_and_not_the_cluster(tmp_path: Path) -> None:
    (tmp_path / ROLL).write_text(json.dumps({"state": REQUESTED, "replaced": []}))
    (tmp_path / ROLL).with_suffix(".partial").mkdir()
    ticked = Roll(NoProcesses(), tmp_path, Console(), start_timeout_s=1.0, drain_timeout_s=1.0)  # type: ignore[arg-type]
    ticked.tick()
    assert ticked.ended and not (tmp_path / ROLL).exists()

"""A worker's event log: serving must not depend on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.core.errors import StartupError
from baton.runtime.event_log import VARIABLE, EventLog


def test_events_are_written_as_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new"))
    events = EventLog("decode-0")
    events.write("offer", sequence=("r", 0), bytes=3)
    (line,) = (tmp_path / "new" / "decode-0.events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert event.pop("t") > 0 and event == {"kind": "offer", "sequence": ["r", 0], "bytes": 3}


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    before = set(os.listdir("/proc/self/fd"))
    EventLog("decode-0").write("offer")
    assert not list(tmp_path.iterdir()) and set(os.listdir("/proc/self/fd")) == before


def test_a_directory_that_cannot_be_created_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    with pytest.raises(StartupError, match=f"{VARIABLE}=.*file: File exists"):
        EventLog("decode-0")


@pytest.fixture
def log_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of event logs."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


IN_LITTLE_ROOM = """
import logging, resource
from baton.runtime.event_log import EventLog
logging.basicConfig(format="%(message)s")
events = EventLog("decode-0")
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))  # Python ignores SIGXFSZ, so a write raises
for number in range(20):
    events.write("step", number=number)
"""


def test_a_failed_write_is_logged_once_and_ends_the_event_log(log_directory: Path) -> None:
    """In a separate process: the limit would also apply to files that pytest writes."""
    done = subprocess.run([sys.executable, "-c", IN_LITTLE_ROOM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.count("no more events are written") == 1, done.stderr
    assert "decode-0.events.jsonl: write failed, no more events are written: File too large" in done.stderr
    assert 0 < (log_directory / "decode-0.events.jsonl").stat().st_size <= 200

"""A worker's event log: serving must not depend on it."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.errors import StartupError
from baton.event_log import VARIABLE, EventLog


def test_events_are_lines_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new"))
    events = EventLog("decode-0")
    events.write("offer", sequence=("r", 0), bytes=3)
    (line,) = (tmp_path / "new" / "decode-0.events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert event.pop("t") > 0 and event == {"kind": "offer", "sequence": ["r", 0], "bytes": 3}


def test_without_a_directory_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    EventLog("decode-0").write("offer")


def test_a_directory_that_cannot_be_made_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    with pytest.raises(StartupError, match=f"{VARIABLE}=.*file: File exists"):
        EventLog("decode-0")


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in which no file becomes longer than 200 bytes."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))  # Python ignores SIGXFSZ, so a write raises
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_where_nothing_more_fits_it_says_so_once_and_ends(room: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog("decode-0")
    with caplog.at_level(logging.WARNING):
        for number in range(20):
            events.write("step", number=number)
    (warning,) = caplog.records
    assert "decode-0.events.jsonl: File too large" in warning.getMessage()
    assert 0 < (room / "decode-0.events.jsonl").stat().st_size <= 200

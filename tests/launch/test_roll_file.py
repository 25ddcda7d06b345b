"""The files that `baton roll` and `baton up` exchange: when one of them ends or is late, when one cannot be written."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from baton.core.errors import StartupError
from launch import roll as module
from launch.console import Console
from launch.roll import DONE, RUNNING, Roll, roll, take_request, write_roll
from launch.run_directory import ROLL, ROLL_REQUEST, reading, run_directory

OLD = {"state": DONE, "replaced": ["of an earlier roll"]}


class NoProcesses:
    """A cluster of which nothing runs on this host."""

    coordinator = batches = None

    def groups(self) -> dict[str, list[object]]:
        return {"prefill": [], "decode": []}


@pytest.mark.parametrize("state", ["", DONE, RUNNING])
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

    def client() -> None:
        try:
            roll(path, Console())
        except StartupError as error:
            errors.append(error.message)

    with run_directory(str(tmp_path / "run")) as path:
        waits = threading.Thread(target=client, daemon=True)
        waits.start()
        while not take_request(path, Console()):
            time.sleep(0.01)
        running = json.dumps({"state": RUNNING, "replaced": [], "now": "prefill-0"})
        (path / ROLL).write_text(running)
    if killed:  # then the file stays
        (path / ROLL).write_text(running)
    waits.join(timeout=10.0)
    assert not waits.is_alive() and len(errors) == 1
    assert errors[0] == "the roll left no result: `baton up` has ended; its output says what was replaced"


@pytest.mark.timeout(30)
def test_a_launcher_that_is_killed_before_it_takes_a_request_replaced_nothing(tmp_path: Path) -> None:
    with run_directory(str(tmp_path / "run")) as path:
        request(path)
    (path / ROLL).write_text(json.dumps(OLD))
    request(path)  # nobody holds the directory any more, its files stay
    with pytest.raises(StartupError, match=r"^the roll left no result: `baton up` has ended"):
        module._follow(path, Console())


def request(path: Path, valid_s: float = 60.0) -> None:
    write_roll(path / ROLL_REQUEST, {"until": time.monotonic() + valid_s})


def test_a_request_that_is_not_taken_is_withdrawn_and_refuses_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed: every later roll was refused as "running already", and a launcher could take it late."""
    monkeypatch.setattr(module, "GRACE_S", 0.0)
    with run_directory(str(tmp_path / "run")) as path:
        for _ in range(2):
            with pytest.raises(
                StartupError, match=r"^`baton up` took no request in .* within 0 s; it is not ready yet"
            ):
                roll(path, Console())
            assert not (path / ROLL_REQUEST).exists() and not (path / ROLL).exists()


def test_a_request_whose_command_was_killed_is_not_taken_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_directory(str(tmp_path / "run")) as path:
        (path / ROLL).write_text(json.dumps(OLD))
        request(path, valid_s=-0.001)
        assert not take_request(path, Console())
        assert not (path / ROLL_REQUEST).exists() and not (path / ROLL).exists(), "a command that slept sees no result"
        request(path, valid_s=-0.001)
        monkeypatch.setattr(module, "_follow", lambda *_: 0)
        assert roll(path, Console()) == 0, "nor does it refuse a later one"
        assert take_request(path, Console())
        assert reading(path / ROLL) == {"state": RUNNING, "replaced": []}


def test_a_request_that_is_withdrawn_while_it_is_taken_begins_no_roll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def withdrawing(file: Path, document: dict[str, object]) -> None:
        write_roll(file, document)
        (tmp_path / ROLL_REQUEST).unlink()

    request(tmp_path)
    monkeypatch.setattr(module, "write_roll", withdrawing)
    assert not take_request(tmp_path, Console()) and not (tmp_path / ROLL).exists()


def test_a_request_is_refused_where_its_progress_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ROLL).write_text(json.dumps(OLD))
    request(tmp_path)
    (tmp_path / ROLL).with_suffix(".partial").mkdir()
    assert not take_request(tmp_path, Console())
    assert not (tmp_path / ROLL_REQUEST).exists() and not (tmp_path / ROLL).exists()
    assert "refused: " in capsys.readouterr().out


@pytest.mark.parametrize("taken", [False, True])
def test_ctrl_c_says_whether_the_roll_goes_on(
    taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_directory(str(tmp_path / "run")) as path:

        def interrupted(seconds: float) -> None:
            if not taken or take_request(path, Console()) is False:
                raise KeyboardInterrupt

        monkeypatch.setattr(module.time, "sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            roll(path, Console())
        shown = capsys.readouterr().out
        if taken:
            assert f"goes on in `baton up`; the output of `baton up` and {path / ROLL} show its progress" in shown
        else:
            assert "withdrawn: nothing is replaced" in shown
            assert not take_request(path, Console())


@pytest.mark.parametrize("taken", [False, True])
def test_a_second_roll_is_refused_and_reads_what_the_first_one_does(taken: bool, tmp_path: Path) -> None:
    with run_directory(str(tmp_path / "run")) as path:
        request(path)
        if taken:
            assert take_request(path, Console())
            write_roll(path / ROLL, {"state": RUNNING, "replaced": [], "now": "decode-0", "doing": "replacing"})
        doing = ": decode-0, replacing" if taken else ""
        with pytest.raises(StartupError) as refused:
            roll(path, Console())
        seen = f"the output of `baton up` and {path / ROLL} show its progress"
        assert refused.value.message == f"a roll is running already{doing}; {seen}"
        assert taken or take_request(path, Console()), "the first one is not withdrawn"


def test_a_result_that_cannot_be_written_ends_the_roll_and_not_the_cluster(tmp_path: Path) -> None:
    (tmp_path / ROLL).write_text(json.dumps({"state": RUNNING, "replaced": []}))
    (tmp_path / ROLL).with_suffix(".partial").mkdir()
    ticked = Roll(NoProcesses(), tmp_path, Console(), start_timeout_s=1.0)  # type: ignore[arg-type]
    ticked.tick()
    assert ticked.ended and not (tmp_path / ROLL).exists()

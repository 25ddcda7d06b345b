"""Paths that cannot be, and files that are no files: one plain line that names them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.core.errors import StartupError
from baton.runtime import paths
from baton.runtime.model_source import resolve_model, served_name
from baton.runtime.options import read_config_file
from baton.runtime.paths import expanded, read_regular, read_text, write_text
from baton.runtime.token_file import read_token
from launch.capacity.command import load_rows, read_calibration
from launch.report import load
from sim.scale.workload import Lengths


def test_a_home_directory_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert expanded("~/x") == Path("/home/someone/x") and expanded("a/~b") == Path("a/~b")


@pytest.mark.parametrize("read", [resolve_model, served_name, read_token])
def test_a_user_without_a_home_directory_is_named(read: object) -> None:
    with pytest.raises(StartupError, match=r"^~no-such-user/x: ~no-such-user is no user with a home directory here$"):
        read("~no-such-user/x")  # type: ignore[operator]


@pytest.mark.parametrize(("model", "reason"), [("a" * 300, "File name too long"), ("loop", "does not exist")])
def test_a_model_that_no_path_can_name_is_one_line(
    model: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(StartupError, match=rf"^model .*{reason}") as refused:
        resolve_model(model)
    assert "\n" not in refused.value.message


def test_a_path_with_nul_is_one_line() -> None:
    for read in (resolve_model, served_name, read_token):
        with pytest.raises(StartupError, match=r"^'a\\x00b': a path has no NUL$"):
            read("a\0b")


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "link to a pipe"])
def test_only_regular_files_are_read_and_nothing_is_waited_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was opened counts: what a look at the path shows may be replaced before it is opened."""
    (regular := tmp_path / "file").write_bytes(b"content")
    assert read_regular(regular) == b"content"
    os.mkfifo(pipe := tmp_path / "pipe")
    (link := tmp_path / "link").symlink_to(pipe)
    path = {"pipe": pipe, "directory": tmp_path, "device": Path("/dev/zero"), "link to a pipe": link}[kind]
    status, file_descriptors = os.stat(regular), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "stat", lambda *_, **__: status)
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(path)
    assert len(os.listdir("/proc/self/fd")) == file_descriptors


@pytest.mark.timeout(20)
@pytest.mark.parametrize("read", [read_config_file, load, read_calibration])
def test_a_device_without_an_end_is_refused(read: Callable[[str], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "MAX_TEXT_BYTES", 1 << 20)
    with pytest.raises(StartupError, match=r"/dev/zero.* has more than 1 MiB$"):
        read("/dev/zero")


def test_a_pipe_is_read_to_its_end() -> None:
    end, start = os.pipe()
    os.write(start, b"\xef\xbb\xbfthreads = 2")
    os.close(start)
    assert read_config_file(f"/dev/fd/{end}") == {"threads": 2}
    os.close(end)


def _rows(path: str) -> object:
    return load_rows(path, None, Lengths(1, 1), Lengths(1, 1), None, 1.0, 1)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("read", [read_config_file, load, read_calibration, _rows])
def test_a_pipe_without_a_writer_is_given_up(
    read: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "PIPE_S", 0.1)
    os.mkfifo(pipe := tmp_path / "pipe")
    file_descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StartupError, match=r"pipe.* nothing was written to it for 0\.1 s") as refused:
        read(str(pipe))
    assert "\n" not in refused.value.message and len(os.listdir("/proc/self/fd")) == file_descriptors


@pytest.mark.timeout(20)
def test_a_pipe_whose_writer_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "PIPE_S", 0.1)
    end, start = os.pipe()
    os.write(start, b"threads = 2")
    with pytest.raises(StartupError, match=r"nothing was written to it for 0\.1 s$"):
        read_config_file(f"/dev/fd/{end}")
    os.close(start)
    os.close(end)


def test_a_pipe_is_read_as_slowly_as_it_is_written(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")

    def write() -> None:
        with pipe.open("w") as file:
            for part in ("threads", " = ", "2"):
                time.sleep(0.05)
                file.write(part)
                file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    assert read_config_file(str(pipe)) == {"threads": 2}
    writer.join()


@pytest.mark.timeout(20)
def test_a_pipe_without_a_reader_is_not_written(tmp_path: Path) -> None:
    write_text(file := tmp_path / "file", "old and long")
    write_text(file, "new")
    assert read_text(file) == "new"
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(OSError, match="nothing reads this pipe"):
        write_text(pipe, "text")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)


def test_an_empty_model_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("{}")
    with pytest.raises(StartupError, match=r"^the model's name is empty"):
        resolve_model("")

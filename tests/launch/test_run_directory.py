from __future__ import annotations

import errno
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.errors import StartupError
from launch.run_directory import LOCK, directory_of, local_token, run_directory, write_token
from tests.support.model_dirs import text_dir

HOLDER = """
import sys
from launch.run_directory import run_directory
with run_directory(sys.argv[1]) as path:
    (path / "cluster.json").write_text("{}")
    print("held", flush=True)
    sys.stdin.read()
"""


FULL = """
import resource, sys
from baton.core.errors import StartupError
from launch.run_directory import run_directory
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # as on a full disk, files can be made and not be filled
try:
    with run_directory(sys.argv[1]):
        print("held")
except StartupError as error:
    print(error.message)
"""


def open_and_leave(wanted: str) -> Path:
    with run_directory(wanted) as path:
        return path


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_run_directory_is_in_the_cache_or_at_the_given_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert open_and_leave("").parent == tmp_path / "baton" / "runs"
    assert open_and_leave(str(tmp_path / "mine")) == tmp_path / "mine"
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="cannot be used: Not a directory"):
        open_and_leave(str(tmp_path / "file" / "below"))
    with pytest.raises(StartupError, match="cannot be used"):
        open_and_leave("/proc/self")
    (tmp_path / "mine" / "cluster.json").mkdir()
    with pytest.raises(StartupError, match=r"cannot be used.*cluster\.json"):
        open_and_leave(str(tmp_path / "mine"))


def test_full_run_directory_is_refused_by_name(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=30)
    assert done.stdout == f"run directory {tmp_path} cannot be used: File too large; choose another with --run-dir\n"
    assert not done.stderr


def test_unwritable_ready_file_is_a_one_line_error(tmp_path: Path) -> None:
    ready = tmp_path / "absent" / "ready.json"
    command = [
        sys.executable,
        "-m",
        "coordinator",
        "--model",
        str(text_dir(tmp_path / "m")),
        "--ready-file",
        str(ready),
    ]
    command += ["--port", "0", "--grpc-port", "0", "--control-port", "0", "--log-level", "error"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, f"error: --ready-file {ready}: No such file or directory\n")


def test_error_names_the_option_if_no_run_directory_can_be_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/x")

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(
        StartupError,
        match=r"cache directory \(Not a directory.*\) or the temporary .*No space left .*: /tmp/x\); set --run-dir",
    ):
        open_and_leave("")


def test_run_directory_in_use_is_refused_with_the_pid_of_its_owner_and_unchanged(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    run = tmp_path / "run"
    for _ in range(2):
        with pytest.raises(StartupError) as caught:
            open_and_leave(str(run))
        expected = f"run directory {run} is in use by pid {holder.pid}; choose another with --run-dir"
        assert caught.value.message == expected and (run / "cluster.json").exists()


def test_run_directory_of_a_killed_process_is_reused_without_its_old_addresses(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.kill()
    holder.wait(10)
    assert (tmp_path / "run" / "cluster.json").exists()
    with run_directory(str(tmp_path / "run")) as path:
        assert not (path / "cluster.json").exists()


def test_closed_run_directory_is_reused_without_its_old_addresses(tmp_path: Path) -> None:
    for _ in range(2):
        with run_directory(str(tmp_path)) as path:
            for name in ("cluster.json", "coordinator.json", "decode-0.log"):
                (path / name).write_text("{}")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["decode-0.log", "up.lock"]


def test_file_system_without_locks_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert open_and_leave(str(tmp_path)) == tmp_path


def test_child_processes_of_the_owner_do_not_hold_the_lock(tmp_path: Path) -> None:
    with run_directory(str(tmp_path)):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        open_and_leave(str(tmp_path))
    finally:
        child.kill()
        child.communicate()


def test_token_of_a_cluster_in_the_default_directory_is_found_by_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert local_token("http://127.0.0.1:8100") == ""
    with run_directory("") as made:
        token = write_token(made)
        (made / "cluster.json").write_text('{"url": "http://127.0.0.1:8100"}')
        (made.parent / "other").mkdir()
        (made.parent / "other" / "cluster.json").write_text("not json")
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert local_token("http://127.0.0.1:8100/") == str(token) and local_token("http://127.0.0.1:8101") == ""
    assert local_token("http://127.0.0.1:8100") == "" and not token.exists()


def test_a_cluster_is_named_by_its_url_and_by_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`baton roll ""` replaced the processes of a cluster that has no address for operators alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with run_directory("") as run:
        (run / "cluster.json").write_text('{"url": "http://127.0.0.1:1234"}')
        for url in ("127.0.0.1:1234", "http://127.0.0.1:1234/"):
            assert directory_of(url) == run
        for url in ("", "/", "http://", "None", "127.0.0.1:123"):
            assert directory_of(url) is None


def test_the_directory_of_a_killed_cluster_is_not_taken_for_the_present_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still has the address, which `baton up` uses again, and another token."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with run_directory("") as run:
        for number in range(5):
            killed = run.parent / f"killed{number}"
            killed.mkdir()
            (killed / LOCK).touch()
            (killed / "cluster.json").write_text('{"url": "http://127.0.0.1:1234"}')
        assert directory_of("http://127.0.0.1:1234") is None
        (run / "cluster.json").write_text('{"url": "http://127.0.0.1:1234"}')
        assert directory_of("http://127.0.0.1:1234") == run

"""When a member is restarted; and one member through its restarts, with real short-lived processes."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.core.errors import StartupError
from baton.core.liveness import AGENT_SILENCE_S, MAX_READ_GAP_S
from baton.runtime.process import HEARTBEAT_VARIABLE
from launch import supervisor
from launch.child import Child, ChildSpec
from launch.console import Console
from launch.supervisor import RETRY_S, Backoff, MemberFailed, RestartPolicy, Signals, Supervised


def not_started(where: Path, code: int, first_s: float = 0.0) -> Supervised:
    spec = ChildSpec("m", (sys.executable, "-c", f"raise SystemExit({code})"), where / "m.log")
    return Supervised("m", lambda: spec, Console(), Backoff(first_s, longest_s=first_s))


def until_it_ends(member: Supervised) -> None:
    deadline = time.monotonic() + 30.0
    while member.child is not None:
        assert time.monotonic() < deadline
        member.tick()
        time.sleep(0.01)


def member(where: Path, code: int, *, joins: bool, first_s: float = 0.0) -> Supervised:
    """A member whose first incarnation has ended with `code`, as the supervisor has detected."""
    made = not_started(where, code, first_s)
    made.start()
    if joins:
        made.mark_joined("joined")
    until_it_ends(made)
    return made


def test_member_that_exits_with_0_after_joining_is_not_restarted(tmp_path: Path) -> None:
    drained = member(tmp_path, 0, joins=True)
    assert drained.left and not drained.joined and drained.restart_at is None
    for _ in range(3):
        drained.tick()
    assert drained.child is None


def test_a_member_that_is_renewed_starts_again_when_it_leaves(tmp_path: Path) -> None:
    """One that drained after the limit of a roll stayed away, and the next roll skipped it."""
    made = not_started(tmp_path, 0)
    made.start()
    made.mark_joined("joined")
    assert made.child is not None and made.child.wait(30.0) == 0
    made.renew()
    until_it_ends(made)
    assert not made.left
    made.tick()
    assert made.child is not None
    made.mark_joined("joined")
    until_it_ends(made)
    assert made.left, "it was renewed once"
    made.renew()
    made.tick()
    assert made.child is not None, "also one that had left"
    made.kill()


def test_a_run_is_requested_to_drain_once(tmp_path: Path) -> None:
    """At a second signal it would end at once, with its requests."""
    made = not_started(tmp_path, 0)
    for _ in range(2):
        signals = list[str]()
        run = SimpleNamespace(terminate=lambda to=signals: to.append("SIGTERM"))
        made.child = run  # type: ignore[assignment]
        assert not made.drains
        made.renew()
        made.renew()
        made.retire()
        made.drain()
        assert made.drains and signals == ["SIGTERM"]


def test_member_that_failed_is_restarted(tmp_path: Path) -> None:
    dead = member(tmp_path, 1, joins=True)
    assert not dead.left and dead.restart_at is not None
    dead.tick()
    assert dead.child is not None
    dead.child.kill(0)


def test_the_first_run_of_a_member_that_was_retired_is_no_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = not_started(tmp_path, 0)
    for restarts in (False, True):
        made.retire()
        made.return_to_work()
        shown = capsys.readouterr().out
        assert "starting" in shown and ("restart" in shown) == restarts
        made.retire()
        until_it_ends(made)


def test_exit_with_0_before_joining_does_not_count_as_leaving(tmp_path: Path) -> None:
    try:
        early = member(tmp_path, 0, joins=False)
    except MemberFailed:
        return
    assert not early.left and early.restart_at is not None


@pytest.mark.parametrize("code", [2, 3])
def test_member_that_joined_once_is_restarted_after_any_exit_code(tmp_path: Path, code: int) -> None:
    assert member(tmp_path, code, joins=True).restart_at is not None


def joined() -> RestartPolicy:
    policy = RestartPolicy()
    policy.joined(0.0)
    return policy


def usual(policy: RestartPolicy, *codes: int, now: float = 0.0) -> list[float | None]:
    """Returns the delays after these exits in a row."""
    delays = [policy.died(code, now) for code in codes]
    return [None if delay is None else delay.usual_s for delay in delays]


def test_backoff_doubles_up_to_its_limit() -> None:
    policy = joined()
    assert usual(policy, *[1] * 8) == [1, 2, 4, 8, 16, 30, 30, 30]


@pytest.mark.parametrize("killed", [-9, 137, -15, 143])
def test_kills_from_outside_do_not_count_for_the_backoff(killed: int) -> None:
    policy = joined()
    assert usual(policy, killed, killed, 1, killed, 1, killed) == [1, 1, 1, 1, 2, 1]


def test_a_role_without_a_ready_worker_waits_little() -> None:
    policy = joined()
    delays = [policy.died(code, 0.0) for code in (-9, -9, 1, 1, 1, 1, 1, -9)]
    assert [delay and delay.urgent_s for delay in delays] == [0, 0, 0, 2, 4, RETRY_S, RETRY_S, 0]


def test_a_member_whose_role_has_no_ready_worker_is_restarted_before_its_delay(tmp_path: Path) -> None:
    dead = member(tmp_path, 1, joins=True, first_s=1000.0)
    dead.tick()
    assert dead.child is None
    dead.hurry()
    dead.tick()
    assert dead.child is not None
    dead.child.kill(0)


def test_backoff_resets_only_after_a_healthy_minute() -> None:
    policy = joined()
    assert usual(policy, 1, 1, 1) == [1, 2, 4]
    policy.joined(100.0)
    assert usual(policy, 1, now=159.0) == [8]
    policy.joined(200.0)
    assert usual(policy, 1, now=260.0) == [1]


def test_startup_error_is_final_only_before_the_first_join() -> None:
    assert RestartPolicy().died(3, now=0.0) is None
    policy = joined()
    assert usual(policy, 3, 3) == [1, 2]


def test_other_failures_before_joining_are_retried_a_few_times() -> None:
    policy = RestartPolicy(Backoff(tries_before_joining=3))
    assert usual(policy, 1, -9, 1) == [1, 2, None]


def test_a_process_that_gets_no_temporary_file_is_not_started_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(StartupError, match=r"^m cannot be started: .*No such file or directory"):
        Child(ChildSpec("m", ("touch", str(tmp_path / "started"))))
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("log", [None, "missing/m.log"])
def test_a_process_that_cannot_be_started_leaves_no_open_files(log: str | None, tmp_path: Path) -> None:
    gc.collect()  # files of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(StartupError):
            Child(ChildSpec("m", ("/no/such/program",), None if log is None else tmp_path / log))
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_gap_between_two_looks_counts_as_little_silence(tmp_path: Path) -> None:
    """The machine may have been suspended meanwhile. A process that hangs is killed all the same."""
    beats_once = f"import os, time; os.write(int(os.environ[{HEARTBEAT_VARIABLE!r}]), b'.'); time.sleep(600)"
    child = Child(ChildSpec("m", (sys.executable, "-c", beats_once)))
    deadline = time.monotonic() + 30.0
    while child._last_heartbeat_at is None:
        assert child.watch(time.monotonic()) is None and time.monotonic() < deadline
        time.sleep(0.01)
    now, looks = time.monotonic(), 0
    while not child.hung:
        now, looks = now + 20.0, looks + 1
        child.watch(now)
        assert looks < 100
    assert abs(looks - AGENT_SILENCE_S / MAX_READ_GAP_S) <= 1 and child.wait(10.0) == -signal.SIGKILL


def test_a_signal_that_is_delivered_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` signals its command, and then the group that it is in: that is no second Ctrl-C, which kills."""
    with Signals() as signals:
        monkeypatch.setattr(supervisor, "REPEAT_S", 600.0)
        for number in (signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert (signals.stops, signals.last) == (1, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert (signals.stops, signals.last) == (2, signal.SIGINT), "another one counts at once"
        monkeypatch.setattr(supervisor, "REPEAT_S", 0.0)
        os.kill(os.getpid(), signal.SIGINT)
        assert (signals.stops, signals.last) == (3, signal.SIGINT)


def test_the_last_lines_of_a_log_are_shown_after_a_rotation_truncated_it(tmp_path: Path) -> None:
    log = tmp_path / "m.log"
    log.write_text("of an earlier run\n" * 100)
    child = Child(ChildSpec("m", ("true",), log))
    child.wait(10)
    log.write_text("Traceback: boom\n")
    assert child.tail() == ["Traceback: boom"]

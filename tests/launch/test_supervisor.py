"""When a member is restarted; and one member through its restarts, with real short-lived processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from launch.child import ChildSpec
from launch.console import Console
from launch.supervisor import Backoff, MemberFailed, RestartPolicy, Supervised


def member(where: Path, code: int, *, joins: bool) -> Supervised:
    """A member whose first incarnation has ended with `code`, as the supervisor has detected."""
    spec = ChildSpec("m", (sys.executable, "-c", f"raise SystemExit({code})"), where / "m.log")
    made = Supervised("m", lambda: spec, Console(), Backoff(first_s=0.0))
    made.start()
    if joins:
        made.mark_joined("joined")
    deadline = time.monotonic() + 30.0
    while made.child is not None:
        assert time.monotonic() < deadline
        made.tick()
        time.sleep(0.01)
    return made


def test_member_that_exits_with_0_after_joining_is_not_restarted(tmp_path: Path) -> None:
    drained = member(tmp_path, 0, joins=True)
    assert drained.left and not drained.joined and drained.restart_at is None
    for _ in range(3):
        drained.tick()
    assert drained.child is None


def test_member_that_failed_is_restarted(tmp_path: Path) -> None:
    dead = member(tmp_path, 1, joins=True)
    assert not dead.left and dead.restart_at is not None
    dead.tick()
    assert dead.child is not None
    dead.child.kill(0)


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


def test_backoff_doubles_up_to_its_limit() -> None:
    policy = joined()
    assert [policy.died(1, float(n)) for n in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]


def test_backoff_resets_only_after_a_healthy_minute() -> None:
    policy = joined()
    assert [policy.died(1, float(n)) for n in range(3)] == [1, 2, 4]
    policy.joined(100.0)
    assert policy.died(-9, now=159.0) == 8.0
    policy.joined(200.0)
    assert policy.died(-9, now=260.0) == 1.0


def test_startup_error_is_final_only_before_the_first_join() -> None:
    assert RestartPolicy().died(3, now=0.0) is None
    policy = joined()
    assert policy.died(3, now=1.0) == 1.0 and policy.died(3, now=2.0) == 2.0


def test_other_failures_before_joining_are_retried_a_few_times() -> None:
    policy = RestartPolicy(Backoff(tries_before_joining=3))
    assert [policy.died(code, now=0.0) for code in (1, -11, 1)] == [1.0, 2.0, None]

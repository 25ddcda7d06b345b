"""When a member is started again; and one through its restarts, with real short-lived processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from launch.child import ChildSpec
from launch.console import Console
from launch.supervisor import Backoff, MemberFailed, RestartPolicy, Supervised


def member(where: Path, code: int, *, joins: bool) -> Supervised:
    """One incarnation that has ended with `code`, noticed."""
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


def test_a_member_that_ended_well_after_joining_has_left_and_stays_away(tmp_path: Path) -> None:
    drained = member(tmp_path, 0, joins=True)
    assert drained.left and not drained.joined and drained.restart_at is None
    for _ in range(3):
        drained.tick()
    assert drained.child is None


def test_a_member_that_died_comes_back(tmp_path: Path) -> None:
    dead = member(tmp_path, 1, joins=True)
    assert not dead.left and dead.restart_at is not None
    dead.tick()
    assert dead.child is not None
    dead.child.kill(0)


def test_an_end_with_0_before_joining_is_no_leaving(tmp_path: Path) -> None:
    try:
        early = member(tmp_path, 0, joins=False)
    except MemberFailed:
        return
    assert not early.left and early.restart_at is not None


@pytest.mark.parametrize("code", [2, 3])
def test_a_member_that_joined_once_is_tried_again_whatever_its_code(tmp_path: Path, code: int) -> None:
    assert member(tmp_path, code, joins=True).restart_at is not None


def joined() -> RestartPolicy:
    policy = RestartPolicy()
    policy.joined(0.0)
    return policy


def test_backoff_doubles_up_to_its_limit() -> None:
    policy = joined()
    assert [policy.died(1, float(n)) for n in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_healthy_minute_resets_and_less_does_not() -> None:
    policy = joined()
    assert [policy.died(1, float(n)) for n in range(3)] == [1, 2, 4]
    policy.joined(100.0)
    assert policy.died(-9, now=159.0) == 8.0
    policy.joined(200.0)
    assert policy.died(-9, now=260.0) == 1.0


def test_startup_error_ends_it_only_before_it_ever_joined() -> None:
    assert RestartPolicy().died(3, now=0.0) is None
    policy = joined()
    assert policy.died(3, now=1.0) == 1.0 and policy.died(3, now=2.0) == 2.0


def test_other_deaths_before_joining_are_tried_a_few_times() -> None:
    policy = RestartPolicy(Backoff(tries_before_joining=3))
    assert [policy.died(code, now=0.0) for code in (1, -11, 1)] == [1.0, 2.0, None]

"""What `baton drain` and `baton flip` print when a worker is lost, joins again in its first role, or was the last."""

from __future__ import annotations

from typing import Any

import pytest

from launch import drain as command
from launch.cluster_api import ClusterView

BEFORE = {"id": "p1", "role": "prefill", "incarnation": 1, "state": "ready", "pids": [7, 8], "host": "10.0.0.1"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"pids": [9, 10]},
            "its process (pid 7, 8 on 10.0.0.1) ended meanwhile and was started again; its log says why",
        ),
        (
            {},
            "another command changed its role meanwhile, or its container was started again; its log says which",
        ),
    ],
)
def test_the_last_line_says_why(
    changes: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def view(**of_worker: Any) -> ClusterView:
        return ClusterView((BEFORE | of_worker,), "", {})

    views = iter([view(state="draining"), ClusterView((), "", {}), view(incarnation=2, **changes)])
    monkeypatch.setattr(command, "control_of", lambda *_: (view(), "127.0.0.1:1", "", None))
    monkeypatch.setattr(command, "drain_worker", lambda *_, **__: None)
    monkeypatch.setattr(command, "get_cluster", lambda _: next(views))
    monkeypatch.setattr(command, "POLL_S", 0.0)
    assert command.drain("p1", "http://127.0.0.1:1", 0.5, "decode", "", "", "") == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"joined again as prefill, not as decode: {why}")


@pytest.mark.parametrize(
    ("after", "code", "line"),
    [((), 0, "left"), (({"state": "lost"},), 1, "lost: its lease ended before it left; its log says why")],
)
def test_a_worker_whose_lease_ended_has_not_left(
    after: tuple[dict[str, str], ...],
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    views = iter([ClusterView((BEFORE,), "", {}), ClusterView(tuple(BEFORE | row for row in after), "", {})])
    monkeypatch.setattr(command, "control_of", lambda *_: (ClusterView((BEFORE,), "", {}), "127.0.0.1:1", "", None))
    monkeypatch.setattr(command, "drain_worker", lambda *_, **__: None)
    monkeypatch.setattr(command, "get_cluster", lambda _: next(views))
    monkeypatch.setattr(command, "POLL_S", 0.0)
    assert command.drain("p1", "http://127.0.0.1:1", 0.5, None, "", "", "") == code
    assert capsys.readouterr().out.splitlines()[-1].split(maxsplit=3)[-1] == line


@pytest.mark.parametrize(
    ("other", "last"),
    [({"role": "prefill"}, False), ({"role": "prefill", "state": "draining"}, True), ({"role": "decode"}, True)],
)
def test_the_last_worker_of_a_role_drains_with_a_warning(
    other: dict[str, str], last: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = ClusterView((BEFORE, BEFORE | {"id": "w2"} | other), "", {}), ClusterView((), "", {})
    monkeypatch.setattr(command, "control_of", lambda *_: (before, "127.0.0.1:1", "", None))
    monkeypatch.setattr(command, "drain_worker", lambda *_, **__: None)
    monkeypatch.setattr(command, "get_cluster", lambda _: after)
    assert command.drain("p1", "http://127.0.0.1:1", 0.5, None, "", "", "") == 0
    warning = "no other prefill worker is ready: requests that need one wait, up to --hold-s"
    assert (warning in capsys.readouterr().out) == last

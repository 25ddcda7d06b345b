"""Where the number of workers is fixed: the split of roles, and which worker changes its own."""

from __future__ import annotations

import pytest

from baton.core.errors import StartupError
from launch.autoscale import command
from launch.autoscale.flip import Flip, next_flip, split
from launch.autoscale.law import ClusterSample, WorkerSample
from sim.scale.planner import Size


@pytest.mark.parametrize(
    ("total", "need", "expected"),
    [
        (2, Size(9, 1), Size(1, 1)),
        (4, Size(3, 1), Size(3, 1)),
        (4, Size(1, 3), Size(1, 3)),
        (4, Size(2, 2), Size(2, 2)),
        (4, Size(0, 0), Size(2, 2)),
        (4, Size(6, 6), Size(2, 2)),
        (4, Size(9, 3), Size(3, 1)),
        (10, Size(4, 12), Size(3, 7)),
        (5, Size(1, 1), Size(2, 3)),
    ],
)
def test_the_role_that_lacks_more_gets_more(total: int, need: Size, expected: Size) -> None:
    assert split(total, need) == expected


def test_no_other_split_leaves_both_roles_with_less_need() -> None:
    for total in range(2, 12):
        for prefill in range(1, 14):
            for decode in range(1, 14):
                made = split(total, Size(prefill, decode))
                assert made.prefill + made.decode == total and min(made.prefill, made.decode) >= 1
                lacks = max(prefill / made.prefill, decode / made.decode)
                assert all(lacks <= max(prefill / p, decode / (total - p)) for p in range(1, total))


def cluster(prefill: int, *rows: int) -> ClusterSample:
    """`rows` run at each decode worker."""
    workers = [WorkerSample(f"p{n}", "prefill", 1) for n in range(prefill)]
    return ClusterSample(
        0.0, workers=(*workers, *(WorkerSample(f"d{n}", "decode", 1, rows=r) for n, r in enumerate(rows)))
    )


def test_the_worker_with_the_fewest_sequences_changes() -> None:
    assert next_flip(cluster(1, 4, 0, 2), Size(2, 1), 4) == Flip("d1", "prefill")
    assert next_flip(cluster(3, 8), Size(1, 3), 4) == Flip("p2", "decode")
    assert next_flip(cluster(2, 3, 3), Size(2, 2), 4) is None


def test_one_worker_changes_at_a_time_and_the_last_of_a_role_never() -> None:
    assert next_flip(cluster(3, 8), Size(1, 3), 5) is None, "one is not ready"
    assert next_flip(cluster(1, 8), Size(9, 1), 2) is None
    assert next_flip(cluster(0, 8, 8), Size(1, 1), 2) == Flip("d1", "prefill")
    assert next_flip(cluster(1), Size(1, 9), 1) is None


def test_a_flip_that_is_refused_does_not_end_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def refuse(worker: str, *more: object) -> int:
        asked.append(worker)
        raise StartupError("no reply from a coordinator")

    class Looks:
        sample, present = cluster(1, 4, 0, 2), 4

        def __init__(self, *given: object) -> None:
            pass

        def look(self) -> Size:
            if len(asked) == 2:
                raise KeyboardInterrupt
            return Size(2, 1)

    monkeypatch.setattr("launch.drain.drain", refuse)
    monkeypatch.setattr("launch.autoscale.observe.Autoscaler", Looks)
    assert command._flip(None, "http://127.0.0.1:9", 0.0) == 0  # type: ignore[arg-type]
    assert asked == ["d1", "d1"]
    assert "d1 did not become a prefill worker: no reply from a coordinator" in capsys.readouterr().out

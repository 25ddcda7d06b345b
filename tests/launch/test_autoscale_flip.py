"""Where the number of workers is fixed: the split of roles, and which worker changes its own."""

from __future__ import annotations

import random

import pytest

from baton.core.errors import StartupError
from launch.autoscale import command
from launch.autoscale.flip import Flip, lack, next_flip, split
from launch.autoscale.law import ClusterSample, Sizing, WorkerSample
from sim.scale.planner import Size


@pytest.mark.parametrize(
    ("prefill", "decode", "busy", "expected"),
    [
        (1, 1, (9.0, 1.0), 1),
        (2, 2, (2.6, 0.4), 3),
        (3, 1, (0.4, 2.6), 1),
        (2, 2, (1.9, 1.2), 2),
        (3, 1, (0.0, 0.0), 3),
        (3, 1, (0.9, 0.9), 3),
        (2, 2, (6.0, 6.0), 2),
        (2, 2, (9.0, 3.0), 3),
        (5, 5, (4.0, 12.0), 3),
        (3, 2, (2.9, 2.1), 3),
    ],
)
def test_the_role_that_lacks_more_gets_more(
    prefill: int, decode: int, busy: tuple[float, float], expected: int
) -> None:
    assert split(prefill, decode, busy) == expected


def test_no_other_split_leaves_both_roles_with_a_tenth_less_to_do() -> None:
    source = random.Random(1)
    for _ in range(2000):
        total, busy = source.randrange(2, 12), (source.uniform(0, 14), source.uniform(0, 14))
        prefill = source.randrange(1, total)
        made = split(prefill, total - prefill, busy)
        before, lacks = (lack(p, total - p, busy) for p in (prefill, made))
        assert 1 <= made < total
        if made != prefill:
            assert before > 1.0 and lacks < 0.9 * before, "a flip for nothing"
        elif before > 1.0:
            assert all(0.9 * before <= lack(p, total - p, busy) for p in range(1, total))


def cluster(prefill: int, *rows: int) -> ClusterSample:
    """`rows` run at each decode worker."""
    workers = [WorkerSample(f"p{n}", "prefill", 1) for n in range(prefill)]
    return ClusterSample(
        0.0, workers=(*workers, *(WorkerSample(f"d{n}", "decode", 1, rows=r) for n, r in enumerate(rows)))
    )


def test_the_worker_with_the_fewest_sequences_changes() -> None:
    assert next_flip(cluster(1, 4, 0, 2), (2.0, 1.0), 4) == Flip("d1", "prefill")
    assert next_flip(cluster(3, 8), (1.0, 3.0), 4) == Flip("p2", "decode")
    assert next_flip(cluster(2, 3, 3), (2.0, 2.0), 4) is None


def test_one_worker_changes_at_a_time_and_the_last_of_a_role_never() -> None:
    assert next_flip(cluster(3, 8), (1.0, 3.0), 5) is None, "one is not ready"
    assert next_flip(cluster(1, 8), (9.0, 1.0), 2) is None
    assert next_flip(cluster(0, 8, 8), (1.0, 1.0), 2) == Flip("d1", "prefill")
    assert next_flip(cluster(1), (1.0, 9.0), 1) is None


def test_a_flip_that_is_refused_does_not_end_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def refuse(worker: str, *more: object) -> int:
        asked.append(worker)
        raise StartupError("no reply from a coordinator")

    class Looks:
        sample, present, decision = cluster(1, 4, 0, 2), 4, Sizing(Size(2, 1), ("", ""), busy=(2.0, 1.0))

        def __init__(self, *given: object) -> None:
            pass

        def look(self) -> Size:
            if len(asked) == 2:
                raise KeyboardInterrupt
            return Size(2, 1)

    monkeypatch.setattr("launch.drain.drain", refuse)
    monkeypatch.setattr("launch.autoscale.observe.Autoscaler", Looks)
    assert command._flip(None, "http://127.0.0.1:9", 0.0, "", "", "") == 0  # type: ignore[arg-type]
    assert asked == ["d1", "d1"]
    assert "d1 did not become a prefill worker: no reply from a coordinator" in capsys.readouterr().out

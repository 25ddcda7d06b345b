"""Requests of a simulation: scaling, mirrored times, distributions of lengths."""

from __future__ import annotations

import random
from statistics import median

import pytest

from sim.scale.workload import Lengths, first_seconds, fitting, parse_lengths, poisson, scaled
from sim.trace import TraceRow

ROWS = tuple(TraceRow(10.0 + i, 100 + i, 10, (0, i)) for i in range(1, 101))


def test_scaling_multiplies_the_requests_in_the_same_time() -> None:
    found = scaled(ROWS, 10.5, seed=1)
    assert len(found) == pytest.approx(1050, rel=0.03)
    assert found == scaled(ROWS, 10.5, seed=1) and found != scaled(ROWS, 10.5, seed=2)
    assert ROWS[0].at_s <= found[0].at_s and found[-1].at_s <= ROWS[-1].at_s
    assert [r.at_s for r in found] == sorted(r.at_s for r in found)
    assert len({r.at_s for r in found}) > 800  # copies do not arrive together
    assert len({r.blocks[0] for r in found}) == 11  # what copies share is theirs alone
    assert len(scaled(ROWS, 0.25, seed=1)) == pytest.approx(25, abs=12)
    assert scaled(ROWS, 1.0, seed=1) == ROWS


def test_first_seconds_start_at_zero() -> None:
    found = first_seconds(ROWS, 10.0)
    assert (found[0].at_s, len(found)) == (0.0, 11)
    assert fitting(ROWS, 150)[1] == 60


def test_a_rate_and_lengths_make_a_poisson_process() -> None:
    found = poisson(50.0, 100.0, Lengths(300, 300, 2000), Lengths(5, 9), seed=3)
    assert len(found) == pytest.approx(5000, rel=0.05)
    inputs = sorted(row.input_len for row in found)
    assert median(inputs) == pytest.approx(300, rel=0.1)
    assert inputs[len(inputs) * 95 // 100] == pytest.approx(2000, rel=0.15)
    assert {row.output_len for row in found} == {5, 6, 7, 8, 9}


TOO_LONG = "1000000000000", "1-1000000000000", f"p50=1,p95=1{'0' * 400}"


@pytest.mark.parametrize(
    "text", ["", "x", "9-3", "-1", "p50=300", "p50=300,p95=200", "p50=0,p95=3", "p50=1,p99=3", *TOO_LONG]
)
def test_invalid_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["512", "128-1024", "p50=300,p95=2000"])
def test_lengths_are_printed_as_they_are_written(text: str) -> None:
    assert str(parse_lengths(text)) == text
    assert parse_lengths(text).draw(random.Random(1)) > 0

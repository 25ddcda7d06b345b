from __future__ import annotations

import random

import pytest

from launch.bench.load import Lengths, Load, parse_lengths
from launch.bench.stats import Record, percentile, statistics, summarize


def test_percentile_is_linear_between_ranks() -> None:
    assert percentile([10, 20, 30, 40], 50) == 25
    assert percentile([10, 20, 30, 40], 95) == pytest.approx(38.5)
    assert percentile([10, 20, 30, 40], 99) == pytest.approx(39.7)
    assert percentile([7], 99) == 7
    assert percentile([], 50) == 0


def test_percentile_agrees_with_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    source = random.Random(1)
    for size in (1, 2, 3, 10, 101):
        values = sorted(source.random() for _ in range(size))
        for p in (0, 1, 50, 95, 99, 100):
            assert percentile(values, p) == pytest.approx(numpy.percentile(values, p))


def test_times_of_one_request() -> None:
    record = Record(100.0, (100.5, 100.75, 101.5), ended=102.0, finished=101.5, prompt_tokens=9, output_tokens=5)
    assert record.ttft_s == 0.5
    assert record.tpot_s == 0.25  # 1.0 s for the 4 tokens after the first, though only 3 events
    assert record.gaps_s == (0.25, 0.75)
    assert record.e2e_s == 2.0


def test_one_token_has_no_tpot() -> None:
    assert Record(0.0, (1.0,), ended=1.0, finished=1.0, output_tokens=1).tpot_s is None


def test_statistics_of_two_requests_and_two_failures() -> None:
    records = [
        Record(0.0, (1.0, 2.0), ended=2.0, finished=2.0, prompt_tokens=10, output_tokens=2),
        Record(1.0, (4.0, 5.0, 8.0), ended=8.0, finished=8.0, prompt_tokens=20, output_tokens=3, counted=False),
        Record(0.5, error="status 503: too busy"),
        Record(0.6, error="status 503: too busy"),
    ]
    stats = statistics(records)
    assert (stats.requests, stats.failed, stats.errors, stats.uncounted) == (4, 2, {"status 503: too busy": 2}, 1)
    assert (stats.duration_s, stats.prompt_tokens, stats.output_tokens) == (8.0, 30, 5)
    assert (stats.output_tokens_per_s, stats.prompt_tokens_per_s, stats.requests_per_s) == (0.625, 3.75, 0.25)
    assert (stats.ttft.p50, stats.ttft.mean, stats.ttft.max, stats.ttft.count) == (2.0, 2.0, 3.0, 2)
    assert (stats.tpot.p50, stats.tpot.max) == (1.5, 2.0)
    assert (stats.itl.count, stats.itl.p50, stats.itl.p95) == (3, 1.0, pytest.approx(2.8))
    assert stats.e2e.p50 == 4.5


def test_nothing_but_failures() -> None:
    stats = statistics([Record(0.0, error="x")])
    assert (stats.failed, stats.duration_s, stats.output_tokens_per_s, stats.ttft.count) == (1, 0.0, 0.0, 0)
    assert summarize([None]).count == 0


def test_same_seed_same_load() -> None:
    load = Load(3, Lengths(5, 9), Lengths(2, 4), text=False, token_ids=Lengths(300, 400))
    jobs = [load.job(i) for i in range(50)]
    assert jobs == [load.job(i) for i in range(50)] != [Load(4, *_rest(load)).job(i) for i in range(50)]
    assert {len(job.prompt) for job in jobs} == {5, 6, 7, 8, 9} and {job.max_tokens for job in jobs} == {2, 3, 4}
    assert all(300 <= token <= 400 for job in jobs for token in job.prompt)
    assert len({tuple(job.prompt) for job in jobs}) == 50


def test_text_prompts_count_words() -> None:
    prompt = Load(0, Lengths(7, 7), Lengths(1, 1), text=True, token_ids=Lengths(0, 1)).job(0).prompt
    assert isinstance(prompt, str) and len(prompt.split()) == 7


def test_lengths() -> None:
    assert parse_lengths("512") == Lengths(512, 512) and parse_lengths("1-8") == Lengths(1, 8)
    for wrong in ("", "x", "8-1", "-3", "1-2-3"):
        with pytest.raises(ValueError):
            parse_lengths(wrong)


def _rest(load: Load) -> tuple[Lengths, Lengths, bool, Lengths]:
    return load.input_len, load.output_len, load.text, load.token_ids

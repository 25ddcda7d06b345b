from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from launch.bench.load import LoadPlan
from launch.bench.report import Report, Run, tables
from launch.bench.run import ENOUGH_ALONE, MOST_STEPS, Search, hopeless
from launch.bench.stats import RequestRecord, interval, statistics
from sim.scale.workload import Lengths, parse_lengths
from sim.stats import parse_slo, percentile, summarize
from sim.trace import TraceRow, read_trace


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


def test_times_of_a_request_follow_from_its_events() -> None:
    record = RequestRecord(100.0, (100.5, 100.75, 101.5), ended=102.0, finished=101.5, prompt_tokens=9, output_tokens=5)
    assert record.ttft_s == 0.5
    assert record.tpot_s == 0.25  # 1.0 s for the 4 tokens after the first, though only 3 events
    assert record.gaps_s == (0.25, 0.75)
    assert record.e2e_s == 2.0


def test_one_token_has_no_tpot() -> None:
    assert RequestRecord(0.0, (1.0,), ended=1.0, finished=1.0, output_tokens=1).tpot_s is None


def test_statistics_of_two_requests_and_two_failures() -> None:
    records = [
        RequestRecord(0.0, (1.0, 2.0), ended=2.0, finished=2.0, prompt_tokens=10, output_tokens=2),
        RequestRecord(1.0, (4.0, 5.0, 8.0), ended=8.0, finished=8.0, prompt_tokens=20, output_tokens=3, counted=False),
        RequestRecord(0.5, error="status 503: too busy"),
        RequestRecord(0.6, error="status 503: too busy"),
    ]
    stats = statistics(records)
    assert (stats.requests, stats.failed, stats.errors, stats.uncounted) == (4, 2, {"status 503: too busy": 2}, 1)
    assert (stats.duration_s, stats.prompt_tokens, stats.output_tokens) == (8.0, 30, 5)
    assert (stats.output_tokens_per_s, stats.prompt_tokens_per_s, stats.requests_per_s) == (0.625, 3.75, 0.25)
    assert (stats.ttft.p50, stats.ttft.mean, stats.ttft.max, stats.ttft.count) == (2.0, 2.0, 3.0, 2)
    assert (stats.tpot.p50, stats.tpot.max) == (1.5, 2.0)
    assert (stats.itl.count, stats.itl.p50, stats.itl.p95) == (3, 1.0, pytest.approx(2.8))
    assert stats.e2e.p50 == 4.5


def test_statistics_without_successful_requests_are_zero() -> None:
    stats = statistics([RequestRecord(0.0, error="x")])
    assert (stats.failed, stats.duration_s, stats.output_tokens_per_s, stats.ttft.count) == (1, 0.0, 0.0, 0)
    assert summarize([None]).count == 0


def test_same_seed_gives_the_same_load() -> None:
    load = LoadPlan(3, Lengths(5, 9), Lengths(2, 4), token_ids=Lengths(300, 400))
    jobs = [load.job(i).body for i in range(50)]
    assert jobs == [load.job(i).body for i in range(50)] != [replace(load, seed=4).job(i).body for i in range(50)]
    assert {len(job["prompt"]) for job in jobs} == {5, 6, 7, 8, 9} and {job["max_tokens"] for job in jobs} == {2, 3, 4}
    assert all(300 <= token <= 400 for job in jobs for token in job["prompt"])
    assert len({tuple(job["prompt"]) for job in jobs}) == 50


def test_ids_are_not_drawn_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # The client makes prompts beside open streams, whose arrivals it reads late meanwhile.
    draw, drawn = Lengths.draw, list[int]()
    monkeypatch.setattr(Lengths, "draw", lambda self, source: drawn.append(1) or draw(self, source))
    load = LoadPlan(1, Lengths(5000, 5000), Lengths(1, 1), token_ids=Lengths(300, 302))
    prompt = load.job(0).body["prompt"]
    assert len(prompt) == 5000 and set(prompt) == {300, 301, 302}
    assert len(drawn) == 2  # the lengths


def test_text_prompts_count_words() -> None:
    prompt = LoadPlan(0, Lengths(7, 7), Lengths(1, 1), "text").job(0).body["prompt"]
    assert isinstance(prompt, str) and len(prompt.split()) == 7


def test_each_turn_of_a_conversation_extends_the_previous_prompt() -> None:
    load = LoadPlan(1, Lengths(10, 10), Lengths(4, 4), "turns", turns=3, shared_len=5)
    first, second = load.sessions(0, 6)
    for session in (first, second):
        prompts = [job.body["prompt"] for job in session.jobs]
        assert [len(prompt) for prompt in prompts] == [15, 29, 43]
        assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(prompts))
    mine, others = first.jobs[0].body["prompt"], second.jobs[0].body["prompt"]
    assert mine[:5] == others[:5] and mine[5] != others[5]
    assert sum(len(session.jobs) for session in load.sessions(0, 7)) == 7


def test_open_loop_arrivals_are_a_poisson_process_at_the_given_rate() -> None:
    load = LoadPlan(1, Lengths(1, 1), Lengths(1, 1), rate=50.0)
    due = [session.at_s for session in load.sessions(0, 5000)]
    gaps = [later - earlier for earlier, later in pairwise(due)]
    assert load.is_open and due == sorted(due)
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)


def test_the_rate_of_conversations_counts_each_turn() -> None:
    load = LoadPlan(1, Lengths(1, 1), Lengths(1, 1), "turns", turns=4, rate=50.0)
    *_, last = load.sessions(0, 20_000)
    assert last.at_s == pytest.approx(400, rel=0.05)


def test_rows_of_one_second_and_length_have_different_prompts() -> None:
    """Else a prefix cache would help by chance: many a trace counts whole seconds."""
    rows = tuple(TraceRow(float(i // 2), 20, 1) for i in range(4))
    load = LoadPlan(1, Lengths(1, 1), Lengths(1, 1), trace=rows)
    prompts = [tuple(session.jobs[0].body["prompt"]) for session in load.sessions(0, 4)]
    assert len(set(prompts)) == 4


def test_tool_and_schema_loads_use_chat_completions() -> None:
    tools, schema = (LoadPlan(0, Lengths(3, 3), Lengths(9, 9), kind).job(0) for kind in ("tools", "schema"))  # type: ignore[arg-type]
    assert tools.path == schema.path == "/chat/completions"
    assert tools.body["tool_choice"] == "required" and schema.body["response_format"]["type"] == "json_schema"
    assert "ignore_eos" not in tools.body


def test_traces_of_both_formats_are_read(tmp_path: Path) -> None:
    mooncake, azure = tmp_path / "m.jsonl", tmp_path / "a.csv"
    mooncake.write_text(
        '{"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}\n'
        '{"timestamp": 1000, "input_length": 600, "output_length": 0, "hash_ids": [1, 3]}\n'
    )
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04.0,396,109\n"
    )
    rows = read_trace(mooncake)
    assert [row.at_s for row in rows] == [1.0, 3.0]
    early, late = LoadPlan(0, Lengths(1, 1), Lengths(1, 1), trace=rows, scale=4.0).sessions(0, 9)
    assert (early.at_s, late.at_s) == (0.0, 0.5)
    one, other = (session.jobs[0].body for session in (early, late))
    assert (len(one["prompt"]), len(other["prompt"]), one["max_tokens"]) == (600, 700, 1)
    assert one["prompt"][:512] == other["prompt"][:512] and one["prompt"][512:] != other["prompt"][512:600]
    (first, second) = read_trace(azure)
    assert (first.input_len, second.output_len) == (374, 109) and 0 < second.at_s - first.at_s < 0.1
    for text in ("", "{}", "nonsense\n", '{"timestamp": 1}\n'):
        mooncake.write_text(text)
        with pytest.raises(ValueError, match=r"row 1|no rows"):
            read_trace(mooncake)


GOOD = {"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": []}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("m.jsonl", "[1]"),
        ("m.jsonl", "[" * 100_000),
        ("m.jsonl", json.dumps(GOOD).replace('"timestamp": 1', '"timestamp": 1e400')),
        ("m.jsonl", json.dumps(GOOD).replace('"timestamp": 1', '"timestamp": NaN')),
        ("m.jsonl", json.dumps(GOOD | {"input_length": -1})),
        ("m.jsonl", json.dumps(GOOD).replace('"input_length": 2', '"input_length": 1e400')),
        ("m.jsonl", json.dumps(GOOD | {"output_length": 10**9})),
        ("m.jsonl", json.dumps(GOOD | {"hash_ids": 5})),
        ("m.jsonl", json.dumps(GOOD | {"hash_ids": [{}]})),
        ("m.jsonl", json.dumps(GOOD | {"hash_ids": [0] * 20_000})),
        ("a.csv", "a,b\n1,2\n"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374\n"),
        ("a.csv", f"TIMESTAMP,ContextTokens,GeneratedTokens\n{'9' * 200_000},1,1\n"),
    ],
)
def test_invalid_trace_row_is_named(tmp_path: Path, name: str, text: str) -> None:
    good = f"{json.dumps(GOOD)}\n" if name == "m.jsonl" else ""
    (tmp_path / name).write_text(good + text)
    with pytest.raises(ValueError, match=rf"^row {2 if good else 1} is not a trace row"):
        read_trace(tmp_path / name)


def test_goodput_counts_requests_within_the_limits() -> None:
    slo = parse_slo("ttft=0.5,tpot=50ms")
    assert (slo.ttft_s, slo.tpot_s, str(slo)) == (0.5, 0.05, "ttft=0.5,tpot=0.05")
    good = RequestRecord(0.0, (0.4, 0.44), 0.5, finished=0.44, output_tokens=2)
    late = RequestRecord(0.0, (0.6, 0.64), 0.7, finished=0.64, output_tokens=2)
    slow = RequestRecord(0.0, (0.4, 0.6), 2.0, finished=0.6, output_tokens=2)
    stats = statistics([good, late, slow, RequestRecord(0.0, error="x")], slo)
    assert (stats.met, stats.met_share, stats.goodput_per_s) == (1, 0.25, 0.5)
    for wrong in ("", "itl=1", "ttft=x", "ttft=-1", "ttft=1,ttft=2", "ttft=nan", "ttft=inf"):
        with pytest.raises(ValueError):
            parse_slo(wrong)


def test_confidence_interval_contains_the_mean_in_95_percent_of_samples() -> None:
    """Checked on 2,000 samples of 5 values each from a normal distribution."""
    source, held = random.Random(1), 0
    for _ in range(2000):
        mean, half = interval([source.gauss(10.0, 2.0) for _ in range(5)])
        held += abs(mean - 10.0) <= half
    assert held / 2000 == pytest.approx(0.95, abs=0.015)
    assert interval([3.0]) == (3.0, 0.0)


@pytest.mark.parametrize("capacity", [0.003, 0.7, 1.0, 13.0, 400.0])
def test_sweep_finds_the_capacity_of_a_server(capacity: float) -> None:
    search, tried = Search(1.0), 0
    while (rate := search.next()) is not None:
        search.tried(rate, kept=rate <= capacity)
        tried += 1
    assert search.best <= capacity < search.best * 1.1 and tried <= MOST_STEPS


def test_sweep_ends_if_every_rate_or_no_rate_is_sustained() -> None:
    for kept in (True, False):
        search = Search(1.0)
        while (rate := search.next()) is not None:
            search.tried(rate, kept=kept)
        assert (search.best > 1) == kept


def test_limits_that_lone_requests_miss_are_hopeless() -> None:
    """Else a sweep halves the rate until 20 requests take hours."""

    def sent(at_s: float, ttft_s: float) -> RequestRecord:
        return RequestRecord(at_s, (at_s + ttft_s,), at_s + ttft_s, at_s + ttft_s, output_tokens=1)

    slo, alone = parse_slo("ttft=0.5"), [sent(10.0 * i, 0.6) for i in range(ENOUGH_ALONE)]
    assert hopeless(alone, slo) and not hopeless(alone[1:], slo)
    assert not hopeless(alone, parse_slo("ttft=0.7"))
    assert not hopeless([sent(0.1 * i, 0.6) for i in range(20)], slo)  # each beside others
    behind_one_that_hangs = [RequestRecord(-1.0, error="timed out", timed_out=True), *alone]
    assert not hopeless(behind_one_that_hangs, slo)
    assert hopeless([RequestRecord(0.0, error="status 503")], slo)


def test_lengths_are_parsed() -> None:
    assert parse_lengths("512") == Lengths(512, 512) and parse_lengths("1-8") == Lengths(1, 8)
    for wrong in ("", "x", "8-1", "-3", "1-2-3"):
        with pytest.raises(ValueError):
            parse_lengths(wrong)


def test_revisions_are_compared_if_the_server_names_several() -> None:
    def record(revision: str, ttft_s: float, **more: object) -> RequestRecord:
        times = {"arrivals": (ttft_s, ttft_s + 0.1), "finished": ttft_s + 0.1, "ended": ttft_s + 0.2}
        return RequestRecord(0.0, **times, output_tokens=2, stages={"decode": 0.1}, revision=revision, **more)  # type: ignore[arg-type]

    def rows(*records: RequestRecord) -> list[list[str]]:
        return [[*row] for table in tables(Report({}, runs=[Run("s", [*records])])) for row in table.rows]

    stable = ["-", "2", "250.00", "299.00", "100.00", "100.00"]
    records = [record("", 0.2), record("", 0.3), record("v2", 0.4), RequestRecord(0.0, error="503")]
    assert rows(*records)[-2:] == [stable, ["v2", "1", "400.00", "400.00", "100.00", "100.00"]]
    assert stable not in rows(*records[:2]), "one revision needs no comparison"

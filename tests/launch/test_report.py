"""`baton report`: the arithmetic on two scrapes, and the command against a real Metrics object over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from click.testing import CliRunner

from baton.core.errors import StartupError, WorkerLost
from coordinator import metrics as coordinator_metrics
from coordinator.metrics import Metrics
from launch.cli import baton
from launch.report import OTHER, Scrape, counted_limits, load, made_of, parse, parse_prices, text_of
from sim.stats import Slo
from tests.coordinator.test_metrics import CLUSTER, Clock, play

START = 1_000.0


def scraped(at: float, *, start: float = START, **counts: float) -> Scrape:
    """Keys are names without `baton_`; `name__label_value` has a label."""
    samples = {("process_start_time_seconds", ()): start}
    for key, value in counts.items():
        name, _, labels = key.partition("__")
        pairs = tuple(sorted(tuple(label.split("_is_")) for label in labels.split("__") if label))
        samples[f"baton_{name}", tuple((k, v.replace("0p", "0.")) for k, v in pairs)] = value  # type: ignore[index]
    return Scrape(at, "", samples)


def test_a_window_is_the_difference_of_two_scrapes() -> None:
    before = scraped(
        2_000.0,
        request_seconds_count=10,
        requests_latency_total__ttft_le_is_0p3__tpot_le_is_0p02=8,
        prompt_tokens_total=1_000,
        generated_tokens_total=100,
        pool_prompt_tokens_computed_total__role_is_decode=30,
        prefilled_tokens_total=700,
    )
    after = scraped(
        2_100.0,
        request_seconds_count=60,
        requests_latency_total__ttft_le_is_0p3__tpot_le_is_0p02=38,
        requests_latency_total__ttft_le_is_0p5__tpot_le_is_0p02=8,
        requests_latency_total__ttft_le_is_0p3__tpot_le_is_0p1=12,
        requests_failed_total__code_is_cancelled=5,
        requests_failed_total__code_is_queuefull=10,
        prompt_tokens_total=9_000,
        prompt_tokens_cached_total=2_000,
        generated_tokens_total=2_100,
        pool_prompt_tokens_computed_total__role_is_decode=130,
        prefilled_tokens_total=750,
        prefilled_tokens_wasted_total__reason_is_cancelled=15,
    )
    made = made_of(before, after, counted_limits(Slo(ttft_s=0.35, tpot_s=0.05)))
    assert (made.seconds, made.requests, made.cancelled, made.failed) == (100.0, 50, 5, {"queuefull": 10})
    assert (made.ttft_s, made.tpot_s, made.good) == (0.3, 0.05, 30), "limits are rounded down to counted ones"
    assert (made.goodput_per_s, made.good_share) == (0.3, 0.5)
    assert made_of(before, after, counted_limits(Slo(ttft_s=0.5))).good == 50 and made_of(before, after).good == 50
    assert made.computed == 100 and made.wasted == {"cancelled": 15, OTHER: 50} and made.wasted_share == 0.65
    assert (made.prompt_tokens, made.cached_tokens, made.generated_tokens) == (8_000, 2_000, 2_000)


def test_utilisation_and_cost_follow_from_the_time_of_workers() -> None:
    counts = {
        "pool_worker_seconds_total__role_is_prefill": 7_200.0,
        "pool_step_seconds_total__role_is_prefill": 1_800.0,
        "pool_worker_seconds_total__role_is_decode": 3_600.0,
        "pool_step_seconds_total__role_is_decode": 2_700.0,
        "generated_tokens_total": 500_000.0,
        "prompt_tokens_total": 1_500_000.0,
    }
    made = made_of(None, scraped(START + 3_600, **counts), prices=parse_prices("prefill=1.5,decode=2"))
    assert (made.seconds, made.roles["prefill"].utilisation, made.roles["decode"].utilisation) == (3_600, 0.25, 0.75)
    assert (made.roles["prefill"].worker_hours, made.cost) == (2.0, 5.0)
    assert made.cost_per_million(made.generated_tokens) == 10.0
    assert [line for line in text_of(made) if line.startswith("cost")] == [
        "cost         5; 10 per million generated tokens, 2.5 per million tokens"
    ]
    assert made_of(None, scraped(START + 1)).cost is None


def test_a_restarted_coordinator_begins_the_window() -> None:
    made = made_of(
        scraped(2_000.0, generated_tokens_total=500), scraped(2_100.0, start=2_050.0, generated_tokens_total=7)
    )
    assert made.restarted and (made.seconds, made.generated_tokens) == (50.0, 7)


@pytest.mark.parametrize("text", ["2.5.1", "-1", "inf", "prefill=1", "prefill=1,decode=2,decode=3", "gpu=1,decode=2"])
def test_invalid_prices_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_prices(text)


def test_metrics_of_another_server_are_refused() -> None:
    with pytest.raises(StartupError, match="not the metrics of a coordinator"):
        parse("# TYPE a gauge\na 1\n", 1.0)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Metrics]]:
    """The address of a server of real metrics, with a request of 0.2 s to the first token and a failed one."""
    clock, metrics = Clock(), Metrics()
    monkeypatch.setattr(coordinator_metrics, "time", clock)
    play(metrics, clock)
    play(metrics, clock, WorkerLost("x"))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(metrics.text(CLUSTER))

        def log_message(self, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", metrics
    server.shutdown()
    server.server_close()


def test_the_command_reports_since_the_start_or_since_a_saved_scrape(
    served: tuple[str, Metrics], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, metrics = served
    saved = str(tmp_path / "before.json")
    run = CliRunner().invoke
    first = run(baton, ["report", url, "--slo", "ttft=0.5,tpot=50ms", "--price", "2", "--save", saved])
    assert first.exit_code == 0, first.output
    lines = dict(line.split(maxsplit=1) for line in first.output.splitlines())
    assert lines["requests"] == "1 without error; failed: 1 worker_lost; given up by clients: 0"
    assert "50.0% of those that ended (first token within 0.5 s, each further one within 0.05 s)" in lines["goodput"]
    # CLUSTER: 700 + 7 tokens computed, 900 of them in prefills that produced a token, 100 in vain
    assert "prefilled    707 tokens computed" in first.output
    assert "60 cancelled; 40 rescheduled" in first.output
    assert "0.00347222 worker-hours, 40.0% of them in steps, cost 0.00694444" in first.output
    play(metrics, Clock())
    second = run(baton, ["report", url, "--since", saved, "--slo", "ttft=0.5", "--json"])
    made = json.loads(second.output)
    assert (made["requests"], made["failed"], made["good"], made["computed"], made["wasted"]) == (1, {}, 1, 0, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--since", "a", "--for", "3"], "give only one"),
        (["--since", "/nonexistent"], "--since /nonexistent cannot be read"),
        (["--price", "x"], "--price x"),
        (["--slo", "ttft=0.05"], "a limit of 0.05 s is below 0.1 s, the lowest that is counted"),
    ],
)
def test_bad_options_are_refused_by_name(served: tuple[str, Metrics], options: list[str], message: str) -> None:
    done = CliRunner().invoke(baton, ["report", served[0], *options])
    assert done.exit_code != 0 and message in str(done.exception) + done.output


@pytest.mark.parametrize("text", ["", "[]", "7", "[" * 100_000, '{"at": 1}', '{"at": 1, "metrics": "x"}'])
def test_a_file_that_is_no_saved_scrape_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    path.write_text(text)
    with pytest.raises(StartupError, match=r"^--since .*saved.json is not a file that `baton report --save` wrote$"):
        load(str(path))

"""`baton bench` against a server with known delays. Counts and order are asserted, never wall-clock limits."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
from click.testing import CliRunner

from baton.core.errors import StartupError
from launch.bench.client import Target, send
from launch.bench.load import Job
from launch.cli import baton
from tests.support.fake_openai_server import FakeServer, fake_server


def bench(server: FakeServer, tmp_path: Path, *flags: str) -> tuple[int, str, dict]:
    """Exit code, what it printed, the JSON."""
    file = tmp_path / "bench.json"
    words = ["bench", server.url, "--json", str(file), "--markdown", str(tmp_path / "bench.md"), *flags]
    result = CliRunner().invoke(baton, words, standalone_mode=False)
    assert result.exception is None, result.exception
    return int(result.return_value), result.output, json.loads(file.read_text())


def test_counts_order_and_lower_bounds(tmp_path: Path) -> None:
    with fake_server(first_s=0.05, gap_s=0.01) as server:
        flags = ["--concurrency", "3", "--requests", "9", "--warmup", "2", "--input-len", "10-20", "--output-len", "5"]
        code, shown, report = bench(server, tmp_path, *flags)
        assert code == 0 and server.served == 11 and server.most_at_once == 3
        body = server.bodies[0]
        assert body["ignore_eos"] and body["stream_options"] == {"include_usage": True} and body["model"] == "fake"
        assert all(300 <= token <= 3999 for token in body["prompt"])
    stats = report["statistics"]
    assert (stats["requests"], stats["failed"], stats["output_tokens"]) == (9, 0, 45)
    assert stats["prompt_tokens"] == sum(len(body["prompt"]) for body in server.bodies[2:])
    assert (stats["ttft"]["count"], stats["tpot"]["count"], stats["itl"]["count"]) == (9, 9, 36)
    assert stats["ttft"]["p50"] >= 0.045 and stats["tpot"]["p50"] >= 0.009  # the server's delays are a floor
    assert stats["ttft"]["p50"] > stats["itl"]["p50"] and stats["e2e"]["p50"] > stats["ttft"]["p99"] - 1e-9
    for one in report["per_request"]:
        assert one["e2e_s"] >= one["ttft_s"] + sum(one["gaps_s"]) - 1e-3
    for name in ("TTFT", "TPOT", "ITL", "E2E", "(n - 1)", "tokens/s"):
        assert name in shown and name in (tmp_path / "bench.md").read_text()


def test_failures_are_counted_and_shown(tmp_path: Path) -> None:
    with fake_server(fail_every=3, error_event_every=4) as server:
        flags = ["--concurrency", "1", "--requests", "12", "--warmup", "0", "--output-len", "4", "--input-len", "4"]
        code, shown, report = bench(server, tmp_path, *flags)
    assert code == 0
    errors = report["statistics"]["errors"]
    assert errors == {"status 503: too busy": 4, "worker lost": 2}
    assert "4 x status 503: too busy" in shown and "2 x worker lost" in shown
    assert report["statistics"]["output_tokens"] == 24


def test_all_failed_is_exit_code_1(tmp_path: Path) -> None:
    with fake_server(fail_every=1) as server:
        code, _, report = bench(server, tmp_path, "--requests", "3", "--warmup", "0", "--input-len", "2")
    assert code == 1 and report["statistics"]["failed"] == 3


def test_without_usage_events_are_counted(tmp_path: Path) -> None:
    with fake_server(usage=False) as server:
        _, shown, report = bench(server, tmp_path, "--requests", "2", "--warmup", "0", "--output-len", "6")
    assert report["statistics"]["output_tokens"] == 12 and report["statistics"]["uncounted"] == 2
    assert "no usage" in shown


def test_first_token_is_the_first_with_text(tmp_path: Path) -> None:
    with fake_server(gap_s=0.05, empty_text_every=2) as server:  # tokens 0, 2, 4 are empty
        flags = ["--requests", "1", "--warmup", "0", "--output-len", "5", "--input-len", "3", "--prompts", "text"]
        _, _, report = bench(server, tmp_path, *flags)
        assert len(server.bodies[0]["prompt"].split()) == 3
    stats = report["statistics"]
    assert stats["ttft"]["p50"] >= 0.045 and stats["itl"]["count"] == 1


def test_timeout_and_no_server(tmp_path: Path) -> None:
    with fake_server(first_s=30) as server:
        flags = ["--requests", "1", "--warmup", "0", "--timeout-s", "0.3", "--output-len", "1"]
        code, _, report = bench(server, tmp_path, *flags)
    assert code == 1 and report["statistics"]["errors"] == {"no end within 0.3 s": 1}
    result = CliRunner().invoke(baton, ["bench", server.url], standalone_mode=False)
    assert isinstance(result.exception, StartupError) and "no server answers" in result.exception.message


async def test_no_connection_in_time_is_not_a_request_that_did_not_end() -> None:
    class Session:
        def post(self, *_: object, **__: object) -> object:
            raise aiohttp.ConnectionTimeoutError("Connection timeout to host http://h/v1")

    record = await send(Session(), Target("http://h/v1", "m", "", 600.0, {}), Job([1], 1))  # type: ignore[arg-type]
    assert record.error == "ConnectionTimeoutError: Connection timeout to host http://h/v1"

"""`baton bench` against a server with known delays. Counts and order are asserted, never wall-clock limits."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
from asyncio.selector_events import _SelectorSocketTransport
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from click.testing import CliRunner

from baton.core.errors import StartupError
from launch.bench import client as bench_client
from launch.bench.client import ServerTarget, client_session, first_model, run_load, send
from launch.bench.load import LoadPlan, PlannedRequest, completion
from launch.bench.stats import RequestRecord
from launch.cli import baton
from sim.scale.workload import Lengths
from tests.support.fake_openai_server import FakeServer, fake_server


def bench(server: FakeServer, tmp_path: Path, *flags: str) -> tuple[int, str, dict]:
    """The exit code, the output and the JSON report."""
    file = tmp_path / "bench.json"
    words = ["bench", server.url, "--json", str(file), "--markdown", str(tmp_path / "bench.md"), *flags]
    result = CliRunner().invoke(baton, words, standalone_mode=False)
    assert result.exception is None, result.exception
    return int(result.return_value), result.output, json.loads(file.read_text())


def refused(*words: str) -> str:
    """The message with which the command line is refused."""
    result = CliRunner().invoke(baton, ["bench", *words], standalone_mode=False)
    assert isinstance(result.exception, StartupError), result.exception
    return result.exception.message


def test_report_has_exact_counts_and_plausible_times(tmp_path: Path) -> None:
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


def test_each_command_has_its_own_requests_and_reports_cached_tokens(tmp_path: Path) -> None:
    """With the same prompts as an earlier command it would measure the server's prefix cache."""
    flags = ["--concurrency", "1", "--requests", "3", "--warmup", "0", "--input-len", "10", "--output-len", "2"]
    with fake_server(caches=True) as server:
        found = []
        for seed in ([], [], ["--seed", "7"], ["--seed", "7"]):
            _, shown, report = bench(server, tmp_path, *flags, *seed)
            found.append((report["settings"]["seed"], report["statistics"]["cached_tokens"]))
            cached = found[-1][1]
            note = f"30 tokens, {cached} of them ({cached / 30:.1%}) from the server's prefix cache"
            assert note in " ".join(shown.split()) and note in (tmp_path / "bench.md").read_text()
    assert [cached for _, cached in found] == [0, 0, 0, 30]
    assert found[0][0] != found[1][0] and found[2][0] == found[3][0] == 7
    assert [one["cached_tokens"] for one in report["per_request"]] == [10] * 3
    with fake_server() as server:
        _, shown, report = bench(server, tmp_path, *flags)
    assert report["statistics"]["cached_tokens"] is None and "prefix cache" not in shown


def test_failures_are_counted_and_shown(tmp_path: Path) -> None:
    with fake_server(fail_every=3, error_event_every=4) as server:
        flags = ["--concurrency", "1", "--requests", "12", "--warmup", "0", "--output-len", "4", "--input-len", "4"]
        code, shown, report = bench(server, tmp_path, *flags)
    assert code == 0
    errors = report["statistics"]["errors"]
    assert errors == {"status 503: too busy": 4, "worker lost": 2}
    assert "4 x status 503: too busy" in shown and "2 x worker lost" in shown
    assert report["statistics"]["output_tokens"] == 24


def test_exit_code_is_1_if_all_requests_failed(tmp_path: Path) -> None:
    with fake_server(fail_every=1) as server:
        code, _, report = bench(server, tmp_path, "--requests", "3", "--warmup", "0", "--input-len", "2")
    assert code == 1 and report["statistics"]["failed"] == 3


def test_events_are_counted_if_the_server_sends_no_usage(tmp_path: Path) -> None:
    with fake_server(usage=False) as server:
        _, shown, report = bench(server, tmp_path, "--requests", "2", "--warmup", "0", "--output-len", "6")
    assert report["statistics"]["output_tokens"] == 12 and report["statistics"]["uncounted"] == 2
    assert "no usage" in shown


def test_first_token_is_the_first_event_with_text(tmp_path: Path) -> None:
    with fake_server(gap_s=0.05, empty_text_every=2) as server:  # tokens 0, 2, 4 are empty
        flags = ["--requests", "1", "--warmup", "0", "--output-len", "5", "--input-len", "3", "--prompts", "text"]
        _, _, report = bench(server, tmp_path, *flags)
        assert len(server.bodies[0]["prompt"].split()) == 3
    stats = report["statistics"]
    assert stats["ttft"]["p50"] >= 0.045 and stats["itl"]["count"] == 1


def test_timeout_and_unreachable_server_are_reported(tmp_path: Path) -> None:
    with fake_server(first_s=30) as server:
        flags = ["--requests", "1", "--warmup", "0", "--timeout-s", "0.3", "--output-len", "1"]
        code, _, report = bench(server, tmp_path, *flags)
    assert code == 1 and report["statistics"]["errors"] == {"timed out after 0.3 s": 1}
    assert "the server cannot be queried" in refused(server.url)


async def test_connection_timeout_is_not_reported_as_a_request_timeout() -> None:
    class Session:
        def post(self, *_: object, **__: object) -> object:
            raise aiohttp.ConnectionTimeoutError("Connection timeout to host http://h/v1")

    record = await send(Session(), ServerTarget("http://h/v1", "m", "", 600.0, {}), completion([1], 1))  # type: ignore[arg-type]
    assert record.error == "ConnectionTimeoutError: Connection timeout to host http://h/v1"


async def test_request_time_starts_when_its_bytes_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fake clock ticks at each reading; the last tick before a request's bytes are written is its start."""
    ticks, written = itertools.count(1.0), []
    reading = [0.0]

    def perf_counter() -> float:
        reading[0] = next(ticks)
        return reading[0]

    monkeypatch.setattr("launch.bench.client.time", SimpleNamespace(perf_counter=perf_counter))
    plain = _SelectorSocketTransport.write

    def write(transport: _SelectorSocketTransport, data: bytes) -> None:
        if data.startswith(b"POST"):
            written.append(reading[0])
        plain(transport, data)

    monkeypatch.setattr(_SelectorSocketTransport, "write", write)
    with fake_server() as server:
        target = ServerTarget(f"{server.url}/v1", "fake", "", 60.0, {})
        sessions = LoadPlan(0, Lengths(2, 2), Lengths(3, 3)).sessions(0, 8)
        records = await run_load(target, sessions, 4, lambda _: None)
    assert [record.error for record in records] == [None] * 8 and len(written) == 8
    assert sorted(record.sent for record in records) == written


def test_open_loop_does_not_wait_for_responses(tmp_path: Path) -> None:
    with fake_server(first_s=0.3) as server:
        flags = ["--rate", "200", "--requests", "20", "--warmup", "0", "--output-len", "1", "--input-len", "2"]
        code, _, report = bench(server, tmp_path, *flags)
        assert code == 0 and server.served == 20 and server.most_at_once > 10
    assert report["settings"]["loop"] == "open loop" and report["settings"]["rate"] == 200
    assert "concurrency" not in report["settings"] and report["runs"][0]["rate"] == 200


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * i, "input_length": 3 + i, "output_length": 1 + i, "hash_ids": []} for i in range(4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with fake_server() as server:
        code, _, report = bench(server, tmp_path, "--trace", str(trace), "--scale", "10", "--warmup", "0")
        assert code == 0
        assert [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies] == [(3, 1), (4, 2), (5, 3), (6, 4)]
    assert report["settings"]["trace_rows"] == 4


def test_each_run_of_a_trace_has_its_own_prompts(tmp_path: Path) -> None:
    """Else those after the first would hit the prefix cache that it filled. Rows of one run share their blocks."""
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": i, "input_length": 600, "output_length": 1, "hash_ids": [7]} for i in range(2)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with fake_server() as server:
        bench(server, tmp_path, "--trace", str(trace), "--warmup", "0", "--repeats", "2")
        prompts = [tuple(body["prompt"]) for body in server.bodies]
    begin = Counter(prompt[:512] for prompt in prompts)
    assert sorted(begin.values()) == [2, 2] and len(set(prompts)) == 4


def test_two_servers_are_measured_alternately_with_the_same_requests(tmp_path: Path) -> None:
    with fake_server(gap_s=0.01) as slow, fake_server(gap_s=0.001) as fast:
        flags = ["--against", fast.url, "--repeats", "3", "--requests", "4", "--warmup", "1", "--output-len", "6"]
        page = tmp_path / "bench.html"
        code, shown, report = bench(slow, tmp_path, *flags, "--input-len", "4", "--html", str(page))
        assert code == 0 and slow.served == fast.served == 15
        assert slow.bodies == fast.bodies, "the same requests"
        assert len({tuple(body["prompt"]) for body in slow.bodies}) == 15, "and no run repeats one"
    servers = [run["server"] for run in report["runs"]]
    assert servers == [f"{slow.url}/v1", f"{fast.url}/v1"] * 3
    row = next(line for line in shown.splitlines() if line.startswith("TPOT p50"))
    assert float(row.split("(")[0].split()[-1]) < 1.0 and "±" in row
    text = page.read_text()
    assert (
        text.count("<svg") == 3
        and "TPOT p50 ms" in text
        and "http" not in text.split("<h2>Settings")[0].replace(slow.url, "").replace(fast.url, "")
    )


def test_sweep_ends_at_the_capacity_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes longer the more requests it has."""
    monkeypatch.setattr("launch.bench.run.SWEEP_S", 0.3)
    with fake_server(first_s=0.01, first_s_each=0.02) as server:
        flags = ["--sweep", "--slo", "ttft=0.1", "--rate", "20", "--output-len", "1", "--input-len", "2"]
        code, shown, report = bench(server, tmp_path, *flags, "--html", str(tmp_path / "bench.html"))
    rates = [run["rate"] for run in report["runs"]]
    assert code == 0 and "the highest rate at which 90%" in shown
    assert len(rates) > 3 and 5 <= report["best_rate"] < max(rates)
    assert (tmp_path / "bench.html").read_text().count("<svg") == 3


def test_goodput_is_shown(tmp_path: Path) -> None:
    with fake_server(first_s=0.05) as server:
        flags = ["--slo", "ttft=10ms", "--requests", "4", "--warmup", "0", "--output-len", "1"]
        _, shown, report = bench(server, tmp_path, *flags)
    assert report["statistics"]["met"] == 0 and "0 of 4 within ttft=0.01" in shown


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--sweep"], "--sweep needs --slo"),
        (["--sweep", "--slo", "ttft=1", "--against", "x"], "cannot be combined with --against"),
        (["--rate", "1", "--trace", __file__], "give only one"),
        (["--trace", "azure-code", "--prompts", "text"], "--trace sends token ids"),
        (["--trace", __file__], "row 1 is not a trace row"),
        (["--input-len", "0"], "must be at least 1"),
        (["--token-ids", "p50=300,p95=900"], "--token-ids must be an id, or a range"),
    ],
)
def test_conflicting_options_are_refused(flags: list[str], expected: str) -> None:
    assert expected in refused("http://127.0.0.1:1", *flags)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--input-len", "8-1"], "expected a length, or a range such as 128-1024"),
        (["--slo", "itl=1"], "'itl' is not ttft or tpot, or is repeated; expected limits such as ttft=0.5,tpot=50ms"),
    ],
)
def test_unparsable_value_is_refused_with_an_example(flags: list[str], expected: str) -> None:
    result = CliRunner().invoke(baton, ["bench", *flags])
    assert result.exit_code == 2 and expected in " ".join(result.output.split())


def test_recorded_command_line_omits_the_api_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["baton", "bench", "--api-key", "sk-secret", "--api-key=sk-secret", "--seed", "3"])
    with fake_server() as server:
        _, _, report = bench(server, tmp_path, "--requests", "1", "--warmup", "0", "--output-len", "1")
    assert report["settings"]["command"] == "baton bench --api-key ... --api-key=... --seed 3"


@pytest.mark.parametrize(
    "event",
    [
        "[1]",
        '"x"',
        "{",
        '{"choices": 5}',
        '{"choices": [5]}',
        '{"choices": [{"delta": "abc"}]}',
        '{"usage": [1]}',
        '{"usage": {"prompt_tokens": "12"}}',
        '{"usage": {"completion_tokens": -1}}',
        '{"usage": {"prompt_tokens": 9007199254740993000}}',
        '{"choices": [{"timeline": {}}]}',
        '{"choices": [{"timeline": {"spans": [{"name": "prefill"}]}}]}',
        '{"choices": [{"timeline": {"spans": [{"name": "prefill", "ms": "1"}]}}]}',
        '{"choices": [{"timeline": {"spans": [{"name": "prefill", "ms": 1e300}]}}]}',
    ],
)
def test_malformed_event_fails_only_its_request(tmp_path: Path, event: str) -> None:
    with fake_server(odd_event=event) as server:
        flags = ["--concurrency", "1", "--requests", "4", "--warmup", "0", "--output-len", "2", "--input-len", "2"]
        code, _, report = bench(server, tmp_path, *flags)
    assert code == 0 and report["statistics"]["failed"] == 2 and report["statistics"]["output_tokens"] == 4


def test_markup_and_control_characters_of_a_server_are_escaped(tmp_path: Path) -> None:
    """Neither markup nor control characters from a server reach the terminal."""
    with fake_server(model="[/x] :smile: \x1b[31m", error_event_every=1) as server:
        flags = ["--requests", "1", "--warmup", "0", "--output-len", "2", "--input-len", "2"]
        code, shown, report = bench(server, tmp_path, *flags, "--html", str(tmp_path / "bench.html"))
        assert server.bodies[0]["model"] == "[/x] :smile: \x1b[31m"
    assert code == 1 and "[/x] :smile: \\x1b[31m" in shown and "\x1b[31m" not in shown
    assert report["settings"]["model"] == "[/x] :smile: \\x1b[31m"


def test_unwritable_report_path_is_refused_before_any_request_is_sent(tmp_path: Path) -> None:
    with fake_server() as server:
        assert "No such file" in refused(server.url, "--requests", "1", "--json", str(tmp_path / "no" / "x.json"))
        assert not server.bodies


def test_a_password_in_a_url_is_refused() -> None:
    message = refused("http://me:sk-secret@127.0.0.1:1")
    assert "use --api-key" in message and "sk-secret" not in message


def test_sweep_ends_if_the_server_fails_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.bench.run.SWEEP_S", 0.1)
    with fake_server(fail_every=1) as server:
        flags = ["--sweep", "--slo", "ttft=0.1", "--rate", "200", "--output-len", "1", "--input-len", "2"]
        code, shown, report = bench(server, tmp_path, *flags)
    assert code == 1 and len(report["runs"]) == 1 and report["best_rate"] == 0 and "no rate was found" in shown


def test_sweep_ends_if_requests_that_run_alone_miss_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.bench.run.SWEEP_S", 0.1)
    with fake_server(first_s=0.01) as server:
        flags = ["--sweep", "--slo", "ttft=2ms", "--rate", "40", "--output-len", "1", "--input-len", "2"]
        _, shown, report = bench(server, tmp_path, *flags)
    assert len(report["runs"]) < 10 and report["best_rate"] == 0 and "no rate was found" in shown


def test_endless_response_is_reported_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.cluster_api.MAX_BYTES", 1 << 20)
    monkeypatch.setattr("launch.bench.client._MAX_EVENT_BYTES", 1 << 20)
    endless = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {"

    def drip(listening: socket.socket) -> None:
        while True:
            try:
                caller, _ = listening.accept()
                with caller:
                    caller.recv(65536)
                    caller.sendall(endless)
                    while True:
                        caller.sendall(b" " * 65536)
            except ConnectionError:
                continue
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=drip, args=(listening,), daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(OSError, match="the response is too long or too slow"):
            first_model(f"{url}/v1", "")
        target = ServerTarget(f"{url}/v1", "m", "", 30.0, {})

        async def send_one() -> RequestRecord:
            async with client_session(target) as session:
                return await send(session, target, PlannedRequest("/completions", {"prompt": "x"}))

        assert "an event exceeds 1 MiB" in str(asyncio.run(send_one()).error)
        listening.shutdown(socket.SHUT_RDWR)


def test_arrival_time_is_taken_when_bytes_are_read_not_when_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = 8
    heads, events = threading.Event(), threading.Event()
    seen: list[int] = []
    arrived: list[float] = []
    parsed: list[float] = []
    descriptor, feed = bench_client._descriptor, bench_client._ServerStream.feed

    def last_head_waits(answer: aiohttp.ClientResponse) -> int:
        seen.append(descriptor(answer))
        if len(seen) == streams:
            heads.set()
            assert events.wait(30)  # blocks the loop: all events are in their sockets when it resumes
        return seen[-1]

    def noted(stream: bench_client._ServerStream, now: float, chunk: bytes) -> None:
        parsed.append(time.perf_counter())
        arrived.append(now)
        feed(stream, now, chunk)

    monkeypatch.setattr(bench_client, "_descriptor", last_head_waits)
    monkeypatch.setattr(bench_client._ServerStream, "feed", noted)

    def serve(listening: socket.socket) -> None:
        callers = [listening.accept()[0] for _ in range(streams)]
        for caller in callers:
            caller.recv(65536)
            caller.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        assert heads.wait(30)
        for caller in callers:
            caller.sendall(b'data: {"choices": [{"index": 0, "text": "x"}]}\n\ndata: [DONE]\n\n')
        events.set()
        for caller in callers:
            caller.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=serve, args=(listening,), daemon=True)
        server.start()
        target = ServerTarget(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", "m", "", 30.0, {})
        load = LoadPlan(0, Lengths(4, 4), Lengths(1, 1)).sessions(0, streams)
        records = asyncio.run(run_load(target, load, streams, lambda record: None))
        server.join(30)
    assert [record.error for record in records] == [None] * streams and len(arrived) == streams
    assert max(arrived) < min(parsed) and -1 not in seen


def test_model_name_that_cannot_be_encoded_is_refused() -> None:
    with fake_server(model="\ud800") as server:
        assert "no list of models" in refused(server.url, "--requests", "1")

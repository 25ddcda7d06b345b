"""`baton calibrate`, `simulate` and `plan`: fits that find the costs behind the samples, files, refusals, reports."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner, Result

from baton.core.errors import InvalidRequest, StartupError
from launch.bench import command as bench_command
from launch.bench.client import ServerTarget
from launch.bench.stats import RequestRecord
from launch.capacity import loads as measured
from launch.capacity.calibrate import LoadLimits, costs, loads
from launch.capacity.command import plan_command, read_calibration, simulate_command
from launch.capacity.loads import ClosedLoop, LoadClient, RoleCounters, Sample, cpu_seconds
from launch.capacity.plan import FLAGS
from sim import trace
from sim.scale.costs import Calibration, parse_calibration
from sim.scale.fit import fit
from sim.scale.members import ClusterShape
from sim.scale.replay import Replay
from sim.trace import TraceRow
from tests.support.scale import CALIBRATION

LINK = replace(CALIBRATION.link, send_s=2e-3, send_token_s=1e-6, receive_s=1e-3, receive_token_s=2e-6, offer_s=5e-4)
FRONT = replace(
    CALIBRATION.front,
    prompt_token_cpu_s=1e-6,
    message_cpu_s=2e-4,
    client_request_cpu_s=4e-4,
    client_message_cpu_s=5e-5,
    client_token_cpu_s=2e-5,
)
DECODE = replace(CALIBRATION.decode, beyond=((4, 5e-5), (16, 4e-4)))  # a second line that is flatter, a steeper third
TRUE = replace(CALIBRATION, link=LINK, front=FRONT, decode=DECODE)
IDLE_S = 1e-4
LIMITS = LoadLimits(max_model_len=4096, step_tokens=512, max_running=64)


def sample(
    load: ClosedLoop, kind: Calibration, *, shared_host: bool, beside_s: float = 0.0, decode_workers: int = 1
) -> Sample:
    """What a cluster with these costs shows under a load, without chance. A batch runs whole from its first step on, in
    equal parts on the decode workers. On their core, others compute for `beside_s` in each of their steps."""
    prefill, decode, link, front = kind.prefill, kind.decode, kind.link, kind.front
    tokens, n = load.input_len, load.requests
    rows = -(-tokens // 512) * n
    steps = rows if load.concurrency == 1 else -(-n * tokens // 512)  # a backlog fills the steps
    step_s = prefill.base_s * steps + prefill.row_s * rows
    step_s += n * (prefill.token_s * tokens + prefill.pair_s * tokens * (tokens + 1) / 2)
    handed = n if load.output_len > 1 else 0
    sent = 0 if load.shared else handed * tokens
    rounds = load.output_len - 1
    batches = -(-n // load.concurrency) * min(decode_workers, load.concurrency)
    made = Sample(load, (), RoleCounters(), RoleCounters(), 0.0, 0.0, 0.0)
    decode_s = rounds * batches * decode.plain_s(n / batches, 0) + decode.context_s * made.context
    gap_s = link.latency_s + tokens * kind.token_bytes / link.bytes_per_s + decode.plain_s(1, tokens + 1)
    if shared_host:
        gap_s += link.send_s + link.receive_s + (link.send_token_s + link.receive_token_s) * tokens
    offer_s = link.offer_s if shared_host and handed else 0.0
    ttft_s = front.request_s + (step_s + (0.0 if shared_host else steps * IDLE_S)) / n + offer_s
    step = decode.plain_s(1, tokens + 1) + beside_s
    arrivals = [ttft_s, *(ttft_s + gap_s + i * step for i in range(load.output_len - 1))]
    record = RequestRecord(0.0, tuple(arrivals), arrivals[-1], arrivals[-1], tokens, 0, load.output_len)
    messages = steps + rounds * batches
    front_s = n * front.admit_cpu_s(tokens) + front.deliver_cpu_s(messages, n * load.output_len)
    client_s = n * front.client_request_cpu_s + front.read_cpu_s(messages, n * load.output_len)
    send_s = (link.send_s + link.offer_s) * handed + link.send_token_s * sent
    receive_s = (link.receive_s + link.accept_s) * handed + link.receive_token_s * sent
    return Sample(
        load,
        (record,) * n,
        RoleCounters(steps, step_s, tokens * n, n, kind.token_bytes * sent, cpu_s=step_s + send_s),
        RoleCounters(rounds * batches, decode_s, 0, rounds * n, cpu_s=decode_s + receive_s),
        front_s,
        client_s,
        step_s + steps * IDLE_S,
    )


@pytest.mark.parametrize("shared_host", [True, False])
def test_fits_find_the_costs_behind_the_samples(shared_host: bool) -> None:
    given = [sample(load, TRUE, shared_host=shared_host) for load in loads(LIMITS)]
    found = costs(given, LIMITS.step_tokens, shared_host=shared_host)
    for part, true in (("prefill", TRUE.prefill), ("front", TRUE.front)):
        for name in true.__slots__:
            if name != "idle_s":
                assert getattr(getattr(found, part), name) == pytest.approx(getattr(true, name), rel=0.03), (part, name)
    for rows in (1, 3, 4, 10, 16, 40, 64):
        assert found.decode.plain_s(rows, 0) == pytest.approx(TRUE.decode.plain_s(rows, 0), rel=1e-3), rows
    assert found.decode.context_s == pytest.approx(TRUE.decode.context_s, rel=1e-3)
    assert found.link.latency_s == pytest.approx(TRUE.link.latency_s, rel=0.05)
    assert found.link.bytes_per_s == pytest.approx(TRUE.link.bytes_per_s, rel=0.05)
    sends = found.link.send_s, found.link.send_token_s, found.link.receive_s, found.link.receive_token_s
    assert sends == pytest.approx((2e-3, 1e-6, 1e-3, 2e-6) if shared_host else (0.0,) * 4, rel=0.05)
    assert found.link.offer_s == pytest.approx(5e-4 if shared_host else 0.0, rel=0.05)
    assert found.link.accept_s == 0.0
    assert found.prefill.idle_s == pytest.approx(0.0 if shared_host else IDLE_S, rel=0.1)
    assert found.token_bytes == TRUE.token_bytes
    assert all(residual.largest < 0.03 for residual in found.residuals.values()), found.residuals


def test_the_costs_of_two_decode_workers_are_those_of_one() -> None:
    kind = replace(TRUE, decode=replace(DECODE, beyond=(*DECODE.beyond, (32, 1e-4))))
    limits = replace(LIMITS, decode_workers=2)
    given = [sample(load, kind, shared_host=True, decode_workers=2) for load in loads(limits)]
    found = costs(given, limits.step_tokens, shared_host=True).decode
    for rows in (1, 4, 16, 32, 64):
        assert found.plain_s(rows, 0) == pytest.approx(kind.decode.plain_s(rows, 0), rel=1e-3), rows


def test_what_does_not_fit_between_two_tokens_is_done_at_the_offer() -> None:
    link = replace(LINK, latency_s=1e-5, bytes_per_s=1e15, accept_s=6e-4)
    kind = replace(TRUE, link=link)
    given = [sample(load, kind, shared_host=True) for load in loads(LIMITS)]
    fitted = costs(given, LIMITS.step_tokens, shared_host=True).link
    assert (fitted.accept_s, fitted.receive_s) == pytest.approx((6e-4, 1e-3), rel=0.05)
    assert fitted.latency_s == pytest.approx(1e-5, rel=0.1)


def test_a_prefill_worker_does_at_the_offer_what_does_not_fit_between_two_tokens_either() -> None:
    """Its tokens come as if it had nothing to do for hand-overs after the first one."""
    given = [sample(load, replace(TRUE, link=LINK), shared_host=True) for load in loads(LIMITS)]
    idle = replace(LINK, offer_s=0.0, send_s=0.0, receive_s=0.0, latency_s=1e-5, bytes_per_s=1e15)
    early = [sample(load, replace(TRUE, link=idle), shared_host=True).records for load in loads(LIMITS)]
    fitted = costs(
        [replace(s, records=records) for s, records in zip(given, early, strict=True)], 512, shared_host=True
    ).link
    assert (fitted.accept_s, fitted.offer_s) == pytest.approx((1e-3, 2.5e-3), rel=0.05)
    assert fitted.receive_s == pytest.approx(0.0, abs=1e-5) and fitted.send_s == pytest.approx(0.0, abs=1e-4)


def test_rounding_makes_no_cost_negative() -> None:
    """All that workers do for a hand-over is done at the offer: what is left for later is nothing, and not less."""
    for ten_us in range(100, 140):
        early = replace(LINK, offer_s=ten_us * 3e-6, send_s=0.0, receive_s=0.0, latency_s=-5e-4, bytes_per_s=1e15)
        late = replace(LINK, send_s=ten_us * 1e-5, receive_s=ten_us * 2e-5)
        given = [sample(load, replace(TRUE, link=late), shared_host=True) for load in loads(LIMITS)]
        times = [sample(load, replace(TRUE, link=early), shared_host=True).records for load in loads(LIMITS)]
        given = [replace(s, records=records) for s, records in zip(given, times, strict=True)]
        link = costs(given, LIMITS.step_tokens, shared_host=True).link
        assert link.send_s >= 0.0 and link.receive_s >= 0.0, (ten_us, link)


def test_a_replayed_stream_beside_coordinator_and_client_is_as_fast_as_the_measured_one() -> None:
    """On one core: what they compute for a token is in the measured times, and in their own costs."""
    front = replace(FRONT, message_cpu_s=2e-3, client_message_cpu_s=1e-3)
    beside_s = front.deliver_cpu_s(1, 1) + front.read_cpu_s(1, 1)
    kind = replace(TRUE, front=front)
    given = [sample(load, kind, shared_host=True, beside_s=beside_s) for load in loads(LIMITS)]
    found = costs(given, LIMITS.step_tokens, shared_host=True)
    fitted = replace(kind, prefill=found.prefill, decode=found.decode, link=found.link, front=found.front)
    cluster = ClusterShape(fitted, 1, fitted, 1, cores=((1,), (0,)), host_cores=2, front_cores=(0,))
    itl_s = Replay(cluster, [TraceRow(0.0, 32, 97)]).run().itl.p50
    assert itl_s == pytest.approx(kind.decode.plain_s(1, 33) + beside_s, rel=0.02)


def test_loads_stay_within_the_limits_of_the_cluster() -> None:
    small = loads(LoadLimits(max_model_len=300, step_tokens=128, max_running=4))
    assert all(load.input_len + load.output_len <= 300 and load.concurrency <= 6 for load in small)
    assert {load.name for load in small} == {load.name for load in loads(LIMITS)}


async def _no_requests(*_: object) -> list[RequestRecord]:
    return []


def test_the_processor_time_of_threads_that_have_ended_counts() -> None:
    spent = list[float]()

    def work() -> None:
        while time.thread_time() < 0.05:
            pass
        spent.append(time.thread_time())

    before, thread = cpu_seconds(os.getpid()), threading.Thread(target=work)
    thread.start()
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():  # the kernel ends it a little later
        time.sleep(0.001)
    assert cpu_seconds(os.getpid()) - before >= spent[0]
    assert cpu_seconds(0) == 0.0


def test_processor_time_of_workers_with_part_of_a_core_counts_as_what_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"role": "decode", "state": "ready", "step_s": 0.0, "speculation": None, "pids": [os.getpid()]}
    cluster = SimpleNamespace(workers=(row,), document={"coordinator": {}})
    monkeypatch.setattr(measured, "get_cluster", lambda url: cluster)
    before = time.process_time()
    counted = LoadClient("", ServerTarget("", "", "", 1.0, {}), 1, core_share=0.25).cpu_s()
    assert 4 * before <= counted <= 4 * time.process_time()


def test_bytes_of_a_hand_over_that_are_reported_after_its_tokens_count(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"state": "ready", "step_s": 0.0, "speculation": None, "pids": []}

    def rows(tokens: int, sent: int, received: int) -> SimpleNamespace:
        prefill = {**row, "role": "prefill", "tokens_generated": tokens, "kv_bytes_sent": sent}
        decode = {**row, "role": "decode", "tokens_generated": tokens, "kv_bytes_received": received}
        return SimpleNamespace(workers=(prefill, decode), document={"coordinator": {}})

    # Earlier hand-overs were sent by workers that have been replaced, or received by them.
    reported = [rows(7, 900, 700), rows(8, 900, 750), rows(8, 950, 750), rows(9, 999, 999)]
    monkeypatch.setattr(measured, "get_cluster", lambda url: reported[0])
    monkeypatch.setattr(measured.time, "sleep", lambda seconds: reported.pop(0))
    monkeypatch.setattr(measured, "run_load", _no_requests)
    sample = LoadClient("", ServerTarget("", "", "", 1.0, {}), 1).measure(ClosedLoop("hand-over", 1, 1, 10, 2))
    assert (sample.prefill.kv_bytes, sample.decode.kv_bytes, sample.decode.tokens) == (50, 50, 1)


def test_a_fit_leaves_out_negative_terms_and_states_its_error() -> None:
    ones, xs = [1.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]
    found, residual = fit({"a": ones, "b": xs, "c": [x * x for x in xs]}, [5.0, 7.0, 9.0, 11.0, 13.0])
    assert (found["a"], found["b"], found["c"]) == pytest.approx((3.0, 2.0, 0.0), abs=1e-9) and residual.largest < 1e-9
    found, residual = fit({"a": ones, "b": xs}, [5.0, 4.0, 3.0, 2.0, 1.0])
    assert found["b"] == 0.0 and found["a"] > 0 and residual.largest > 0.5
    with pytest.raises(InvalidRequest, match="too few"):
        fit({"a": ones[:1], "b": xs[:1]}, [1.0])


def test_a_calibration_is_read_as_it_is_written() -> None:
    assert parse_calibration(json.loads(json.dumps(TRUE.as_json()))) == TRUE


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.update(format=0), "format"),
        (lambda d: d.update(colour=1), "colour"),
        (lambda d: d.pop("block_size"), "block_size"),
        (lambda d: d.update(block_size=0), "block_size"),
        (lambda d: d["decode"].update(base_s="x"), "decode.base_s"),
        (lambda d: d["decode"].update(base_s=-1), "decode.base_s"),
        (lambda d: d["decode"].update(base_s=1e999), "decode.base_s"),
        (lambda d: d["decode"].update(beyond=[[4]]), "decode.beyond"),
        (lambda d: d["decode"].update(beyond=[[4, 1e-4], [4, 2e-4]]), "decode.beyond"),
        (lambda d: d["decode"].update(beyond=[[1.5, 1e-4]]), "decode.beyond"),
        (lambda d: d["decode"].update(beyond=[[4, -1e-4]]), "decode.beyond"),
        (lambda d: d["prefill_worker"].update(blocks=1.5), "prefill_worker.blocks"),
        (lambda d: d["link"].update(bytes_per_s=0), "link.bytes_per_s"),
        (lambda d: d.update(block_size=10**10), "block_size"),
        (lambda d: d["decode"].update(base_s=10**400), "decode.base_s"),
        (lambda d: d["decode"].update(accepted=1), "decode.accepted"),
        (lambda d: d.update(decode={"base_s": 0, "row_s": 0}), "decode"),
        (lambda d: d.update(prefill={"base_s": 0, "token_s": 0}), "prefill"),
        (lambda d: d.update(residuals={"x": {"median": 0}}), "residuals.x.largest"),
        (lambda d: d.update(prefill=3), "prefill"),
        (lambda d: d.update(name=""), "name"),
    ],
)
def test_a_wrong_calibration_is_refused_by_field(change: Callable[[dict], object], named: str, tmp_path: Path) -> None:  # type: ignore[type-arg]
    document = json.loads(json.dumps(TRUE.as_json()))
    change(document)
    path = tmp_path / "c.json"
    path.write_text(json.dumps(document))
    with pytest.raises(StartupError, match=rf"--calibration .*: {named}: "):
        read_calibration(str(path))


@pytest.fixture
def calibration(tmp_path: Path) -> str:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(replace(TRUE, errors={"ttft_p50": 0.07, "throughput": 0.02}).as_json()))
    return str(path)


def run(command: object, *arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, standalone_mode=False, catch_exceptions=True)  # type: ignore[arg-type]


LOAD = ("--rate", "6", "--duration-s", "15", "--input-len", "p50=300,p95=2000", "--output-len", "20-60")


def test_plan_writes_its_tables_json_and_page(calibration: str, tmp_path: Path) -> None:
    page, data = tmp_path / "plan.html", tmp_path / "plan.json"
    files = ("--html", str(page), "--json", str(data))
    limits = ("--slo", "ttft=0.3,tpot=0.02", "--calibration", calibration, "--price", "gpu=3")
    result = run(plan_command, *LOAD, "--duration-s", "4", *limits, *files)
    assert result.exception is None and result.return_value == 0, result
    document = json.loads(data.read_text())
    workers = document["workers"]
    assert document["feasible"] and document["outcome"]["met_share"] >= 0.9
    assert document["price_per_hour"] == 3 * (workers["prefill"] + workers["decode"])
    assert [point["factor"] for point in document["curve"]] == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0]
    assert all(point["met_share"] < 0.9 for point in document["one_fewer"])
    assert set(document["needed"]) == {"2", "5"} and document["errors"]["prefill"]["ttft_p50"] == 0.07
    assert "±7%" in result.output and "±?" in result.output and "Routing" in page.read_text()
    assert page.read_text().count("<svg") >= 3 and "http" not in page.read_text().split("Settings")[0]


def test_plan_compares_where_prompts_are_computed(calibration: str, tmp_path: Path) -> None:
    plans = {}
    for rate, lengths, tpot in (("1", "100-200", "0.05"), ("6", "3000-8000", "0.012")):
        data = tmp_path / "plan.json"
        load = ("--rate", rate, "--duration-s", "8", "--input-len", lengths, "--output-len", "20-60", "--no-headroom")
        limits = ("--slo", f"ttft=2,tpot={tpot}", "--calibration", calibration)
        result = run(plan_command, *load, *limits, "--json", str(data))
        assert result.return_value == 0, result
        shown = " ".join(result.output.split())
        assert all(f"({flags})" in shown for flags in FLAGS.values())
        plans[rate] = json.loads(data.read_text())
    light, heavy = plans["1"], plans["6"]
    assert light["workers"] == {"prefill": 0, "decode": 1} and light["split"] == "never"
    one_of_each = {"feasible": True, "workers": {"prefill": 1, "decode": 1}, "price_per_hour": 2.0}
    assert light["others"] == [{"split": split, **one_of_each} for split in ("always", "auto")]
    assert light["outcome"]["on_decode"] == light["outcome"]["requests"]
    assert heavy["workers"]["prefill"] > 0 and heavy["split"] != "never"
    for other in heavy["others"]:
        assert not other["feasible"] or other["price_per_hour"] >= heavy["price_per_hour"]


def test_prompts_that_go_where_they_cost_least_need_fewer_workers(calibration: str, tmp_path: Path) -> None:
    data = tmp_path / "plan.json"
    load = ("--rate", "12", "--duration-s", "15", "--input-len", "500-6000", "--output-len", "5-50", "--no-headroom")
    result = run(plan_command, *load, "--slo", "ttft=1,tpot=0.05", "--calibration", calibration, "--json", str(data))
    assert result.return_value == 0, result
    plan = json.loads(data.read_text())
    assert plan["split"] == "auto" and f"with {FLAGS['auto']}" in " ".join(result.output.split())
    assert all(other["price_per_hour"] > plan["price_per_hour"] for other in plan["others"])
    assert 0 < plan["outcome"]["on_decode"] < plan["outcome"]["requests"]


def test_an_infeasible_limit_is_named_with_the_nearest_one(calibration: str) -> None:
    result = run(plan_command, *LOAD, "--slo", "ttft=1ms,tpot=0.02", "--calibration", calibration)
    assert result.return_value == 1
    text = " ".join(result.output.split())
    assert "infeasible with any number of workers: ttft=0.001" in text and "nearest feasible: --slo ttft=0." in text


def test_simulate_prints_where_requests_waited(calibration: str, tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    result = run(simulate_command, *LOAD, "--calibration", calibration, "--decode", "2", "--json", str(out))
    assert result.return_value == 0 and "prefill_queue" in result.output
    assert json.loads(out.read_text())["requests"] > 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either --trace or --rate"),
        (("--rate", "1", "--trace", "azure-code"), "either --trace or --rate"),
        (("--trace", "no-such-file"), "--trace no-such-file"),
        (("--rate", "1e9"), "more than 5000000 requests"),
        (("--rate", "1", "--output-len", "0"), "must be at least 1"),
        (("--rate", "1", "--price", "other=1"), "no calibration 'other'"),
        (("--rate", "1", "--price", "gpu=0"), "must be above 0"),
        (("--rate", "1", "--price", "gpu=1e12"), "below 1e9"),
        (("--rate", "1", "--price", "gpu=1", "--price", "gpu=2"), "'gpu' has a price already"),
        (("--rate", "1", "--duration-s", "5", "--input-len", "50000"), "no request fits into 32768 tokens"),
    ],
)
def test_wrong_options_are_named(calibration: str, arguments: tuple[str, ...], message: str) -> None:
    result = run(plan_command, "--slo", "ttft=1", "--calibration", calibration, *arguments)
    assert isinstance(result.exception, StartupError) and message in result.exception.message


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (
            ("--input-len", "50000", "--duration-s", "5"),
            "these workers can serve no request of the load (9 exceeds_pool)",
        ),
        (("--scale", "0.001", "--duration-s", "1"), "the load has no requests"),
    ],
)
def test_a_simulation_in_which_nothing_is_served_is_an_error(
    calibration: str, tmp_path: Path, load: tuple[str, ...], message: str
) -> None:
    out = tmp_path / "o.json"
    result = run(simulate_command, "--rate", "1", *load, "--calibration", calibration, "--json", str(out))
    assert isinstance(result.exception, StartupError) and message in result.exception.message
    assert not out.exists()


def test_a_trace_whose_block_ids_are_hashes_is_replayed_as_one_that_counts_them(
    calibration: str, tmp_path: Path
) -> None:
    outcomes = []
    for ids in ((0, 1, 2), (2**64 - 1, -1, 10**30)):
        rows = [{"timestamp": 900 * i, "input_length": 1100, "output_length": 9} for i in range(6)]
        file, out = tmp_path / "t.jsonl", tmp_path / "o.json"
        file.write_text(
            "".join(json.dumps(r | {"hash_ids": [ids[0], ids[1 + i % 2]]}) + "\n" for i, r in enumerate(rows))
        )
        result = run(simulate_command, "--trace", str(file), "--calibration", calibration, "--json", str(out))
        assert result.exception is None and result.return_value == 0, result
        outcomes.append(json.loads(out.read_text()))
    assert outcomes[0] == outcomes[1] and outcomes[0]["requests"] == 6


def test_a_trace_of_which_only_the_beginning_was_read_is_named(
    calibration: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(f'{{"timestamp": {1000 * i}, "input_length": 9, "output_length": 2}}\n' for i in range(9)))
    monkeypatch.setattr(trace, "MOST_ROWS", 4)
    monkeypatch.setattr(bench_command, "MOST_ROWS", 4)
    result = run(simulate_command, "--trace", str(path), "--calibration", calibration)
    assert result.return_value == 0, result
    assert f"--trace {path}: only its first 4 rows were read, 3 s" in result.output
    monkeypatch.setattr(trace, "MOST_ROWS", 10)
    monkeypatch.setattr(bench_command, "MOST_ROWS", 10)
    assert "only its first" not in run(simulate_command, "--trace", str(path), "--calibration", calibration).output


def test_a_file_that_cannot_be_written_is_named_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "absent.txt").write_text("")
    for name in ("absent/plan.json", "absent.txt/plan.json"):
        result = run(plan_command, "--calibration", str(tmp_path / "absent"), "--json", str(tmp_path / name))
        assert isinstance(result.exception, click.UsageError)
        folder = str((tmp_path / name).parent)
        assert result.exception.message.endswith(f"{str(tmp_path / name)!r}: no file can be made in {folder!r}.")

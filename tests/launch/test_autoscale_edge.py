"""What the autoscaler reads from a coordinator, and what it answers KEDA."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from click.testing import CliRunner

from baton.core.errors import StartupError
from baton.runtime.streams import NO_PROXY
from baton.v1 import externalscaler_pb2, externalscaler_pb2_grpc
from launch.autoscale.command import autoscale_command
from launch.autoscale.flip import Flip
from launch.autoscale.keda import serve
from launch.autoscale.law import STARTS, Policy
from launch.autoscale.observe import TTFT, Autoscaler, above, mismatch, read_sample
from launch.up import autoscale_policy, plan_for
from launch.up_config import UpConfig
from sim.scale.planner import Size
from sim.stats import Slo
from tests.support.scale import CALIBRATION
from tests.support.topologies import free_ports

COORDINATOR = {
    "admitted": 100,
    "refused": 4,
    "admitted_tokens": 50_000,
    "admitted_tokens_squared": 30_000_000,
    "choices": 7,
    "queued_choices": 5,
    "queued_tokens": 2_500,
    "max_queued_tokens": 1 << 20,
    "backlog_tokens": 900,
    "waits_for": "decode",
    "expected_output_tokens": 64.5,
}
ROW = {
    "incarnation": 3,
    "state": "ready",
    "steps": 10,
    "step_s": 1.5,
    "prompt_tokens_computed": 4_000,
    "prompt_tokens_cached": 500,
    "tokens_generated": 900,
    "blocks_total": 100,
    "blocks_free": 60,
    "block_size": 16,
    "running": 4,
    "waiting": 2,
    "pids": [1],
}
PREFILL, DECODE = (ROW | {"id": f"{role}-0", "role": role} for role in ("prefill", "decode"))
DOCUMENT = {
    "workers": [
        PREFILL,
        DECODE,
        ROW | {"id": "decode-1", "role": "decode", "state": "draining"},
        ROW | {"id": "decode-2", "role": "decode", "state": "lost"},
    ],
    "control": "127.0.0.1:8101",
    "coordinator": COORDINATOR,
}
IDLE = DOCUMENT | {"workers": [], "coordinator": dict.fromkeys(COORDINATOR, 0) | {"waits_for": ""}}
METRICS = f"""# HELP {TTFT} time to the first token
# TYPE {TTFT} histogram
{TTFT}_bucket{{le="0.3"}} 40.0
{TTFT}_bucket{{le="0.6"}} 70.0
{TTFT}_bucket{{le="1.2"}} 90.0
{TTFT}_bucket{{le="+Inf"}} 100.0
{TTFT}_count 100.0
{TTFT}_sum 60.0
# TYPE other gauge
other{{le="0.3"}} 1.0
"""
EXPECT = "/expect_workers"
LOAD = ["--rate", "8", "--duration-s", "60", "--input-len", "2000", "--output-len", "20"]
POLICY = Policy(Slo(1.0, 0.05, 0.95), CALIBRATION, CALIBRATION, Size(0, 0), Size(8, 8))


def test_a_sample_has_what_workers_and_metrics_show() -> None:
    sample = read_sample(DOCUMENT, METRICS, Slo(0.9, 0.05), 12.0)
    assert (sample.at_s, sample.in_flight, sample.queued, sample.waits_for) == (12.0, 7, 5, "decode")
    assert (sample.admitted, sample.admitted_tokens, sample.queued_tokens) == (100, 50_000, 2_500)
    assert (sample.refused, sample.admitted_tokens_squared, sample.max_queued_tokens) == (4, 30_000_000, 1 << 20)
    assert (sample.first_tokens, sample.late) == (100.0, pytest.approx(20.0)) and sample.ended == 0.0
    prefill, decode = sample.workers  # those that drain or are lost take no new work
    assert (prefill.name, prefill.tokens, prefill.cached, prefill.key) == ("prefill-0", 4_000, 500, ("prefill-0", 3))
    assert (decode.tokens, decode.rows, decode.kv_tokens) == (900, 6, 640)


def test_values_above_a_limit() -> None:
    assert above(METRICS, TTFT, 0.6) == (100.0, 30.0)
    assert above(METRICS, TTFT, 0.15) == (100.0, pytest.approx(80.0))
    assert above(METRICS, TTFT, 50.0) == (100.0, 10.0)  # they may be anywhere above 1.2 s
    assert above(METRICS, TTFT, 0.0) == (100.0, 0.0) and above("", TTFT, 1.0) == (0.0, 0.0)


class _Coordinator(BaseHTTPRequestHandler):
    document: Any = DOCUMENT
    asked: list[str]
    post_status = 200

    def do_GET(self) -> None:
        metrics = self.path == "/metrics"
        self._answer(200, METRICS.encode() if metrics else json.dumps(self.document).encode())

    def do_POST(self) -> None:
        self._answer(self.post_status, b"{}")

    def _answer(self, status: int, body: bytes) -> None:
        self.asked.append(self.path)
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def coordinator() -> Any:
    class Handler(_Coordinator):
        pass

    Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    server.handler = Handler  # type: ignore[attr-defined]
    yield server
    server.shutdown()
    server.server_close()


def test_a_coordinator_that_does_not_reply_changes_nothing_and_is_logged_once(coordinator: Any) -> None:
    lines: list[str] = []
    autoscaler = Autoscaler(POLICY, f"http://127.0.0.1:{coordinator.server_port}", lines.append)
    size = autoscaler.look()
    assert size is not None and size.prefill >= 1 and size.decode >= 1 and len(lines) == 1
    coordinator.handler.document = {"workers": [], "coordinator": {}}
    assert autoscaler.look() == size and autoscaler.look() == size
    assert len(lines) == 2 and "unchanged: the coordinator does not report 'admitted'" in lines[1]
    assert Autoscaler(POLICY, "http://127.0.0.1:1", lines.append).look() is None


def test_only_what_starts_workers_reports_that_there_are_none_on_purpose(coordinator: Any) -> None:
    handler, lines = coordinator.handler, list[str]()
    handler.document = IDLE
    autoscaler = Autoscaler(POLICY, f"http://127.0.0.1:{coordinator.server_port}", lines.append)
    assert autoscaler.look() == Size(0, 0) and EXPECT not in handler.asked
    assert autoscaler.look(acts=True) == Size(0, 0) and handler.asked[-1] == EXPECT
    handler.post_status = 404
    assert autoscaler.look(acts=True) == autoscaler.look(acts=True) == Size(0, 0) and handler.asked.count(EXPECT) == 3
    assert len(lines) == 2 and "without workers it is not ready: " in lines[1] and "status 404" in lines[1]
    handler.document = DOCUMENT | {"workers": []}
    assert autoscaler.look(acts=True) == Size(1, 1) and handler.asked.count(EXPECT) == 3, "from here --hold-s counts"


def test_where_no_decode_worker_is_needed_those_that_run_are_not_kept(coordinator: Any) -> None:
    policy = replace(POLICY, limit=Size(8, 0))
    size = Autoscaler(policy, f"http://127.0.0.1:{coordinator.server_port}", lambda line: None).look()
    assert size is not None and size.prefill >= 1 and size.decode == 0


def _decode_only(*workers: object, missing_role: str = "", prefill_s: float = 0.0) -> dict[str, Any]:
    """What a coordinator shows whose decode workers compute the prompts."""
    own = COORDINATOR | {"missing_role": missing_role}
    return DOCUMENT | {"workers": workers, "coordinator": own, "totals": {"prefill": {"worker_s": prefill_s}}}


def test_a_cluster_whose_decode_workers_compute_the_prompts_keeps_no_prefill_worker(coordinator: Any) -> None:
    policy, lines = replace(POLICY, least=Size(1, 1)), list[str]()
    autoscaler = Autoscaler(policy, f"http://127.0.0.1:{coordinator.server_port}", lines.append)
    coordinator.handler.document = _decode_only(DECODE)
    size = autoscaler.look()
    assert size is not None and size.prefill == 0 and size.decode >= 1
    assert "0 prefill + 1 decode: prefill has nothing to do; decode 11.0 sequences" in lines[0]
    coordinator.handler.document = _decode_only()  # its workers were started again
    size = autoscaler.look()
    assert size is not None and size.prefill == 0 and size.decode >= 1
    coordinator.handler.document = _decode_only(DECODE, PREFILL)
    size = autoscaler.look()
    assert size is not None and size.prefill >= 1, "an operator added one"


@pytest.mark.parametrize(
    "shown",
    [_decode_only(DECODE, missing_role="prefill"), _decode_only(DECODE, prefill_s=7.0)],
    ids=["--split always", "they were lost"],
)
def test_prefill_workers_that_are_missing_are_asked_for(coordinator: Any, shown: dict[str, Any]) -> None:
    coordinator.handler.document = shown
    size = Autoscaler(POLICY, f"http://127.0.0.1:{coordinator.server_port}", lambda line: None).look()
    assert size is not None and size.prefill >= 1


def test_prefill_workers_that_join_after_decode_workers_stay_asked_for(
    coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a cluster that starts from zero with --split auto, however late they join."""
    clock = count(0.0, STARTS * POLICY.start_s("prefill") + 1.0)
    monkeypatch.setattr("launch.autoscale.observe.time", SimpleNamespace(monotonic=lambda: next(clock)))
    autoscaler = Autoscaler(POLICY, f"http://127.0.0.1:{coordinator.server_port}", lambda line: None)
    for workers in ((), (DECODE,), (DECODE,)):
        coordinator.handler.document = _decode_only(*workers)
        size = autoscaler.look()
        assert size is not None and size.prefill >= 1


def test_a_calibration_of_other_workers_is_named_once(coordinator: Any) -> None:
    about = {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
    kind, lines = replace(CALIBRATION, about=about), list[str]()
    rows = [row | {"tensor_parallel": 1, "dtype": "bfloat16"} for row in DOCUMENT["workers"]]  # type: ignore[attr-defined]
    assert mismatch(rows, kind) == ""
    rows[1] |= {"dtype": "float32"}
    coordinator.handler.document = DOCUMENT | {"workers": rows}
    autoscaler = Autoscaler(replace(POLICY, decode=kind), f"http://127.0.0.1:{coordinator.server_port}", lines.append)
    assert autoscaler.look() == autoscaler.look() is not None
    named = "sizes may be wrong: dtype of decode-0 is float32, that of the calibrated ones bfloat16"
    assert [line for line in lines if "calibration" in line] == [f"the calibration is of other workers, {named}"]


@pytest.fixture
async def keda(coordinator: Any) -> AsyncIterator[tuple[Any, Any]]:
    coordinator.handler.document = IDLE
    ports: asyncio.Queue[int] = asyncio.Queue()
    autoscaler = Autoscaler(POLICY, f"http://127.0.0.1:{coordinator.server_port}", lambda line: None)
    task = asyncio.create_task(serve(autoscaler, "127.0.0.1", 0, 0.02, ports.put_nowait))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await ports.get()}", options=[NO_PROXY]) as channel:
        yield externalscaler_pb2_grpc.ExternalScalerStub(channel), coordinator.handler
    task.cancel()
    await asyncio.wait({task})


def _reference(role: str) -> Any:
    return externalscaler_pb2.ScaledObjectRef(name="pool", namespace="n", scalerMetadata={"role": role})


async def test_keda_receives_both_roles_when_the_first_request_arrives(keda: tuple[Any, Any]) -> None:
    scaler, coordinator = keda
    streams = [scaler.StreamIsActive(_reference(role)) for role in ("prefill", "decode")]
    assert [(await asyncio.wait_for(stream.read(), 30)).result for stream in streams] == [False, False]
    coordinator.document = DOCUMENT | {"workers": [], "coordinator": COORDINATOR | {"waits_for": ""}}
    assert [(await asyncio.wait_for(stream.read(), 30)).result for stream in streams] == [True, True]
    for role in ("prefill", "decode"):
        assert (await scaler.IsActive(_reference(role))).result
        (spec,) = (await scaler.GetMetricSpec(_reference(role))).metricSpecs
        request = externalscaler_pb2.GetMetricsRequest(scaledObjectRef=_reference(role), metricName=spec.metricName)
        (value,) = (await scaler.GetMetrics(request)).metricValues
        assert (spec.targetSizeFloat, value.metricName) == (1.0, f"baton-{role}-workers")
        assert value.metricValueFloat == value.metricValue == 1


async def test_zero_is_on_purpose_only_while_keda_is_there(keda: tuple[Any, Any]) -> None:
    scaler, coordinator = keda

    async def looked(*, expects: bool) -> None:
        """Waits for four looks of which each, or none, was followed by a report."""
        async with asyncio.timeout(30):
            while (last := coordinator.asked[-12:]).count("/workers") < 4 or last.count(EXPECT) != 4 * expects:
                await asyncio.sleep(0.02)

    await looked(expects=False)
    stream = scaler.StreamIsActive(_reference("prefill"))
    assert (await asyncio.wait_for(stream.read(), 30)).result is False
    await looked(expects=True)
    stream.cancel()
    await looked(expects=False)


async def test_what_keda_asks_wrongly_is_refused_by_name(keda: tuple[Any, Any]) -> None:
    scaler, _ = keda
    with pytest.raises(grpc.aio.AioRpcError, match=r"scalerMetadata.role: 'both' is not prefill or decode"):
        await scaler.IsActive(_reference("both"))
    request = externalscaler_pb2.GetMetricsRequest(scaledObjectRef=_reference("decode"), metricName="s0-x")
    with pytest.raises(grpc.aio.AioRpcError, match=r"metricName: 's0-x' is not 'baton-decode-workers'"):
        await scaler.GetMetrics(request)


def test_the_contract_is_kedas() -> None:
    """Its names and numbers, from KEDA's externalscaler.proto."""
    service = externalscaler_pb2.DESCRIPTOR.services_by_name["ExternalScaler"]
    assert service.full_name == "externalscaler.ExternalScaler"
    assert [m.name for m in service.methods] == ["IsActive", "StreamIsActive", "GetMetricSpec", "GetMetrics"]
    numbers = {
        name: {field.name: field.number for field in message.fields}
        for name, message in externalscaler_pb2.DESCRIPTOR.message_types_by_name.items()
    }
    assert numbers == {
        "ScaledObjectRef": {"name": 1, "namespace": 2, "scalerMetadata": 3},
        "IsActiveResponse": {"result": 1},
        "GetMetricSpecResponse": {"metricSpecs": 1},
        "MetricSpec": {"metricName": 1, "targetSize": 2, "targetSizeFloat": 3},
        "GetMetricsRequest": {"scaledObjectRef": 1, "metricName": 2},
        "GetMetricsResponse": {"metricValues": 1},
        "MetricValue": {"metricName": 1, "metricValue": 2, "metricValueFloat": 3},
    }


def _calibration(tmp_path: Path, start_s: float = 20.0) -> str:
    worker = replace(CALIBRATION.decode_worker, start_s=start_s)
    file = tmp_path / "c.json"
    file.write_text(json.dumps(replace(CALIBRATION, decode_worker=worker).as_json()))
    return str(file)


def test_a_dry_run_prints_each_decision_with_its_numbers(tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    words = ["--dry-run", "--calibration", _calibration(tmp_path), "--json", str(written), "--slo", "ttft=1", *LOAD]
    done = CliRunner().invoke(autoscale_command, words, catch_exceptions=False, standalone_mode=False)
    assert "of 2000 uncached tokens" in done.output and "worker-hours" in done.output
    assert json.loads(written.read_text())["changes"][0]["decision"]["size"]["prefill"] >= 2


def test_a_dry_run_decides_as_often_as_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def run(*_: object, every_s: float = 0.0) -> None:
        asked.append(every_s)
        raise StartupError("enough")

    monkeypatch.setattr("launch.autoscale.simulate.dry_run", run)
    words = ["--dry-run", "--calibration", _calibration(tmp_path), "--slo", "ttft=1", *LOAD]
    for more in ([], ["--every-s", "30"]):
        with pytest.raises(StartupError, match="enough"):
            CliRunner().invoke(autoscale_command, [*words, *more], catch_exceptions=False, standalone_mode=False)
    assert asked == [1.0, 30.0]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--slo", "ttft=1", "--rate", "1"], "--trace and --rate need --dry-run"),
        (["--rate", "1", "--dry-run"], "--slo is required"),
        (["--slo", "ttft=1", "--listen", "x"], "--listen"),
        (["--slo", "ttft=1", "--max-prefill", "0"], "--max-prefill 0: prompts that decode workers compute are not"),
        (["--slo", "ttft=1", "--min", "3", "--max-prefill", "2"], "--min 3 is above --max-prefill 2"),
        (["--slo", "ttft=1", "--min", "3", "--max-decode", "2"], "--min 3 is above --max-decode 2"),
        (["--slo", "ttft=1", "--dry-run"], "give either --trace or --rate"),
        (["--slo", "ttft=1", "--dry-run", "--max-decode", "0", *LOAD], "--max-decode 0: the load generates tokens"),
        (
            ["--slo", "ttft=1", "--flip", "--cluster-token-file", "/nowhere"],
            "--cluster-token-file /nowhere: No such file",
        ),
        (["--slo", "ttft=1", "--flip", "--coordinator", "x"], "--coordinator must be HOST:PORT"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, words: list[str], reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        CliRunner().invoke(
            autoscale_command,
            ["--calibration", _calibration(tmp_path), *words],
            catch_exceptions=False,
            standalone_mode=False,
        )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("more", [[], ["--flip"]])
def test_sigterm_ends_the_command_also_as_process_1(coordinator: Any, tmp_path: Path, more: list[str]) -> None:
    """A signal without a handler does not end the first process of a container; here that it is handled shows in the
    exit code."""
    url = f"http://127.0.0.1:{coordinator.server_port}"
    listen = ["--listen", f"127.0.0.1:{free_ports(1)[0]}"]
    words = ["autoscale", url, "--calibration", _calibration(tmp_path), "--slo", "ttft=1", *listen, *more]
    command = [sys.executable, "-m", "launch.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "autoscale" in process.stdout.readline()
        process.terminate()
        assert process.wait(30) == 0


def test_a_flip_that_is_refused_again_and_again_is_named_once(
    coordinator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, reasons = count(), iter(["token: it is missing"] * 3 + ["it is leaving"] * 2)

    def refuse(*_: object) -> int:
        raise StartupError(f"flip refused: {next(reasons)}")

    def sleep(seconds: float) -> None:
        if next(looks) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("launch.drain.drain", refuse)
    monkeypatch.setattr("launch.autoscale.flip.next_flip", lambda *_: Flip("decode-0", "prefill"))
    monkeypatch.setattr("launch.autoscale.command.time.sleep", sleep)
    monkeypatch.setattr("launch.autoscale.command.signal.signal", lambda *_: None)
    url = f"http://127.0.0.1:{coordinator.server_port}"
    words = [url, "--calibration", _calibration(tmp_path), "--slo", "ttft=1", "--flip"]
    lines = CliRunner().invoke(autoscale_command, words, standalone_mode=False, catch_exceptions=False).output
    named = "decode-0 did not become a prefill worker: flip refused: "
    assert lines.count(named + "token: it is missing") == lines.count(named + "it is leaving") == 1
    assert lines.count(" decode busy") == 1


def test_up_scales_between_the_least_and_what_the_cluster_names(tmp_path: Path) -> None:
    config = UpConfig(model="builtin", prefill=3, decode=4, autoscale=_calibration(tmp_path), autoscale_min=2)
    policy = autoscale_policy(config, plan := plan_for(config), frozenset({"local"}))
    assert policy is not None and (policy.least, policy.limit) == (Size(2, 2), Size(3, 4))
    assert policy.slo == Slo(1.0, 0.05, 0.95)
    assert autoscale_policy(UpConfig(model="builtin"), plan, frozenset({"local"})) is None


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"autoscale_min": 0}, r"--autoscale-min 0: requests wait 30 s \(--hold-s\), a worker starts in 85 s"),
        ({"autoscale_slo": "ttft=x"}, "--autoscale-slo ttft=x"),
        ({"prefill": 0}, "--autoscale needs prefill workers"),
        ({"prefill": 2, "decode": 3, "autoscale_min": 3}, "--autoscale-min 3 is above --prefill 2"),
        ({"prefill": 3, "decode": 2, "autoscale_min": 3}, "--autoscale-min 3 is above --decode 2"),
        ({"autoscale": "", "autoscale_slo": "ttft=x"}, "--autoscale-slo has no effect without --autoscale"),
        ({"autoscale": "/nowhere.json"}, r"--autoscale /nowhere.json: No such file"),
    ],
)
def test_an_autoscaler_that_cannot_work_is_refused_before_the_start(
    tmp_path: Path, more: dict[str, Any], reason: str
) -> None:
    given = {"model": "builtin", "autoscale": _calibration(tmp_path, 85.0), **more}
    config = UpConfig(**given)
    with pytest.raises(StartupError, match=reason):
        autoscale_policy(config, plan_for(config), frozenset({"local"}))

"""The metrics of a scrape, from requests observed delta by delta and from a `/workers` document."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.core.errors import Cancelled, QuotaExceeded, WorkerLost
from baton.core.events import SpeculationCounters
from coordinator import metrics as coordinator_metrics
from coordinator.metrics import Metrics
from coordinator.metrics_cluster import WORKER_COUNTERS, WORKER_GAUGES
from coordinator.metrics_vllm import DERIVED, NAMES, REASONS
from coordinator.policy.pool import TOTALS
from coordinator.policy.quotas import Client
from coordinator.submission import Delta, Submission, Timeline, Usage
from tests.support.fake_generator import FakeGenerator
from tests.support.vllm_queries import QUERIES

ROW: dict[str, Any] = dict.fromkeys((*WORKER_GAUGES, *WORKER_COUNTERS), 0) | {"block_size": 16}
GPU = {"memory_used_bytes": 3 << 30, "memory_total_bytes": 80 << 30, "utilisation": 0.5}
CLUSTER: dict[str, Any] = {
    "workers": [
        ROW | {"id": "prefill-0", "role": "prefill", "state": "ready", "prompt_tokens_computed": 700, "gpu": GPU},
        ROW | {"id": "decode-0", "role": "decode", "state": "lost", "blocks_total": 40, "blocks_free": 30},
    ],
    "joins_refused": {"dtype": 2},
    "flips": {"decode": 3},
    "batches": {
        "lines": {"running": 2, "retries": 5, "answered": {"200": 30, "400": 1}},
        "unfinished": {"in_progress": 1, "validating": 2},
        "stored_bytes": 5000,
        "max_bytes": 9000,
    },
    "tenants": {"acme": {"running": 3, "queued": 2}, "other": {"running": 1, "queued": 0}},
    "coordinator": {
        "requests": 7,
        "queued": 3,
        "choices": 16,
        "queued_choices": 5,
        "held_choices": 2,
        "oldest_queued_s": 1.5,
        "admitted": 40,
        "admitted_tokens": 9000,
        "queued_tokens": 600,
        "backlog_tokens": 300,
        "expected_output_tokens": 75.5,
        "rescheduled": 2,
        "retry_budget": 9.5,
        "retries_refused": 1,
        "reassigned": 1,
        "loop_stalls": 4,
        "loop_longest_stall_ms": 250.0,
        "ready": True,
        "missing_role": "decode",
        "expects_workers": True,
        "prefilled_tokens": 900,
        "wasted_tokens": {"cancelled": 60, "failed": 0, "rescheduled": 40},
        "adapters": {"max": 4, "running": ["a", "b"], "waiting": ["c"]},
    },
    "totals": {
        "prefill": dict.fromkeys(TOTALS, 5) | {"prompt_tokens_computed": 700, "worker_s": 12.5},
        "decode": dict.fromkeys(TOTALS, 7) | {"worker_s": 12.5},
    },
}
ENDED = Timeline(queue_s=0.02, prefill_s=0.1, decode_s=0.5, prefill_worker="prefill-0", decode_worker="decode-0")


TIMES = "queue", "prefill", "decode", "inference"
SUCCESS = "vllm:request_success_total"
SCRAPED = {"job", "instance", "namespace", "pod"}  # labels that the scrape adds


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(coordinator_metrics, "time", made)
    return made


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.text(CLUSTER).decode())
    found = [(s.name, tuple(sorted(s.labels.items())), s.value) for family in families for s in family.samples]
    assert len({(name, labels) for name, labels, _ in found}) == len(found)  # no sample is repeated
    return {(name, labels): value for name, labels, value in found}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, tuple(sorted(labels.items()))]


def play(metrics: Metrics, clock: Clock, end: BaseException | None = None, choices: int = 1) -> None:
    """A prompt of 10 tokens (4 cached); for each choice a token after 0.2 s and two more after 0.01 s each."""
    observed = metrics.request(Submission("r1", tuple(range(10)), 64, n=choices))
    clock.now += 0.2
    for step in range(3):
        for choice in range(choices):
            last = step == 2 and end is None
            usage = Usage(10, 3, 4, SpeculationCounters(1, 8, 5)) if last else None
            timeline, reason = (ENDED, "length") if last else (None, None)
            observed.delta(Delta("x", (step,), reason, usage=usage, timeline=timeline, choice=choice))  # type: ignore[arg-type]
        clock.now += 0.01
    clock.now += 0.5
    observed.end(end)


def test_a_request_is_counted(clock: Clock) -> None:
    metrics = Metrics()
    play(metrics, clock)
    assert value(metrics, "baton_requests_finished_total", finish_reason="length") == 1
    assert value(metrics, "baton_prompt_tokens_total") == 10
    assert value(metrics, "baton_prompt_tokens_cached_total") == 4
    assert value(metrics, "baton_generated_tokens_total") == 3
    assert value(metrics, "baton_draft_tokens_total") == 8 and value(metrics, "baton_draft_tokens_accepted_total") == 5
    assert value(metrics, "baton_time_to_first_token_seconds_sum") == pytest.approx(0.2)
    assert value(metrics, "baton_inter_token_latency_seconds_count") == 2
    assert value(metrics, "baton_inter_token_latency_seconds_sum") == pytest.approx(0.02)
    assert value(metrics, "baton_time_per_output_token_seconds_sum") == pytest.approx(0.01)
    assert value(metrics, "baton_request_seconds_sum") == pytest.approx(0.73)
    assert value(metrics, "baton_stage_seconds_sum", stage="prefill") == pytest.approx(0.1)
    assert value(metrics, "baton_inter_token_latency_seconds_bucket", le="0.008") == 0


def test_cached_tokens_count_with_the_first_token_and_only_as_the_first_choice_has_them(clock: Clock) -> None:
    """The other choices reuse the KV that the first one computed, and the client may leave in the middle."""
    metrics = Metrics()
    observed = metrics.request(Submission("r1", tuple(range(10)), 64, n=2))
    observed.delta(Delta("x", (1,), cached_tokens=4))
    assert value(metrics, "baton_prompt_tokens_total") == 10 and value(metrics, "baton_prompt_tokens_cached_total") == 4
    assert observed.tokens_used == 10 - 4 + 1
    observed.delta(Delta("x", (1,), "length", usage=Usage(10, 1, 9), choice=1, cached_tokens=9))
    observed.end(GeneratorExit())
    assert observed.tokens_used == 10 - 4 + 2
    observed.delta(Delta("x", (2,), "length", usage=Usage(10, 2, 4)))
    assert value(metrics, "baton_prompt_tokens_cached_total") == 4


def test_token_gaps_of_choices_are_counted_separately_and_their_request_once(clock: Clock) -> None:
    metrics = Metrics()
    play(metrics, clock, choices=3)
    assert value(metrics, "baton_requests_finished_total", finish_reason="length") == 1
    assert value(metrics, "baton_requests_finished_total", finish_reason="stop") == 0
    assert value(metrics, "baton_generated_tokens_total") == 9
    assert value(metrics, "baton_prompt_tokens_total") == 10 and value(metrics, "baton_prompt_tokens_cached_total") == 4
    assert value(metrics, "baton_inter_token_latency_seconds_count") == 6
    assert value(metrics, "baton_time_per_output_token_seconds_sum") == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("end", "code"),
    [(WorkerLost("x"), "worker_lost"), (GeneratorExit(), "cancelled"), (RuntimeError("x"), "internal_error")],
)
def test_a_failure_is_counted_by_its_code(end: BaseException, code: str, clock: Clock) -> None:
    metrics = Metrics()
    play(metrics, clock, end)
    assert value(metrics, "baton_requests_failed_total", code=code) == 1
    assert {n for (name, _), n in samples(metrics).items() if name == "baton_requests_finished_total"} == {0}
    assert value(metrics, "baton_request_seconds_count") == 0  # failures are fast, and would lower the measured time


def test_closing_after_the_last_delta_does_not_count_as_cancelled(clock: Clock) -> None:
    metrics = Metrics()
    observed = metrics.request(Submission("r1", (1,), 4))
    observed.delta(Delta("x", (1,), "stop", usage=Usage(1, 1)))
    observed.end(GeneratorExit())
    assert value(metrics, "baton_requests_finished_total", finish_reason="stop") == 1


def test_cluster_metrics_match_the_workers_report() -> None:
    metrics = Metrics()
    assert value(metrics, "baton_requests_running") == 4 and value(metrics, "baton_requests_queued") == 3
    assert value(metrics, "baton_choices_running") == 11 and value(metrics, "baton_choices_queued") == 5
    assert value(metrics, "baton_oldest_queued_seconds") == 1.5
    assert value(metrics, "baton_role_missing", role="decode") == 1
    assert value(metrics, "baton_role_missing", role="prefill") == 0
    assert value(metrics, "baton_workers_expected") == 1
    assert value(metrics, "baton_choices_admitted_total") == 40
    assert value(metrics, "baton_prompt_tokens_admitted_total") == 9000
    assert value(metrics, "baton_prompt_tokens_queued") == 600 and value(metrics, "baton_prompt_tokens_backlog") == 300
    assert value(metrics, "baton_expected_output_tokens") == 75.5
    assert value(metrics, "baton_loop_stalls_total") == 4
    assert value(metrics, "baton_loop_longest_stall_seconds") == 0.25
    assert value(metrics, "baton_kv_usage") == 0  # a lost worker's last load does not count
    CLUSTER["workers"][1]["state"] = "ready"
    try:
        assert value(metrics, "baton_kv_usage") == pytest.approx(0.25)
    finally:
        CLUSTER["workers"][1]["state"] = "lost"
    assert value(metrics, "baton_joins_refused_total", field="dtype") == 2
    assert value(metrics, "baton_worker_flips_total", role="decode") == 3
    assert value(metrics, "baton_worker_up", worker="decode-0", role="decode", state="lost") == 0
    assert value(metrics, "baton_worker_blocks_free", worker="decode-0", role="decode") == 30
    assert value(metrics, "baton_worker_prompt_tokens_computed_total", worker="prefill-0", role="prefill") == 700
    assert value(metrics, "baton_worker_gpu_memory_used_bytes", worker="prefill-0", role="prefill") == 3 << 30
    assert value(metrics, "baton_worker_gpu_utilisation", worker="prefill-0", role="prefill") == 0.5
    gpus = [labels for name, labels in samples(metrics) if name == "baton_worker_gpu_memory_total_bytes"]
    assert gpus == [(("role", "prefill"), ("worker", "prefill-0"))]  # a worker on CPU has none


def test_vllm_metric_names(clock: Clock) -> None:
    assert not [name for name, _ in samples(Metrics()) if name.startswith("vllm:")]
    metrics = Metrics("m", "vllm")
    play(metrics, clock, choices=2)
    metrics.responses.labels("404").inc()
    metrics.responses.labels("400").inc()
    exported = {metric.name for metric in metrics.everything(CLUSTER).collect()}
    assert {name for names in (*NAMES.values(), DERIVED) for name in names} <= exported
    of = {"model_name": "m", "engine": "0"}
    assert value(metrics, "vllm:num_requests_waiting", **of) == 5
    assert value(metrics, "vllm:num_requests_waiting_by_reason", **of, reason="capacity") == 3
    assert value(metrics, "vllm:num_requests_waiting_by_reason", **of, reason="deferred") == 2
    assert value(metrics, "vllm:request_success_total", **of, finished_reason="length") == 2
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", **of, le="0.3") == 1
    assert value(metrics, "vllm:prompt_tokens_by_source_total", **of, source="local_compute") == 700 + 7
    assert value(metrics, "vllm:iteration_tokens_total_count", **of) == 5 + 7
    assert value(metrics, "vllm:iteration_tokens_total_sum", **of) == 700 + 5 + 7 + 7
    assert value(metrics, "vllm:num_preemptions_total", **of) == 7
    assert value(metrics, "vllm:engine_sleep_state", **of, sleep_state="awake") == 1
    loras = {"max_lora": "4", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert value(metrics, "vllm:lora_requests_info", **of, **loras) == pytest.approx(time.time(), abs=60)
    assert value(metrics, "http_requests_total", status="4xx") == 2
    # The request: 0.02 s in the queue, a token of each choice at 0.2 s, the last ones at 0.22 s.
    sums = {name: value(metrics, f"vllm:request_{name}_time_seconds_sum", **of) for name in TIMES}
    assert sums == pytest.approx({"queue": 0.02, "prefill": 0.18, "decode": 0.02, "inference": 0.2})
    assert value(metrics, "vllm:request_params_n_sum", **of) == 2
    assert value(metrics, "vllm:request_params_max_tokens_sum", **of) == 64
    assert value(metrics, "vllm:request_prefill_kv_computed_tokens_sum", **of) == 6
    assert value(metrics, "vllm:request_max_num_generation_tokens_sum", **of) == 3
    assert value(metrics, "vllm:request_generation_tokens_sum", **of) == 6


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (GeneratorExit(), "abort"),
        (Cancelled("the client left"), "abort"),
        (WorkerLost("x"), "error"),
        (RuntimeError("x"), "error"),
        (QuotaExceeded("x"), None),
    ],
)
def test_vllms_reasons_of_failed_requests(end: BaseException, reason: str | None, clock: Clock) -> None:
    metrics = Metrics("m", "vllm")
    play(metrics, clock, end)
    counts = {dict(labels)["finished_reason"]: n for (name, labels), n in samples(metrics).items() if name == SUCCESS}
    assert counts == dict.fromkeys(REASONS, 0) | ({reason: 1} if reason else {})


@pytest.mark.parametrize("user", QUERIES)
def test_what_users_of_vllms_metrics_query_is_exported(user: str, clock: Clock) -> None:
    metrics = Metrics("m", "vllm")
    play(metrics, clock)
    metrics.responses.labels("200").inc()
    CLUSTER["workers"][1]["state"] = "ready"
    try:
        exported = samples(metrics)
    finally:
        CLUSTER["workers"][1]["state"] = "lost"
    names = {name for name, _ in exported}
    labels = {label for _, own in exported for label, _ in own} | SCRAPED
    for query in QUERIES[user]:
        asked = set(re.findall(r"\b(?:vllm|http|process)[:_]\w+", query))
        assert asked and asked <= names, asked - names
        of = set(re.findall(r"(\w+)=", query))
        of |= {label for by in re.findall(r"by \((.*?)\)", query) for label in by.split(", ")}
        assert of <= labels, of - labels


def test_a_lost_decode_workers_blocks_are_not_in_the_cache_config(clock: Clock) -> None:
    metrics, of = Metrics("m", "vllm"), {"model_name": "m", "engine": "0", "block_size": "16"}
    assert not [name for name, _ in samples(metrics) if name == "vllm:cache_config_info"]
    CLUSTER["workers"][1]["state"] = "ready"
    try:
        assert value(metrics, "vllm:cache_config_info", **of, num_gpu_blocks="40") == 1
    finally:
        CLUSTER["workers"][1]["state"] = "lost"


def test_requests_are_counted_by_both_latencies(clock: Clock) -> None:
    metrics = Metrics()
    play(metrics, clock)
    play(metrics, clock, choices=3)
    play(metrics, clock, WorkerLost("x"))
    cells = {labels: n for (name, labels), n in samples(metrics).items() if name == "baton_requests_latency_total"}
    assert sum(cells.values()) == 2
    bounds = [dict(labels) for labels in cells]  # the clock's sums are a bit more than 0.2 and 0.01
    assert all(b["ttft_le"] in ("0.2", "0.3") and b["tpot_le"] in ("0.01", "0.02") for b in bounds), bounds


def test_a_pooled_request_is_counted_by_its_latency(clock: Clock) -> None:
    """`baton report --slo` divides by all requests."""
    metrics = Metrics()
    observed = metrics.request(Submission("r1", (1, 2), 1, pooling="last"))
    clock.now += 0.15
    observed.delta(Delta("", finish_reason="stop", usage=Usage(2, 0), timeline=ENDED, pooled=b"abcd"))
    observed.end(None)
    assert value(metrics, "baton_requests_latency_total", ttft_le="0.2", tpot_le="0.01") == 1


def test_each_request_is_logged_in_one_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.requests")
    play(Metrics(slow_s=1.0), clock)
    play(Metrics(slow_s=0.5), clock, WorkerLost("x"))
    fast, slow = caplog.records
    assert fast.levelno == logging.INFO and slow.levelno == logging.WARNING
    assert fast.getMessage() == (
        "r1 finished: length; 10 prompt tokens (4 cached), 3 generated; prefill-0 to decode-0; queue 20 ms, prefill"
        " 100 ms, reserve 0 ms, transfer 0 ms, decode_queue 0 ms, decode 500 ms; first token after 200 ms; total 730 ms"
    )
    assert slow.getMessage().startswith("slow: r1 failed: worker_lost; 10 prompt tokens (0 cached), 3 generated; first")


def test_requests_refused_before_the_first_token_are_not_logged(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.requests")
    Metrics().request(Submission("r1", (1,), 4)).end(WorkerLost("x"))
    assert not caplog.records


async def test_metrics_are_served_and_responses_are_counted_by_status(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    answer = await client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    await client.post("/v1/completions", json={"prompt": 1.5})
    await client.get("/nowhere")
    assert generator.statuses == [200, 400, 404]


def test_only_counters_end_in_total() -> None:
    for metric in Metrics().everything(CLUSTER).collect():
        assert metric.type == "counter" or not metric.name.endswith("_total"), metric.name


def test_tenants_have_metrics_and_those_that_are_not_configured_share_a_label() -> None:
    made = Metrics(tenants=["acme"])
    for tenant, prompt, tokens in (("acme", (1, 2, 3), (7, 8)), ("", (1,), (9,)), ("stranger", (1,), (9,))):
        submission = Submission("r", prompt, 4, client=Client(tenant, tenant))
        observed = made.request(submission)
        observed.delta(Delta("a", tokens, "stop", usage=Usage(len(prompt), len(tokens))))
        observed.end(None)
    refused = made.request(Submission("r", (1, 2), 4, client=Client("acme", "acme")))
    refused.end(QuotaExceeded("no"))
    made.failure(QuotaExceeded("no"), "acme")
    made.failure(WorkerLost("killed"), "acme", started=True)  # no refusal: it had started
    made.failure(Cancelled("left"), "acme")
    samples = {
        (sample.name, sample.labels["tenant"]): sample.value
        for family in text_string_to_metric_families(made.text(CLUSTER).decode())
        for sample in family.samples
        if sample.name.startswith("baton_tenant_")
    }
    assert samples == {
        ("baton_tenant_prompt_tokens_total", "acme"): 3,
        ("baton_tenant_prompt_tokens_total", "other"): 2,
        ("baton_tenant_generated_tokens_total", "acme"): 2,
        ("baton_tenant_generated_tokens_total", "other"): 2,
        ("baton_tenant_requests_refused_total", "acme"): 2,
        ("baton_tenant_requests_refused_total", "other"): 0,
        ("baton_tenant_choices_running", "acme"): 3,
        ("baton_tenant_choices_running", "other"): 1,
        ("baton_tenant_choices_queued", "acme"): 2,
        ("baton_tenant_choices_queued", "other"): 0,
    }

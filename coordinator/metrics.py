"""The coordinator's metrics, for `GET /metrics` in Prometheus' text format, and one log line for each request.

Requests are observed in `Pipeline.generate`, which both fronts call; the state of workers and queue is read at each
scrape. With `compat="vllm"` the metrics that have a counterpart in vLLM are exported under its names too, for
dashboards and gateways made for it. Names, types and meanings: docs/operations.md.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.core.codes import ErrorCode
from baton.core.errors import BatonError
from baton.runtime.ignored_fields import as_header
from coordinator.policy.pool import LOAD_COLUMNS
from coordinator.policy.timeline import Timeline
from coordinator.submission import Delta, Submission, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
GAP_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
MAX_LOGGED_FIELDS = 256
WHOLE_S = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
STAGES = ("queue", "prefill", "reserve", "transfer", "decode_queue", "decode")

VLLM: dict[str, tuple[str, ...]] = {
    "baton_choices_running": ("vllm:num_requests_running",),
    "baton_choices_queued": ("vllm:num_requests_waiting",),
    "baton_kv_usage": ("vllm:kv_cache_usage_perc",),
    "baton_prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries"),
    "baton_generated_tokens": ("vllm:generation_tokens",),
    "baton_requests_finished": ("vllm:request_success",),
    "baton_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "baton_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds",),
    "baton_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "baton_request_seconds": ("vllm:e2e_request_latency_seconds",),
    "baton_prompt_tokens_cached": ("vllm:prefix_cache_hits",),
    "baton_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "baton_draft_tokens_accepted": ("vllm:spec_decode_num_accepted_tokens",),
    "baton_worker_preemptions": ("vllm:num_preemptions",),
}
"""Maps our names to vLLM's; the label `finish_reason` is its `finished_reason`."""

WORKER_GAUGES = ("running", "waiting", "sequences", "blocks_total", "blocks_free")
WORKER_COUNTERS = tuple(name for name in LOAD_COLUMNS if name not in WORKER_GAUGES)
GPU_GAUGES = {
    "memory_used_bytes": "memory in use on the GPUs of a worker's first node, by any process",
    "memory_total_bytes": "total memory of the GPUs of a worker's first node",
    "utilisation": "mean share of time, 0 to 1, in which a kernel ran on these GPUs",
}
_METRIC_NAMES = {"step_s": "step_seconds", "blocks_total": "blocks"}
"""Metric names spell out their unit; `_total` is the suffix of counters."""

log = logging.getLogger("baton.requests")
disable_created_metrics()  # type: ignore[no-untyped-call]  # half of the samples would be creation times


class Metrics:
    """Requests longer than `slow_s` are logged as warnings; 0 disables this."""

    def __init__(self, model: str = "", compat: str = "none", slow_s: float = 0.0) -> None:
        self._registry = CollectorRegistry()
        self._model, self._compat, self._slow_s = model, compat, slow_s
        new: dict[str, Any] = {"registry": self._registry}
        self.finished = Counter("baton_requests_finished", "choices that ended without error", ["finish_reason"], **new)
        self.failed = Counter("baton_requests_failed", "requests that ended with an error", ["code"], **new)
        self.prompt_tokens = Counter("baton_prompt_tokens", "prompt tokens of requests that produced a token", **new)
        self.cached_tokens = Counter("baton_prompt_tokens_cached", "prompt tokens found in a prefix cache", **new)
        self.tokens = PerToken()
        self._registry.register(self.tokens)
        self.drafted = Counter("baton_draft_tokens", "draft tokens that were verified", **new)
        self.accepted = Counter("baton_draft_tokens_accepted", "draft tokens that were accepted", **new)
        self.responses = Counter("baton_http_responses", "responses begun, by HTTP status", ["status"], **new)
        without = "fields of requests that were accepted without effect, by endpoint"
        self.ignored_fields = Counter("baton_ignored_fields", without, ["endpoint"], **new)
        self._logged_fields: set[str] = set()  # at most MAX_LOGGED_FIELDS
        first = "time from admission to the first token, at the coordinator"
        self.first_token = Histogram("baton_time_to_first_token_seconds", first, buckets=TTFT_S, **new)
        mean = "a request's mean time per token after the first"
        self.per_token = Histogram("baton_time_per_output_token_seconds", mean, buckets=GAP_S, **new)
        self.whole = Histogram(
            "baton_request_seconds", "time from admission to the end of requests without error", buckets=WHOLE_S, **new
        )
        stage = "a request's time in a stage"
        self._stage = Histogram("baton_stage_seconds", stage, ["stage"], buckets=TTFT_S, **new)
        self._stages = {name: self._stage.labels(name) for name in STAGES}

    def text(self, cluster: Mapping[str, Any]) -> bytes:
        """Returns the response to a scrape; `cluster` is the `/workers` document. Not for the event loop."""
        return generate_latest(self.everything(cluster))

    def everything(self, cluster: Mapping[str, Any]) -> CollectorRegistry:
        registry = CollectorRegistry()
        registry.register(self._registry)
        registry.register(_State(cluster))
        if self._compat == "vllm":
            registry.register(_Renamed([self._registry, _State(cluster)], self._model))
        return registry

    def request(self, submission: Submission) -> Observed:
        return Observed(self, submission, time.monotonic())

    def stages(self, timeline: Timeline) -> None:
        for name, histogram in self._stages.items():
            histogram.observe(getattr(timeline, f"{name}_s"))

    def ignored(self, endpoint: str, names: Collection[str]) -> None:
        """Counts ignored fields, and logs each once. Names come from clients: they are no label of a metric, and only
        the first MAX_LOGGED_FIELDS are logged."""
        if not names:
            return
        self.ignored_fields.labels(endpoint).inc(len(names))
        logged = self._logged_fields
        for name in sorted({f"{endpoint} {as_header([name])}" for name in names} - logged):
            if len(logged) < MAX_LOGGED_FIELDS:
                logged.add(name)
                log.info("ignored field of a request (logged once): %s", name)
                if len(logged) == MAX_LOGGED_FIELDS:
                    log.info("further ignored fields are not logged; responses name them in x-ignored-fields")

    def ended(self, line: str, seconds: float, refused: bool) -> None:
        slow = 0 < self._slow_s < seconds
        level = logging.WARNING if slow else logging.DEBUG if refused else logging.INFO
        log.log(level, "%s%s", "slow: " if slow else "", line)


class PerToken(Collector):
    """The metrics of each delta, as plain numbers: the library's locks would cost a tenth of the time of a token.
    Written only by the event loop."""

    def __init__(self) -> None:
        self.generated = 0
        self.gaps = [0] * (len(GAP_S) + 1)  # by bucket: gaps[i] up to GAP_S[i], the last one above all
        self.gap_s = 0.0

    def gap(self, seconds: float) -> None:
        self.gaps[bisect_left(GAP_S, seconds)] += 1
        self.gap_s += seconds

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily("baton_generated_tokens", "tokens sent to clients", value=self.generated)
        bounds = [*map(floatToGoString, GAP_S), "+Inf"]
        buckets = list(zip(bounds, accumulate(self.gaps), strict=True))
        name, help_text = "baton_inter_token_latency_seconds", "time between two deltas of a choice"
        yield HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=self.gap_s)


class Observed:
    """Observes one request on its way to the client."""

    def __init__(self, metrics: Metrics, submission: Submission, now: float) -> None:
        self._metrics, self._submission, self._began = metrics, submission, now
        self._first = 0.0  # when the first token was sent
        self._last: dict[int, float] = {}  # when the latest token of each choice was
        self._tokens = 0  # sent
        self._usages: list[Usage] = []  # of choices that have ended, as the next two
        self._timeline: Timeline | None = None
        self._reasons: list[str] = []

    def delta(self, delta: Delta) -> None:
        now, metrics, choice = time.monotonic(), self._metrics, delta.choice
        if delta.pooled:
            self._first = now
            metrics.prompt_tokens.inc(len(self._submission.prompt))
        if count := len(delta.token_ids):
            self._tokens += count
            tokens = metrics.tokens
            tokens.generated += count
            if not self._first:
                self._first = now
                metrics.first_token.observe(now - self._began)
                metrics.prompt_tokens.inc(len(self._submission.prompt))
            if (last := self._last.get(choice)) is not None:
                tokens.gap(now - last)
            self._last[choice] = now
        if delta.finish_reason is not None:
            self._choice_ended(delta)

    def _choice_ended(self, delta: Delta) -> None:
        metrics = self._metrics
        self._reasons.append(str(delta.finish_reason))
        if (timeline := delta.timeline) is not None:
            self._timeline = self._timeline or timeline
            metrics.stages(timeline)
        if (usage := delta.usage) is not None:
            self._usages.append(usage)
            if delta.choice == 0:
                metrics.cached_tokens.inc(usage.cached_tokens)
            if (drafts := usage.speculation) is not None:
                metrics.drafted.inc(drafts.drafted_tokens)
                metrics.accepted.inc(drafts.accepted_tokens)

    @property
    def tokens_used(self) -> int:
        """The tokens charged to the client's quota: uncached prompt tokens, once the first token or the vector is sent,
        and generated ones."""
        cached = max((usage.cached_tokens for usage in self._usages), default=0)
        return self._tokens + (len(self._submission.prompt) - cached if self._first else 0)

    def end(self, error: BaseException | None) -> None:
        """Records the end of the request; `error` is what ended it, unless it ended well."""
        metrics, now = self._metrics, time.monotonic()
        seconds = now - self._began
        if error is None or len(self._reasons) == self._submission.n:  # after the last delta the reader may just close
            for reason in self._reasons:
                metrics.finished.labels(reason).inc()
            outcome = "finished: " + ", ".join(dict.fromkeys(self._reasons))
            metrics.whole.observe(seconds)
        else:
            code = _code(error)
            metrics.failed.labels(code).inc()
            outcome = f"failed: {code}"
        if self._tokens > len(self._last) and self._first:
            per_choice = (self._tokens - len(self._last)) / len(self._last)
            metrics.per_token.observe((max(self._last.values()) - self._first) / per_choice)
        refused = error is not None and not self._first  # a client can cause any number of them: logged at DEBUG
        of = f" of {self._submission.client.key}" if self._submission.client.key else ""
        metrics.ended(f"{self._submission.request_id}{of} {outcome}; {self._described(seconds)}", seconds, refused)

    def _described(self, seconds: float) -> str:
        cached = max((usage.cached_tokens for usage in self._usages), default=0)
        parts = [f"{len(self._submission.prompt)} prompt tokens ({cached} cached), {self._tokens} generated"]
        if (timeline := self._timeline) is not None:
            parts.append(f"{timeline.prefill_worker or '-'} to {timeline.decode_worker or '-'}")
            stages = ((name, getattr(timeline, f"{name}_s")) for name in STAGES)
            parts.append(", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in stages))
        if self._first and self._tokens:
            parts.append(f"first token after {(self._first - self._began) * 1e3:.0f} ms")
        return "; ".join([*parts, f"total {seconds * 1e3:.0f} ms"])


def _code(error: BaseException) -> str:
    if isinstance(error, BatonError):
        return error.code
    return ErrorCode.INTERNAL_ERROR if isinstance(error, Exception) else "cancelled"


class _State(Collector):
    """Collects the state of the queue, the event loop and the workers from the `/workers` document."""

    def __init__(self, cluster: Mapping[str, Any]) -> None:
        self._cluster = cluster

    def collect(self) -> Iterable[Metric]:
        known = self._cluster
        own, workers = known["coordinator"], known["workers"]
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        running = "requests of which a choice has started"
        yield gauge("baton_requests_running", running, value=own["requests"] - own["queued"])
        waiting = "requests of which all choices wait for a worker"
        yield gauge("baton_requests_queued", waiting, value=own["queued"])
        running = "choices that run on a worker, or have ended while others of their request run"
        yield gauge("baton_choices_running", running, value=own["choices"] - own["queued_choices"])
        yield gauge("baton_choices_queued", "choices that wait for a worker", value=own["queued_choices"])
        oldest = "how long the oldest queued choice has waited"
        yield gauge("baton_oldest_queued_seconds", oldest, value=own["oldest_queued_s"])
        yield counter("baton_choices_admitted", "choices admitted to the queue", value=own["admitted"])
        admitted = "prompt tokens of requests admitted to the queue"
        yield counter("baton_prompt_tokens_admitted", admitted, value=own["admitted_tokens"])
        yield gauge("baton_prompt_tokens_queued", "prompt tokens in the queue", value=own["queued_tokens"])
        backlog = "prompt tokens that prefill workers have been given and not computed yet"
        yield gauge("baton_prompt_tokens_backlog", backlog, value=own["backlog_tokens"])
        expected = "tokens of an output of recent average length"
        yield gauge("baton_expected_output_tokens", expected, value=own["expected_output_tokens"])
        yield counter("baton_loop_stalls", "times the event loop was blocked for over 50 ms", value=own["loop_stalls"])
        longest = "the longest time that the event loop was blocked"
        yield gauge("baton_loop_longest_stall_seconds", longest, value=own["loop_longest_stall_ms"] / 1e3)
        again = "times a request was queued again, for example because its worker was lost"
        yield counter("baton_requests_rescheduled", again, value=own["rescheduled"])
        handed = "times parked KV was offered to another decode worker"
        yield counter("baton_requests_reassigned", handed, value=own["reassigned"])
        refused = counter("baton_joins_refused", "refused joins of workers, by field", labels=["field"])
        for name, count in known["joins_refused"].items():
            refused.add_metric([name], count)
        yield refused
        flips = counter(
            "baton_worker_flips", "workers that joined again in another role, by that role", labels=["role"]
        )
        for role, count in known["flips"].items():
            flips.add_metric([role], count)
        yield flips
        blocks = {
            name: sum(w[name] for w in workers if w["role"] == "decode" and w["state"] != "lost")
            for name in ("blocks_total", "blocks_free")
        }
        used = 1 - blocks["blocks_free"] / blocks["blocks_total"] if blocks["blocks_total"] else 0.0
        yield gauge("baton_kv_usage", "share of the decode workers' KV blocks that is in use", value=used)
        up = gauge("baton_worker_up", "1 for each worker, 0 if it is lost", labels=["worker", "role", "state"])
        for w in workers:
            up.add_metric([w["id"], w["role"], w["state"]], float(w["state"] != "lost"))
        yield up
        for names, family in ((WORKER_GAUGES, gauge), (WORKER_COUNTERS, counter)):
            for name in names:
                made = family(
                    f"baton_worker_{_METRIC_NAMES.get(name, name)}",
                    f"`{name}` of GET /workers",
                    labels=["worker", "role"],
                )
                for w in workers:
                    made.add_metric([w["id"], w["role"]], w[name])
                yield made
        for name, help_text in GPU_GAUGES.items():
            made = gauge(f"baton_worker_gpu_{name}", help_text, labels=["worker", "role"])
            for w in (w for w in workers if w.get("gpu")):
                made.add_metric([w["id"], w["role"]], w["gpu"][name])
            yield made


class _Renamed(Collector):
    """Exports the metrics that have a counterpart in vLLM under its names."""

    def __init__(self, own: Iterable[Collector], model: str) -> None:
        self._own, self._model = own, model

    def collect(self) -> Iterable[Metric]:
        for collector in self._own:
            for metric in collector.collect():
                for name in VLLM.get(metric.name, ()):
                    yield self._renamed(metric, name)

    def _renamed(self, metric: Metric, name: str) -> Metric:
        made = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            labels = {k.replace("finish_reason", "finished_reason"): v for k, v in sample.labels.items()}
            made.add_sample(
                sample.name.replace(metric.name, name, 1), labels | {"model_name": self._model}, sample.value
            )
        return made

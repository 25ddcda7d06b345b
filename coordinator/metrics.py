"""The coordinator's metrics, for `GET /metrics` in Prometheus' text format, and one log line for each request.

Requests are observed in `Pipeline.generate`, which both fronts call; the state of workers and queue is read at each
scrape (metrics_cluster.py). With `compat="vllm"` they are exported under vLLM's names too (metrics_vllm.py). Names,
types and meanings: docs/operations.md.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate
from typing import Any, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.core.codes import ErrorCode
from baton.core.errors import BatonError
from baton.core.request import FinishReason
from baton.runtime.ignored_fields import as_header
from baton.runtime.status import http_status
from coordinator.metrics_cluster import ClusterMetrics
from coordinator.metrics_vllm import TOKENS, VllmNames, VllmRequests
from coordinator.policy.timeline import TPOT_S as TPOT_LIMITS_S
from coordinator.policy.timeline import TTFT_S as TTFT_LIMITS_S
from coordinator.policy.timeline import Timeline, upper_bound
from coordinator.submission import Delta, Submission, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
GAP_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
REFUSAL_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
REFUSALS = (429, 503, 529)
"""The statuses of refusals; the last one is Anthropic's for 503."""
MAX_LOGGED_FIELDS = 256
WHOLE_S = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
OTHER_TENANTS = "other"
STAGES = ("queue", "prefill", "reserve", "transfer", "decode_queue", "decode")

log = logging.getLogger("baton.requests")
disable_created_metrics()  # type: ignore[no-untyped-call]  # half of the samples would be creation times


class Metrics:
    """Requests longer than `slow_s` are logged as warnings; 0 disables this. `tenants` have metrics of their own."""

    def __init__(
        self, model: str = "", compat: str = "none", slow_s: float = 0.0, tenants: Collection[str] = ()
    ) -> None:
        self._registry = CollectorRegistry()
        self._model, self._slow_s, self._tenants = model, slow_s, frozenset(tenants)
        new: dict[str, Any] = {"registry": self._registry}
        ended = "requests that ended without error: `length` if a choice was cut, else `stop`"
        self.finished = Counter("baton_requests_finished", ended, ["finish_reason"], **new)
        for reason in get_args(FinishReason):  # a sum of series of which none exists yet is no number
            self.finished.labels(reason)
        self.failed = Counter("baton_requests_failed", "requests that ended with an error", ["code"], **new)
        self.prompt_tokens = Counter("baton_prompt_tokens", "prompt tokens of requests that produced a token", **new)
        self.cached_tokens = Counter("baton_prompt_tokens_cached", "prompt tokens found in a prefix cache", **new)
        self.tokens = PerToken()
        self._registry.register(self.tokens)
        self.drafts = Counter("baton_drafts", "drafts that were verified, one for each sequence and step", **new)
        self.drafted = Counter("baton_draft_tokens", "draft tokens that were verified", **new)
        self.accepted = Counter("baton_draft_tokens_accepted", "draft tokens that were accepted", **new)
        self.responses = Counter("baton_http_responses", "responses begun, by HTTP status", ["status"], **new)
        refusal = "time from the complete head of a request to its refusal with 429, 503 or 529"
        self.refusal = Histogram("baton_http_refusal_seconds", refusal, buckets=REFUSAL_S, **new)
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
        by_revision = "requests that ended, by the revision of their workers"
        self.by_revision = Counter("baton_revision_requests", by_revision, ["revision", "outcome"], **new)
        first = "time to the first token, by the revision of the workers"
        seconds = {"labelnames": ["revision"], **new}
        self.revision_first = Histogram("baton_revision_time_to_first_token_seconds", first, buckets=TTFT_S, **seconds)
        mean = "a request's mean time per token after the first, by the revision of its workers"
        self.revision_per_token = Histogram(
            "baton_revision_time_per_output_token_seconds", mean, buckets=GAP_S, **seconds
        )
        lengths: dict[str, Any] = {"buckets": TOKENS, **new}
        self.prompt_length = Histogram("baton_request_prompt_tokens", "tokens of a request's prompt", **lengths)
        generated = "tokens generated for a choice"
        self.generated_length = Histogram("baton_request_generated_tokens", generated, **lengths)
        latency = "requests without error by the upper bounds of their times to the first and per further token"
        self.latency = Counter("baton_requests_latency", latency, ["ttft_le", "tpot_le"], **new)
        refused = "requests of a tenant that were refused with 429 or 503, or the same over gRPC"
        self.tenant_refused = Counter("baton_tenant_requests_refused", refused, ["tenant"], **new)
        ended = "of requests that have ended, by tenant"
        self.tenant_prompt_tokens = Counter("baton_tenant_prompt_tokens", f"prompt tokens {ended}", ["tenant"], **new)
        self.tenant_generated = Counter("baton_tenant_generated_tokens", f"tokens generated {ended}", ["tenant"], **new)
        for each in (self.tenant_refused, self.tenant_prompt_tokens, self.tenant_generated):
            for tenant in (*self._tenants, OTHER_TENANTS):
                each.labels(tenant)
        self.vllm = VllmRequests() if compat == "vllm" else None
        ProcessCollector(registry=self._registry)
        stage = "a request's time in a stage"
        self._stage = Histogram("baton_stage_seconds", stage, ["stage"], buckets=TTFT_S, **new)
        self._stages = {name: self._stage.labels(name) for name in STAGES}

    def text(self, cluster: Mapping[str, Any]) -> bytes:
        """Returns the response to a scrape; `cluster` is the `/workers` document. Not for the event loop."""
        return generate_latest(self.everything(cluster))

    def everything(self, cluster: Mapping[str, Any]) -> CollectorRegistry:
        registry = CollectorRegistry()
        registry.register(self._registry)
        registry.register(ClusterMetrics(cluster))
        if self.vllm is not None:
            registry.register(
                VllmNames([self._registry, self.vllm.registry, ClusterMetrics(cluster)], cluster, self._model)
            )
        return registry

    def request(self, submission: Submission) -> Observed:
        return Observed(self, submission, time.monotonic())

    def answered(self, status: int, seconds: float) -> None:
        self.responses.labels(str(status)).inc()
        if status in REFUSALS:
            self.refusal.observe(seconds)

    def label(self, tenant: str) -> str:
        """Returns the label of a tenant: its name if that is configured, else one for all others."""
        return tenant if tenant in self._tenants else OTHER_TENANTS

    def failure(self, error: BaseException, tenant: str, *, started: bool = False) -> str:
        """Counts a request that failed, possibly before its body was read, and returns its code; `started`: the client
        has received a token."""
        code = _code(error)
        self.failed.labels(code).inc()
        if self.vllm is not None:
            self.vllm.failed(error)
        if not started and isinstance(error, BatonError) and http_status(error) in REFUSALS:
            self.tenant_refused.labels(self.label(tenant)).inc()
        return code

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
        self._cached = 0  # tokens of the prompt, as the first choice computes it; the others may reuse its KV
        self._usages: list[Usage] = []  # of choices that have ended, as the next two
        self._timeline: Timeline | None = None
        self._reasons: list[str] = []

    def delta(self, delta: Delta) -> None:
        now, metrics, choice = time.monotonic(), self._metrics, delta.choice
        if delta.cached_tokens:  # with the first tokens: the client may leave before the last ones
            self._count_cached(choice, delta.cached_tokens)
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
            self._count_cached(delta.choice, usage.cached_tokens)
            if (drafts := usage.speculation) is not None:
                metrics.drafts.inc(drafts.steps)
                metrics.drafted.inc(drafts.drafted_tokens)
                metrics.accepted.inc(drafts.accepted_tokens)

    def _count_cached(self, choice: int, cached_tokens: int) -> None:
        if choice == 0 and cached_tokens > self._cached:
            self._metrics.cached_tokens.inc(cached_tokens - self._cached)
            self._cached = cached_tokens

    @property
    def tokens_used(self) -> int:
        """The tokens charged to the client's quota: uncached prompt tokens, once the first token or the vector is sent,
        and generated ones."""
        return self._tokens + (len(self._submission.prompt) - self._cached if self._first else 0)

    def end(self, error: BaseException | None, revision: str = "") -> None:
        """Records the end of the request; `error` is what ended it, unless it ended well. `revision` is that of its
        workers; unnamed ones have no metrics of their own."""
        metrics, now = self._metrics, time.monotonic()
        seconds = now - self._began
        per_token_s = 0.0
        if self._tokens > len(self._last) and self._first:
            per_choice = (self._tokens - len(self._last)) / len(self._last)
            per_token_s = (max(self._last.values()) - self._first) / per_choice
            metrics.per_token.observe(per_token_s)
        if error is None or len(self._reasons) == self._submission.n:  # after the last delta the reader may just close
            metrics.finished.labels("length" if "length" in self._reasons else "stop").inc()
            if metrics.vllm is not None:
                for reason in self._reasons:
                    metrics.vllm.ended.labels(reason).inc()
            outcome = "finished: " + ", ".join(dict.fromkeys(self._reasons))
            metrics.whole.observe(seconds)
            self._finished(per_token_s)
        else:
            code = metrics.failure(error, self._submission.client.tenant, started=bool(self._first))
            outcome = f"failed: {code}"
        tenant = metrics.label(self._submission.client.tenant)
        metrics.tenant_prompt_tokens.labels(tenant).inc(len(self._submission.prompt) if self._first else 0)
        metrics.tenant_generated.labels(tenant).inc(self._tokens)
        if revision:
            metrics.by_revision.labels(revision, outcome.partition(":")[0]).inc()
            if self._first:
                metrics.revision_first.labels(revision).observe(self._first - self._began)
            if per_token_s:
                metrics.revision_per_token.labels(revision).observe(per_token_s)
        refused = error is not None and not self._first  # a client can cause any number of them: logged at DEBUG
        of = f" of {self._submission.client.key}" if self._submission.client.key else ""
        metrics.ended(f"{self._submission.request_id}{of} {outcome}; {self._described(seconds)}", seconds, refused)

    def _finished(self, per_token_s: float) -> None:
        """Records lengths and latency of a request that ended without error."""
        metrics, submission = self._metrics, self._submission
        metrics.prompt_length.observe(len(submission.prompt))
        generated = [usage.completion_tokens for usage in self._usages]
        for tokens in generated:
            metrics.generated_length.observe(tokens)
        if not (self._first and (self._tokens or submission.pooling)):
            return
        first_s = self._first - self._began
        metrics.latency.labels(upper_bound(TTFT_LIMITS_S, first_s), upper_bound(TPOT_LIMITS_S, per_token_s)).inc()
        if metrics.vllm is not None and self._tokens:
            queue_s = 0.0 if self._timeline is None else self._timeline.queue_s
            last_s = max(self._last.values()) - self._began
            metrics.vllm.finished(submission, generated, self._cached, queue_s, first_s, last_s)

    def _described(self, seconds: float) -> str:
        parts = [f"{len(self._submission.prompt)} prompt tokens ({self._cached} cached), {self._tokens} generated"]
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

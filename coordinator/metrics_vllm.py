"""The metrics under vLLM's names, with `--metrics-compat vllm`, for gateways, autoscalers, cost models and dashboards
that were made for it. One coordinator appears as one engine: `engine` is always 0, and counters of workers are totals
of their pool. What has no counterpart here (swapping, sleep levels, multimodal caches, KV connectors) is not exported.

docs/coming-from-vllm.md lists the names; where vLLM and Baton measure the same, NAMES maps one to the other.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.core.errors import Cancelled
from baton.core.request import FinishReason
from baton.runtime.status import row
from coordinator.submission import Submission

NAMES: dict[str, tuple[str, ...]] = {
    "baton_choices_running": ("vllm:num_requests_running",),
    "baton_choices_queued": ("vllm:num_requests_waiting",),
    "baton_kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "baton_prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
    "baton_prompt_tokens_cached": (
        "vllm:prompt_tokens_cached",
        "vllm:prefix_cache_hits",
        "vllm:gpu_prefix_cache_hits",
    ),
    "baton_generated_tokens": ("vllm:generation_tokens",),
    "baton_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "baton_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "baton_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "baton_request_seconds": ("vllm:e2e_request_latency_seconds",),
    "baton_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "baton_request_generated_tokens": ("vllm:request_generation_tokens",),
    "baton_drafts": ("vllm:spec_decode_num_drafts",),
    "baton_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "baton_draft_tokens_accepted": ("vllm:spec_decode_num_accepted_tokens",),
}
"""vLLM's present and former names of our metrics."""

DERIVED = {
    "vllm:request_success": "choices that ended, by `finished_reason`; also requests that the client gave up (`abort`)"
    " or that failed with a status of 500 or above (`error`)",
    "vllm:num_requests_waiting_by_reason": "`baton_choices_queued`: `deferred` are those that no present worker can"
    " serve (`--hold-s`), `capacity` all others",
    "vllm:num_preemptions": "`baton_pool_preemptions_total` of decode",
    "vllm:prompt_tokens_by_source": "prompt tokens that workers computed (source `local_compute`) or had cached"
    " (`local_cache_hit`)",
    "vllm:iteration_tokens_total": "steps (count) and tokens (sum) of both pools; no buckets",
    "vllm:engine_sleep_state": "`sleep_state` `awake`: `baton_ready`",
    "vllm:cache_config_info": "`block_size` of the decode workers, and `num_gpu_blocks` of all of them",
    "vllm:lora_requests_info": "`running_lora_adapters`, `waiting_lora_adapters`, `max_lora`; the value is the time",
    "vllm:request_queue_time_seconds": "waiting, at the coordinator and for a prefill step",
    "vllm:request_prefill_time_seconds": "from then on to the first token",
    "vllm:request_decode_time_seconds": "from the first token to the last one",
    "vllm:request_inference_time_seconds": "both of these",
    "vllm:request_prefill_kv_computed_tokens": "prompt tokens of a request that were not cached",
    "vllm:request_max_num_generation_tokens": "tokens of the longest choice of a request",
    "vllm:request_params_n": "`n` of requests",
    "vllm:request_params_max_tokens": "`max_tokens` of requests",
    "http_requests": "`baton_http_responses_total` by class of `status` (`2xx`)",
}
"""What else is exported, and what it is."""

REASONS = (*get_args(FinishReason), "abort", "error")
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
TIMES_S = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class VllmRequests:
    """What is recorded of requests for vLLM's names only."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def histogram(name: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(f"vllm:{name}", DERIVED[f"vllm:{name}"], buckets=bounds, registry=self.registry)

        name = "vllm:request_success"
        self.ended = Counter(name, DERIVED[name], ["finished_reason"], registry=self.registry)
        for reason in REASONS:
            self.ended.labels(reason)
        self._queue = histogram("request_queue_time_seconds", TIMES_S)
        self._prefill = histogram("request_prefill_time_seconds", TIMES_S)
        self._decode = histogram("request_decode_time_seconds", TIMES_S)
        self._inference = histogram("request_inference_time_seconds", TIMES_S)
        self._computed = histogram("request_prefill_kv_computed_tokens", TOKENS)
        self._longest = histogram("request_max_num_generation_tokens", TOKENS)
        self._n = histogram("request_params_n", (1, 2, 5, 10, 20))
        self._max_tokens = histogram("request_params_max_tokens", TOKENS)

    def failed(self, error: BaseException) -> None:
        """Counts a request that its client gave up, or that failed through no fault of the client's."""
        if not isinstance(error, Exception) or isinstance(error, Cancelled):
            self.ended.labels("abort").inc()
        elif row(error).http >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.ended.labels("error").inc()

    def finished(
        self,
        submission: Submission,
        generated: Sequence[int],
        cached: int,
        queue_s: float,
        first_s: float,
        last_s: float,
    ) -> None:
        """Observes a request that ended without error: the tokens of each choice, and seconds since its admission to
        the first token and to the last one, of which it waited `queue_s`."""
        self._queue.observe(queue_s)
        self._prefill.observe(max(first_s - queue_s, 0.0))
        self._decode.observe(last_s - first_s)
        self._inference.observe(max(last_s - queue_s, 0.0))
        self._computed.observe(len(submission.prompt) - cached)
        self._longest.observe(max(generated, default=0))
        self._n.observe(submission.n)
        self._max_tokens.observe(submission.max_tokens)


class VllmNames(Collector):
    """Exports the metrics of `own` that have a counterpart in vLLM, and those derived from the `/workers` document."""

    def __init__(self, own: Iterable[Collector], cluster: Mapping[str, Any], model: str) -> None:
        self._own, self._cluster = own, cluster
        self._labels = {"model_name": model, "engine": "0"}

    def collect(self) -> Iterable[Metric]:
        for metric in (metric for collector in self._own for metric in collector.collect()):
            for name in NAMES.get(metric.name, ()):
                yield self._renamed(metric, name)
            if metric.name == "baton_http_responses":
                yield self._http(metric)
            elif metric.name in DERIVED:
                yield self._renamed(metric, metric.name)
        yield from self._of_state()

    def _of_state(self) -> Iterable[Metric]:
        own, totals = self._cluster["coordinator"], self._cluster["totals"]
        held = own["held_choices"]
        waiting = {"capacity": own["queued_choices"] - held, "deferred": held}
        yield self._family(GaugeMetricFamily, "vllm:num_requests_waiting_by_reason", "reason", waiting)
        awake = {"awake": float(own["ready"])}
        yield self._family(GaugeMetricFamily, "vllm:engine_sleep_state", "sleep_state", awake)
        name = "vllm:num_preemptions"
        preemptions = CounterMetricFamily(name, DERIVED[name], labels=[*self._labels])
        preemptions.add_metric([*self._labels.values()], totals["decode"]["preemptions"])
        yield preemptions
        sources = {"local_compute": "prompt_tokens_computed", "local_cache_hit": "prompt_tokens_cached"}
        by_source = {source: sum(pool[name] for pool in totals.values()) for source, name in sources.items()}
        yield self._family(CounterMetricFamily, "vllm:prompt_tokens_by_source", "source", by_source)
        steps = sum(pool["steps"] for pool in totals.values())
        tokens_of = sum(pool["prompt_tokens_computed"] + pool["tokens_generated"] for pool in totals.values())
        name = "vllm:iteration_tokens_total"
        iterations = HistogramMetricFamily(name, DERIVED[name], labels=[*self._labels])
        iterations.add_metric([*self._labels.values()], [("+Inf", steps)], tokens_of)
        yield iterations
        yield self._cache_config()
        if (adapters := own["adapters"]) is not None:
            names = {"max_lora": str(adapters["max"])}
            names |= {f"{state}_lora_adapters": ",".join(adapters[state]) for state in ("running", "waiting")}
            name = "vllm:lora_requests_info"
            info = GaugeMetricFamily(name, DERIVED[name], labels=[*self._labels, *names])
            info.add_metric([*self._labels.values(), *names.values()], time.time())
            yield info

    def _cache_config(self) -> Metric:
        blocks: dict[int, int] = defaultdict(int)
        for worker in self._cluster["workers"]:
            if worker["role"] == "decode" and worker["state"] != "lost":
                blocks[worker["block_size"]] += worker["blocks_total"]
        name, labels = "vllm:cache_config_info", [*self._labels, "block_size", "num_gpu_blocks"]
        made = GaugeMetricFamily(name, DERIVED[name], labels=labels)
        for size, count in blocks.items():
            made.add_metric([*self._labels.values(), str(size), str(count)], 1.0)
        return made

    def _family(
        self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, label: str, values: Mapping[str, float]
    ) -> Metric:
        made = kind(name, DERIVED[name], labels=[*self._labels, label])
        for value, count in values.items():
            made.add_metric([*self._labels.values(), value], count)
        return made

    def _http(self, metric: Metric) -> Metric:
        classes: dict[str, float] = defaultdict(float)
        for sample in metric.samples:
            classes[f"{sample.labels['status'][0]}xx"] += sample.value
        made = CounterMetricFamily("http_requests", DERIVED["http_requests"], labels=["status"])
        for status, count in classes.items():
            made.add_metric([status], count)
        return made

    def _renamed(self, metric: Metric, name: str) -> Metric:
        made = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            made.add_sample(sample.name.replace(metric.name, name, 1), sample.labels | self._labels, sample.value)
        return made

"""Queries of the metrics that vLLM's public users read, in the form in which they read them, by user: gateways,
autoscalers, cost models and dashboards. Each names its metrics and labels as its user does; Grafana's variables are
substituted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

_MODEL = '{model_name="$model_name"}'
_ALL = '{job=~"$job", model_name=~"$model_name", instance=~"$instance", engine=~"$engine"}'


def _quantile(metric: str, labels: str = _MODEL) -> str:
    return f"histogram_quantile(0.95, sum by (le) (rate({metric}_bucket{labels}[$__rate_interval])))"


def _mean(metric: str, labels: str = _MODEL) -> str:
    return f"rate({metric}_sum{labels}[$__rate_interval]) / rate({metric}_count{labels}[$__rate_interval])"


def _window(metric: str) -> str:
    """The form in which OpenCost takes the rise of a counter in a window: its last value before a time."""
    return f"sum by (model_name, namespace) (last_over_time({metric}[2m]))"


LATENCIES = tuple(
    f"vllm:{name}_seconds" for name in ("e2e_request_latency", "time_to_first_token", "inter_token_latency")
)
QUERIES: dict[str, tuple[str, ...]] = {
    "Gateway API endpoint picker and llm-d's router": (
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        'vllm:cache_config_info{block_size=~".+", num_gpu_blocks=~".+"}',
    ),
    "KEDA and HPA": (
        "vllm:num_requests_waiting",
        "sum by (namespace) (vllm:num_requests_waiting)",
        "sum(vllm:num_requests_running)",
        "avg(vllm:gpu_cache_usage_perc)",
    ),
    "OpenCost": tuple(
        _window(f"vllm:{name}")
        for name in (
            "prompt_tokens_total",
            "generation_tokens_total",
            "request_prefill_time_seconds_sum",
            "request_time_per_output_token_seconds_sum",
            "prefix_cache_hits_total",
        )
    ),
    "vLLM's example dashboard": (
        *(make(metric) for metric in LATENCIES for make in (_quantile, _mean)),
        f"rate(vllm:prompt_tokens_total{_MODEL}[$__rate_interval])",
        f"rate(vllm:generation_tokens_total{_MODEL}[$__rate_interval])",
        f"vllm:num_requests_running{_MODEL}",
        f"vllm:num_requests_waiting{_MODEL}",
        f"vllm:kv_cache_usage_perc{_MODEL}",
        f"sum by (le) (increase(vllm:request_prompt_tokens_bucket{_MODEL}[$__rate_interval]))",
        f"sum by (le) (increase(vllm:request_generation_tokens_bucket{_MODEL}[$__rate_interval]))",
        f"sum by (finished_reason) (increase(vllm:request_success_total{_MODEL}[$__rate_interval]))",
        *(
            f"rate(vllm:request_{name}_sum{_MODEL}[$__rate_interval])"
            for name in ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds")
        ),
        f"rate(vllm:request_max_num_generation_tokens_sum{_MODEL}[$__rate_interval])",
    ),
    "vLLM's dashboards by engine": (
        f"max by (instance, engine) (vllm:kv_cache_usage_perc{_ALL})",
        f"sum(rate(vllm:prefix_cache_hits_total{_ALL}[$__rate_interval]))"
        f" / (sum(rate(vllm:prefix_cache_queries_total{_ALL}[$__rate_interval])) > 0)",
        f"sum(rate(vllm:prompt_tokens_cached_total{_ALL}[$__rate_interval]))",
        f"sum by (source) (rate(vllm:prompt_tokens_by_source_total{_ALL}[$__rate_interval]))",
        f"sum(rate(vllm:num_preemptions_total{_ALL}[$__rate_interval]))",
        f'sum(vllm:num_requests_waiting_by_reason{_ALL[:-1]}, reason="capacity"}})',
        f'max(vllm:engine_sleep_state{_ALL[:-1]}, sleep_state="awake"}})',
        "time() - process_start_time_seconds",
        'sum(rate(http_requests_total{status="2xx"}[$__rate_interval]))',
        "rate(vllm:iteration_tokens_total_count[$__rate_interval])",
        _mean("vllm:request_inference_time_seconds", _ALL),
        _mean("vllm:request_prefill_kv_computed_tokens", _ALL),
        _mean("vllm:request_params_n", _ALL),
        _mean("vllm:request_params_max_tokens", _ALL),
        *(f"sum(vllm:spec_decode_num_{name}_total{_ALL})" for name in ("drafts", "draft_tokens", "accepted_tokens")),
    ),
    "dashboards for earlier versions of vLLM": (
        _quantile("vllm:time_per_output_token_seconds"),
        _quantile("vllm:request_time_per_output_token_seconds"),
        f"vllm:gpu_cache_usage_perc{_MODEL}",
        "vllm:gpu_prefix_cache_hits_total / vllm:gpu_prefix_cache_queries_total",
    ),
    "llm-d's examples": (
        "sum by (model_name, pod) (rate(vllm:prompt_tokens_total[5m]) + rate(vllm:generation_tokens_total[5m]))",
        "avg by (pod, model_name) (vllm:kv_cache_usage_perc * 100)",
        "1 - avg by (pod) (rate(vllm:iteration_tokens_total_count[5m]) > 0)",
    ),
}


def substituted(query: str, model: str) -> str:
    """Returns a query with Grafana's variables replaced: this model, and everything else."""
    query = re.sub(r"\$\{?__(rate_interval|interval)\}?", "10s", query)
    query = re.sub(r"\$\{?__range\}?", "1m", query)
    query = re.sub(r"\$\{?(model_name|model|Deployment_id)\b\}?", model, query)
    return re.sub(r"\$\{?[a-zA-Z]\w*\}?", ".*", query)


def dashboard_queries(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the title of a panel and a query of it, for each query of an exported Grafana dashboard."""

    def panels(node: object) -> Iterator[tuple[str, str]]:
        if isinstance(node, dict):
            for target in node.get("targets") or ():
                if isinstance(target, dict) and target.get("expr"):
                    yield str(node.get("title", "")), target["expr"]
            for value in node.values():
                yield from panels(value)
        elif isinstance(node, list):
            for value in node:
                yield from panels(value)

    yield from panels(json.loads(path.read_text(encoding="utf-8")))

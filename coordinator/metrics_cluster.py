"""The metrics that are read from the `/workers` document at each scrape: queue, event loop, workers, and pools, whose
totals include workers that have left; and from the figures of the batches process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.core.commands import Role
from coordinator.policy.pool import LOAD_COLUMNS, TOTALS

WORKER_GAUGES = ("running", "waiting", "sequences", "blocks_total", "blocks_free")
WORKER_COUNTERS = tuple(name for name in LOAD_COLUMNS if name not in WORKER_GAUGES)
GPU_GAUGES = {
    "memory_used_bytes": "memory in use on the GPUs of a worker's first node, by any process",
    "memory_total_bytes": "total memory of the GPUs of a worker's first node",
    "utilisation": "mean share of time, 0 to 1, in which a kernel ran on these GPUs",
}
POOL_SECONDS = "time that workers of a role were present, added up over all of them"
_METRIC_NAMES = {"worker_s": "worker_seconds", "step_s": "step_seconds", "blocks_total": "blocks"}
"""Metric names spell out their unit; `_total` is the suffix of counters."""


class ClusterMetrics(Collector):
    """Collects the state of the queue, the event loop and the workers from the `/workers` document, to which `batches`
    is added: None without a batches process, empty if it does not reply."""

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
        again = "times a choice was queued again, for example because its worker was lost"
        yield counter("baton_choices_rescheduled", again, value=own["rescheduled"])
        budget = "how many more failures may make choices fail again with at most one new token, before none is retried"
        yield gauge("baton_retry_budget", budget, value=own["retry_budget"])
        again = "choices that were not retried because of that"
        yield counter("baton_retries_refused", again, value=own["retries_refused"])
        handed = "times parked KV was offered to another decode worker"
        yield counter("baton_choices_reassigned", handed, value=own["reassigned"])
        yield gauge("baton_ready", "1 while `/ready` is 200", value=float(own["ready"]))
        missing = "1 for a role that is needed and has no ready worker"
        role_missing = gauge("baton_role_missing", missing, labels=["role"])
        for role in get_args(Role):
            role_missing.add_metric([role], float(role == own["missing_role"]))
        yield role_missing
        expected = "1 while there may be no worker on purpose: as an autoscaler reports, or after a take-over"
        yield gauge("baton_workers_expected", expected, value=float(own["expects_workers"]))
        prefilled = "tokens that prefills computed, counted when their first token arrives"
        yield counter("baton_prefilled_tokens", prefilled, value=own["prefilled_tokens"])
        vain = "of these, tokens of choices that ended before their answer was complete, or that were prefilled again"
        wasted = counter("baton_prefilled_tokens_wasted", vain, labels=["reason"])
        for reason, tokens in own["wasted_tokens"].items():
            wasted.add_metric([reason], tokens)
        yield wasted
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
        for state, meaning in (
            ("running", "choices of a tenant at workers"),
            ("queued", "its choices that wait for one"),
        ):
            of_tenant = gauge(f"baton_tenant_choices_{state}", meaning, labels=["tenant"])
            for tenant, counts in known["tenants"].items():
                of_tenant.add_metric([tenant], counts[state])
            yield of_tenant
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
        for name in ("worker_s", *TOTALS):
            meaning = (
                POOL_SECONDS
                if name == "worker_s"
                else f"`{name}` of all workers of a role, of those that have left too"
            )
            made = counter(f"baton_pool_{_METRIC_NAMES.get(name, name)}", meaning, labels=["role"])
            for role, totals in known["totals"].items():
                made.add_metric([role], totals[name])
            yield made
        for name, help_text in GPU_GAUGES.items():
            made = gauge(f"baton_worker_gpu_{name}", help_text, labels=["worker", "role"])
            for w in (w for w in workers if w.get("gpu")):
                made.add_metric([w["id"], w["role"]], w["gpu"][name])
            yield made
        if (batches := known.get("batches")) is not None:
            yield from _of_batches(batches)


def _of_batches(figures: Mapping[str, Any]) -> Iterable[Metric]:
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    yield gauge("baton_batches_up", "1 while the batches process replies", value=float(bool(figures)))
    if not figures:
        return
    unfinished = gauge("baton_batches_unfinished", "batches that have not ended, by status", labels=["status"])
    for status, count in figures["unfinished"].items():
        unfinished.add_metric([status], count)
    yield unfinished
    lines = figures["lines"]
    yield gauge("baton_batch_lines_running", "lines of batches whose requests run", value=lines["running"])
    answered = counter(
        "baton_batch_lines", "lines of batches that got their response, by its status", labels=["status"]
    )
    for status, count in lines["answered"].items():
        answered.add_metric([status], count)
    yield answered
    again = "times a line was sent again, because it was refused or failed with a cluster error"
    yield counter("baton_batch_line_retries", again, value=lines["retries"])
    yield gauge("baton_batches_stored_bytes", "bytes of files and batches on disk", value=figures["stored_bytes"])
    yield gauge("baton_batches_max_bytes", "the limit of these, `--max-data-mib`", value=figures["max_bytes"])

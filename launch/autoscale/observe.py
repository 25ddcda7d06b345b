"""The thin edge of the law: looks at a running cluster, asks the law, and logs what it decides."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton.core.errors import StartupError
from launch.autoscale.law import ClusterSample, Memory, Policy, Sizing, WorkerSample, decide
from launch.cluster_api import expect_workers, get_cluster, get_metrics
from sim.scale.costs import Calibration
from sim.scale.planner import Size
from sim.stats import Slo

TTFT = "baton_time_to_first_token_seconds"
TPOT = "baton_time_per_output_token_seconds"


class Autoscaler:
    """Asks the law about the cluster at a URL, and logs what changes."""

    def __init__(self, policy: Policy, url: str, log: Callable[[str], object]) -> None:
        self._policy, self._url, self._log = policy, url, log
        self._memory = Memory()
        self._problem = ""  # the last one, so that it is logged once
        self._mismatch = ""  # the last one, likewise
        self.decision: Sizing | None = None  # the last one
        self.roles: dict[str, str] = {}  # of the workers that were ready
        self.sample: ClusterSample | None = None  # the last one
        self.present = 0  # workers that were not lost
        self._decode_only = False  # the cluster is one without prefill workers

    def look(self, *, acts: bool = False) -> Size | None:
        """Returns the size to have now; None before the first look at the cluster. While the coordinator does not
        reply, the size stays as it is. `acts`: workers are started and ended accordingly. Then it reports zero
        workers to the coordinator: if that were not ready, no balancer would send the request that starts some."""
        try:
            document, metrics = get_cluster(self._url).document, get_metrics(self._url)
            sample = read_sample(document, metrics, self._policy.slo, time.monotonic())
            policy = self._policy_for(document, sample)
        except (StartupError, KeyError, TypeError, ValueError) as error:
            missing = "the coordinator does not report " if isinstance(error, KeyError) else ""
            self._report(f"unchanged: {missing}{error}")
            return None if self.decision is None else self.decision.size
        self.sample, self.present = sample, sum(row["state"] != "lost" for row in document["workers"])
        self.roles = {worker.name: worker.role for worker in sample.workers}
        if (differs := mismatch(document["workers"], self._policy.decode)) and differs != self._mismatch:
            self._log(f"the calibration is of other workers, sizes may be wrong: {differs}")
            self._mismatch = differs
        if not policy.limit.decode:  # the law would keep those that run, as an operator's choice
            sample = replace(sample, workers=tuple(worker for worker in sample.workers if worker.role == "prefill"))
        before = self.decision
        self.decision, self._memory = decide(policy, self._memory, sample)
        if before is None or self.decision.size != before.size or self.decision.unmet != before.unmet:
            self._log(str(self.decision))
        problem = ""
        if acts and self.decision.size == Size(0, 0):
            try:
                expect_workers(self._url)
            except StartupError as error:
                problem = f"without workers it is not ready: {error}"
        self._report(problem)
        return self.decision.size

    def _policy_for(self, document: Mapping[str, Any], sample: ClusterSample) -> Policy:
        """Returns the policy. It keeps no prefill worker where decode workers compute the prompts, the coordinator has
        never had a prefill worker, and none was asked for. Raises KeyError if the coordinator does not report that."""
        asked = self.decision is not None and self.decision.size.prefill
        if sample.ready("prefill"):
            self._decode_only = False
        elif sample.ready("decode") and self._policy.limit.decode and not asked:
            had_any = document["totals"]["prefill"]["worker_s"] > 0
            self._decode_only = not had_any and not document["coordinator"]["missing_role"]
        if not self._decode_only:
            return self._policy
        least, limit = self._policy.least, self._policy.limit
        return replace(self._policy, least=Size(0, least.decode), limit=Size(0, limit.decode))

    def _report(self, problem: str) -> None:
        if problem and problem != self._problem:
            self._log(problem)
        self._problem = problem


def mismatch(workers: Sequence[Mapping[str, Any]], kind: Calibration) -> str:
    """Returns in what the first ready decode worker that is not of the calibrated kind differs; empty if none does.
    Pure."""
    calibrated: dict[str, int | str] = {"tensor_parallel": kind.tensor_parallel, "block_size": kind.block_size}
    calibrated |= {name: kind.about[name] for name in ("dtype", "kv_dtype") if name in kind.about}
    for row in workers:
        for name, value in calibrated.items() if row["role"] == "decode" and row["state"] == "ready" else ():
            if name in row and str(row[name]) != str(value):
                return f"{name} of {row['id']} is {row[name]}, that of the calibrated ones {value}"
    return ""


def read_sample(document: Mapping[str, Any], metrics: str, slo: Slo, at_s: float) -> ClusterSample:
    """Returns what GET /workers and GET /metrics show. Pure.

    Raises:
        KeyError, TypeError, ValueError: they lack something, or it is malformed.
    """
    own = document["coordinator"]
    first_tokens, late = above(metrics, TTFT, slo.ttft_s)
    ended, slow = above(metrics, TPOT, slo.tpot_s)
    workers = tuple(_worker(row) for row in document["workers"] if row["state"] == "ready")
    return ClusterSample(
        at_s,
        admitted=int(own["admitted"]),
        refused=int(own["refused"]),
        admitted_tokens=int(own["admitted_tokens"]),
        admitted_tokens_squared=int(own["admitted_tokens_squared"]),
        in_flight=int(own["choices"]),
        queued=int(own["queued_choices"]),
        queued_tokens=int(own["queued_tokens"]),
        max_queued_tokens=int(own["max_queued_tokens"]),
        backlog_tokens=int(own["backlog_tokens"]),
        waits_for=own["waits_for"],
        output_tokens=float(own["expected_output_tokens"]),
        first_tokens=first_tokens,
        late=late,
        ended=ended,
        slow=slow,
        workers=workers,
    )


def _worker(row: Mapping[str, Any]) -> WorkerSample:
    sample = WorkerSample(row["id"], row["role"], int(row["incarnation"]), int(row["steps"]), float(row["step_s"]))
    if row["role"] == "prefill":
        return replace(sample, tokens=int(row["prompt_tokens_computed"]), cached=int(row["prompt_tokens_cached"]))
    used = (int(row["blocks_total"]) - int(row["blocks_free"])) * int(row["block_size"])
    rows = int(row["running"]) + int(row["waiting"])
    return replace(sample, tokens=int(row["tokens_generated"]), rows=rows, kv_tokens=used)


def above(metrics: str, histogram: str, limit: float) -> tuple[float, float]:
    """Returns how many values a histogram has, and how many of them are above `limit` (0: none), linear within a
    bucket."""
    from prometheus_client.parser import text_string_to_metric_families  # here: `baton up` need not load it

    lines = [line for line in metrics.splitlines() if line.startswith((f"# TYPE {histogram} ", f"{histogram}_"))]
    bounds, counts = [0.0], [0.0]
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            if sample.name == f"{histogram}_bucket":
                bounds.append(float(sample.labels["le"]))
                counts.append(sample.value)
    total = counts[-1]
    if not limit or not total:
        return total, 0.0
    at = bisect_left(bounds, limit)
    if at >= len(bounds) - 1:  # above the last finite bound, where nothing is known
        return total, total - counts[-2]
    share = (limit - bounds[at - 1]) / (bounds[at] - bounds[at - 1])
    return total, total - (counts[at - 1] + share * (counts[at] - counts[at - 1]))

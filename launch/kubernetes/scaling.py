"""When KEDA changes the number of workers of a pool, and how Prometheus' operator scrapes the coordinator. Pure.

The queries give the work of a whole pool, which Kubernetes divides by its workers and compares with what one of them
may have: seconds of prefill, or a share of KV blocks. Sums, since an average over the workers that there are cannot ask
for more; counted for workers that are up, since the coordinator shows lost ones for minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.core.commands import Role
from baton.core.errors import StartupError
from launch.kubernetes.config import KubernetesConfig
from launch.kubernetes.pods import PodPool
from launch.topology import ROLES

RATE_WINDOW = "5m"
"""Over which the cost of a prompt is averaged."""
MAX_PERIOD_S = 1800
"""Of the policy of a HorizontalPodAutoscaler; its validation refuses more."""


def highest(config: KubernetesConfig, role: Role) -> int:
    """Returns the most workers of a pool of `role`; 0 if their number is fixed."""
    return config.prefill_max if role == "prefill" else config.decode_max


def check_scaling(config: KubernetesConfig, pools: Sequence[PodPool]) -> None:
    """Raises StartupError if a limit is less than a pool's number of workers, or for several pools, each of which would
    do all the work of their role. Also for a role without a pool, whose limit would be ignored."""
    for role in ROLES:
        if highest(config, role) and role not in {pool.role for pool in pools}:
            raise StartupError(f"--{role}-max {highest(config, role)}: the topology has no {role} worker")
    for pool in pools:
        limit = highest(config, pool.role)
        flag = f"--{pool.role}-max {limit}"
        if 0 < limit < pool.replicas:
            raise StartupError(f"{flag} is less than the {pool.replicas} {pool.role} workers of the topology")
        if limit and [other.role for other in pools].count(pool.role) > 1:
            raise StartupError(f"{flag}: the {pool.role} workers differ, and only one pool of a role can be scaled")


def scaled_object(
    config: KubernetesConfig, pool: PodPool, target: dict[str, Any], job: str, grace_s: int
) -> dict[str, Any]:
    """Returns the spec of a ScaledObject: up to the option's number of workers, from the pool's, or with `--scaler`
    from what that asks for. `job` labels the coordinator's series. `grace_s` is how long a worker may take to end: it
    removes one at a time."""
    if config.scaler:
        trigger = {"type": "external-push", "metadata": {"scalerAddress": config.scaler, "role": pool.role}}
        least = {"minReplicaCount": 0, "cooldownPeriod": 0}  # `--min` and `--idle-s` of `baton autoscale` bound it
    else:
        least = {"minReplicaCount": pool.replicas}
        query, limit = _backlog_s(job), config.backlog_s
        if pool.role == "decode":
            query, limit = _kv_used(job), config.kv_share
        asked = {"serverAddress": config.prometheus, "query": query, "threshold": f"{limit:g}"}
        asked["ignoreNullValues"] = "false"  # an empty answer is an error: the number of workers stays
        trigger = {"type": "prometheus", "metricType": "AverageValue", "metadata": asked}
    down = {"policies": [{"type": "Pods", "value": 1, "periodSeconds": min(grace_s, MAX_PERIOD_S)}]}
    return {
        "scaleTargetRef": target,
        **least,
        "maxReplicaCount": highest(config, pool.role),
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": down}}},
        "triggers": [trigger],
    }


def pod_monitor(selector: dict[str, Any], port: str) -> dict[str, Any]:
    """Returns the spec of a PodMonitor of the coordinator's /metrics."""
    return {"selector": {"matchLabels": selector}, "podMetricsEndpoints": [{"port": port, "path": "/metrics"}]}


def _backlog_s(job: str) -> str:
    """The seconds of compute of all prompts that run or wait: their number, by the seconds of steps per prompt."""
    of = f'job="{job}"'
    prefill = f'{of},role="prefill"'
    prompts = f"sum((baton_worker_running{{{prefill}}} + baton_worker_waiting{{{prefill}}}) and on(worker) {_up(of)})"
    waiting = f"sum(baton_choices_queued{{{of}}})"
    busy = f"sum(rate(baton_worker_step_seconds_total{{{prefill}}}[{RATE_WINDOW}]))"
    done = f'sum(rate(baton_stage_seconds_count{{{of},stage="prefill"}}[{RATE_WINDOW}]))'
    # Without prompts in that time the cost is unknown, and taken as 0. Without any series the answer is empty.
    return f"({prompts} + {waiting}) * ({busy} / ({done} > 0) or {done} * 0)"


def _kv_used(job: str) -> str:
    """The shares of KV blocks in use, added up over the decode workers."""
    of = f'job="{job}"'
    decode = f'{of},role="decode"'
    free = f"baton_worker_blocks_free{{{decode}}} / baton_worker_blocks{{{decode}}}"
    return f"sum((1 - {free}) and on(worker) {_up(of)})"


def _up(of: str) -> str:
    return f"(baton_worker_up{{{of}}} == 1)"

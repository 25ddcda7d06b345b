"""The options of `baton emit kubernetes`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from baton.core.names import host_port_error
from baton.runtime.config import option

SETS = ("disaggregatedset", "leaderworkerset")
_MAX_INT32 = (1 << 31) - 1
"""Of a number of replicas in Kubernetes."""


def _url_error(text: str) -> str | None:
    try:
        host, _ = (parts := urlsplit(text)).hostname, parts.port  # reading them checks them
    except ValueError:
        host = None
    return None if host and re.fullmatch(r"https?://[!-~]+", text) else "must be a URL such as http://prometheus:9090"


@dataclass(frozen=True, slots=True)
class KubernetesConfig:
    """What a topology does not say about its objects."""

    topology: str = option("", "TOML file of the cluster")
    out: str = option("baton-kubernetes", "directory for objects.yaml and kustomization.yaml")
    name: str = option("baton", "name of the cluster: the first part of the name of each object")
    namespace: str = option("default", "namespace of the objects")
    image: str = option("baton-serve", "image built from the Dockerfile")
    secret: str = option("baton", "Secret with the topology's token, key and certificate files, each under its name")
    models_claim: str = option("", "PersistentVolumeClaim with the models, mounted read-only above their paths")
    checksums: str = option("", "file of sha256sum, relative to that mount; default: computed from the models here")
    sets: str = option("disaggregatedset", "what the workers are: one object for both pools, or one each", choices=SETS)
    gpu_resource: str = option("nvidia.com/gpu", "name of the resource that a GPU is")
    domain_label: str = option("", "label of a worker's pod whose value is its --domain; none: one domain")
    spread_over: str = option("kubernetes.io/hostname", "node label over whose values the pods of a pool are spread")
    prefill_max: int = option(
        0, "most prefill workers, for autoscaling; 0: their number is fixed", low=0, high=_MAX_INT32
    )
    decode_max: int = option(
        0, "most decode workers, for autoscaling; 0: their number is fixed", low=0, high=_MAX_INT32
    )
    prometheus: str = option(
        "http://prometheus-operated.monitoring.svc:9090",
        "URL at which KEDA queries the metrics, for autoscaling",
        check=_url_error,
    )
    scaler: str = option("", "HOST:PORT of an external-push scaler, instead of Prometheus", check=host_port_error)
    backlog_s: float = option(1.5, "prefill work that one worker may have, running and waiting, in seconds", low=0.001)
    kv_share: float = option(0.8, "share of a decode worker's KV blocks that may be in use", low=0.01, high=1)
    pod_monitor: bool = option(True, "emit a PodMonitor, by which Prometheus' operator scrapes the coordinator")
    start_timeout_s: float = option(
        900.0, "time limit for a worker to load the model, before it is restarted", low=10, high=1e9
    )

"""The options of `baton up`: those of a coordinator and of workers, which it passes on to them, and its own."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields

from baton.core.errors import StartupError
from baton.core.reshard import MAX_TENSOR_PARALLEL
from baton.engine.kernels.build import CACHE_VARIABLE as CACHE
from baton.runtime.config import (
    BatchesConfig,
    BatchesOptions,
    CoordinatorConfig,
    CoordinatorOptions,
    WorkerConfig,
    WorkerOptions,
    option,
)
from baton.runtime.event_log import VARIABLE as EVENT_LOG
from baton.runtime.process import PARENT_VARIABLE as PARENT


@dataclass(frozen=True)
class UpConfig(BatchesOptions, CoordinatorOptions, WorkerOptions):
    """A cluster on this machine: one coordinator, some prefill and some decode workers, files and batches."""

    prefill: int = option(1, "prefill workers; without any, decode workers compute the prompts", low=0, high=256)
    decode: int = option(1, "decode workers; a model that is served only for pooling needs none", low=0, high=256)
    prefill_tp: int = option(1, "tensor-parallel ranks of a prefill worker", low=1, high=MAX_TENSOR_PARALLEL)
    decode_tp: int = option(1, "tensor-parallel ranks of a decode worker", low=1, high=MAX_TENSOR_PARALLEL)
    batches: bool = option(True, "start the process that serves /v1/files and /v1/batches")
    batches_port: int = option(0, "port of that process, on loopback; 0: any free one", low=0, high=65535)
    data_dir: str = option(
        "", "directory for files, batches and, with --store, responses; default: files and batches in the run directory"
    )
    control_port: int = option(0, "port workers dial, on loopback; 0: any free one", low=0, high=65535)
    threads: int = option(0, "compute threads of a worker; 0: the cores divided among the workers", low=0, high=1024)
    prefill_block_size: int = option(0, "--block-size of prefill workers; 0: the same", low=0, high=1024)
    decode_block_size: int = option(0, "--block-size of decode workers; 0: the same", low=0, high=1024)
    autoscale: str = option(
        "", "file of `baton calibrate`: workers of this host start and drain with the load, up to all of the cluster"
    )
    autoscale_slo: str = option(
        "ttft=1,tpot=50ms", "limits of TTFT and TPOT that --autoscale keeps for 95 % of requests"
    )
    autoscale_min: int = option(1, "workers of each role that --autoscale keeps; 0: none while idle", low=0, high=256)
    autoscale_down_s: float = option(600.0, "time that --autoscale keeps workers that are not needed any more", low=1)
    autoscale_idle_s: float = option(600.0, "time without a request until --autoscale-min 0 ends all workers", low=1)
    start_timeout_s: float = option(900.0, "time limit for the cluster to become ready", low=1)
    topology: str = option("", "TOML file of a cluster over several nodes; the members on this host are started")
    node: str = option("", "node of the topology that is this host; default: each whose address it has")
    dry_run: bool = option(False, "print placement, ports, memory and the exact commands, and start nothing")
    run_dir: str = option("", "directory for logs; default a fresh one in the user's cache directory")


@dataclass(frozen=True)
class DoctorConfig(UpConfig):
    """What `baton doctor` looks at: what `baton up` with the same options would start."""

    limit_s: float = option(30.0, "time limit for each hand-over", low=1)
    wait_s: float = option(300.0, "time limit for the workers of all nodes to load and join", low=1)


COORDINATOR_FIELDS = tuple(f.name for f in fields(CoordinatorOptions) if f.name != "served_model_name")
"""Passed on to the coordinator; the plan passes the model to every process."""

WORKER_FIELDS = tuple(f.name for f in fields(WorkerOptions) if f.name not in ("model", "threads", "block_size"))
"""Passed on to every worker; its threads follow from its cores, its block size from its role."""


BATCHES_FIELDS = tuple(f.name for f in fields(BatchesOptions))
"""Passed on to the batches process."""


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuses a `BATON_*` variable that no process of the cluster reads.

    Raises:
        StartupError: names the variable and the nearest known one.
    """
    known = {f.name for cls in (UpConfig, BatchesConfig, CoordinatorConfig, WorkerConfig) for f in fields(cls)}
    read = {"BATON_" + name.upper() for name in known} | {CACHE, EVENT_LOG, PARENT}
    for name in environment:
        if name.startswith("BATON_") and not name.startswith("BATON_TEST_") and name not in read:
            close = difflib.get_close_matches(name, read, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise StartupError(f"unknown environment variable {name}{hint}")

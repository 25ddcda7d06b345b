"""What `baton up` can be told. Fields that a coordinator or a worker knows too are handed on to it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields

from baton.core.config import CoordinatorConfig, WorkerConfig, option
from baton.core.errors import StartupError
from baton.core.reshard import MAX_TENSOR_PARALLEL
from baton.engine.kernels.build import CACHE_VARIABLE as CACHE
from baton.event_log import VARIABLE as EVENT_LOG
from baton.process import PARENT_VARIABLE as PARENT


@dataclass(frozen=True, slots=True)
class UpConfig:
    """A cluster on this machine: one coordinator, some prefill and some decode workers."""

    model: str = option("builtin", "checkpoint directory, ORG/NAME on the hub, or `builtin`")
    served_model_name: str = option("", "name clients use; default the directory's or `builtin`", model_name=True)
    draft: str = option(
        "auto",
        "who guesses tokens ahead: `none`, `ngram`, a draft checkpoint; `auto`: the built-in model's own, else none",
    )
    draft_tokens: int = option(0, "tokens guessed per sequence and step; 0: as many as pay", low=0, high=8)
    force_acceptance: float = option(
        -1.0, "benchmarks only, output is not real: the share of guesses that count as right; -1: off", low=-1, high=1
    )
    prefill: int = option(1, "prefill workers", low=1, high=256)
    decode: int = option(1, "decode workers", low=1, high=256)
    prefill_tp: int = option(1, "tensor-parallel ranks of a prefill worker", low=1, high=MAX_TENSOR_PARALLEL)
    decode_tp: int = option(1, "tensor-parallel ranks of a decode worker", low=1, high=MAX_TENSOR_PARALLEL)
    host: str = option("127.0.0.1", "address of HTTP and public gRPC")
    port: int = option(8100, "HTTP port; 0: any free one", low=0, high=65535)
    grpc_port: int = option(8102, "public gRPC port; 0: any free one", low=0, high=65535)
    control_port: int = option(0, "port workers dial, on loopback; 0: any free one", low=0, high=65535)
    device: str = option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = option("auto", "weights and KV", choices=("auto", "bfloat16", "float32"))
    exact: bool = option(False, "the same bits whatever the batch, chunk or cache; --dtype auto is float32")
    kernels: str = option(
        "auto",
        "what computes on CPU: the best compiled kernels of this processor, torch's, or compiled ones by name",
        choices=("auto", "torch", "avx2", "avx512", "avx512_bf16", "amx"),
    )
    quantize: str = option("none", "weights of linear layers and head, on CPU", choices=("none", "int8"))
    threads: int = option(0, "compute threads of a worker; 0: the cores divided among the workers", low=0, high=1024)
    max_model_len: int = option(0, "longest prompt + output in tokens; 0: the model's own limit", low=0)
    kv_memory_gib: float = option(0.0, "memory for KV blocks of a worker; 0: chosen from free memory", low=0, high=1e6)
    block_size: int = option(16, "tokens in a KV block", low=1, high=1024)
    prefill_block_size: int = option(0, "the same on prefill workers; 0: as --block-size", low=0, high=1024)
    decode_block_size: int = option(0, "the same on decode workers; 0: as --block-size", low=0, high=1024)
    staging_mib: float = option(256.0, "memory of a worker for KV on its way; a quarter more is kept", low=0.001)
    gpu_share: float = option(
        0.0, "share of its GPU's memory that a rank may use; 0: even parts for the ranks that share it", low=0, high=1
    )
    edge_kind: str = option(
        "auto",
        "how KV moves; auto: nccl on cuda, else gloo; ipc: within one host, by shared memory",
        choices=("auto", "gloo", "nccl", "ipc"),
    )
    step_tokens: int = option(512, "most tokens computed in one step", low=1, high=1 << 20)
    prefix_cache: bool = option(True, "keep KV of finished requests for later ones that begin with the same tokens")
    max_running: int = option(64, "most sequences in one decode step", low=1, high=65536)
    step_budget_ms: float = option(50.0, "time of a decode step up to which preempted sequences are recomputed", low=1)
    plan_ahead: str = option(
        "auto",
        "plan and launch a decode step while the one before it computes; only without a draft; auto: on cuda",
        choices=("auto", "on", "off"),
    )
    drain_timeout_s: float = option(30.0, "longest running requests may take to finish at shutdown", low=0)
    start_timeout_s: float = option(900.0, "longest the cluster may take to become ready", low=1)
    request_timeout_s: float = option(600.0, "longest a request may take in all", low=0.1)
    lease_s: float = option(3.0, "silence after which a worker counts as lost", low=0.2)
    hold_s: float = option(30.0, "longest accepted requests wait while no worker can serve them", low=0)
    max_queued_requests: int = option(1024, "requests that may wait before callers get 503", low=1)
    max_queued_tokens: int = option(1 << 20, "prompt tokens that may wait before callers get 503", low=1)
    max_body_mib: float = option(4.0, "largest request body", low=0.001)
    edge_timeout_s: float = option(5.0, "longest one KV operation may take", low=0.1)
    topology: str = option("", "TOML file of a cluster over several nodes; what belongs to this host is started")
    node: str = option("", "the node of the topology that this host is; default those whose address it has")
    dry_run: bool = option(False, "print placement, ports, memory and the exact commands, and start nothing")
    run_dir: str = option("", "directory for logs; default a fresh one in the user's cache directory")
    log_level: str = option("info", "least severe message logged", choices=("debug", "info", "warning", "error"))

    def ranks(self, role: str) -> int:
        """Tensor-parallel ranks of a worker of this role."""
        return self.prefill_tp if role == "prefill" else self.decode_tp

    def blocks_of(self, role: str) -> int:
        """Tokens in a KV block of a worker of this role."""
        return (self.prefill_block_size if role == "prefill" else self.decode_block_size) or self.block_size


@dataclass(frozen=True, slots=True)
class DoctorConfig(UpConfig):
    """What `baton doctor` looks at: what `baton up` with the same options would start."""

    limit_s: float = option(10.0, "longest each step of a probe may take", low=1)
    wait_s: float = option(60.0, "longest the doctors of the other nodes may take to come", low=1)
    full_digest: bool = option(False, "compare every byte of the model, not only sizes and headers")


COORDINATOR_FIELDS = (
    "host",
    "port",
    "grpc_port",
    "control_port",
    "max_model_len",
    "drain_timeout_s",
    "request_timeout_s",
    "lease_s",
    "hold_s",
    "max_queued_requests",
    "max_queued_tokens",
    "max_body_mib",
    "log_level",
)
WORKER_FIELDS = (
    "device",
    "dtype",
    "exact",
    "kernels",
    "quantize",
    "kv_memory_gib",
    "staging_mib",
    "edge_kind",
    "gpu_share",
    "max_model_len",
    "step_tokens",
    "prefix_cache",
    "max_running",
    "step_budget_ms",
    "plan_ahead",
    "draft",
    "draft_tokens",
    "force_acceptance",
    "edge_timeout_s",
    "log_level",
)


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuses a `BATON_*` variable that no process of the cluster reads.

    Raises:
        StartupError: names it and the nearest that is read.
    """
    known = {f.name for cls in (UpConfig, CoordinatorConfig, WorkerConfig) for f in fields(cls)}
    read = {"BATON_" + name.upper() for name in known} | {CACHE, EVENT_LOG, PARENT}
    for name in environment:
        if name.startswith("BATON_") and not name.startswith("BATON_TEST_") and name not in read:
            close = difflib.get_close_matches(name, read, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise StartupError(f"nothing reads the environment variable {name}{hint}")


def check_supported(config: UpConfig) -> None:
    """Refuses what this release does not do, rather than ignore it.

    Raises:
        StartupError: names the option.
    """
    small, large = sorted((config.blocks_of("prefill"), config.blocks_of("decode")))
    if large % small:
        raise StartupError(f"--prefill-block-size and --decode-block-size: {small} does not divide {large}")

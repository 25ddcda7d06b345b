"""Checks of a plan before its first process starts: sizes that do not divide, workers that do not match each other,
missing files. The errors read like those with which a worker that loads, or the coordinator at a join, would refuse it.

What only the running worker can determine is not checked: what `--dtype auto` is on its host, and everything about a
model that is not on this host. An option that is not set is read from this environment, as a worker here would.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import cast

from baton.core.compatibility import PROTOCOL_VERSION, Compatibility, difference
from baton.core.edge_kinds import EDGE_KINDS
from baton.core.errors import StartupError
from baton.core.kv_layout import KVDType, KVLayout, stored_dtype
from baton.core.reshard import even_share, local_heads
from baton.models.model_config import AnyConfig, GeneralConfig, ModelConfig, parse_config, parse_config_json
from baton.runtime.cluster_token import check_listening
from baton.runtime.config import CoordinatorConfig, WorkerConfig, resolve
from baton.runtime.model_source import resolve_draft, resolve_model
from baton.runtime.token_file import read_token
from coordinator.api_keys import read_api_keys
from coordinator.options import check_options
from coordinator.text.pooling import read_pooling
from launch.plan import COORDINATOR, Plan
from launch.topology import WorkerPlace


def check_plan(plan: Plan, environment: Mapping[str, str] = os.environ) -> None:
    """Raises StartupError for the first worker that cannot start, or does not match an earlier one, with its name."""
    config = _model_config(plan.model)
    coordinator = coordinator_options(plan, environment)
    with naming(COORDINATOR):
        check_options(coordinator)
    resolved = [(w, resolve(WorkerConfig, file={}, env=environment, flags=w.options)) for w in plan.topology.workers]
    _check_roles(plan, config, coordinator)
    _check_pairs(resolved, coordinator)
    if config is not None:
        for worker, options in resolved:
            with naming(worker.name):
                config.longest(options.max_model_len)
                if not isinstance(config, ModelConfig) or options.model_impl == "transformers":
                    continue  # a worker knows how its ranks divide the model
                even_share(config.num_heads, worker.tensor_parallel, "num_attention_heads")
                local_heads(config.num_kv_heads, worker.tensor_parallel, 0)
                even_share(config.intermediate_size, worker.tensor_parallel, "intermediate_size")
    # A value that is unknown for a worker is assumed to equal that of the first worker for which it is known.
    dtype = next((known for _, options in resolved if (known := _dtype(options))), "float32")
    if config is not None:
        longest = config.max_position_embeddings
    else:
        longest = next((options.max_model_len for _, options in resolved if options.max_model_len), 0)
    edge_kind = next((known for _, options in resolved if (known := _edge_kind(options))), "")
    _check_gpu_shares(plan, {worker.name: options for worker, options in resolved})
    earlier: list[tuple[WorkerPlace, Compatibility]] = []
    for worker, options in resolved:
        facts = Compatibility(
            PROTOCOL_VERSION,
            code_version="",  # what the plan makes equal is left empty
            exact=options.exact,
            dtype=_dtype(options) or dtype,
            kv_dtype=(kv_dtype := stored_dtype(options.kv_dtype, cast(KVDType, _dtype(options) or dtype))),
            quantize=options.quantize,
            model_impl="transformers" if _by_transformers(config, options) else "baton",
            edge_kind=_edge_kind(options) or edge_kind,
            config_digest="",
            model_digest="",
            vocab_size=0,
            max_model_len=options.max_model_len or longest,
            layout=_layout(config, options.block_size, kv_dtype),
        )
        for other, theirs in earlier:
            if (differs := difference(theirs, facts)) is not None:
                reason = differs.between(other.name, worker.name)
                raise StartupError(f"{worker.role} worker {worker.name} refused: {reason}")
            if _one_host(facts.edge_kind) and worker.nodes != other.nodes:
                nodes = " and ".join(dict.fromkeys((*other.nodes, *worker.nodes)))
                reason = f"edge_kind: {facts.edge_kind} works only within a host, but {other.name} and {worker.name}"
                raise StartupError(f"{worker.role} worker {worker.name} refused: {reason} are on {nodes}")
        earlier.append((worker, facts))


def coordinator_options(plan: Plan, environment: Mapping[str, str] = os.environ) -> CoordinatorConfig:
    """Returns the coordinator's options, as its process would have them."""
    return resolve(CoordinatorConfig, file={}, env=environment, flags=plan.topology.coordinator.options)


def _check_roles(plan: Plan, config: AnyConfig | None, options: CoordinatorConfig) -> None:
    """Raises StartupError if a role without workers is needed: decode by a model that generates, as far as that is
    known here, and prefill by one that does not."""
    roles = {worker.role for worker in plan.topology.workers}
    if len(roles) > 1:
        return
    generates = {"generate": True, "pooling": False}.get(options.runner)
    if options.runner == "auto" and config is not None:
        generates = read_pooling(resolve_model(plan.model)).generates
    if "prefill" not in roles and generates is False:
        raise StartupError("no prefill worker: a model that is served only for pooling needs one")
    if "decode" not in roles and generates:
        raise StartupError("no decode worker: only a model that is served for pooling needs none; see --runner")


def _check_pairs(workers: Collection[tuple[WorkerPlace, WorkerConfig]], options: CoordinatorConfig) -> None:
    """Raises StartupError if all prompts need a pair of workers, and none has both roles in one revision and domain."""
    classes: dict[tuple[str, str], set[str]] = {}
    for worker, config in workers:
        classes.setdefault((config.revision, config.domain), set()).add(worker.role)
    roles = {worker.role for worker, _ in workers}
    if options.split == "always" and len(roles) > 1 and roles not in classes.values():
        names = ", ".join(
            f"{worker.name} (revision {config.revision!r}, domain {config.domain!r})" for worker, config in workers
        )
        raise StartupError(f"no prefill worker can hand over to a decode worker of its revision and domain: {names}")


def check_memory(plan: Plan, nodes: Collection[str], host_bytes: int) -> None:
    """Checks that this host, which has `host_bytes` of memory, can hold the KV memory configured for the CPU workers on
    `nodes`. KV memory that is not configured is chosen from free memory. Pages are allocated as KV arrives, so without
    this check the host would run out only under load.

    Raises:
        StartupError: it cannot; names the workers.
    """
    sizes: dict[str, int] = {}
    for part in plan.parts:
        given = part.worker.config.kv_memory_gib
        if part.node.name in nodes and given and not part.gpus:
            sizes[part.name] = round(given * part.ranks / part.worker.tensor_parallel * (1 << 30))
    if sum(sizes.values()) > host_bytes:
        named = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in sizes.items())
        there = f"exceeds the {host_bytes / 2**30:.1f} GiB of this host; lower --kv-memory-gib"
        raise StartupError(f"KV memory of {sum(sizes.values()) / 2**30:.1f} GiB ({named}) {there}")


def host_memory_bytes() -> int:
    """Returns the memory that processes here may use: the machine's, or less if a control group (v1 or v2) says so."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # the other version, or `max`
            limits.append(int(Path(path).read_text()))
    return min(limits)


def check_files(plan: Plan, nodes: Collection[str]) -> None:
    """Raises StartupError, with the member's name, for the first member on `nodes` (this host) whose model, draft
    model, LoRA adapter, cluster token, API keys or certificates it could not use, or that would listen off loopback
    without a token."""
    place, parts = plan.topology.coordinator, [part for part in plan.parts if part.node.name in nodes]
    members = [COORDINATOR] * (place.node in nodes) + [part.name for part in parts]
    if not members:
        return
    with naming(members[0]):
        model = resolve_model(plan.model)
    if place.node in nodes:
        with naming(COORDINATOR):
            options = coordinator_options(plan)
            check_listening("--control-host", plan.topology.front.address, read_token(options.cluster_token_file))
            read_api_keys(options.api_key_file)
            _check_certificates(options.cluster_tls_dir, "coordinator")
            if options.tls_cert_file:
                from coordinator.front_tls import read_front_tls  # with gRPC

                read_front_tls(options.tls_cert_file, options.tls_key_file)
            _check_adapters(options, _model_config(plan.model))
    for part in (part for part in parts if part.node_rank == 0):  # only a worker's leader drafts and listens
        with naming(part.name):
            resolved = resolve(WorkerConfig, file={}, env=os.environ, flags=part.worker.options)
            check_listening("--host", part.node.address, read_token(resolved.cluster_token_file))
            _check_certificates(resolved.cluster_tls_dir, part.role)
            if part.role == "decode":
                with naming("--draft"):
                    resolve_draft(resolved.draft, model)


def _check_certificates(directory: str, role: str) -> None:
    if directory:
        from baton.runtime.tls import read_cluster_tls  # with gRPC

        read_cluster_tls(directory, role)


def _check_adapters(options: CoordinatorConfig, config: AnyConfig | None) -> None:
    if options.lora and config is not None:
        from coordinator.adapters import read_adapters  # with safetensors

        read_adapters(options.lora, config, options.max_lora_rank)


@contextlib.contextmanager
def naming(member: str) -> Iterator[None]:
    """Prefixes the message of a StartupError in the block with a name."""
    try:
        yield
    except StartupError as error:
        raise StartupError(f"{member}: {error.message}") from None


def _edge_kind(options: WorkerConfig) -> str:
    """Returns the kind of edge; empty if only the worker's host determines it."""
    if options.edge_kind != "auto":
        return options.edge_kind
    return "gloo" if options.device == "cpu" else "nccl" if options.device == "cuda" else ""


def _check_gpu_shares(plan: Plan, resolved: Mapping[str, WorkerConfig]) -> None:
    """Raises StartupError if the ranks on one GPU may use more than all of its memory."""
    used: dict[tuple[str, str], float] = {}
    for part in (part for part in plan.parts if part.gpus):
        share = resolved[part.worker.name].gpu_share or 1 / part.gpu_ranks
        names = part.gpus.split(",")
        for rank in range(part.ranks):
            at = (part.node.name, names[rank % len(names)])
            used[at] = used.get(at, 0.0) + share
            if used[at] > 1.001:
                where = f"GPU {at[1]} of node {at[0]!r}"
                raise StartupError(
                    f"{part.name}: --gpu-share: the shares of the ranks on {where} add up to {used[at]:.2f}"
                )


def _dtype(options: WorkerConfig) -> str:
    """Returns the dtype; empty if only the worker's host determines it."""
    if options.dtype == "auto":
        return "float32" if options.exact else ""
    return options.dtype


def _layout(config: AnyConfig | None, block_size: int, dtype: KVDType) -> KVLayout:
    return config.kv_layout(block_size, dtype) if isinstance(config, ModelConfig) else KVLayout(block_size, ())


def _by_transformers(config: AnyConfig | None, options: WorkerConfig) -> bool:
    return isinstance(config, GeneralConfig) or options.model_impl == "transformers"


def _one_host(edge_kind: str) -> bool:
    return bool(edge_kind) and EDGE_KINDS[edge_kind].one_host


def _model_config(model: str) -> AnyConfig | None:
    """Returns the model's config; None if it cannot be read here: a worker that loads it will report why."""
    try:
        directory: Path = resolve_model(model)
        return parse_config(parse_config_json((directory / "config.json").read_bytes()))
    except (StartupError, OSError):
        return None

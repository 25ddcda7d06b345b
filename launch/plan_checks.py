"""What of a plan cannot work, seen before its first process starts: sizes that do not divide, workers that do not fit
each other. In the words in which a worker that loads, or the coordinator at a join, would refuse it later.

What only the running worker knows is left to it: what `--dtype auto` is on its host, and everything about a model that
is not on this one. An option that nobody set is taken from this environment, as a worker here would.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from baton.core.commands import WorkerFacts
from baton.core.config import WorkerConfig, resolve
from baton.core.errors import StartupError
from baton.core.kv_layout import KVLayout
from baton.core.model_config import DType, ModelConfig, parse_config_json, parse_model_config
from baton.core.reshard import even_share, local_heads
from baton.model_source import resolve_model
from launch.plan import Plan
from launch.topology import WorkerPlace


def check_plan(plan: Plan, environment: Mapping[str, str] = os.environ) -> None:
    """Raises StartupError for the first worker that cannot be started, or not beside those before it, with its name."""
    config = _model_config(plan.model)
    if config is not None:
        for worker in plan.topology.workers:
            try:
                check_divides(config, worker.tensor_parallel)
            except StartupError as error:
                raise StartupError(f"{worker.name}: {error.message}") from None
    told = [(w, resolve(WorkerConfig, file={}, env=environment, flags=w.options)) for w in plan.topology.workers]
    # What is not known of a worker is taken to be as in the first of which it is.
    dtype = next((known for _, options in told if (known := _dtype(options))), "float32")
    longest = next((options.max_model_len for _, options in told if options.max_model_len), 0)
    if config is not None:
        longest = config.max_position_embeddings
    before: list[WorkerFacts] = []
    for worker, options in told:
        facts = _facts(worker, options, config, _dtype(options) or dtype, options.max_model_len or longest)
        for other in before:
            difference = other.first_difference(facts)
            if difference is not None:
                raise StartupError(f"{worker.role} worker {worker.name} refused: {difference}")
        before.append(facts)


def check_divides(config: ModelConfig, ranks: int) -> None:
    """Raises StartupError where a model's heads or columns cannot be divided over the ranks of a worker, with the
    numbers."""
    even_share(config.num_heads, ranks, "num_attention_heads")
    local_heads(config.num_kv_heads, ranks, 0)
    even_share(config.intermediate_size, ranks, "intermediate_size")


def _dtype(options: WorkerConfig) -> str:
    """Empty where only the host of the worker tells."""
    if options.dtype == "auto":
        return "float32" if options.exact else ""
    return options.dtype


def _facts(
    worker: WorkerPlace, options: WorkerConfig, config: ModelConfig | None, dtype: str, max_model_len: int
) -> WorkerFacts:
    """What the worker will say of itself when it joins; what is the same for all by the plan is left empty."""
    layers = config.kv_layout(options.block_size, cast(DType, dtype)).layers if config is not None else ()
    return WorkerFacts(
        model_digest="",
        config_digest="",
        layout=KVLayout(options.block_size, layers),
        dtype=dtype,
        code_version="",
        exact=options.exact,
        vocab_size=0,
        max_model_len=max_model_len,
        tensor_parallel=worker.tensor_parallel,
        quantize=options.quantize,
    )


def _model_config(model: str) -> ModelConfig | None:
    """None where it cannot be read here; whoever loads it will say why."""
    try:
        directory: Path = resolve_model(model)
        return parse_model_config(parse_config_json((directory / "config.json").read_bytes()))
    except (StartupError, OSError):
        return None

"""Reads a LoRA adapter for the coordinator: whether it fits the model, and its digest. Workers read it again."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError, deserialize

from baton.core.commands import AdapterSource
from baton.core.errors import InvalidRequest, StartupError, Unavailable
from baton.models.adapter_config import (
    WEIGHTS_FILE,
    adaptable,
    adapted_modules,
    adapter_digest,
    adapter_tensors,
    check_tensors,
)
from baton.models.model_config import AnyConfig
from baton.runtime.adapters import read_adapter_config, read_adapter_weights
from baton.runtime.paths import expanded
from coordinator.cluster import Cluster
from coordinator.options import parse_adapters
from coordinator.policy.adapters import Adapter

MAX_ITEM_BYTES, MAX_HEADER_BYTES = 8, 16 << 20
"""Of a value, and of what describes the tensors, in an adapter's weights: a longer file is not this model's."""


def read_adapter(name: str, path: str, config: AnyConfig, max_rank: int) -> Adapter:
    """Reads an adapter from a directory as PEFT writes it.

    Raises:
        InvalidRequest: it does not fit the model, or cannot be read; names the key or the tensor.
    """
    try:
        directory = os.path.realpath(expanded(path))
    except StartupError as error:
        raise InvalidRequest(error.message[:500], param="lora_path") from None
    config_text = read_adapter_config(directory)
    modules = adapted_modules(config_text, adaptable(config), max_rank)
    values = sum(map(math.prod, adapter_tensors(modules).values()))
    weights = read_adapter_weights(directory, values * MAX_ITEM_BYTES + MAX_HEADER_BYTES)
    try:
        shapes = {tensor: tuple(stored["shape"]) for tensor, stored in deserialize(weights)}  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        message = f"{WEIGHTS_FILE}: damaged safetensors file: {' '.join(str(error).split())[:200]}"
        raise InvalidRequest(message, param="lora_path") from None
    check_tensors(modules, shapes)
    return Adapter(name, AdapterSource(adapter_digest(config_text, weights), directory), int(time.time()))


def read_adapters(option: str, config: AnyConfig, max_rank: int) -> list[Adapter]:
    """Reads the adapters of `--lora`. Raises StartupError."""
    adapters = []
    for name, path in parse_adapters(option).items():
        with _naming(name):
            adapters.append(read_adapter(name, path, config, max_rank))
    return adapters


def add_adapters(cluster: Cluster, option: str, config: AnyConfig) -> None:
    """Adds the adapters of `--lora`, which workers load when they join. Raises StartupError."""
    for adapter in read_adapters(option, config, cluster.adapters.max_rank):
        with _naming(adapter.name):
            cluster.adapters.load(adapter)
        cluster.adapters.loaded(adapter)


@contextmanager
def _naming(adapter: str) -> Iterator[None]:
    """Makes a StartupError about `--lora` of an InvalidRequest."""
    try:
        yield
    except InvalidRequest as error:
        raise StartupError(f"--lora {adapter[:100]}: {error.message}") from None


async def load_adapter(cluster: Cluster, name: str, path: str, *, replace: bool, decode: bool) -> None:
    """Loads an adapter at all workers while they serve; `decode`: whether decode workers are needed. Raises
    BatonError."""
    if cluster.own_model is None:
        raise Unavailable("the coordinator has no model to compare adapters with")
    config = cluster.own_model.config
    cluster.adapters.check_name(name, replace=replace)
    adapter = await asyncio.to_thread(read_adapter, name, path, config, cluster.adapters.max_rank)
    await cluster.load_adapter(adapter, replace=replace, decode=decode)

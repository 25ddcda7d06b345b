"""Differences between two workers that prevent KV transfers between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from baton.core.compatibility import PROTOCOL_VERSION
from baton.core.handover import LinkHello
from baton.core.kv_layout import KVLayout

REFUSED_WITHIN_S = 1.0


def _layers(**changes: Any) -> Callable[[KVLayout], KVLayout]:
    """Changes values of the last layer of a layout."""
    return lambda layout: replace(layout, layers=(*layout.layers[:-1], replace(layout.layers[-1], **changes)))


MISFITS: list[tuple[str, dict[str, Any]]] = [
    (f"protocol_version: {PROTOCOL_VERSION} at d0 and 11 at the prefill worker", {"protocol_version": 11}),
    (
        f"protocol_version: {PROTOCOL_VERSION} at d0 and {PROTOCOL_VERSION - 1} at the prefill worker",
        {"protocol_version": PROTOCOL_VERSION - 1},
    ),
    ("tokenizer_digest: 't' at d0 and 'u' at the prefill worker", {"tokenizer_digest": "u"}),
    ("run_id: 'run' at d0 and 'other' at the prefill worker", {"run_id": "other"}),
    ("model_digest: 'm' at d0 and 'x' at the prefill worker", {"model_digest": "x"}),
    ("model_digest: 'm' at d0 and 'xxxxxxxxxxxx' at the prefill worker", {"model_digest": "x" * 100_000}),
    ("model_digest: 'm' at d0 and 'x\\n' at the prefill worker", {"model_digest": "x\n"}),
    ("edge_kind: 'gloo' at d0 and 'nccl' at the prefill worker", {"edge_kind": "nccl"}),
    ("edge_kind: 'gloo' at d0 and 'rdma' at the prefill worker", {"edge_kind": "rdma"}),
    ("kv_dtype: 'float32' at d0 and 'float8_e4m3fn' at the prefill worker; ", {"kv_dtype": "float8_e4m3fn"}),
    ("quantize: 'none' at d0 and 'int8' at the prefill worker", {"quantize": "int8"}),
    ("token: it is missing", {"token": ""}),
    ("token: it is not this cluster's", {"token": "secret "}),
    ("block_size: 4 at d0 and 6 at the prefill worker; ", {"layout": lambda layout: replace(layout, block_size=6)}),
    ("block_size: 4 at d0 and 0 at the prefill worker; ", {"layout": lambda layout: replace(layout, block_size=0)}),
    ("block_size: 4 at d0 and -4 at the prefill worker; ", {"layout": lambda layout: replace(layout, block_size=-4)}),
    (
        "layers: 2 at d0 and 3 at the prefill worker",
        {"layout": lambda layout: replace(layout, layers=(*layout.layers, layout.layers[0]))},
    ),
    ("layers: 2 at d0 and 0 at the prefill worker", {"layout": lambda layout: replace(layout, layers=())}),
    ("layers[1].num_kv_heads: 2 at d0 and 1 at the prefill worker", {"layout": _layers(num_kv_heads=1)}),
    ("layers[1].head_dim: 8 at d0 and 16 at the prefill worker", {"layout": _layers(head_dim=16)}),
    ("layers[1].dtype: 'float32' at d0 and 'bfloat16' at the prefill worker", {"layout": _layers(dtype="bfloat16")}),
    ("layers[1].window: 0 at d0 and 4 at the prefill worker", {"layout": _layers(window=4)}),
    ("tensor_parallel: 2 KV heads cannot be divided over 3 ", {"tensor_parallel": 3}),
    ("tensor_parallel: 128 tensor-parallel ranks on the prefill side, not 1 to 64", {"tensor_parallel": 128}),
    ("tensor_parallel: 1073741824 tensor-parallel ranks on the prefill side", {"tensor_parallel": 1 << 30}),
    ("tensor_parallel: 0 tensor-parallel ranks", {"tensor_parallel": 0}),
    ("tensor_parallel: -1 tensor-parallel ranks", {"tensor_parallel": -1}),
]
"""How each refusal continues after `link refused: `, and the changes to a matching hello; a function computes the new
value from the old one."""


def changed(hello: LinkHello, changes: dict[str, Any]) -> LinkHello:
    for name, change in changes.items():
        owner = hello if hasattr(hello, name) else hello.facts
        value = {name: change(getattr(owner, name)) if callable(change) else change}
        hello = replace(hello, **value) if owner is hello else replace(hello, facts=replace(hello.facts, **value))
    return hello

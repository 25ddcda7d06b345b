"""Differences between two workers that prevent KV transfers between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from baton.core.commands import PROTOCOL_VERSION
from baton.core.handover import LinkHello
from baton.core.kv_layout import KVLayout

REFUSED_WITHIN_S = 1.0


def _layers(**changes: Any) -> Callable[[KVLayout], KVLayout]:
    """Changes values of the last layer of a layout."""
    return lambda layout: replace(layout, layers=(*layout.layers[:-1], replace(layout.layers[-1], **changes)))


MISFITS: list[tuple[str, dict[str, Any]]] = [
    (f"protocol_version: 11 is not {PROTOCOL_VERSION}", {"protocol_version": 11}),
    ("code_version: '9.9' is not '0.1.0'", {"code_version": "9.9"}),
    ("code_version: '' is not '0.1.0'", {"code_version": ""}),
    ("run_id: 'other' is not 'run'", {"run_id": "other"}),
    ("model_digest: 'x' is not 'm'", {"model_digest": "x"}),
    ("model_digest: 'x" + 78 * "x" + " is not 'm'", {"model_digest": "x" * 100_000}),
    ("model_digest: 'x\\n' is not 'm'", {"model_digest": "x\n"}),
    ("edge_kind: 'nccl' is not 'gloo'", {"edge_kind": "nccl"}),
    ("edge_kind: 'rdma' is not 'gloo'", {"edge_kind": "rdma"}),
    ("quantize: 'int8' is not 'none'", {"quantize": "int8"}),
    ("token: it is missing", {"token": ""}),
    ("token: it is not this cluster's", {"token": "secret "}),
    ("block_size: 4 and 6, ", {"layout": lambda layout: replace(layout, block_size=6)}),
    ("block_size: 4 and 0, ", {"layout": lambda layout: replace(layout, block_size=0)}),
    ("block_size: 4 and -4, ", {"layout": lambda layout: replace(layout, block_size=-4)}),
    ("layers: 2 and 3", {"layout": lambda layout: replace(layout, layers=(*layout.layers, layout.layers[0]))}),
    ("layers: 2 and 0", {"layout": lambda layout: replace(layout, layers=())}),
    ("layers[1].num_kv_heads: 2 and 1", {"layout": _layers(num_kv_heads=1)}),
    ("layers[1].head_dim: 8 and 16", {"layout": _layers(head_dim=16)}),
    ("layers[1].dtype: float32 and bfloat16", {"layout": _layers(dtype="bfloat16")}),
    ("layers[1].window: 0 and 4", {"layout": _layers(window=4)}),
    ("tensor_parallel: 2 KV heads cannot be divided over 3 ", {"tensor_parallel": 3}),
    ("tensor_parallel: 128 tensor-parallel ranks on the prefill side, not 1 to 64", {"tensor_parallel": 128}),
    ("tensor_parallel: 1073741824 tensor-parallel ranks on the prefill side", {"tensor_parallel": 1 << 30}),
    ("tensor_parallel: 0 tensor-parallel ranks", {"tensor_parallel": 0}),
    ("tensor_parallel: -1 tensor-parallel ranks", {"tensor_parallel": -1}),
]
"""How each refusal continues after `link refused: `, and the changes to a matching hello; a function computes the new
value from the old one."""


def changed(hello: LinkHello, changes: dict[str, Any]) -> LinkHello:
    return replace(hello, **{k: v(getattr(hello, k)) if callable(v) else v for k, v in changes.items()})

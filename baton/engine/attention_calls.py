"""What a model that transformers implements asks of attention and of its KV cache, recorded from one forward pass.

Layers store K and V and call attention in the same order in every pass. So the pass that `Recorder` observes, over a
few tokens and possibly without weights (fake tensors), describes all later ones: storage i is what the i-th call of the
cache's `update` stores, and `calls[j]` is the j-th call of attention. Whatever a paged cache cannot give is refused
here, by name: every argument that is not None must be known, and every layer must attend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.core.kv_layout import DTYPE_BYTES, LayerKV
from baton.engine.attention import Reach
from baton.engine.device_stream import to_device

MaskFunction = Callable[..., Tensor]
"""Of (batch indexes, head, query positions, key positions), broadcast: whether a query attends to a key."""

WITHOUT_EFFECT = {
    "cache_position", "dropout", "input_ids", "is_causal", "is_sliding", "layer_idx", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_embeddings", "position_ids", "return_dict", "use_cache",
}  # fmt: skip
"""Arguments of attention that say nothing about its result, or that other parts of the call say, too."""
CPU = torch.device("cpu")
_MASKED_QUERIES, _MASKED_POSITIONS = (
    24,
    160,
)  # of `reach_of`: sampled queries, and first positions that are all compared


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention, with `kv_heads` in storage `source`; `latent`: of MLA, whose K and V are expanded from it.
    `reach` is None if it is unknown: a mask that reads fake tensors cannot be evaluated."""

    source: int
    kv_heads: int
    reach: Reach | None
    scale: float | None
    softcap: float | None
    sinks: bool
    latent: bool


@dataclass(frozen=True, slots=True)
class Recorded:
    """`storages` in the order in which a pass writes them, as the whole model has them, `calls` in the order of
    attention. A storage whose heads ranks do not divide has one head, as large as all of them, which is then on every
    rank."""

    storages: tuple[LayerKV, ...]
    calls: tuple[AttentionCall, ...]


class Recorder:
    """Observes one forward pass over `num_tokens` tokens of a model for up to `longest` positions, on `device`."""

    def __init__(self, num_tokens: int, longest: int, device: torch.device) -> None:
        self._num_tokens, self._longest, self._device = num_tokens, longest, device
        self._stored: list[tuple[Tensor, Tensor]] = []  # kept: tensors are compared by identity
        self._layers: list[int] = []
        self._calls: list[AttentionCall] = []
        self._heads: dict[int, int] = {}  # of storages whose heads ranks divide: the whole model's
        self._masks: list[tuple[Any, int | None]] = []  # of each call, with its argument `sliding_window`

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> None:
        """A layer stores keys [1, K, T, D] and values [1, K, T, E]."""
        for new in (keys, values):
            if new.ndim != 4 or new.shape[0] != 1 or new.shape[2] != self._num_tokens or new.shape[1] != keys.shape[1]:
                raise StartupError(f"layer {layer_idx} stores KV of shapes {list(keys.shape)} and {list(values.shape)}")
        if layer_idx in self._layers:
            raise StartupError(f"layer {layer_idx} stores KV twice for a token")
        if _name(keys) not in DTYPE_BYTES or values.dtype != keys.dtype:
            raise StartupError(f"layer {layer_idx} stores KV in {keys.dtype} and {values.dtype}")
        self._layers.append(layer_idx)
        self._stored.append((keys, values))

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]
    ) -> Tensor:
        """A layer attends with query [1, H, T, D]; returns zeros [1, T, H, E]."""
        unknown = sorted(n for n, v in options.items() if v is not None and n not in {*WITHOUT_EFFECT, *_KNOWN})
        if unknown or options.get("is_causal") is False:
            raise StartupError(f"asks attention for {', '.join(unknown) or 'is_causal=False'}")
        source, latent = self._source(module, key, value)
        if query.shape[1] % key.shape[1] or query.dtype != key.dtype:
            raise StartupError(f"attends with {query.shape[1]} heads in {query.dtype} to {key.shape[1]} in {key.dtype}")
        scale, softcap = options.get("scaling"), options.get("softcap")
        scale = None if scale is None else float(scale)
        if mask is not None and not callable(mask):
            raise StartupError("attends with a mask of its own")
        self._masks.append((mask, options.get("sliding_window")))
        if module.baton_kv_heads and module.layer_idx == self._layers[source]:
            self._heads[source] = module.baton_kv_heads
        call = AttentionCall(
            source, self._stored[source][0].shape[1], None, scale, softcap, options.get("s_aux") is not None, latent
        )
        if latent and (call.sinks or softcap is not None):
            raise StartupError("attends to latents with sinks or softcap")
        self._calls.append(call)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    def finish(self, num_layers: int) -> Recorded:
        """Evaluates the masks, outside of any mode of fake tensors. Raises StartupError unless each of the model's
        layers attended: others would keep other state."""
        if not self._calls:
            raise StartupError("never calls transformers' attention interface")
        if len(self._calls) != num_layers:
            raise StartupError(f"attention is called {len(self._calls)} times in a model of {num_layers} layers")
        calls = [replace(c, reach=r) for c, r in zip(self._calls, self._reaches(), strict=True)]
        windows: dict[int, list[int]] = {}
        for call in calls:
            reach = call.reach or Reach()
            windows.setdefault(call.source, []).append(reach.window or reach.chunk)
        storages = []
        for index, (keys, values) in enumerate(self._stored):
            of_readers = windows.get(index, [0])
            window = max(of_readers) if all(of_readers) else 0
            heads = self._heads.get(index, 0)
            shared = 1 if heads else keys.shape[1]
            layer = LayerKV(heads or 1, shared * keys.shape[3], _name(keys), window=window)  # type: ignore[arg-type]
            layer = replace(layer, value_dim=shared * values.shape[3])
            storages.append(layer)
        return Recorded(tuple(storages), tuple(calls))

    def _source(self, module: Any, key: Tensor, value: Tensor) -> tuple[int, bool]:
        """Returns which storage K and V are from, and whether they were expanded from its latents."""
        for index, (keys, values) in enumerate(self._stored):
            if key is keys and value is values:
                return index, False
        if self._stored and self._layers[-1] == module.layer_idx and hasattr(module, "expand_kv"):
            latents, turned = (tensor.shape for tensor in self._stored[-1])
            projection = getattr(module, "kv_b_proj", None)
            if (
                (latents[1], turned[1]) == (1, 1)
                and isinstance(projection, torch.nn.Linear)
                and projection.bias is None
                and projection.weight.shape
                == (key.shape[1] * (module.qk_nope_head_dim + module.v_head_dim), latents[3])
                and (key.shape[3], value.shape[3]) == (module.qk_nope_head_dim + turned[3], module.v_head_dim)
            ):
                return len(self._stored) - 1, True
        raise StartupError("attends to other K and V than it stores")

    def _reaches(self) -> list[Reach | None]:
        by_mask: dict[int, Reach | None] = {}
        reaches: list[Reach | None] = []
        for mask, window in self._masks:
            if mask is None:
                reaches.append(Reach(window or 0))
                continue
            if id(mask) not in by_mask:
                by_mask[id(mask)] = reach_of(mask, self._longest, self._device)
            reach = by_mask[id(mask)]
            if window and reach not in (None, Reach(window), Reach()):
                raise StartupError(f"attends with a window of {window} and a mask of {reach}")
            reaches.append(reach)
        return reaches


_KNOWN = {"scaling", "softcap", "sliding_window", "s_aux"}


def reach_of(mask: MaskFunction, longest: int, device: torch.device = CPU) -> Reach | None:
    """Returns which positions below `longest` queries attend to, by evaluating the mask on `device`, where it may have
    tensors of its own (Llama 4's have the padding); None if that is impossible on fake tensors. Raises StartupError for
    a pattern that is neither causal, nor sliding, nor chunked."""
    every = torch.arange(longest)

    def seen(queries: list[int], keys: Tensor) -> Tensor:
        parts = torch.zeros(1, dtype=torch.int64), torch.tensor(queries)[:, None], keys[None]
        rows, at, to = (to_device(part, device) for part in parts)
        return mask(rows, 0, at, to).cpu().expand(len(queries), len(keys))

    def first(query: int) -> int:
        return int(seen([query], every).int().argmax())

    try:
        last = longest - 1
        start = first(last)
        if start == 0:
            reach = Reach()
        elif first(last - 1) == start - 1:
            reach = Reach(window=last - start + 1)
        else:
            reach = Reach(chunk=start - first(start - 1))
        sampled = sorted({last * at // _MASKED_QUERIES for at in range(1, _MASKED_QUERIES + 1)} | {max(start - 1, 0)})
        compared = [(sampled, every), (list(range(min(longest, _MASKED_POSITIONS))), every[:_MASKED_POSITIONS])]
        equal = all(
            torch.equal(seen(queries, keys), reach.visible(torch.tensor(queries)[:, None], keys[None]))
            for queries, keys in compared
        )
    except (RuntimeError, AssertionError):  # how operations on fake tensors end that need data
        return None
    if not equal:
        raise StartupError("attends with a mask that is neither causal, nor sliding, nor chunked")
    return reach


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

"""Tensor parallelism of a model that transformers computes: which part of each parameter a rank reads, and which
modules exchange results with the other ranks.

transformers' plans are data here: `tp_plan` names a style for modules and parameters. `_SUPPLEMENTS` has what they
leave whole without need. Its own runtime is not used: its sums have no fixed order, and its waits no limit. What a plan
leaves whole is whole on every rank: norms, routers, latents and what expands to them. KV heads are divided where a plan
divides the projection of keys, else KV is whole on every rank and its layout has one head.

With `--expert-parallel` a rank holds whole experts instead of a part of each. Tokens are not sent to them: between
modules every rank has all tokens, so it computes those of its own experts, and the sum over ranks combines the results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import modeling_utils
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from baton.core.errors import StartupError
from baton.engine.parallel import TPGroup
from baton.engine.transformers_packed import linear, product

Plan = Mapping[str, str]
"""The style of each module or parameter, by name, with * for the numbers of layers."""

_COLUMN = {"colwise": 1, "colwise_gather_output": 1, "packed_colwise": 2}
_ROW = {"rowwise": 1, "rowwise_split_input": 1, "packed_rowwise": 2}
_WHOLE = {"replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"}
_SUMMED = {"moe_tp_experts", "all_reduce"}
_VOCABULARY = "embedding_rowwise"
_PAIRS = "pairs"
"""Columns of gate and up by turns (gpt-oss)."""
_FIRST_RANK = "first_rank"
"""A bias that is added before a sum over ranks: zero on all but one."""
_EXPERTS = "experts"
"""Whole experts of a module that has them in the first dimension of its parameters."""

_EXPERT = re.compile(r"experts\.(\d+)\.")
_MERGES = (MergeModulelist, Concatenate)  # of experts: one tensor for all, then gate and up
_KEYS = ("k_proj", "qkv_proj", "query_key_value")
_HEADS = ("num_heads", "num_attention_heads")
_ATTENTION_ATTRIBUTES = ("head_dim", "head_size", "qk_head_dim")


def _layer(**styles: str) -> dict[str, str]:
    return {f"model.layers.*.{name.replace('__', '.')}": style for name, style in styles.items()}


_OF_ATTENTION = _layer(
    self_attn__q_proj="colwise", self_attn__k_proj="colwise", self_attn__v_proj="colwise", self_attn__o_proj="rowwise"
)
_OF_MLP = _layer(mlp__gate_proj="colwise", mlp__up_proj="colwise", mlp__down_proj="rowwise")
_OF_LATENTS = _layer(
    self_attn__q_proj="colwise",
    self_attn__q_b_proj="colwise",
    self_attn__kv_b_proj="colwise",
    self_attn__o_proj="rowwise",
)
_OF_ENDS = {"model.embed_tokens": _VOCABULARY, "lm_head": "colwise_gather_output"}
_SUPPLEMENTS: dict[str, dict[str, str]] = {
    "deepseek_v3": _OF_LATENTS,
    "glm4_moe_lite": _layer(
        mlp__shared_experts__gate_proj="colwise",
        mlp__shared_experts__up_proj="colwise",
        mlp__shared_experts__down_proj="rowwise",
    ),
    "gpt_oss": _OF_ENDS
    | _OF_ATTENTION
    | _layer(
        self_attn__sinks="colwise",
        mlp__experts="moe_tp_experts",
        mlp__experts__gate_up_proj=_PAIRS,
        mlp__experts__gate_up_proj_bias=_PAIRS,
        mlp__experts__down_proj="colwise",
        mlp__experts__down_proj_bias=_FIRST_RANK,
    ),
    "granitemoe": _OF_ATTENTION,
    "hunyuan_v1_dense": _OF_ENDS | _OF_ATTENTION | _OF_MLP,
    "opt": {
        name.replace("model.", "model.decoder."): style
        for name, style in (
            _OF_ATTENTION | _layer(self_attn__out_proj="rowwise", fc1="colwise", fc2="rowwise") | _OF_ENDS
        ).items()
    },
    "phimoe": _OF_ATTENTION,
    "qwen2_moe": _layer(
        mlp__shared_expert__gate_proj="colwise",
        mlp__shared_expert__up_proj="colwise",
        mlp__shared_expert__down_proj="rowwise",
    ),
    "stablelm": _OF_ENDS | _OF_ATTENTION | _OF_MLP,
}
"""By `model_type`. Names that a model lacks have no effect."""

PROVEN = (
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "cohere", "cohere2", "cohere2_moe", "cwm",
    "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo",
    "flint", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe",
    "glm4_moe_lite", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3",
    "iquestcoder", "jais2", "kolibri1", "laguna", "llama", "llama4_text", "mellum", "mimo_v2_flash", "minicpm3",
    "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "nanochat", "nemotron",
    "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu",
)  # fmt: skip
"""Architectures whose tokens on two ranks are compared with those that transformers generates
(tests/engine/test_parallel_transformers.py). Others are refused: what is wrong with a plan may not show at start."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How ranks divide a parameter's dimension `dim`, counted from the end: a checkpoint may have one tensor for each
    expert where the model has one for all. It has `pieces` equal pieces (gate and up), each of which is divided in
    whole `units` (heads; 0: single rows). `kind`: "even"; "kv", with each unit on several ranks if there are more
    ranks than units; "vocabulary", with rows of zeros at the end; "first", whole on the first rank and zeros on the
    others; "experts", of which a checkpoint may have one tensor each."""

    dim: int
    pieces: int = 1
    units: int = 0
    kind: str = "even"

    def local(self, size: int, group: TPGroup, name: str) -> tuple[list[slice], int]:
        """Returns this rank's part of a dimension of `size`, and how long it is with padding. Raises StartupError if it
        cannot be divided."""
        if self.kind == "first":
            return [slice(0, size)], size
        if self.kind == "vocabulary":
            part, length = group.vocabulary_part(size)
            return [part], length
        piece = size // self.pieces
        units = self.units or piece
        part = group.kv_part(units) if self.kind == "kv" else group.part(units, f"{name}: its dimension of")
        unit = piece // units
        starts = range(0, size, piece)
        slices = [slice(start + part.start * unit, start + part.stop * unit) for start in starts]
        return slices, (part.stop - part.start) * unit * self.pieces


def plan_of(model: Any) -> Plan:
    """Returns the styles of a model's modules and parameters: transformers' plan and its supplement."""
    supplement = _SUPPLEMENTS.get(model.config.model_type, {})
    return dict(model.tp_plan or {}) | supplement


def mark_kv_heads(model: Any) -> None:
    """Sets `baton_kv_heads` on modules of attention: the number of KV heads of the whole model that ranks divide; 0 if
    the plan leaves KV whole. A model that is divided was marked before."""
    plan = plan_of(model)
    for name, module in model.named_modules():
        if not hasattr(module, "baton_kv_heads"):
            divided = any(plan.get(_generic(f"{name}.{key}")) == "colwise" for key in _KEYS)
            module.baton_kv_heads = _heads(module, model.config)[1] if divided else 0


def divide(model: Any, group: TPGroup, *, expert_parallel: bool = False) -> dict[str, Cut]:
    """Replaces the parameters of a model without weights by empty ones of this rank's part, lets its modules exchange
    results, and returns how each parameter is cut, by name. With `expert_parallel` experts stay whole.

    Raises:
        StartupError: the plan cannot be applied, with the name of the module.
    """
    kind, plan, cuts = model.config.model_type, plan_of(model), {}
    if not plan:
        raise StartupError(f"transformers has no tensor-parallel plan for model_type {kind}: use 1 rank")
    if kind not in PROVEN:
        raise StartupError(f"tensor parallelism of model_type {kind} is not tested: use 1 rank")
    mark_kv_heads(model)
    modules = dict(model.named_modules())
    styles = {name: style for name in modules if (style := plan.get(_generic(name))) is not None}
    experts = [name for name, style in styles.items() if style == "moe_tp_experts"]
    if expert_parallel:
        if not experts:
            raise StartupError(f"--expert-parallel: model_type {kind} has no experts that can be divided")
        styles |= dict.fromkeys(experts, _EXPERTS)
    for name, _ in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        style = plan.get(_generic(name)) or (None if styles.get(owner) in _SUMMED else styles.get(owner))
        if styles.get(owner) == _EXPERTS:
            style = _EXPERTS
        if (cut := _cut(style, name, model, modules)) is not None:
            cuts[name] = cut
    for name, style in styles.items():
        _check(name, style, modules[name], cuts, styles)
    head = model.get_output_embeddings()
    if model.config.get_text_config().tie_word_embeddings and head is not None:
        name = next(name for name, module in modules.items() if module is head)
        embedding = next(name for name, module in modules.items() if module is model.get_input_embeddings())
        if (f"{embedding}.weight" in cuts) != (f"{name}.weight" in cuts):
            raise StartupError(f"{name}: its plan divides only one of it and {embedding}, which share their weights")
    heads = {name: _heads(module, model.config) for name, module in modules.items() if _is_attention(module)}
    for name, cut in cuts.items():
        owner, _, leaf = name.rpartition(".")
        shape = list(modules[owner].get_parameter(leaf).shape)
        shape[cut.dim] = cut.local(shape[cut.dim], group, name)[1]
        old = modules[owner].get_parameter(leaf)
        setattr(modules[owner], leaf, nn.Parameter(old.new_empty(shape), requires_grad=False))
    for name, whole in heads.items():
        if any(cut.units for cut_name, cut in cuts.items() if cut_name.startswith(f"{name}.")):
            _set_heads(modules[name], whole, group)
    for name, style in styles.items():
        _exchange(modules[name], style, group, is_head=modules[name] is head)
    return cuts


@contextmanager
def reading_parts(group: TPGroup, *, expert_parallel: bool = False) -> Iterator[None]:
    """A model that transformers loads meanwhile is divided, and only this rank's part of its checkpoint is read."""
    convert = modeling_utils.convert_and_load_state_dict_in_model

    def convert_parts(model: Any, state_dict: Mapping[str, Any], load_config: Any, **options: Any) -> Any:
        cuts = divide(model, group, expert_parallel=expert_parallel)
        parts = _parts(model, state_dict, load_config.weight_mapping or [], cuts, group)
        return convert(model=model, state_dict=parts, load_config=load_config, **options)

    modeling_utils.convert_and_load_state_dict_in_model = convert_parts
    try:
        yield
    finally:
        modeling_utils.convert_and_load_state_dict_in_model = convert


class _Part:
    """A tensor of a checkpoint, of which only this rank's part is read."""

    def __init__(self, tensor: Any, cut: Cut, group: TPGroup, name: str) -> None:
        self._tensor, self._cut, self._group, self._name = tensor, cut, group, name

    def __getitem__(self, _: Any) -> Tensor:
        shape = list(self._tensor.get_shape())
        dim = len(shape) + self._cut.dim
        slices, length = self._cut.local(shape[dim], self._group, self._name)
        parts = [self._tensor[(*[slice(None)] * dim, part)] for part in slices]
        if self._cut.kind == "first" and not self._group.leads:
            return torch.zeros_like(parts[0])
        # Of columns a copy: a view would keep the pages of all.
        part: Tensor = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)
        if missing := length - part.shape[dim]:
            part = torch.cat([part, part.new_zeros(*shape[:dim], missing, *shape[dim + 1 :])], dim)
        return part


def _parts(
    model: Any, tensors: Mapping[str, Any], mapping: list[Any], cuts: Mapping[str, Cut], group: TPGroup
) -> dict[str, Any]:
    """Returns the tensors of a checkpoint, each as this rank's part. `mapping` is how transformers renames and merges
    them."""
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    targets, parts = model.state_dict(), {}
    for key, tensor in tensors.items():
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, targets)
        cut = cuts.get(name)
        if pattern is not None:
            cut = _cut_of_source(key, name, of_pattern[pattern], cuts)
            if cut is not None and cut.kind == _EXPERTS and (number := _EXPERT.search(key)) is not None:
                first, *_ = cut.local(model.get_parameter(name).shape[0] * group.size, group, name)[0]
                if first.start <= int(number[1]) < first.stop:
                    parts[key] = tensor
                continue
        parts[key] = tensor if cut is None else _Part(tensor, cut, group, key)
    return parts


def _cut_of_source(key: str, name: str, converter: Any, cuts: Mapping[str, Cut]) -> Cut | None:
    """How to cut a tensor of a checkpoint that a converter makes parameter `name` of, with others: an expert's, gate
    and up still apart. Raises StartupError for other conversions of parameters that are cut."""
    first, *siblings = converter.target_patterns
    cut = cuts.get(name)
    steps = converter.operations
    if all(
        isinstance(step, kind) and step.dim == at for at, (step, kind) in enumerate(zip(steps, _MERGES, strict=False))
    ):
        return cut if cut is None or len(converter.source_patterns) == 1 else replace(cut, pieces=1)
    if cut is not None or any(name.replace(first, sibling) in cuts for sibling in siblings):
        steps = ", ".join(type(step).__name__ for step in converter.operations)
        raise StartupError(f"tensor {key}: transformers converts it by {steps}, which cannot be divided over ranks")
    return None


def _generic(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _is_attention(module: Any) -> bool:
    return hasattr(module, "layer_idx") and any(hasattr(module, name) for name in _ATTENTION_ATTRIBUTES)


def _heads(attention: Any, config: Any) -> tuple[int, int]:
    """Returns the numbers of query and KV heads of a module of attention."""
    size = getattr(attention, "head_dim", None)
    projection, keys = (getattr(attention, name, None) for name in ("q_proj", "k_proj"))
    heads = next((int(getattr(attention, name)) for name in _HEADS if hasattr(attention, name)), 0)
    if not heads and size and isinstance(projection, nn.Linear):
        heads = projection.out_features // size
    heads = heads or config.get_text_config().num_attention_heads
    return heads, keys.out_features // size if size and isinstance(keys, nn.Linear) else heads


def _set_heads(attention: Any, whole: tuple[int, int], group: TPGroup) -> None:
    """Sets the attributes of a module that say how many heads it has."""
    part, kv_part = group.part(whole[0], "num_attention_heads"), group.kv_part(whole[1])
    heads, kv_heads = part.stop - part.start, kv_part.stop - kv_part.start
    local = dict.fromkeys(_HEADS, heads) | {"num_key_value_heads": kv_heads, "num_key_value_groups": heads // kv_heads}
    for name, value in local.items():
        if hasattr(attention, name):
            setattr(attention, name, value)


def _cut(style: str | None, name: str, model: Any, modules: Mapping[str, Any]) -> Cut | None:
    """How a parameter is cut. Raises StartupError for an unknown style."""
    owner, _, leaf = name.rpartition(".")
    parent, _, projection = owner.rpartition(".")
    parameter = modules[owner].get_parameter(leaf)
    if style is None or style in _WHOLE or (style in _ROW and leaf == "bias"):
        return None
    if style == _EXPERTS:
        return Cut(-parameter.ndim, kind=_EXPERTS)
    if style == _FIRST_RANK:
        return Cut(-1, kind="first")
    if style == _PAIRS:
        return Cut(-1, units=parameter.shape[-1] // 2)
    if style == _VOCABULARY:
        return Cut(-2, kind="vocabulary")
    if style not in _COLUMN and style not in _ROW:
        raise StartupError(f"{name}: its tensor-parallel style {style!r:.60} is not supported: use 1 rank")
    cut = Cut(-2 if style in _COLUMN and parameter.ndim > 1 else -1, (_COLUMN | _ROW)[style])
    if modules[owner] is model.get_output_embeddings():
        return replace(cut, kind="vocabulary")
    attention = modules[parent if leaf in ("weight", "bias") else owner]
    if not _is_attention(attention) or style in ("colwise_gather_output", "rowwise_split_input"):
        return cut
    heads, kv_heads = _heads(attention, model.config)
    if projection in ("k_proj", "v_proj"):
        return replace(cut, units=kv_heads, kind="kv")
    return replace(cut, units=heads)


def _check(name: str, style: str, module: Any, cuts: Mapping[str, Cut], styles: Mapping[str, str]) -> None:
    """Raises StartupError for a style that the module does not fit."""
    if style in _WHOLE or style == _EXPERTS:
        return
    if style in _SUMMED:
        if not any(cut.startswith(f"{name}.") for cut in cuts):
            raise StartupError(f"{name}: its plan sums over ranks what it does not divide: use 1 rank")
        return
    expected = nn.Embedding if style == _VOCABULARY else nn.Linear
    if not isinstance(module, expected):
        raise StartupError(f"{name}: a {type(module).__name__} cannot be divided {style}: use 1 rank")
    parent, _, leaf = name.rpartition(".")
    keys = styles.get(f"{parent}.k_proj")
    if leaf == "q_proj" and keys is not None and (style == "colwise") != (keys == "colwise"):
        raise StartupError(f"{name}: its plan divides only one of queries and keys over ranks: use 1 rank")


def _exchange(module: Any, style: str, group: TPGroup, *, is_head: bool) -> None:
    """Lets a module exchange its result with the other ranks."""
    forward: Callable[..., Tensor] = module.forward
    if type(module).forward is nn.Linear.forward:
        forward = MethodType(linear, module)

    def summed(_: Any, *inputs: Any, **options: Any) -> Tensor:
        return group.all_reduce(forward(*inputs, **options))

    def summed_products(self: Any, x: Tensor) -> Tensor:
        if style == "rowwise_split_input":
            x = x[..., group.part(x.shape[-1], "features")]
        y = group.all_reduce(product(self, x, None))
        return y if self.bias is None else y + self.bias

    def gathered(_: Any, x: Tensor) -> Tensor:
        return group.all_gather(forward(x))

    def gathered_on_leader(_: Any, x: Tensor) -> Tensor:
        part = forward(x)
        whole = group.gather(part)
        return part if whole is None else whole

    def embedded(self: Any, tokens: Tensor) -> Tensor:
        rows = len(self.weight)
        own = tokens - group.rank * rows
        elsewhere = (own < 0) | (own >= rows)
        vectors = forward(own.masked_fill(elsewhere, 0))
        return group.all_reduce(vectors.masked_fill(elsewhere[..., None], 0.0))

    def of_own_experts(self: Any, x: Tensor, index: Tensor, weights: Tensor, *inputs: Any, **options: Any) -> Tensor:
        own = index - group.rank * self.num_experts
        elsewhere = (own < 0) | (own >= self.num_experts)
        own, weights = own.masked_fill(elsewhere, self.num_experts), weights.masked_fill(elsewhere, 0.0)
        return group.all_reduce(forward(x, own, weights, *inputs, **options))

    made: Callable[..., Tensor] | None = None
    if style in _SUMMED:
        made = summed
    elif style == _EXPERTS:
        module.num_experts, module._is_expert_parallel = module.num_experts // group.size, True
        made = of_own_experts
    elif style in ("rowwise", "rowwise_split_input"):
        made = summed_products
    elif style == "colwise_gather_output":
        made = gathered_on_leader if is_head else gathered
    elif style == _VOCABULARY:
        made = embedded
    if made is not None:
        module.forward = MethodType(made, module)

"""Any decoder of transformers over packed rows and paged KV, through three of that library's public seams.

A cache object whose `update` writes pages and returns only the new tokens; an AttentionMaskInterface entry, which
returns the mask function instead of a mask; an AttentionInterface entry, which attends over pages. What layers store
and ask for is recorded once (attention_calls.py). `logits_to_keep` with indexes limits logits to the sampled rows.

This module imports transformers, which takes seconds: only a worker that computes such a model imports it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache

from baton.core.errors import InvariantError, StartupError
from baton.core.kv_layout import DTYPE_BYTES, DType
from baton.engine.attention import FastAttention, Reach, Scores
from baton.engine.attention_calls import AttentionCall, MaskFunction, Recorded, Recorder
from baton.engine.attention_native import NativeAttention
from baton.engine.batch import Batch
from baton.engine.checkpoint import Checkpoint, read_model_config
from baton.engine.gguf_files import read_index
from baton.engine.kernels.native import Kernels
from baton.engine.kv_pool import KVPool
from baton.engine.parallel import TPGroup
from baton.engine.safetensors_files import read_small
from baton.engine.transformers_attention import Place, may_store
from baton.engine.transformers_exact import ExactProducts
from baton.engine.transformers_experts import NAME as EXPERTS
from baton.engine.transformers_files import reading_one_by_one
from baton.engine.transformers_kernels import KernelModules
from baton.engine.transformers_mxfp4 import (
    Mxfp4Weight,
    attach,
    form_for,
    mxfp4_weights,
    parameter_bytes,
    reading_mxfp4,
)
from baton.engine.transformers_packed import PackedWeight, weight_of
from baton.engine.transformers_parallel import divide, mark_kv_heads, reading_parts
from baton.models.model_config import parse_config_json, rope_parameters

AnyAttention = FastAttention | NativeAttention
NAME = "baton_paged"
VERSION: str = transformers.__version__
_RECORDED_TOKENS = 5
_STATES = (
    "has_previous_state", "update_conv_state", "update_recurrent_state", "get_conv_state", "get_recurrent_state",
    "update_indexer",
)  # fmt: skip


class PagedCache(Cache):  # type: ignore[misc]
    """What a model of transformers takes for its cache. `target` observes or computes the calls of one forward pass.
    `before` [T] is each token's position less its packed index: a layer that asks for the length of the past adds the
    packed indexes to it, to get positions. `keeps_logits`: the model has the argument `logits_to_keep`."""

    is_compileable, is_sliding, is_linear, is_dummy = False, (), (), ()

    def __init__(self, keeps_logits: bool) -> None:
        self.keeps_logits = keeps_logits
        self.layers: list[Any] = []
        self.target: Recorder | _Step | None = None
        self.before: Tensor | int = 0

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.running.update(keys, values, layer_idx)
        return keys, values

    @property
    def running(self) -> Recorder | _Step:
        if self.target is None:
            raise InvariantError("a layer uses the KV cache outside of a step")
        return self.target

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        return 0 if layer_idx is None else self.before

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def _refuse(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise StartupError(f"keeps a state of each sequence beside its KV (Cache.{name})")

    return refuse


for _name in _STATES:
    setattr(PagedCache, _name, _refuse(_name))


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    return module.baton_cache.running.attend(module, query, key, value, attention_mask, options), None


class _Mask:
    """What a layer receives as its mask: the function that a mask is made of."""

    def __init__(self, function: MaskFunction) -> None:
        self._function = function

    def __call__(self, *where: Any) -> Tensor:
        return self._function(*where)

    def __getitem__(self, _: Any) -> Any:
        raise StartupError("reads its mask as a tensor, as an indexer of sparse attention does")

    def __getattr__(self, name: str) -> Any:
        return self[name]


def _mask(*_: Any, mask_function: MaskFunction, **__: Any) -> _Mask:
    return _Mask(mask_function)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


class _Step:
    """The calls of one forward pass over pages."""

    def __init__(
        self,
        recorded: Recorded,
        slots: Sequence[Tensor],
        kv: KVPool,
        attention: AnyAttention,
        prepared: Mapping[tuple[int, Reach], Any],
    ) -> None:
        """`slots` [T] by group of the KV, `prepared` by group and reach."""
        self._recorded, self._slots, self._kv = recorded, slots, kv
        self._groups = [group for group, _ in kv.layout.places]
        self._attention, self._prepared = attention, prepared
        self._updates = self._calls = 0

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> None:
        storage, slots = self._kv.storage[self._updates], self._slots[self._groups[self._updates]]
        self._updates += 1
        self._attention.store(storage, slots, keys, values)

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]
    ) -> Tensor:
        call = self._recorded.calls[self._calls]
        self._calls += 1
        if call.reach is None:
            raise InvariantError("a mask was not evaluated")
        prepared = self._prepared[self._groups[call.source], call.reach]
        keys, values = (each.view(*each.shape[:2], call.kv_heads, -1) for each in self._kv.storage[call.source])
        scores = Scores(call.scale, call.softcap, options.get("s_aux"))
        queries = query[0].transpose(0, 1)
        if call.latent:
            return self._attend_latents(module, queries, (keys, values), prepared, call)[None]
        return self._attention.attend(queries, keys, values, prepared, scores).view(1, *queries.shape[:2], -1)

    def take(self, kv_heads: int, size: int, dtype: torch.dtype) -> Place | None:
        """Returns where the next layer stores its KV and attends, if it attends to just that, and as a kernel does: the
        layer's calls of `update` and `attend` are then done. Else None."""
        attention, call = self._attention, self._recorded.calls[self._calls]
        if (call.source, call.kv_heads) != (self._updates, kv_heads) or call.reach is None or call.reach.chunk:
            return None
        if call.latent or call.sinks or call.softcap is not None or not isinstance(attention, NativeAttention):
            return None
        storage, group = self._kv.storage[call.source], self._groups[call.source]
        if any(math.prod(each.shape[2:]) != kv_heads * size or not may_store(each, dtype) for each in storage):
            return None
        self._updates += 1
        self._calls += 1
        attention.calls += 1
        return Place(storage, self._slots[group], self._prepared[group, call.reach], call.scale)

    def _attend_latents(
        self, module: Any, queries: Tensor, storage: tuple[Tensor, Tensor], prepared: Any, call: AttentionCall
    ) -> Tensor:
        """MLA, absorbed (DeepSeek-V2, 2024): what expands a latent to K is applied to the query instead, and what
        expands it to V to the result. queries [T, H, nope + rope] -> [T, H, value size]."""
        nope, heads = module.qk_nope_head_dim, queries.shape[1]
        weight = module.kv_b_proj.weight.view(heads, nope + module.v_head_dim, -1)
        scale = queries.shape[-1] ** -0.5 if call.scale is None else call.scale
        absorbed = torch.einsum("thn,hnr->thr", queries[..., :nope], weight[:, :nope])
        absorbed = torch.cat((absorbed, queries[..., nope:]), dim=-1)
        latents = self._attention.attend_latents(absorbed, *storage, prepared, Scores(scale))
        return torch.einsum("thr,hvr->thv", latents, weight[:, nope:])

    def finish(self) -> None:
        counts = len(self._recorded.storages), len(self._recorded.calls)
        if (self._updates, self._calls) != counts:
            raise InvariantError(f"a step stored KV {self._updates} times and attended {self._calls}, not {counts}")


class TransformersModel:
    """A model of transformers behind the contract of `Model`: one rank's part. `recorded` is what `record` returned."""

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        longest: int,
        group: TPGroup,
        kernels: Kernels | None = None,
        threads: int = 1,
        mxfp4: Mapping[str, Mxfp4Weight] = MappingProxyType({}),
        *,
        exact: bool = False,
    ) -> None:
        """`kernels` compute the modules that they can; None means torch's. `mxfp4`: what the checkpoint stores so. With
        `exact` they compute every product; raises StartupError for one that they do not know."""
        self._model, self._vocab_size, self._group = model, vocab_size, group
        self.bytes_read = parameter_bytes(model, mxfp4)
        with _bodies(model) as bodies:
            self.recorded = record(model, longest)
        self._body = bodies[-1] if bodies else model.base_model
        self.steps = 0  # computed over pages
        self.by_kernels: KernelModules | None = None
        if kernels is not None:
            self.by_kernels = KernelModules(model, lambda: _observe(model, longest), kernels, threads, longest)
        self._products: ExactProducts | None = None
        if exact and kernels is not None:
            self._products = ExactProducts(kernels, threads)
            with self._products:
                _observe(model, longest)
        self._is_float32 = False

    def forward(self, batch: Batch, kv: KVPool, attention: AnyAttention) -> Tensor:
        """Computes all rows, writes their KV, and returns logits [S, vocab] in float32 at the sampled positions; on
        followers none: [0, vocab]."""
        reads = [(kv.layout.places[c.source][0], c.reach) for c in self.recorded.calls if c.reach is not None]
        prepared = {
            (group, reach): attention.prepare(batch.spans_of(group), reach.window, reach.chunk)
            for group, reach in dict.fromkeys(reads)
        }
        slots = [batch.slots_of(group) for group in range(kv.layout.groups)]
        step = _Step(self.recorded, slots, kv, attention, prepared)
        before = batch.positions - torch.arange(len(batch.token_ids), device=kv.device)
        with (not self._is_float32 and self._products) or nullcontext():
            logits = _run(self._model, step, before, batch.tokens, batch.positions, batch.sampled)
        step.finish()
        self.steps += 1
        return self._whole(logits)

    def forward_pooled(self, batch: Batch, kv: KVPool, attention: AnyAttention) -> tuple[Tensor, Tensor]:
        """Like `forward`; also returns the final hidden states [N, hidden] at the batch's `pooled` tokens."""
        states: list[Tensor] = []
        hook = self._body.register_forward_hook(lambda *call: states.append(call[2].last_hidden_state))
        try:
            logits = self.forward(batch, kv, attention)
        finally:
            hook.remove()
        return logits, states[0][0].index_select(0, batch.pooled)

    def reference(self, tokens: Tensor) -> Tensor:
        """Logits [T, vocab] of a sequence tokens [T], as transformers computes them by itself: whole, with its plain
        attention and torch's kernels; none on followers, which compute their part."""
        self._model.set_attn_implementation("eager")
        try:
            with self._by_torch():
                logits: Tensor = self._model(input_ids=tokens[None], use_cache=False).logits[0]
        finally:
            self._model.set_attn_implementation(NAME)
        return self._whole(logits)

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Meanwhile all steps compute in float32: weights are converted layer by layer, while each is called, and are
        the same bits as before in the end."""
        self._is_float32 = True
        try:
            with _weights_as(self._model, Tensor.float):
                yield
        finally:
            self._is_float32 = False

    @contextmanager
    def _by_torch(self) -> Iterator[None]:
        if self.by_kernels is None:
            yield
            return
        unpacked = nullcontext() if self._is_float32 else _weights_as(self._model, lambda weight: weight)
        with self.by_kernels.plain(), unpacked:
            yield

    def _whole(self, logits: Tensor) -> Tensor:
        return logits[:, : self._vocab_size].float() if self._group.leads else logits.new_empty(0, self._vocab_size)


def _run(
    model: Any, target: Recorder | _Step, before: Tensor, tokens: Tensor, positions: Tensor, sampled: Tensor
) -> Tensor:
    """Returns logits [S, vocab] at the `sampled` positions."""
    cache: PagedCache = model.baton_cache
    options = {"logits_to_keep": sampled} if cache.keeps_logits else {}
    cache.target, cache.before = target, before
    try:
        result = model(
            input_ids=tokens[None], position_ids=positions[None], past_key_values=cache, use_cache=True, **options
        )
    finally:
        cache.target = None
    logits: Tensor = result.logits[0]
    return logits if cache.keeps_logits else logits.index_select(0, sampled)


def record(model: Any, longest: int) -> Recorded:
    """Runs a few tokens through a model and returns what it asks for. Raises StartupError for what a paged cache cannot
    give."""
    return _observe(model, longest).finish(model.config.get_text_config().num_hidden_layers)


@contextmanager
def _bodies(model: Any) -> Iterator[list[Any]]:
    """Yields the modules below a model that return final hidden states meanwhile, the outermost last. `base_model` need
    not be one: it is the whole model for Llama 4, and for OPT and Whisper a module that is never called."""
    bodies: list[Any] = []

    def hook(module: Any, _: Any, output: Any) -> None:
        if hasattr(output, "last_hidden_state"):
            bodies.append(module)

    handles = [module.register_forward_hook(hook) for module in model.modules() if module is not model]
    try:
        yield bodies
    finally:
        for handle in handles:
            handle.remove()


def _observe(model: Any, longest: int) -> Recorder:
    device = next(model.parameters()).device
    recorder = Recorder(_RECORDED_TOKENS, longest, device)
    positions = torch.arange(_RECORDED_TOKENS, device=device)
    sampled = torch.tensor([1, 4], device=device)
    with torch.no_grad():
        _run(model, recorder, torch.zeros_like(positions), torch.ones_like(positions), positions, sampled)
    return recorder


def probe(
    model_dir: Path, longest: int, dtype: DType, size: int = 1, rank: int = 0, *, level: str | None = None
) -> tuple[Recorded | None, int]:
    """Returns what a model asks for, without reading more of its weights than a few scales, and the bytes of the
    parameters of `rank` of `size`, computed by kernels of `level` (None: torch's). None, and 0, for what only real data
    shows. Raises StartupError for a model that is not served."""
    config = _read_config(model_dir, longest)
    mxfp4 = _mxfp4_weights(model_dir, level, dtype)
    for weight in mxfp4.values():
        weight.sample()
    with _plainly(model_dir):
        with FakeTensorMode():
            # In bfloat16: the kernel of experts has no other dtype on fake tensors.
            model, num_bytes, recorder = None, 0, None
            to_dtype = DTYPE_BYTES[dtype] / DTYPE_BYTES["bfloat16"]
            try:
                model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
                num_bytes = parameter_bytes(model, mxfp4, to_dtype)
                recorder = _observe(_prepare(model), longest)
            except RuntimeError:  # an operation needs data
                pass
            if size > 1 and model is not None:
                group = TPGroup(rank, size)
                cuts = divide(model, group)
                model.tie_weights()
                for name, weight in mxfp4.items():
                    if (cut := cuts.get(name)) is not None:
                        part, *_ = cut.local(weight.get_shape()[cut.dim], group, name)[0]
                        weight.choose((*[slice(None)] * (3 + cut.dim), part))
                num_bytes = parameter_bytes(model, mxfp4, to_dtype)
        if recorder is None:
            return None, num_bytes
        recorded = recorder.finish(config.get_text_config().num_hidden_layers)
    stored = (replace(layer, dtype=dtype) if layer.dtype == "bfloat16" else layer for layer in recorded.storages)
    return replace(recorded, storages=tuple(stored)), num_bytes


def load(
    model_dir: Path,
    longest: int,
    dtype: DType,
    device: torch.device,
    vocab_size: int,
    group: TPGroup,
    *,
    expert_parallel: bool = False,
    kernels: Kernels | None = None,
    threads: int = 1,
    exact: bool = False,
) -> TransformersModel:
    """Loads this rank's part of a checkpoint; all ranks of the group call it. `kernels` None means torch's. Raises
    StartupError, with one line, for one that is damaged or not served."""
    if read_index(model_dir) is not None:
        raise StartupError(f"{model_dir.name}: transformers' path reads safetensors, not GGUF")
    checkpoint = Checkpoint(model_dir)  # refuses pickles, damaged files, and other dtypes than float
    probe(model_dir, longest, dtype, group.size, group.rank)
    level = None if kernels is None else kernels.level
    mxfp4, torch_dtype = _mxfp4_weights(model_dir, level, dtype), getattr(torch, dtype)
    with (
        _plainly(model_dir),
        reading_parts(group, expert_parallel=expert_parallel) if group.size > 1 else nullcontext(),
        reading_mxfp4(mxfp4) if mxfp4 else nullcontext(),
        reading_one_by_one(checkpoint.tensors),
    ):
        model, info = AutoModelForCausalLM.from_pretrained(
            model_dir,
            config=_read_config(model_dir, longest),
            dtype=torch_dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        for problem in ("missing_keys", "mismatched_keys", "error_msgs", "unexpected_keys"):
            for name in sorted(map(str, info.get(problem) or ())):
                raise StartupError(f"tensor {name}: {problem.replace('_', ' ')}")
        del checkpoint
        attach(model, mxfp4, torch_dtype)
        for name, parameter in model.named_parameters():
            if name in mxfp4 and mxfp4[name].form:
                continue
            if parameter.numel() and not torch.isfinite(torch.stack(torch.aminmax(parameter))).all():
                raise StartupError(f"tensor {name} holds NaN or infinite values")
        return TransformersModel(
            _prepare(model.to(device)), vocab_size, longest, group, kernels, threads, mxfp4, exact=exact
        )


def _units(model: Any) -> list[list[Any]]:
    """Returns the modules of each layer, and every other module that has weights of its own."""
    units: list[list[Any]] = [list(each.modules()) for layers in _layer_lists(model) for each in layers]
    inside = {id(module) for unit in units for module in unit}
    return units + [
        [module] for module in model.modules() if id(module) not in inside and next(_own(module), None) is not None
    ]


def _layer_lists(model: Any) -> list[Any]:
    count = model.config.get_text_config().num_hidden_layers
    return [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]


def _own(module: Any) -> Iterator[Tensor]:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            yield tensor


@contextmanager
def _weights_as(model: Any, convert: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Meanwhile modules compute from their weights, unpacked and converted, layer by layer, while each is called."""
    handles = [handle for unit in _units(model) for handle in _convert_while_called(unit, convert)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _convert_while_called(unit: list[Any], convert: Callable[[Tensor], Tensor]) -> Iterator[Any]:
    """Yields the handles of the hooks, at the first module of a unit. Of packed linear layers and the embedding only
    what is used at a time is unpacked and converted; of experts and all else what the unit has."""
    if type(unit[0]).forward is nn.Embedding.forward and len(unit) == 1:
        yield unit[0].register_forward_hook(lambda _, __, vectors: convert(vectors))
        return
    kept: list[tuple[Tensor, Tensor]] = []
    packed = [module.baton_packed for module in unit if "baton_packed" in module.__dict__]
    linears = [each for each in packed if isinstance(each, PackedWeight)]
    experts = [each for each in packed if not isinstance(each, PackedWeight)]

    def unpack(*_: Any) -> None:
        for module in unit:
            in_pieces = module.weight if module.__dict__.get("baton_packed") in linears else None
            for tensor in _own(module):
                if tensor is not in_pieces:
                    kept.append((tensor, tensor.data))
                    tensor.data = convert(weight_of(module, tensor))
        for linear in linears:
            linear.convert = convert
        for each in experts:
            each.unpacked = True

    def restore(*_: Any) -> None:
        for tensor, stored in reversed(kept):
            tensor.data = stored
        kept.clear()
        for linear in linears:
            linear.convert = None
        for each in experts:
            each.unpacked = False

    yield unit[0].register_forward_pre_hook(unpack)
    yield unit[0].register_forward_hook(restore, always_call=True)


def _mxfp4_weights(model_dir: Path, level: str | None, dtype: DType) -> dict[str, Mxfp4Weight]:
    quantization = read_model_config(model_dir, "transformers").quantization
    if quantization is None:
        return {}
    computed = getattr(torch, dtype)
    return mxfp4_weights(Checkpoint(model_dir), quantization, form_for(level, computed), computed)


def _prepare(model: Any) -> Any:
    """Sets the hooks of a model, each with its own cache object."""
    model = model.eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation(EXPERTS)
    model.set_attn_implementation(NAME)
    cache = PagedCache("logits_to_keep" in inspect.signature(model.forward).parameters)
    for module in model.modules():
        module.baton_cache = cache
    mark_kv_heads(model)
    return model


def _read_config(model_dir: Path, longest: int) -> Any:
    """Raises StartupError for rotary frequencies that depend on the longest row of a step."""
    with _plainly(model_dir):
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        config.__dict__.pop("quantization_config", None)  # read by transformers_mxfp4.py
        text = config.get_text_config()
        written = parse_config_json(read_small(model_dir / "config.json"))
        if written.get("rope_parameters") and written.get("rope_scaling"):
            # transformers takes the second alone, and with it its own default of a rope_theta that only the first has.
            text.rope_parameters = dict(rope_parameters(written))
            text.standardize_rope_params()
        rope = getattr(text, "rope_parameters", None) or {}
        for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            if parameters.get("rope_type") == "longrope":
                own = parameters.get("original_max_position_embeddings")
                own = own or getattr(text, "original_max_position_embeddings", None) or 0
                if longest > own:
                    raise StartupError(
                        f"rope_type longrope has other frequencies above {own} positions, for all rows of a step at"
                        f" once; it is served with --max-model-len {own} or less"
                    )
    return config


@contextmanager
def _plainly(model_dir: Path) -> Iterator[None]:
    """Turns whatever transformers raises into a StartupError of one line that names the model."""
    try:
        yield
    except StartupError as error:
        prefix = f"{model_dir.name}: "
        message = error.message if error.message.startswith(prefix) else f"{prefix}not served: {error.message}"
        raise StartupError(message) from None
    except Exception as error:  # whatever the code of 400 architectures raises
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise StartupError(f"{model_dir.name}: transformers {VERSION} cannot load it: {text}") from None

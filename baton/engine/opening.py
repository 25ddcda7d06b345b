"""Opens a checkpoint on one rank: all checks of options, machine and files that need no weight.

What computes a model is Baton's own code or transformers. Each has a function here that opens a checkpoint for it; its
`Opened` is all that `load_runner` knows of the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from baton.core.cores import ranges
from baton.core.errors import StartupError
from baton.core.kv_layout import DType, KVLayout, stored_dtype
from baton.core.ranks import Ranks
from baton.engine.attention_flashinfer import use_flashinfer
from baton.engine.checkpoint import Checkpoint, read_model_config
from baton.engine.computing import build_model
from baton.engine.device import check_capability, check_triton, choose_device, choose_dtype, is_gpu
from baton.engine.kernels.native import Kernels, choose_kernels
from baton.engine.model_native import NativeModel
from baton.engine.options import EngineOptions
from baton.engine.parallel import TPGroup
from baton.engine.quantize import check_quantize
from baton.engine.selftest import check_exact
from baton.engine.transformers_path import check_options, transformers_model
from baton.engine.weights import WeightReader
from baton.models.model_config import AnyConfig, GeneralConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class Setup:
    """What the options amount to on this machine, for this checkpoint. `kernels` None means torch's; `kernels_name`
    says which, and why. `longest` is the most positions of a sequence."""

    options: EngineOptions
    ranks: Ranks
    config: AnyConfig
    longest: int
    device: torch.device
    dtype: DType
    kernels: Kernels | None
    kernels_name: str

    @property
    def on_gpu(self) -> bool:
        return is_gpu(self.device)

    @property
    def max_samples(self) -> int:
        """The most samples of one step."""
        return max(1, self.options.decode_rows * self.options.decode_lengths[-1])


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its part of the weights, of `parameter_bytes`. `layout` is the KV of the whole model as it is
    computed; `classifier` float64 [labels, hidden]."""

    model: Any
    layout: KVLayout
    parameter_bytes: int
    kernels_name: str
    classifier: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint of which no weight is read yet. `layout` is as `Loaded.layout`, without layers where only the loaded
    model knows them. All ranks of a group call `load` together."""

    impl: Literal["baton", "transformers"]
    layout: KVLayout
    load: Callable[[TPGroup], Loaded]
    int8_activations: bool = False


def open_checkpoint(options: EngineOptions, ranks: Ranks, tensors: Checkpoint | None) -> tuple[Setup, Opened]:
    """Decides how this rank computes the model, and opens its checkpoint. With `tensors` the weights come from there.
    Raises StartupError, with one plain line, if the directory or the options are invalid or do not fit the machine."""
    device = choose_device(options.device, ranks.local_rank)
    dtype = choose_dtype(options.dtype, device, options.exact, options.kernels)
    check_quantize(options.quantize, device)
    if is_gpu(device):
        check_triton()
    config = read_model_config(options.model_dir, options.model_impl)
    longest = config.longest(options.max_model_len)
    kernels, kernels_name = choose_kernels(options.kernels, device)
    flashinfer = use_flashinfer(options, config, dtype, stored_dtype(options.kv_dtype, dtype), device)
    options = replace(options, attention="flashinfer" if flashinfer else "triton")
    setup = Setup(options, ranks, config, longest, device, dtype, kernels, kernels_name)
    if isinstance(config, GeneralConfig):
        opened = _open_for_transformers(setup, config)
    else:
        opened = _open(setup, config, tensors)
    if options.borrow_cores:
        _borrow(setup)
    return setup, opened


def _borrow(setup: Setup) -> None:
    if setup.kernels is None or setup.ranks.size > 1 or isinstance(setup.config, GeneralConfig):
        raise StartupError("--borrow-cores: only a worker of one rank with compiled kernels can compute on them")
    setup.kernels.borrow(setup.options.borrow_cores)


def _open_for_transformers(setup: Setup, config: GeneralConfig) -> Opened:
    options, kernels = setup.options, setup.kernels
    check_options(options, kernels)
    if options.exact:
        check_exact(options.block_size, setup.dtype, setup.kernels_name, compiled=kernels is not None)
        torch.set_num_threads(1)  # torch computes the last elements of each thread's share in another way
    module = transformers_model()

    def load(group: TPGroup) -> Loaded:
        model = module.load(
            options.model_dir,
            setup.longest,
            setup.dtype,
            setup.device,
            config.vocab_size,
            group,
            expert_parallel=options.expert_parallel,
            kernels=kernels,
            threads=options.threads,
            exact=options.exact,
        )
        layout = KVLayout(options.block_size, model.recorded.storages)
        return Loaded(model, layout, model.bytes_read, f"transformers {module.VERSION}, {setup.kernels_name}")

    return Opened("transformers", KVLayout(options.block_size, ()), load)


def _open(setup: Setup, config: ModelConfig, tensors: Checkpoint | None) -> Opened:
    options, kernels = setup.options, setup.kernels
    if setup.on_gpu:
        check_capability(setup.device)
    if options.expert_parallel:
        raise StartupError(f"--expert-parallel: the architecture of {options.model_dir.name} has no experts")
    weights = _open_weights(setup, config, tensors)

    def load(group: TPGroup) -> Loaded:
        model = build_model(config, weights, group, kernels, setup.longest, options)
        name = setup.kernels_name
        if options.borrow_cores:
            name += f" borrowing cores {ranges(options.borrow_cores)}"
        if isinstance(model, NativeModel) and model.int8_linears:
            name += f", activations in int8 at {model.int8_linears} matrices in Q8_0"
        classifier = weights.classifier() if config.num_labels and group.leads else None
        return Loaded(model, layout, weights.bytes_read, name, classifier)

    layout = config.kv_layout(options.block_size, setup.dtype)
    return Opened("baton", layout, load, weights.int8_activations)


def _open_weights(setup: Setup, config: ModelConfig, tensors: Checkpoint | None) -> WeightReader:
    options, kernels, dtype = setup.options, setup.kernels, setup.dtype
    share = TPGroup(setup.ranks.rank, setup.ranks.size)  # only divides the model; `connect` returns the connected group
    checkpoint = Checkpoint(options.model_dir) if tensors is None else tensors
    weights = WeightReader(checkpoint, config, share, getattr(torch, dtype), setup.device, quantized=options.quantize)
    if options.quantize == "int8" and kernels is None:
        raise StartupError(f"quantize int8 needs compiled kernels, not {setup.kernels_name}: set quantize to none")
    blocks = kernels is not None and kernels.computes_blocks and dtype == "bfloat16"
    if options.quantize == "int4" and not blocks:
        raise StartupError(
            f"quantize int4 needs dtype bfloat16 and kernels avx512_bf16 or amx, not {dtype} and {setup.kernels_name}:"
            " set quantize to int8 or none"
        )
    weights.in_blocks = blocks and options.quantize != "int8"
    if options.activations == "auto" and not options.exact and kernels is not None and options.quantize == "none":
        weights.int8_activations = blocks and kernels.computes_int8_activations and checkpoint.in_gguf
    if options.exact and not setup.on_gpu:
        check_exact(options.block_size, dtype, setup.kernels_name, compiled=kernels is not None)
    return weights

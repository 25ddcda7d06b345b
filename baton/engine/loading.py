"""Loads a model on one rank: `load_runner`, stage by stage.

check (the options, this machine and this checkpoint), connect (the ranks compare options and connect), load (weights),
kv (as many blocks as fit), capture (on a GPU), warm-up, and measurements of what was loaded: self-test (in exact mode),
self-check (of models that transformers computes), errors of rounded activations and KV.

On a GPU the size of the KV pool depends on what the largest step takes: captures and that step run once beside a pool
of one block, and are measured. Captures empty torch's cache of free memory, so the warm-up, which fills it, comes last.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from baton.core.compatibility import PROTOCOL_VERSION, Compatibility
from baton.core.edge_kinds import choose_edges
from baton.core.kv_layout import DType, KVLayout, stored_dtype, stored_layers
from baton.core.ranks import Ranks
from baton.core.reshard import local_layout
from baton.core.window import STEPS_AHEAD, Window
from baton.engine.activation_error import report_activation_error
from baton.engine.adapters import Adapters
from baton.engine.checkpoint import Checkpoint, model_digest
from baton.engine.computing import how_to_compute
from baton.engine.first_steps import run_largest, warm_up
from baton.engine.grammars import Grammars
from baton.engine.kv_error import TOKENS as KV_ERROR_TOKENS
from baton.engine.kv_error import report_kv_error
from baton.engine.kv_pool import KVPool
from baton.engine.memory import kv_budget, peak_bytes, plan_blocks
from baton.engine.model_native import NativeModel
from baton.engine.opening import Loaded, Opened, Setup, open_checkpoint
from baton.engine.options import EngineOptions
from baton.engine.parallel import LOAD_TIMEOUT_S, TPGroup, connect
from baton.engine.rank_options import RankOptions, check_ranks
from baton.engine.runner import Computing, Runner
from baton.engine.safetensors_files import read_small
from baton.engine.selfcheck import check_against_reference, check_in_float32, num_blocks
from baton.engine.selftest import prove_row_invariance
from baton.models.model_config import GeneralConfig

OnStage = Callable[[str, float], None]


def load_runner(
    options: EngineOptions,
    on_stage: OnStage | None = None,
    *,
    ranks: Ranks | None = None,
    store: Any = None,
    tensors: Checkpoint | None = None,
) -> Runner:
    """Loads a checkpoint onto this machine; `on_stage` is called with each finished stage and its seconds. Several
    `ranks` load their shares at the same time and connect through `store`. With `tensors` the weights come from there,
    and only the config is read from the model's directory: for benchmarks of shapes without a checkpoint on disk.

    Raises StartupError, with one plain line, if the directory or the options are invalid or do not fit the machine,
    RankLost when another rank fails.
    """
    torch.set_num_threads(options.threads)
    ranks = ranks or Ranks()
    with _stage("check", on_stage), torch.no_grad():
        setup, opened = open_checkpoint(options, ranks, tensors)
    options = setup.options
    facts = _facts(setup, opened, model_digest(options.model_dir) if tensors is None else "")
    with _stage("connect", on_stage if ranks.size > 1 else None):
        level = "torch" if setup.kernels is None else setup.kernels.level
        ours = RankOptions.of(options, facts, setup.device.type, level, int8_activations=opened.int8_activations)
        check_ranks(store, ranks, ours, LOAD_TIMEOUT_S)
        group = connect(store, ranks, setup.device, options.host)
    with _stage("load", on_stage), torch.no_grad():
        loaded = opened.load(group)
    make = _Runners(setup, loaded, replace(facts, layout=_stored(loaded.layout, options)), group)
    with _stage("kv", on_stage), torch.no_grad():
        kv = _kv_pool(make)
    grammars = None
    if group.leads and tensors is None:
        grammars = Grammars.load(options.model_dir, setup.config.vocab_size)
    # More than the pool has if all layers have a window.
    held = Window.of(make.facts.layout).max_tokens(kv.num_blocks, 1)
    runner, computing = make(kv, held, grammars)
    if computing.prepare is not None:
        with _stage("capture", on_stage):
            computing.prepare()
    with _stage("warm-up", on_stage):
        warm_up(runner, computing, setup.max_samples)
    _check(make, runner, on_stage)
    group.barrier("end of loading")
    return runner


def _facts(setup: Setup, opened: Opened, digest: str) -> Compatibility:
    """Returns what the rank is compared by. The layers of a model that only its loading reveals are missing."""
    options, directory = setup.options, setup.options.model_dir
    return Compatibility(
        protocol_version=PROTOCOL_VERSION,
        code_version=options.version,
        exact=options.exact,
        dtype=setup.dtype,
        kv_dtype=stored_dtype(options.kv_dtype, setup.dtype),
        quantize=options.quantize,
        model_impl=opened.impl,
        edge_kind=choose_edges(options.edge_kind, setup.device.type),
        config_digest=_digest(directory / "config.json"),
        model_digest=digest,
        vocab_size=setup.config.vocab_size,
        max_model_len=setup.longest,
        layout=_stored(opened.layout, options),
        tokenizer_digest=_digest(directory / "tokenizer.json"),
    )


def _stored(layout: KVLayout, options: EngineOptions) -> KVLayout:
    return replace(layout, layers=stored_layers(layout.layers, options.kv_dtype))


@dataclass(frozen=True, slots=True)
class _Runners:
    """Makes runners of one model, each with a KV pool of its own."""

    setup: Setup
    loaded: Loaded
    facts: Compatibility
    group: TPGroup

    @property
    def local(self) -> KVLayout:
        """The layout of this rank's pool."""
        return local_layout(self.facts.layout, self.group.size, self.group.rank)

    def __call__(
        self, kv: KVPool, max_model_len: int, grammars: Grammars | None = None, computed: DType | None = None
    ) -> tuple[Runner, Computing]:
        """`computed` is the dtype of the computation, if not the model's."""
        setup, model, longest = self.setup, self.loaded.model, min(self.setup.longest, max_model_len)
        dtype = getattr(torch, computed or setup.dtype)
        computing = how_to_compute(model, kv, setup.config, self.group, longest, setup.options, dtype)
        like = torch.empty(0, dtype=getattr(torch, setup.dtype), device=setup.device)
        runner = Runner(
            computing,
            setup.config,
            kv,
            setup.options,
            kernels=self.loaded.kernels_name,
            max_model_len=longest,
            facts=self.facts,
            group=self.group,
            parameter_bytes=self.loaded.parameter_bytes,
            grammars=grammars,
            classifier=self.loaded.classifier,
            adapters=Adapters(model, setup.config, self.group, like),
        )
        return runner, computing


def _kv_pool(make: _Runners) -> KVPool:
    """Allocates as many blocks as fit, the same number on every rank."""
    setup, local, step_bytes = make.setup, make.local, 0
    if setup.on_gpu:

        def largest() -> None:
            run_largest(*make(KVPool(local, 1, setup.device), setup.longest), setup.max_samples)

        step_bytes = peak_bytes(setup.device, largest)
    options, ranks = setup.options, setup.ranks
    budget = kv_budget(options, local, setup.longest, setup.device, ranks, setup.dtype, step_bytes)
    fitting = plan_blocks(local, budget, options.max_model_len, STEPS_AHEAD * options.max_num_tokens)
    return KVPool(local, make.group.minimum(fitting, "KV blocks"), setup.device)


def _check(make: _Runners, runner: Runner, on_stage: OnStage | None) -> None:
    """Proves row invariance in exact mode, compares with transformers' own computation, and logs errors of rounding.
    Raises StartupError if the model may not be served."""
    setup, model = make.setup, make.loaded.model
    options, dtype, device = setup.options, setup.dtype, setup.device
    if options.exact:
        with _stage("self-test", on_stage):
            limits = (setup.config.vocab_size, runner.max_model_len, options.max_num_tokens)
            prove_row_invariance(runner.step_logits, runner.kv, *limits)
    if isinstance(model, NativeModel) and model.int8_linears:
        with _stage("activation error", on_stage), torch.no_grad():
            report_activation_error(runner, model)
    wide = runner
    if make.facts.kv_dtype != dtype:
        unrounded = local_layout(make.loaded.layout, make.group.size, make.group.rank)
        few = max(num_blocks(unrounded), unrounded.blocks_for(KV_ERROR_TOKENS))
        wide, _ = make(KVPool(unrounded, few, device), unrounded.positions_in(few))
    if isinstance(setup.config, GeneralConfig):
        with _stage("self-check", on_stage), torch.no_grad():
            in_float32 = None
            if dtype != "float32":
                layers = tuple(replace(layer, dtype="float32") for layer in make.local.layers)
                pool = KVPool(KVLayout(options.block_size, layers), num_blocks(make.local), device)
                checked, _ = make(pool, pool.layout.positions_in(pool.num_blocks), computed="float32")
                in_float32 = check_in_float32(checked, model.reference, model.in_float32())
            check_against_reference(wide, model.reference, in_float32=in_float32)
    if wide is not runner:
        with _stage("kv error", on_stage), torch.no_grad():
            report_kv_error(runner, wide)


@contextmanager
def _stage(name: str, on_stage: OnStage | None) -> Iterator[None]:
    started = time.perf_counter()
    yield
    if on_stage is not None:
        on_stage(name, time.perf_counter() - started)


def _digest(path: Path) -> str:
    """Returns the SHA-256 of a file; empty if there is none."""
    return hashlib.sha256(read_small(path)).hexdigest() if path.exists() else ""

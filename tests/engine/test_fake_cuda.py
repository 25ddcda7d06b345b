"""Steps on tensors that say they are on a GPU and hold no data: an operation whose host side needs the data (`item`,
`nonzero`, a condition) fails, and so does one that mixes host and device memory. Launches of kernels are counted."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from baton.core.request import SamplingParams, SequenceId, TokenBias
from baton.core.step import History, Row, StepPlan
from baton.engine.batch import RowLimits, make_batch
from baton.engine.checkpoint import Checkpoint, read_model_config
from baton.engine.device_stream import HostMark
from baton.engine.kv_pool import KVPool
from baton.engine.layers import Rotary
from baton.engine.model import Model, shard_config
from baton.engine.outputs import reports
from baton.engine.parallel import TPGroup
from baton.engine.processors import Drafted, Draw, SeenTables, process
from baton.engine.weights import WeightReader

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="with a GPU the kernels are launched: see tests/gpu"
)
CUDA = torch.device("cuda")
GREEDY = SamplingParams(temperature=0.0)
_NO_KERNEL = {"view", "_unsafe_view", "slice", "select", "split", "split_with_sizes", "expand", "transpose", "permute"}
_NO_KERNEL |= {"empty", "empty_like", "new_empty", "empty_strided", "detach", "alias", "as_strided", "t", "unbind"}
_NO_KERNEL |= {"squeeze", "unsqueeze", "lift", "lift_fresh"}


class Launches(TorchDispatchMode):
    """Counts torch's operations on the device that run a kernel, and copies, by name; `kernels` counts Triton's."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor)]
        if any(t.device.type == "cuda" for t in tensors) and name.partition(".")[0] not in _NO_KERNEL:
            self.counts[name] += 1
        return result


class Indexing(TorchFunctionMode):
    """Python's indexing by operations that, unlike it, do not need a torch built for CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return _indexed(*args)
        if func is Tensor.__setitem__:
            target, index, value = args
            if not isinstance(index, Tensor):
                part = _indexed(target, index)
                return part.fill_(value) if not isinstance(value, Tensor) else torch.ops.aten.copy_(part, value)
            value = value if isinstance(value, Tensor) else torch.full((), value, dtype=target.dtype, device=CUDA)
            return torch.ops.aten.index_put_(target, [index], value)
        if func is Tensor.to and kwargs and kwargs.get("device") == CUDA:
            return torch.ops.aten._to_copy(*args, **kwargs)
        return func(*args, **(kwargs or {}))


def _indexed(tensor: Tensor, index: Any) -> Tensor:
    dim = 0
    for part in index if isinstance(index, tuple) else (index,):
        if part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, slice):
            tensor = torch.ops.aten.slice(tensor, dim, part.start, part.stop, part.step or 1)
        elif isinstance(part, Tensor):
            assert part.dtype != torch.bool, "the size of the result depends on data"
            tensor = torch.ops.aten.index(tensor, [*[None] * dim, part])
        else:
            tensor = torch.ops.aten.select(tensor, dim, int(part))
            dim -= 1
        dim += 1
    return tensor


class Weights:
    """A checkpoint's weights, read into host memory; moved to the fake device when a model asks for them."""

    dtype, device = torch.bfloat16, CUDA

    def __init__(self, model_dir: Path) -> None:
        self.config = read_model_config(model_dir)
        reader = WeightReader(Checkpoint(model_dir), self.config, TPGroup(0, 1), self.dtype, torch.device("cpu"))
        self._layers = [reader.layer(index) for index in range(self.config.num_layers)]
        self._rest = reader.embedding(), reader.final_norm(), reader.head()

    def embedding(self) -> Any:
        return _moved(self._rest[0])

    def final_norm(self) -> Any:
        return _moved(self._rest[1])

    def head(self) -> Any:
        return _moved(self._rest[2])

    def layer(self, index: int) -> Any:
        return _moved(self._layers[index])


def _moved(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device=CUDA)
    return (
        replace(value, **{f.name: _moved(getattr(value, f.name)) for f in fields(value)})
        if is_dataclass(value)
        else value
    )


@pytest.fixture
def weights(checkpoint: Callable[..., Path]) -> Weights:
    return Weights(checkpoint("qwen3"))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, weights: Weights) -> Iterator[Launches]:
    from triton.runtime.interpreter import InterpretedFunction

    from baton.engine import attention_triton

    counting = Launches()

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        assert all(arg.device == CUDA or arg.device.type == "cuda" for arg in args if isinstance(arg, Tensor))
        counting.counts[kernel.fn.__name__] += 1

    monkeypatch.setattr(InterpretedFunction, "run", run)
    monkeypatch.setattr(attention_triton, "flash_supports", lambda *_: True)
    modules = (
        "attention_triton",
        "batch",
        "block_tables",
        "decode_graphs",
        "processors",
        "kernels.masks",
        "kernels.sampling",
    )
    for module in modules:
        monkeypatch.setattr(f"baton.engine.{module}.to_device", lambda tensor, device: tensor.to(device=device))
    with Indexing(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), counting:
        yield counting


class Engine:
    def __init__(self, weights: Weights, *, exact: bool = False, paged: Any = None) -> None:
        from baton.engine.attention_triton import TritonAttention
        from baton.engine.kernels.fused import fused

        config, group = weights.config, TPGroup(0, 1)
        self.layers, self.config = config.num_layers, config
        self.model = Model(
            config,
            weights,
            group,  # type: ignore[arg-type]
            fused(Rotary(config, 256, torch.bfloat16, CUDA), exact=exact),
        )
        self.kv = KVPool(config.kv_layout(16, "bfloat16"), 60, CUDA)
        self.attention = TritonAttention(
            shard_config(config, group), 16, torch.bfloat16, CUDA, exact=exact, paged=paged
        )
        self.limits = RowLimits(16, 60, config.vocab_size, 256)

    def forward(self, *rows: Row) -> Tensor:
        return self.model.forward(make_batch(StepPlan(1, rows), self.limits, CUDA), self.kv, self.attention)


def row(name: str, start: int, count: int, samples: int = 1) -> Row:
    return Row(SequenceId(name), start, (5,) * count, tuple(range(12)), GREEDY, samples)


def test_launched_steps_of_every_kind_wait_for_nothing(launches: Launches, weights: Weights) -> None:
    engine = Engine(weights)
    rows = [row("a", 20, 1), row("b", 0, 150), row("c", 30, 40, 3), row("d", 7, 70), row("e", 9, 9)]
    logits = engine.forward(*rows)
    assert logits.device.type == "cuda" and logits.shape == (7, engine.config.vocab_size)
    counts = launches.counts
    assert counts["_flash_attention_forward.default"] == engine.layers, "one call for both long rows"
    assert counts["_attend"] == 2 * engine.layers, "one for short rows, one for the others"


@pytest.mark.parametrize("between", [False, True])
def test_long_rows_of_a_launched_step_take_one_kernel_with_flashinfer_and_four_without(
    launches: Launches, weights: Weights, monkeypatch: pytest.MonkeyPatch, between: bool
) -> None:
    """Two rows, with another one between them (whose tokens are then gathered and put back) or not."""
    from baton.engine import attention_flashinfer

    class Wrapper:
        def __init__(self, *_: Any) -> None: ...

        def plan(self, *_: Any, **__: Any) -> None: ...

        def run(self, q: Tensor, cache: Any, out: Tensor | None = None) -> Tensor:
            launches.counts["run"] += 1
            return torch.empty_like(q) if out is None else out

    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper))
    monkeypatch.setattr(attention_flashinfer, "pinned", lambda tensor, _: tensor)
    local = shard_config(weights.config, TPGroup(0, 1))
    paged = attention_flashinfer.FlashInferRows(local, 16, torch.bfloat16, CUDA, HostMark)
    rows, short = [row("a", 0, 150), row("b", 7, 70)], row("c", 20, 1)
    rows.insert(1 if between else 2, short)
    counts = []
    for engine in (Engine(weights), Engine(weights, paged=paged)):
        engine.forward(*rows)  # makes `arrived` large enough
        every = []
        for layers in (engine.layers, 1):
            engine.model._layers = engine.model._layers[:layers]
            launches.counts.clear()
            engine.forward(*rows)
            every.append(Counter(launches.counts))
        counts.append({name: n / (engine.layers - 1) for name, n in (every[0] - every[1]).items()})
    others = {"_add_norm": 2, "mm.default": 4, "_rotate_and_store": 1, "_attend": 1, "_silu_mul": 1}
    moved = {"index.Tensor": 1, "index_put_.default": 1} if between else {}
    put = moved or {"copy_.default": 1}
    assert counts[0] == others | {"index_select.default": 2, "_flash_attention_forward.default": 1} | put
    assert counts[1] == others | {"run": 1} | moved


def test_launched_steps_in_exact_mode_use_no_library_that_chooses_by_shape(
    launches: Launches, weights: Weights
) -> None:
    engine = Engine(weights, exact=True)
    logits = engine.forward(row("a", 20, 1), row("b", 0, 150), row("c", 30, 40, 3))
    assert logits.shape == (5, engine.config.vocab_size)
    assert launches.counts["_linear"] == 4 * engine.layers + 1 and launches.counts["_attend"] == 2 * engine.layers
    assert not [name for name in launches.counts if "flash" in name or "mm" in name or "linear.d" in name]


@pytest.mark.parametrize("exact", [False, True])
def test_captured_step_waits_for_nothing_and_has_few_launches(
    launches: Launches, weights: Weights, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    from baton.engine.decode_graphs import DecodeGraphs, Shape

    engine = Engine(weights, exact=exact)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    tables = engine.limits.new_tables()
    graphs = DecodeGraphs(engine.model, engine.kv, engine.attention, tables, 256, 8, (1, 3))
    counts = []
    for layers in (engine.layers, 1):
        engine.model._layers = engine.model._layers[:layers]
        step, _ = graphs._step(Shape(4, 3, 2), torch.zeros(4 * 3 + 3 * 4, dtype=torch.int32, device=CUDA))
        launches.counts.clear()
        assert step().shape == (12, engine.config.vocab_size)
        counts.append(sum(launches.counts.values()))
        assert launches.counts["_attend"] == launches.counts["_rotate_and_store"] == layers
    a_layer = (counts[0] - counts[1]) / (engine.layers - 1)
    assert a_layer == 9 and counts[1] - a_layer < 30, launches.counts
    assert not any("copy" in name and "cpu" in name for name in launches.counts)


def test_sampling_and_log_probabilities_wait_for_nothing(launches: Launches) -> None:
    from baton.engine.kernels.masks import mask_rows
    from baton.engine.kernels.sampling import decide

    history = History((1, 2, 3), (4, 5), (7,))
    kinds = (
        SamplingParams(),
        SamplingParams(logit_bias=(TokenBias(3, 1.0),), bad_words=((1,), (5, 6))),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.1, top_p=0.9),
        SamplingParams(min_tokens=4, allowed_token_ids=(1, 2, 3), top_k=4, min_p=0.1),
    )
    draws = [Draw(sampling, 0, 2, history, (), SequenceId(f"s{n}")) for n, sampling in enumerate(kinds)]
    logits = torch.zeros((4, 320), device=CUDA)
    drafted = Drafted(torch.zeros((4, 2), dtype=torch.int64, device=CUDA), [0, 0, 2, 0])
    for more in (None, drafted):
        processed = process(logits, draws, SeenTables(), more, in_place=True)
        mask_rows(processed, [(1, np.zeros(40, np.uint8)), (3, np.zeros(40, np.uint8))])
        tokens = decide(processed, draws)
        assert reports(logits, tokens, 20).shape == (4, 42)
    assert launches.counts["_choose"] == launches.counts["_mask_rows"] == 2


@pytest.mark.parametrize("wait", [lambda t: t.tolist(), lambda t: bool(t[0]), lambda t: t[t > 0]])
def test_fake_device_fails_where_the_host_would_wait(launches: Launches, wait: Callable[[Tensor], object]) -> None:
    with pytest.raises(Exception, match=r"_local_scalar_dense|depends on data"):
        wait(torch.zeros(3, device=CUDA))

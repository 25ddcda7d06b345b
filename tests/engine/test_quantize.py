"""int8 and int4 weights: the nearest steps, compiled kernels against their twin, the same slices on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.engine import opening
from baton.engine.checkpoint import Checkpoint, read_model_config
from baton.engine.kernels.build import processor_levels
from baton.engine.parallel import TPGroup
from baton.engine.quantize import check_quantize, in_blocks, quantize
from baton.engine.runner import Runner
from baton.engine.selftest import prove_row_invariance
from baton.engine.weights import Projection, WeightReader
from tests.engine.test_model_native import VARIANTS as ALL_VARIANTS
from tests.engine.tiles import load
from tests.support.engine_driver import all_logits, bfloat16_levels, random_tokens, tiny_runner
from tests.support.rank_pool import RankPool

CPU = torch.device("cpu")
VARIANTS = {name: ALL_VARIANTS[name] for name in ("llama-bias", "qwen2", "qwen3")}
compiled = pytest.mark.skipif(not processor_levels(), reason="no compiled kernels for this processor")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def test_int8_steps_are_the_nearest_and_use_the_whole_range() -> None:
    weight = torch.randn(40, 100, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 40)[:, None]
    weight[3] = 0.0
    steps, scale = quantize(weight)
    assert steps.dtype == torch.int8 and scale.dtype == torch.float32 and scale[3] == 1.0
    assert torch.equal(steps.abs().amax(1) == 127, torch.arange(40) != 3)
    error = (steps.double() * scale.double()[:, None] - weight.double()).abs()
    assert (error <= scale.double()[:, None] * 0.50001).all()


def test_ties_go_to_the_even_step() -> None:
    steps, scale = quantize(torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0]]))
    assert scale.tolist() == [1.0] and steps.tolist() == [[127, 0, 2, -2, -127]]


class DequantizingReader(WeightReader):
    """Gives torch's kernels the dequantised int8 weights."""

    def __init__(self, *where: Any, quantized: str) -> None:
        super().__init__(*where, quantized="int8")

    def _in_int8(self, weight: Tensor, columns: slice = slice(None)) -> Projection:
        steps, scale = quantize(weight)
        return Projection((steps * scale[:, None])[:, columns].contiguous(), None)


@compiled
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_logits_match_torch_with_dequantised_weights(
    checkpoint: Callable[..., Path], variant: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir, tokens = checkpoint(**VARIANTS[variant]), random_tokens(150)
    found = all_logits(tiny_runner(model_dir, quantize="int8", exact=exact), tokens, [7, 1, 40, 3])
    with monkeypatch.context() as patch:
        patch.setattr(opening, "WeightReader", DequantizingReader)
        twin = all_logits(tiny_runner(model_dir, exact=exact, kernels="torch"), tokens, [150])
    assert torch.allclose(found, twin, rtol=0, atol=1e-4)
    full = all_logits(tiny_runner(model_dir), tokens, [150])
    assert 1e-3 < (found - full).abs().max() < 0.1 * full.abs().max()


@pytest.mark.parametrize("level", bfloat16_levels())
@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_is_row_invariant_and_as_close_to_float32_as_unquantised_torch(
    checkpoint: Callable[..., Path], variant: str, level: str
) -> None:
    model_dir, tokens = checkpoint(**VARIANTS[variant], dtype="bfloat16"), random_tokens(150)
    runner = tiny_runner(model_dir, dtype="bfloat16", kernels=level, quantize="int8")
    prove_row_invariance(runner.step_logits, runner.kv, runner.model_config.vocab_size, runner.max_model_len, 8192)
    found, full = (all_logits(r, tokens, [64]) for r in (runner, tiny_runner(model_dir, quantize="int8")))
    torchs, wide = (tiny_runner(model_dir, dtype=dtype, kernels="torch") for dtype in ("bfloat16", "float32"))
    twin = (all_logits(torchs, tokens, [64]) - all_logits(wide, tokens, [64])).abs().mean()
    assert (found - full).abs().mean() < 1.1 * twin


def linears(model_dir: Path, rank: int, size: int, quantized: str = "int8") -> list[Projection]:
    config = read_model_config(model_dir)
    share = TPGroup(rank, size)
    reader = WeightReader(Checkpoint(model_dir), config, share, torch.float32, CPU, quantized=quantized)
    layers = [reader.layer(index) for index in range(config.num_layers)]
    values = [getattr(layer, field.name) for layer in layers for field in fields(layer)]
    return [value for value in values if isinstance(value, Projection)] + [reader.head()]


def test_ranks_have_slices_of_the_same_steps_and_the_scales_of_whole_rows(checkpoint: Callable[..., Path]) -> None:
    model_dir = checkpoint("llama")
    alone, first, second = linears(model_dir, 0, 1), linears(model_dir, 0, 2), linears(model_dir, 1, 2)

    def rows(projection: Projection) -> set[tuple[float, ...]]:
        assert projection.scale is not None and projection.weight.dtype == torch.int8
        both = torch.cat([projection.scale.double()[:, None], projection.weight.double()], dim=1)
        return set(map(tuple, both.tolist()))

    for one, left, right in zip(alone, first, second, strict=True):
        if left.weight.shape[1] == one.weight.shape[1]:  # column-parallel: other outputs
            assert rows(left) | rows(right) == rows(one)
        else:
            assert torch.equal(torch.cat([left.weight, right.weight], dim=1), one.weight)
            for part in (left, right):
                assert torch.equal(_scale(part), _scale(one))


def _scale(projection: Projection) -> Tensor:
    assert projection.scale is not None
    return projection.scale


@compiled
def test_two_ranks_compute_the_logits_of_one(checkpoint: Callable[..., Path], pool: RankPool) -> None:
    model_dir, tokens = checkpoint("llama", bias=True), random_tokens(120)
    expected = all_logits(tiny_runner(model_dir, quantize="int8"), tokens, [120])
    with pool.load(model_dir, 2, quantize="int8") as ranks:
        assert torch.allclose(all_logits(ranks, tokens, [7, 1, 40]), expected, rtol=0, atol=1e-4)


@compiled
def test_int8_layers_use_less_than_a_third_of_the_float32_memory(checkpoint: Callable[..., Path]) -> None:
    def loaded(**options: Any) -> Runner:
        return tiny_runner(checkpoint("llama"), **options)

    plain, int8 = loaded(), loaded(quantize="int8")
    table = plain.model_config.vocab_size * plain.model_config.hidden_size * 4
    assert int8.parameter_bytes - table < 0.32 * (plain.parameter_bytes - table)


def test_int8_on_a_gpu_and_unknown_names_are_refused() -> None:
    check_quantize("int8", CPU)
    check_quantize("none", torch.device("cuda", 0))
    with pytest.raises(StartupError, match="quantize int8 runs on CPU only, not on cuda"):
        check_quantize("int8", torch.device("cuda", 0))
    with pytest.raises(StartupError, match="quantize must be none, int8 or int4, not 'int3'"):
        check_quantize("int3", CPU)


def test_int8_without_compiled_kernels_is_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(StartupError, match="quantize int8 needs compiled kernels, not torch"):
        tiny_runner(checkpoint("llama"), quantize="int8", kernels="torch")


@pytest.mark.parametrize(("bits", "steps"), [(4, 15), (8, 254)])
def test_blocks_have_the_nearest_steps_and_use_the_whole_range(bits: int, steps: int) -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 40)[:, None]
    weight[3] = 0.5
    blocks = in_blocks(weight, bits)
    assert (blocks.minima is None) == (bits == 8)
    error = (blocks.dequantized() - weight).abs().view(40, 3, 32).amax(2)
    # Half a step, and what rounding scale and minimum to float16 adds at the ends of the range.
    assert (error <= blocks.scales * (0.5 + steps / 2**11) + weight.abs().view(40, 3, 32).amax(2) / 2**11).all()
    codes = blocks.codes.view(40, 3, 32)[torch.arange(40) != 3].int()
    assert (codes.amax(2) - codes.amin(2) > steps / 2 - 1).all()


def test_blocks_of_weights_that_have_no_place_in_them_are_refused() -> None:
    with pytest.raises(ValueError, match="its 40 inputs are not a multiple of 32"):
        in_blocks(torch.ones(4, 40), 4)
    with pytest.raises(ValueError, match="NaN or infinite"):
        in_blocks(torch.full((4, 32), 1e6), 4)


INT4_LEVELS = [level for level in bfloat16_levels() if load(level).computes_blocks]
int4 = pytest.mark.skipif(not INT4_LEVELS, reason="no processor with bf16 products")


@int4
def test_int4_has_the_logits_of_its_blocks_dequantised(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir, tokens = checkpoint("qwen3", dtype="bfloat16"), random_tokens(150)
    runner = tiny_runner(model_dir, dtype="bfloat16", quantize="int4")
    computed = all_logits(runner, tokens, [7, 1, 40, 3])
    prove_row_invariance(runner.step_logits, runner.kv, runner.model_config.vocab_size, runner.max_model_len, 8192)
    full = tiny_runner(model_dir, dtype="bfloat16")
    size = full.model_config.vocab_size * full.model_config.hidden_size * 2
    assert runner.parameter_bytes - size < 0.42 * (full.parameter_bytes - size)

    class Dequantizing(WeightReader):
        def _of_blocks(self, blocks: Any) -> Projection:
            return Projection(blocks.dequantized().to(self.dtype), None)

    monkeypatch.setattr(opening, "WeightReader", Dequantizing)
    assert torch.equal(computed, all_logits(tiny_runner(model_dir, dtype="bfloat16", quantize="int4"), tokens, [150]))
    assert (computed - all_logits(full, tokens, [150])).abs().mean() > 1e-2


@int4
def test_ranks_have_slices_of_the_same_blocks(checkpoint: Callable[..., Path]) -> None:
    model_dir = checkpoint("llama", intermediate_size=192)
    alone, first, second = (linears(model_dir, *part, "int4") for part in ((0, 1), (0, 2), (1, 2)))
    for one, *parts in zip(alone, first, second, strict=True):
        whole, (left, right) = dequantised(one), map(dequantised, parts)
        if left.shape[1] == whole.shape[1]:
            assert set(map(tuple, torch.cat([left, right]).tolist())) >= set(map(tuple, whole.tolist()))
        else:
            assert torch.equal(torch.cat([left, right], dim=1), whole)
    with pytest.raises(StartupError, match=r"would have inputs 0 to 79 of .*down_proj\.weight, not whole bl"):
        linears(checkpoint("llama"), 0, 2, "int4")


def dequantised(projection: Projection) -> Tensor:
    assert projection.blocks is not None
    return projection.blocks.dequantized()


def test_int4_where_blocks_are_not_computed_is_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(
        StartupError, match="quantize int4 needs dtype bfloat16 and kernels avx512_bf16 or amx, not float32"
    ):
        tiny_runner(checkpoint("llama"), quantize="int4")
    with pytest.raises(StartupError, match="quantize int4 runs on CPU only, not on cuda"):
        check_quantize("int4", torch.device("cuda", 0))

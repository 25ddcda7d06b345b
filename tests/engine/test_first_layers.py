"""A step reports when its first layers have written their KV, and its result is the same as without the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.kernels.build import processor_levels
from baton.engine.runner import Runner
from tests.support.engine_driver import bfloat16_levels, float32_levels, random_tokens, tiny_runner

LENGTH = 40


def last_chunk(step_id: int = 1) -> StepPlan:
    row = Row(SequenceId("r"), 0, tuple(random_tokens(LENGTH)), tuple(range(8)), SamplingParams(temperature=0.0), 1)
    return StepPlan(step_id, (row,))


def kv_of(runner: Runner) -> list[Tensor]:
    """A copy of the current KV, by layer."""
    return [torch.stack([t.clone() for t in layer]) for layer in runner.kv.layers]


def written(runner: Runner) -> list[bool]:
    return [bool(layer.any()) for layer in kv_of(runner)]


def cases() -> list[tuple[str, str]]:
    return [("float32", level) for level in float32_levels()] + [("bfloat16", level) for level in bfloat16_levels()]


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize(("dtype", "level"), cases())
def test_first_layers_are_reported_mid_step_and_do_not_change_the_result(
    checkpoint: Callable[..., Path], dtype: str, level: str, first: int
) -> None:
    model_dir = checkpoint("llama", dtype=dtype, num_layers=3)
    plain, early = (tiny_runner(model_dir, dtype=dtype, kernels=level) for _ in range(2))
    for runner in (plain, early):
        for layer in runner.kv.layers:
            for tensor in layer:
                tensor.zero_()
    calls: list[tuple[int, int, list[bool]]] = []
    early.set_first_layers_callback(
        lambda plan: first, lambda step, layers: calls.append((step, layers, written(early)))
    )
    outcomes = [runner.step(last_chunk(7)) for runner in (plain, early)]
    assert calls == [(7, first, [index < first for index in range(3)])]
    assert outcomes[0].sampled == outcomes[1].sampled
    assert all(torch.equal(a, b) for a, b in zip(kv_of(plain), kv_of(early), strict=True))
    assert torch.equal(plain.step_logits(last_chunk())[0], early.step_logits(last_chunk())[0])


@pytest.mark.skipif(not processor_levels(), reason="there are no compiled kernels")
def test_reported_layers_are_not_computed_again(checkpoint: Callable[..., Path]) -> None:
    runner = tiny_runner(checkpoint("llama", num_layers=3))
    keys, values = runner.kv.layers[0]

    def zero_first_layer(step: int, layers: int) -> None:
        for tensor in (keys, values):
            tensor.zero_()

    runner.set_first_layers_callback(lambda plan: 1, zero_first_layer)
    runner.step(last_chunk())
    assert written(runner) == [False, True, True]


@pytest.mark.skipif(not processor_levels(), reason="there are no compiled kernels")
def test_step_reports_nothing_when_no_first_layers_are_requested(checkpoint: Callable[..., Path]) -> None:
    runner = tiny_runner(checkpoint("llama"))
    runner.set_first_layers_callback(lambda plan: 0, lambda step, layers: pytest.fail("called"))
    runner.step(last_chunk())


def test_torch_kernels_do_not_report_first_layers(checkpoint: Callable[..., Path]) -> None:
    runner = tiny_runner(checkpoint("llama"), kernels="torch")
    runner.set_first_layers_callback(lambda plan: 1, lambda step, layers: pytest.fail("called"))
    runner.step(last_chunk())

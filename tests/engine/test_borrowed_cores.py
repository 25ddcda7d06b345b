"""Steps that helper threads on other cores take part in: the same bits whoever computes a unit, and whenever a helper
loses its core."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.core.errors import StartupError
from baton.engine.kernels.native import Kernels
from baton.engine.loading import load_runner
from baton.engine.options import EngineOptions
from tests.engine.single_kernels import ADD, FLOAT, STORE, SWIGLU
from tests.engine.test_kernels_linear import KINDS, Layer, randn
from tests.engine.tiles import load
from tests.support.engine_driver import all_logits, float32_levels, random_tokens, tiny_runner

LIMIT_S = 60.0
_TAKE_AND_LEAVE = """
import random, sys, time
while True:
    until = time.perf_counter() + random.uniform(0, 0.002)
    while time.perf_counter() < until: pass
    time.sleep(random.uniform(0, 0.002))
"""


@contextlib.contextmanager
def borrowing(kernels: Kernels, count: int = 2) -> Iterator[None]:
    """Helper threads on up to `count` cores of this process; not idle ones, which would not run on a busy machine."""
    kernels.borrow(sorted(os.sched_getaffinity(0))[-count:], idle=False)
    try:
        yield
    finally:
        kernels.borrow([])


@contextlib.contextmanager
def owner() -> Iterator[None]:
    """A process that needs the last core of this process for random times, and leaves it for random times."""
    core = max(os.sched_getaffinity(0))
    process = subprocess.Popen(
        [sys.executable, "-c", _TAKE_AND_LEAVE], preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def until(happened: Callable[[], bool], check: Callable[[], None]) -> None:
    """Repeats `check`, at least once and until it `happened` that its code path was taken."""
    ends = time.monotonic() + LIMIT_S
    check()
    while not happened():
        assert time.monotonic() < ends, "the helper has not taken part"
        check()


@pytest.mark.parametrize(("level", "dtype"), KINDS, ids=str)
def test_outputs_have_the_same_bits_on_borrowed_cores(level: str, dtype: torch.dtype) -> None:
    bias, kernels = randn(672, seed=1).to(dtype), load(level)
    whole = [Layer(level, randn(672, 100).to(dtype), bias, int8=int8) for int8 in (False, True)]
    partial = Layer(level, randn(333, 100).to(dtype), bias[:333])  # its last group is not whole
    rows = {count: randn(count, 100, seed=count).to(dtype) for count in (1, 7, 33, 100)}

    def outputs(threads: int) -> Iterator[torch.Tensor]:
        for x, layer in itertools.product(rows.values(), (*whole, partial)):
            before = randn(len(x), layer.layer.n, seed=7).to(dtype)
            for into in (STORE, ADD, FLOAT, *([] if layer is partial else [SWIGLU])):
                yield layer(x, into, before.clone() if into == ADD else None, threads)

    alone = list(outputs(1))

    def same(threads: int = 1) -> None:
        assert all(torch.equal(*pair) for pair in zip(outputs(threads), alone, strict=True))

    with borrowing(kernels):
        same(threads=2)
        until(lambda: kernels.borrowed()[0] >= 20, same)


def test_a_helper_that_loses_its_core_delays_no_step_and_changes_no_bit() -> None:
    level, dtype = KINDS[-1]
    layers = [Layer(level, randn(1024, size).to(dtype)) for size in (1536, 576)]
    inputs = [randn(rows, layer.layer.k, seed=rows).to(dtype) for rows in (40, 3, 90) for layer in layers]
    alone = [layer(x) for x, layer in zip(inputs, layers * 3, strict=True)]
    kernels = layers[0].kernels

    def same() -> None:
        for x, layer, expected in zip(inputs, layers * 3, alone, strict=True):
            assert torch.equal(layer(x), expected)

    with borrowing(kernels, 1), owner():
        until(lambda: min(kernels.borrowed()) >= 5, same)


@pytest.mark.parametrize("level", float32_levels()[-1:])
def test_logits_of_steps_are_the_same_with_helpers(checkpoint: Callable[..., Path], level: str) -> None:
    model_dir, tokens, kernels = checkpoint(arch="llama", intermediate_size=256), random_tokens(150), load(level)
    alone = all_logits(tiny_runner(model_dir, kernels=level), tokens, [7, 1, 40, 3])
    runner = tiny_runner(model_dir, kernels=level)

    def same() -> None:
        assert torch.equal(all_logits(runner, tokens, [7, 1, 40, 3]), alone)

    with borrowing(kernels):
        until(lambda: kernels.borrowed()[0] >= 10, same)


def test_a_helper_is_one_thread_that_runs_only_on_an_idle_core() -> None:
    core, kernels, before = max(os.sched_getaffinity(0)), load(float32_levels()[0]), set(os.listdir("/proc/self/task"))
    kernels.borrow([core])
    try:
        (helper,) = (int(thread) for thread in set(os.listdir("/proc/self/task")) - before)
        assert os.sched_getscheduler(helper) == os.SCHED_IDLE and os.sched_getaffinity(helper) == {core}
    finally:
        kernels.borrow([])
    assert str(helper) not in os.listdir("/proc/self/task")


def test_cores_that_cannot_be_borrowed_are_refused(checkpoint: Callable[..., Path]) -> None:
    options = EngineOptions(model_dir=checkpoint(), device="cpu", kernels="torch", borrow_cores=(0,))
    with pytest.raises(StartupError, match="--borrow-cores: only a worker of one rank with compiled kernels"):
        load_runner(options)
    with pytest.raises(StartupError, match="--borrow-cores 1000: Invalid argument"):
        load_runner(replace(options, kernels=float32_levels()[0], borrow_cores=(1000,)))

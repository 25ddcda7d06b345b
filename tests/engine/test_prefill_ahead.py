"""Steps of a prefill worker that are launched while the one before is not collected compute the same KV and tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.core.request import GenerateRequest
from baton.engine.runner import Runner
from prefill.scheduler import PrefillScheduler
from tests.support.builders import make_request
from tests.support.engine_driver import random_tokens, tiny_runner


def kv_and_tokens(runner: Runner, requests: list[GenerateRequest], ahead: bool) -> tuple[list[Any], list[int], int]:
    """Computes prompts with launches, up to two at a time."""
    scheduler = PrefillScheduler(runner.layout, runner.num_blocks, 32, plan_ahead=ahead)
    for request in requests:
        scheduler.submit(request, 0.0, hand_over=True)
    outstanding, tokens = 0, {}
    while True:
        plan = scheduler.begin_step(0.0)
        if plan is not None:
            runner.launch(plan)
            outstanding += 1
            if ahead and outstanding < 2:
                continue
        if not outstanding:
            break
        outstanding -= 1
        for progress in scheduler.finish_step(runner.collect(), 0.0).progress:
            if progress.first_token is not None:
                tokens[progress.sequence_id] = progress.first_token
    kv = []
    for request in requests:
        ids = list(scheduler.block_ids(request.sequence_id))
        used = request.num_prefill_tokens
        kv.append([part[ids].flatten(0, 1)[:used].clone() for layer in runner.kv.layers for part in layer])
    return kv, [tokens[request.sequence_id] for request in requests], scheduler.steps_ahead


@pytest.mark.parametrize("same_beginning", [False, True])
def test_steps_launched_ahead_compute_the_same(checkpoint: Callable[..., Path], same_beginning: bool) -> None:
    model = checkpoint(arch="llama")
    beginning = random_tokens(64) if same_beginning else []
    requests = [
        make_request(f"r{n}", tuple(beginning + random_tokens(length, seed=n)), 4)
        for n, length in enumerate((90, 5, 33, 64, 130))
    ]
    expected = kv_and_tokens(tiny_runner(model, exact=True), requests, ahead=False)
    found = kv_and_tokens(tiny_runner(model, exact=True), requests, ahead=True)
    assert found[1] == expected[1] and found[2] > 2 and expected[2] == 0
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert all(a.equal(b) for a, b in zip(mine, theirs, strict=True))

"""A cached prefix changes no bit: the scheduler drives a real engine, and a cache hit computes the same as a miss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.core.request import GenerateRequest
from baton.core.step import Draw, StepOutcome
from baton.engine.runner import Runner
from prefill.scheduler import PrefillScheduler
from tests.support.builders import make_request
from tests.support.engine_driver import random_tokens, tiny_runner
from tests.support.sampler_cases import sample

TURN_1 = random_tokens(150, seed=1)


@dataclass
class Prefilled:
    logits: Tensor
    kv: list[Tensor]
    cached: int


def prefill(runner: Runner, scheduler: PrefillScheduler, request: GenerateRequest) -> Prefilled:
    """Computes a prompt to its first token; the KV is [tokens, heads, head_dim] per layer and K or V."""
    scheduler.submit(request, 0.0, hand_over=True)
    while True:
        plan = scheduler.begin_step(0.0)
        assert plan is not None
        (logits,) = runner.step_logits(plan)
        draws = [Draw(r.sampling, 0, r.output_index) for r in plan.rows if r.num_sampled]
        outcome = StepOutcome(plan.step_id, (tuple(sample(logits, draws)) if draws else (),))
        (progress,) = scheduler.finish_step(outcome, 0.0).progress
        if progress.first_token is not None:
            break
    blocks = torch.tensor(scheduler.block_ids(request.sequence_id))
    kv = [
        part[blocks].flatten(0, 1)[: request.num_prefill_tokens].clone() for pair in runner.kv.layers for part in pair
    ]
    scheduler.release_send(request.sequence_id)
    scheduler.check()
    return Prefilled(logits, kv, progress.cached)


def scheduler_of(runner: Runner, num_blocks: int = 0, *, step_tokens: int = 64, on: bool = True) -> PrefillScheduler:
    return PrefillScheduler(runner.layout, num_blocks or runner.num_blocks, step_tokens, prefix_cache=on)


def assert_same(hit: Prefilled, miss: Prefilled) -> None:
    assert torch.equal(hit.logits, miss.logits)
    for mine, theirs in zip(hit.kv, miss.kv, strict=True):
        assert torch.equal(mine, theirs)


@pytest.fixture(scope="module", params=[16, 32])
def exact(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Runner:
    return tiny_runner(checkpoint(arch="llama"), exact=True, block_size=request.param)


@pytest.mark.parametrize("more", [1, 16, 90])
@pytest.mark.parametrize("step_tokens", [7, 64, 512])
def test_cache_hit_computes_the_same_bits_as_a_miss(exact: Runner, more: int, step_tokens: int) -> None:
    prompt = TURN_1 + random_tokens(more, seed=more)
    miss = prefill(exact, scheduler_of(exact, on=False), make_request("miss", prompt))
    scheduler = scheduler_of(exact, step_tokens=step_tokens)
    prefill(exact, scheduler, make_request("first", TURN_1))
    hit = prefill(exact, scheduler, make_request("hit", prompt))
    size = exact.layout.block_size
    assert (miss.cached, hit.cached) == (0, 150 // size * size)
    assert_same(hit, miss)


def test_fully_cached_prompt_recomputes_its_last_block_without_changing_shared_blocks(exact: Runner) -> None:
    prompt, scheduler = TURN_1[:128], scheduler_of(exact)
    first = prefill(exact, scheduler, make_request("first", prompt))
    shared = scheduler.cache.match(list(scheduler.cache._key_of.values()))
    before = [part[list(shared)].clone() for pair in exact.kv.layers for part in pair]
    hit = prefill(exact, scheduler, make_request("hit", prompt))
    assert hit.cached == 128 - exact.layout.block_size
    assert_same(hit, first)
    after = [part[list(shared)] for pair in exact.kv.layers for part in pair]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_eviction_under_pressure_changes_no_bit(exact: Runner) -> None:
    """The pool has room for one and a half prompts: each evicts a part of the previous one."""
    prompts = {n: random_tokens(150, seed=n) for n in range(3)}
    alone = {n: prefill(exact, scheduler_of(exact, on=False), make_request("a", p)) for n, p in prompts.items()}
    scheduler = scheduler_of(exact, num_blocks=exact.layout.blocks_for(225))
    cached = []
    for number, n in enumerate([0, 0, 1, 0, 2, 2, 1, 0]):
        found = prefill(exact, scheduler, make_request(f"r{number}", prompts[n]))
        assert_same(found, alone[n])
        cached.append(found.cached)
    assert scheduler.cache.evictions > 0
    assert cached[1] > cached[3] > 0 == cached[2]

"""Draft tokens that a draft model makes in one call, against those made with one step for each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.core.errors import InvariantError
from baton.core.request import SamplingParams, SequenceId
from baton.core.step import DraftRow, Draw, History, Row, StepPlan
from baton.engine.draft_tokens_device import DeviceDraftTokens
from baton.engine.runner import Runner
from baton.engine.sampler import pack_draws
from decode.speculation.engine import SpeculativeEngine, propose_pass_by_pass
from tests.engine.single_kernels import Wanted
from tests.support.device_choice import decide
from tests.support.engine_driver import random_tokens, tiny_runner

GREEDY, WARM = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=7)
NUCLEUS = SamplingParams(temperature=0.9, top_p=0.9, min_p=0.02, seed=1 << 63)
PENALTY = SamplingParams(temperature=0.0, repetition_penalty=1.3)
# sampling, tokens whose KV the draft has, tokens that it computes first, number of draft tokens
WORK = ((GREEDY, 40, 1, 8), (WARM, 3, 5, 1), (NUCLEUS, 90, 16, 5), (GREEDY, 0, 33, 0), (WARM, 15, 1, 3))
BLOCKS = 9  # per sequence, of 16 positions each


def draft_rows(
    runner: Runner, work: tuple[tuple[SamplingParams, int, int, int], ...], *, of_target: bool = False
) -> StepPlan:
    """A plan with a draft row for each entry, and a row for each that drafts; computes the KV that exists before it."""
    rows, drafts = [], []
    for number, (sampling, had, behind, count) in enumerate(work):
        sequence, tokens = SequenceId(f"s{number}"), tuple(random_tokens(had + behind, seed=number))
        blocks = tuple(range(number * BLOCKS, (number + 1) * BLOCKS))
        if before := had + behind - 1 if of_target else had:
            runner.step(StepPlan(0, (Row(sequence, 0, tokens[:before], blocks, sampling),)))
        history = History(tokens[:-1], tokens[-1:]) if sampling.penalises else None
        place = len(rows)
        if count:
            rows.append(Row(sequence, had + behind - 1, tokens[-1:], blocks, sampling, 1, 1, history))
        drafts.append(DraftRow(sequence, had, tokens[had:], blocks, count, place if count else -1))
    return StepPlan(1, tuple(rows), tuple(drafts))


def draft_tokens(runner: Runner, plan: StepPlan) -> tuple[tuple[int, ...], ...]:
    return SpeculativeEngine(runner, runner)._draft_tokens(plan)


def written(runner: Runner, work: tuple[tuple[SamplingParams, int, int, int], ...]) -> Tensor:
    """Keys and values of all layers at the positions that a plan computes, which exclude the last draft token."""
    parts = []
    for number, (_, had, behind, count) in enumerate(work):
        for cache in (cache for pair in runner.kv.layers for cache in pair):
            blocks = cache[number * BLOCKS : (number + 1) * BLOCKS].flatten(0, 1)
            parts.append(blocks[: had + behind + max(count - 1, 0)].flatten())
    return torch.cat(parts)


@pytest.fixture(params=["float32", "bfloat16", "as on a GPU"])
def pair(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> tuple[Runner, Runner]:
    on_gpu = request.param == "as on a GPU"
    dtype, kernels = ("float32", "torch") if on_gpu else (request.param, "auto")
    model_dir = checkpoint("llama", dtype=dtype)
    fast, slow = (tiny_runner(model_dir, dtype=dtype, kernels=kernels) for _ in range(2))
    if on_gpu:
        fast._propose = DeviceDraftTokens(fast._compute, fast._limits, torch.device("cpu"), decide, fast._tables)
    if not fast.can_propose:
        pytest.skip(f"{fast.kernels} computes {request.param}")
    slow._propose = None
    return fast, slow


@pytest.mark.parametrize("work", [WORK, WORK[:1], WORK[1:2], (*WORK, (PENALTY, 20, 2, 4))])
def test_draft_tokens_and_kv_equal_those_of_one_step_for_each(pair: tuple[Runner, Runner], work: tuple) -> None:
    fast, slow = pair
    found, expected = (draft_tokens(runner, draft_rows(runner, work)) for runner in pair)
    assert found == expected and [len(g) for g in found] == [count for *_, count in work if count]
    # torch's kernels sum in another order in batches of other rows, as when one row is drafted pass by pass.
    near = 1e-5 if fast.kernels.startswith("torch") else 0.0
    assert torch.allclose(written(fast, work), written(slow, work), rtol=0, atol=near)
    assert (fast.propose_calls, slow.propose_calls) == (1, 0)


def test_rows_with_penalties_are_drafted_pass_by_pass(pair: tuple[Runner, Runner]) -> None:
    fast, _ = pair
    plan = draft_rows(fast, ((PENALTY, 20, 2, 4),))
    assert len(draft_tokens(fast, plan)[0]) == 4 and fast.propose_calls == 0


def test_plan_that_only_fills_kv_makes_no_drafting_call(pair: tuple[Runner, Runner]) -> None:
    fast, _ = pair
    assert draft_tokens(fast, draft_rows(fast, ((GREEDY, 0, 20, 0),))) == () and fast.propose_calls == 0


def test_draft_beyond_the_blocks_or_on_an_unsupported_runner_is_refused(pair: tuple[Runner, Runner]) -> None:
    fast, slow = pair
    plan = draft_rows(fast, ((GREEDY, 10, 1, 1),))
    row = Row(SequenceId("s0"), 10, plan.drafts[0].tokens, plan.drafts[0].block_ids, GREEDY, 1)
    with pytest.raises(InvariantError, match=r"cannot draft 135 tokens after 11 of 144 positions"):
        fast.propose(StepPlan(1, (row,)), [135])
    assert len(fast.propose(StepPlan(1, (row,)), [134])[0]) == 134
    with pytest.raises(InvariantError, match="do not support drafting in one call"):
        slow.propose(StepPlan(1, (row,)), [1])
    assert len(propose_pass_by_pass(slow, 1, [(plan.drafts[0], row)])[0]) == 1


def test_draws_are_packed_into_the_struct_that_the_kernels_read() -> None:
    draws = (Draw(NUCLEUS, 3, 7), Draw(WARM, 0, 1 << 31))
    asked = pack_draws(draws, (5, 9), (8, 2))
    assert len(asked) == 2 * ctypes.sizeof(Wanted)
    first, second = (Wanted * 2).from_buffer_copy(asked)
    assert (first.draw.temperature, first.draw.top_p, first.draw.min_p, first.draw.top_k) == (0.9, 0.9, 0.02, 0)
    assert (first.draw.key_low, first.draw.key_high) == (0, 1 << 31)
    assert (first.draw.output_index, first.draw.choice, first.row, first.count) == (7, 3, 5, 8)
    assert (second.draw.key_low, second.draw.output_index, second.row, second.count) == (7, 1 << 31, 9, 2)


def test_more_rows_than_the_kept_memory_holds_get_the_same_draft_tokens(pair: tuple[Runner, Runner]) -> None:
    work = tuple((WARM if number % 2 else GREEDY, 3 + number, 1 + number % 3, 1 + number % 4) for number in range(7))
    for some in (work, work[:4], work[4:]):  # by then the kept memory has been used
        found, expected = (draft_tokens(runner, draft_rows(runner, some)) for runner in pair)
        assert found == expected and len(found) == len(some)

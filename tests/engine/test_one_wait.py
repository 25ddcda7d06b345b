"""A step with a draft on a device waits once, for draft tokens and tokens together, and yields the same results as
plain steps without a draft."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.core.errors import InvariantError
from baton.core.request import GenerateRequest, SamplingParams, TokenBias
from baton.core.step import StepOutcome, StepPlan
from baton.engine.draft_tokens_device import DeviceDraftTokens
from baton.engine.launches import Launches
from baton.engine.runner import Runner
from baton.runtime.model_source import builtin_directory
from decode.speculation.drafts import ModelDrafts, NgramDrafts
from decode.speculation.engine import SpeculativeEngine, _first_row, propose_pass_by_pass
from decode.speculation.policy import Speculation
from tests.engine.test_launches import SAMPLINGS, same
from tests.engine.test_propose_at_once import PENALTY, WORK, draft_rows
from tests.support.decode_drive import Run, decode_all
from tests.support.device_choice import Undecided, decide
from tests.support.engine_driver import GREEDY, tiny_runner
from tests.support.marked_device import CPU, MarkedDevice
from tests.support.pair_drive import FixedCosts

EACH = (
    *SAMPLINGS["all"],
    SamplingParams(temperature=0.0, min_tokens=5, presence_penalty=0.7, stop_token_ids=tuple(range(10, 60))),
    SamplingParams(temperature=0.0, logprobs=2, repetition_penalty=1.3, frequency_penalty=0.4),
)
COUNT = len(EACH) + 4
"""Requests: some samplings meet again with another prompt."""


class WaitCountingEngine(SpeculativeEngine):
    """Records for each step how often the host waited for the device."""

    def __init__(self, target: Runner, draft: Runner | None, device: MarkedDevice) -> None:
        super().__init__(target, draft)
        self._device = device
        self.steps: list[tuple[StepPlan, StepOutcome, int]] = []

    def step(self, plan: StepPlan) -> StepOutcome:
        before = self._device.waits
        outcome = super().step(plan)
        self.steps.append((plan, outcome, self._device.waits - before))
        return outcome


def requests(count: int, length: int = 20) -> list[GenerateRequest]:
    """Prompts of 3 to 70 tokens that repeat pieces of themselves, each sampling in turn, outputs that end early."""
    made = []
    for index in range(count):
        generator = random.Random(index)
        piece = tuple(generator.choices(range(6, 4096), k=generator.randint(3, 35)))
        eos = tuple(generator.sample(range(4096), 4096 // 12)) if index % 3 == 1 else ()
        sampling = replace(EACH[index % len(EACH)], seed=index)
        prompt = piece + piece[: generator.randint(0, 35)]
        made.append(GenerateRequest(f"r{index}", prompt, generator.randint(2, length), sampling, eos_token_ids=eos))
    return made


@pytest.fixture(scope="module")
def plain() -> Iterator[Run]:
    target = tiny_runner(builtin_directory("target"), exact=True, kernels="torch", kv_memory_bytes=64 << 20)
    yield decode_all(target, requests(COUNT), batch=5)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> MarkedDevice:
    return MarkedDevice(monkeypatch)


@pytest.fixture
def pair() -> tuple[Runner, Runner]:
    target = tiny_runner(builtin_directory("target"), exact=True, kernels="torch", kv_memory_bytes=64 << 20)
    return target, tiny_runner(builtin_directory("draft"), kernels="torch", kv_memory_bytes=16 << 20)


def test_each_step_waits_once_and_yields_the_results_of_plain_steps(
    pair: tuple[Runner, Runner], device: MarkedDevice, plain: Run
) -> None:
    target, draft = pair
    device.adopt(target, draft)
    engine = WaitCountingEngine(target, draft, device)
    # Fewer blocks than the drafts need: some sequences get no draft tokens.
    drafts = ModelDrafts(draft.layout, 14, draft.max_model_len)
    drafting = Speculation(drafts, FixedCosts(), fixed_length=4)
    some = requests(COUNT)
    with device:
        run = decode_all(target, some, speculation=drafting, engine=engine, batch=5)
    assert same(run, plain) and any(run.logprobs.values()) and set(run.ended.values()) == {"length", "stop"}
    assert run.counters.accepted_tokens > 20
    assert [waits for *_, waits in engine.steps] == [1] * len(engine.steps)
    assert 0 < device.most_copied < 200, "tokens and log-probabilities, not logits of 4,096 tokens"
    kinds = Counter(kind for plan, outcome, _ in engine.steps for kind in kinds_of(plan, outcome))
    assert min(kinds[kind] for kind in ("several lengths", "some without", "fills beside")) > 2, kinds
    with_draft_tokens = [outcome for plan, outcome, _ in engine.steps if any(d.num_draft_tokens for d in plan.drafts)]
    assert len(with_draft_tokens) > 20 and draft.propose_calls >= len(with_draft_tokens)
    assert all(0.0 < outcome.draft_s < outcome.elapsed_s for outcome in with_draft_tokens)


def kinds_of(plan: StepPlan, outcome: StepOutcome) -> Iterator[str]:
    lengths = {len(draft_tokens) for draft_tokens in outcome.draft_tokens}
    if len(lengths - {0}) > 1:
        yield "several lengths"
    if 0 in lengths and len(lengths) > 1:
        yield "some without"
    if len({d.num_draft_tokens > 0 for d in plan.drafts}) == 2:
        yield "fills beside"


@pytest.mark.parametrize("work", [WORK, (*WORK, (PENALTY, 20, 2, 4)), WORK[:1]], ids=["all", "penalties", "alone"])
def test_step_with_several_samplings_and_draft_lengths_waits_once(
    checkpoint: Callable[..., Path], device: MarkedDevice, work: tuple[tuple[SamplingParams, int, int, int], ...]
) -> None:
    """As in tests/gpu. KV that was not written is NaN and must not be read."""
    target, draft = (tiny_runner(checkpoint("llama"), kernels="torch") for _ in range(2))
    for cache in (cache for runner in (target, draft) for pair in runner.kv.layers for cache in pair):
        cache.fill_(float("nan"))
    plan = draft_rows(draft, work)
    assert plan == draft_rows(target, work, of_target=True)
    device.adopt(target, draft)
    engine = WaitCountingEngine(target, draft, device)
    with device:
        found = engine.step(plan)
    assert [waits for *_, waits in engine.steps] == [1]
    target.launches_ahead = False
    slow = SpeculativeEngine(target, draft).step(plan)
    assert (found.sampled, found.draft_tokens) == (slow.sampled, slow.draft_tokens)


def test_step_that_only_fills_the_draft_kv_waits_once(pair: tuple[Runner, Runner], device: MarkedDevice) -> None:
    target, draft = pair
    device.adopt(target, draft)
    engine = WaitCountingEngine(target, draft, device)
    plan = draft_rows(draft, ((GREEDY, 0, 20, 0),))
    with device:
        outcome = engine.step(plan)
    assert outcome.sampled == outcome.draft_tokens == () and 0.0 < outcome.draft_s < outcome.elapsed_s
    assert [waits for *_, waits in engine.steps] == [1]


def test_step_with_ngram_draft_tokens_waits_once(pair: tuple[Runner, Runner], device: MarkedDevice, plain: Run) -> None:
    target, _ = pair
    device.adopt(target, None)
    engine = WaitCountingEngine(target, None, device)
    drafting = Speculation(NgramDrafts(), FixedCosts(), fixed_length=3)
    with device:
        run = decode_all(target, requests(COUNT), speculation=drafting, engine=engine, batch=5)
    assert same(run, plain) and run.counters.drafted_tokens > 3
    assert [waits for *_, waits in engine.steps] == [1] * len(engine.steps)


def test_undecided_draws_are_made_by_the_plain_sampler(
    pair: tuple[Runner, Runner], device: MarkedDevice, plain: Run
) -> None:
    """This includes draws after draft tokens that their penalties count."""
    target, draft = pair
    device.adopt(target, draft, Undecided(every=5))
    engine = WaitCountingEngine(target, draft, device)
    drafting = Speculation(
        ModelDrafts(draft.layout, draft.num_blocks, draft.max_model_len), FixedCosts(), fixed_length=2
    )
    with device:
        run = decode_all(target, requests(COUNT), speculation=drafting, engine=engine, batch=3)
    assert same(run, plain) and run.counters.accepted_tokens > 20 and target.launches.rows_corrected > 5
    waits = Counter(waits for *_, waits in engine.steps)
    assert set(waits) == {1, 2} and waits[2] > 20, "one more where some draw was undecided"


# The biased token is sampled until its penalty is too high: if draft tokens were not counted, once more.
PENALIZED = SamplingParams(temperature=0.0, frequency_penalty=3.0, logit_bias=(TokenBias(20, 9.0),))
BIASED = SamplingParams(temperature=0.9, presence_penalty=5.0, logit_bias=(TokenBias(20, 9.0),), min_tokens=4, seed=3)


def test_device_draft_tokens_equal_those_of_one_step_for_each(checkpoint: Callable[..., Path]) -> None:
    """This includes draws that change logits and that depend on the draft tokens before them."""
    fast, slow = (tiny_runner(checkpoint("llama"), kernels="torch") for _ in range(2))
    fast._propose = DeviceDraftTokens(fast._compute, fast._limits, CPU, decide, fast._tables)
    work = (*WORK, (PENALTY, 20, 2, 6), (PENALIZED, 33, 1, 8), (BIASED, 8, 1, 5))
    found: list[list[int]] = []
    for runner in (fast, slow):
        plan = draft_rows(runner, work)
        first = [(drafted, _first_row(drafted, plan)) for drafted in plan.drafts]
        if runner is slow:
            by_row = propose_pass_by_pass(runner, 1, first)
            found.append([token for row in sorted(by_row) for token in by_row[row]])
            continue
        counts = [drafted.num_draft_tokens for drafted in plan.drafts]
        found.append(runner.queue_draft_tokens(StepPlan(1, tuple(row for _, row in first)), counts).tokens.tolist())
    assert found[0] == found[1] and len(found[0]) == sum(count for *_, count in work)


VALUES = torch.arange(6)
WAITS: dict[str, Callable[[Tensor], object]] = {
    "tolist": lambda t: t.tolist(),
    "condition": lambda t: bool(t[0]),
    "equal": lambda t: torch.equal(t, t),
    "allclose": lambda t: torch.allclose(t, t),
    "to a device": lambda t: t.to(CPU),
    "to device=": lambda t: t.to(device="cpu"),
    "type of a device": lambda t: t.type("torch.IntTensor"),
    "nonzero": lambda t: t.nonzero() + t[0],
    "argwhere": lambda t: torch.argwhere(t) + t[0],
    "where of one": lambda t: torch.where(t > 2)[0] + t[0],
    "unique": lambda t: t.unique() + t[0],
    "unique_consecutive": lambda t: t.unique_consecutive() + t[0],
    "bincount": lambda t: t.bincount() + t[0],
    "repeat_interleave": lambda t: t.repeat_interleave(t) + t[0],
    "mask": lambda t: t[t > 2] + t[0],
}
WAITS_NOT: dict[str, Callable[[Tensor], object]] = {
    "where of three": lambda t: torch.where(t > 2, t, 0),
    "to a dtype": lambda t: t.to(torch.float32) + t,
    "type of a dtype": lambda t: t.type(torch.float32) + t,
    "made there": lambda t: torch.zeros(6, device=CPU) + t,
}
REFUSED: dict[str, Callable[[Tensor], object]] = {
    "host memory": lambda t: t + VALUES,
    "tensor": lambda t: t + torch.tensor([1] * 6, device=CPU),
    "as_tensor": lambda t: t + torch.as_tensor([1] * 6, device=CPU),
    "pageable": lambda t: t + VALUES.to(CPU),
}


@pytest.mark.parametrize("name", [*WAITS, *WAITS_NOT, *REFUSED])
def test_marked_device_counts_waits_and_refuses_host_memory(device: MarkedDevice, name: str) -> None:
    what = {**WAITS, **WAITS_NOT, **REFUSED}[name]
    with device:
        there = torch.zeros(6, dtype=torch.int64, device=CPU)
        if name in REFUSED:
            with pytest.raises(AssertionError, match=r"host memory|to_device"):
                what(there)
        else:
            what(there)
    assert device.waits == (name in WAITS)


def test_verification_has_draft_token_positions_and_a_wrong_count_is_refused(pair: tuple[Runner, Runner]) -> None:
    target, draft = pair
    with pytest.raises(InvariantError, match="do not support drafting in one call"):
        draft.queue_draft_tokens(StepPlan(1, ()), [])
    draft._propose = DeviceDraftTokens(draft._compute, draft._limits, CPU, decide, draft._tables)
    target.launches = Launches(CPU, target.group, decide)
    plan = draft_rows(draft, ((GREEDY, 10, 1, 3),))
    draws = target._batch(plan.to_verify()).draws
    assert [draw.output_index for draw in draws] == [1, 2, 3, 4], "a sample at each draft token"
    assert not any(draw.drafts for draw in draws), "zeros in their places are not taken for them"
    draft_tokens = draft.queue_draft_tokens(StepPlan(1, (_first_row(plan.drafts[0], plan),)), [2])
    plans: list[StepPlan] = []
    target.lead(plans.append)
    with pytest.raises(InvariantError, match="step 1 verifies 3 draft tokens, but got 2"):
        target.launch(plan.to_verify(), draft_tokens)
    with pytest.raises(InvariantError, match="step 1 verifies 3 draft tokens, but got None"):
        target.launch(plan.to_verify())
    with pytest.raises(InvariantError, match="step 1 verifies 3 draft tokens, but got None"):
        target.step(plan.to_verify())
    assert not plans, "a follower would wait in it"

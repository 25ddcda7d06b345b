"""Speculation on real engines in exact mode: whatever makes the draft tokens, and however many, the tokens are those of
plain decoding."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.errors import StartupError
from baton.core.request import GenerateRequest, SamplingParams, TokenBias
from baton.core.step import StepOutcome, StepPlan
from baton.engine.runner import Runner
from baton.runtime.config import WorkerConfig
from baton.runtime.model_source import builtin_directory
from decode.speculation.draft_model import load_draft
from decode.speculation.engine import SpeculativeEngine
from decode.speculation.policy import Speculation
from tests.support.checkpoints import make_checkpoint
from tests.support.decode_drive import Run, decode_all, make_drafts
from tests.support.engine_driver import tiny_runner
from tests.support.pair_drive import FixedCosts

LENGTH = 24
KINDS = ("model", "ngram")
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_p=0.95, top_k=40, repetition_penalty=1.2, presence_penalty=0.3),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, min_tokens=8, logit_bias=(TokenBias(20, 2.0),)),
)


@pytest.fixture(scope="module")
def target() -> Iterator[Runner]:
    yield tiny_runner(builtin_directory("target"), exact=True, kv_memory_bytes=64 << 20)


@pytest.fixture(scope="module")
def draft() -> Iterator[Runner]:
    yield tiny_runner(builtin_directory("draft"), kv_memory_bytes=16 << 20)


def requests(count: int, vocab_size: int = 4096, length: int = LENGTH) -> list[GenerateRequest]:
    """Prompts of 8 to 80 tokens that repeat pieces of themselves, every sampling in turn."""
    made = []
    for index in range(count):
        generator = random.Random(index)
        piece = generator.choices(range(6, vocab_size), k=generator.randint(8, 40))
        sampling = replace(SAMPLINGS[index % len(SAMPLINGS)], seed=index)
        prompt = tuple(piece + piece[: generator.randint(0, 40)])
        made.append(GenerateRequest(f"r{index}", prompt, length, sampling, eos_token_ids=(1,)))
    return made


def speculation(kind: str, draft: Runner | None, length: int = 0) -> Speculation:
    return Speculation(make_drafts(kind, draft), FixedCosts(), fixed_length=length)


@pytest.fixture(scope="module")
def plain(target: Runner) -> Run:
    return decode_all(target, requests(12), batch=4)


@pytest.mark.parametrize(
    ("length", "kind"),
    [(0, "model"), (8, "model"), (0, "ngram"), (4, "ngram")]
    + [
        pytest.param(n, kind, marks=pytest.mark.long)
        for n, kind in ((1, "model"), (4, "model"), (1, "ngram"), (8, "ngram"))
    ],
)
def test_speculation_yields_the_tokens_of_plain_decoding(
    target: Runner, draft: Runner, plain: Run, kind: str, length: int
) -> None:
    run = decode_all(target, requests(12), speculation=speculation(kind, draft, length), draft=draft, batch=3)
    assert run.outputs == plain.outputs
    assert run.counters.drafted_tokens > 0
    assert run.steps < plain.steps * 4 / 3 or kind == "ngram"


def test_more_than_a_quarter_of_the_draft_models_tokens_are_accepted(target: Runner, draft: Runner) -> None:
    some = [replace(r, sampling=SamplingParams(temperature=0.0)) for r in requests(4, length=60)]
    run = decode_all(target, some, speculation=speculation("model", draft, 1), draft=draft)
    assert run.counters.accepted_tokens > run.counters.drafted_tokens / 4


class Oracle(SpeculativeEngine):
    """A drafter that is always right, or always wrong, from the outputs of a plain run."""

    def __init__(self, target: Runner, draft: Runner, outputs: dict[str, list[int]], right: bool) -> None:
        super().__init__(target, draft)
        self._outputs, self._right = outputs, right

    def _draft_tokens(self, plan: StepPlan) -> tuple[tuple[int, ...], ...]:
        made: list[tuple[int, ...]] = [()] * len(plan.rows)
        for drafted in plan.drafts:
            if drafted.num_draft_tokens:
                row = plan.rows[drafted.row]
                known = self._outputs[row.sequence_id.request_id][row.output_index :]
                known = (known + [1] * 8)[: drafted.num_draft_tokens]
                made[drafted.row] = tuple(t if self._right else (t + 1) % 4096 for t in known)
        return tuple(made) if any(d.num_draft_tokens for d in plan.drafts) else ()


@pytest.mark.parametrize("right", [True, False])
def test_always_right_and_always_wrong_drafters_do_not_change_tokens(
    target: Runner, draft: Runner, plain: Run, right: bool
) -> None:
    some = requests(12) if right else requests(3, length=96)
    if not right:
        plain = decode_all(target, some, batch=3)
    engine = Oracle(target, draft, plain.outputs, right)
    run = decode_all(target, some, speculation=speculation("model", draft), engine=engine, batch=4)
    assert run.outputs == plain.outputs
    counters, tokens = run.counters, sum(map(len, run.outputs.values()))
    if right:
        assert counters.accepted_tokens > 0.8 * counters.drafted_tokens and run.steps < 0.6 * plain.steps
    else:
        assert counters.accepted_tokens == 0
        assert counters.drafted_tokens < tokens / 4, "drafting must have stopped"


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_speculation_yields_the_same_tokens_in_half_the_pool(
    target: Runner, draft: Runner, plain: Run, kind: str
) -> None:
    """The pool has half of the blocks that the batch needs: sequences are preempted, recomputed, and all finish."""
    run = decode_all(
        target,
        requests(12),
        speculation=speculation(kind, draft) if kind != "none" else None,
        draft=draft,
        batch=6,
        num_blocks=20,
        each_step=lambda scheduler: scheduler.check(),
    )
    assert run.outputs == plain.outputs
    assert run.preemptions > 0
    assert run.longest_silence_s < 30.0


def test_every_request_has_speculation_stats_and_draft_tokens_add_up(target: Runner, draft: Runner) -> None:
    drafting, stats = speculation("model", draft, 2), {}
    outcomes: list[StepOutcome] = []
    engine = SpeculativeEngine(target, draft)
    keep = engine.step

    def step(plan: StepPlan) -> StepOutcome:
        outcomes.append(keep(plan))
        return outcomes[-1]

    engine.step = step  # type: ignore[method-assign]

    def record_stats(scheduler: object) -> None:
        stats.update({i: e.speculation for i, e in scheduler.sequences.items()})  # type: ignore[attr-defined]

    run = decode_all(target, requests(2), speculation=drafting, engine=engine, each_step=record_stats)
    assert sum(len(g) for o in outcomes for g in o.draft_tokens) == run.counters.drafted_tokens
    assert all(o.draft_s > 0.0 for o in outcomes if any(o.draft_tokens))
    assert {i.request_id for i in stats} == {"r0", "r1"}


def test_draft_with_another_vocabulary_is_refused_with_both_sizes(target: Runner, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other")
    config = WorkerConfig(step_tokens=512, model=str(builtin_directory("target")), draft=str(other))
    with pytest.raises(StartupError, match=r"320 tokens, the model's 4096"):
        load_draft(config, target)

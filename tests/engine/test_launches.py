"""Steps launched before the tokens of the previous step are known, on real engines in exact mode: the same tokens,
log-probabilities and finish reasons as steps computed one by one."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch

from baton.core.errors import InvariantError
from baton.core.request import GenerateRequest, SamplingParams, SequenceId, TokenBias
from baton.core.step import Row, StepOutcome, StepPlan
from baton.engine.launches import Launches
from baton.engine.runner import Runner
from baton.runtime.model_source import builtin_directory
from tests.support.decode_drive import Run, decode_all
from tests.support.device_choice import Undecided, decide
from tests.support.engine_driver import GREEDY, random_tokens, tiny_runner

CPU = torch.device("cpu")
WARM = SamplingParams(temperature=0.8)
SAMPLINGS = {
    "greedy": (GREEDY,),
    "warm": (WARM, SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01)),
    "by number": (
        SamplingParams(temperature=0.0, min_tokens=9, logit_bias=(TokenBias(20, 2.0),)),
        SamplingParams(temperature=0.9, logprobs=3, allowed_token_ids=tuple(range(1, 900))),
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=0.7, stop_token_ids=tuple(range(10, 120))),
    ),
    "looking back": (
        GREEDY,
        GREEDY,
        # The biased token is sampled until its penalty is too high: if its count lags by one, once too often.
        SamplingParams(temperature=0.0, frequency_penalty=2.0, logit_bias=(TokenBias(20, 9.0),)),
        SamplingParams(temperature=0.8, repetition_penalty=1.2),
    ),
}
SAMPLINGS["all"] = tuple(s for some in SAMPLINGS.values() for s in some)


class DeferredLauncher:
    """Launches a step on the runner only when it is collected, as a device would compute it: when the next step is
    planned and launched, this one has no result yet."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._waiting: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._waiting.append(plan)

    def collect(self) -> StepOutcome:
        self._runner.launch(self._waiting.popleft())
        return self._runner.collect()


def requests(kind: str, count: int, vocab_size: int = 4096, length: int = 24) -> list[GenerateRequest]:
    made = []
    for index in range(count):
        generator = random.Random(f"{kind} {index}")
        prompt = tuple(generator.choices(range(6, vocab_size), k=generator.randint(3, 60)))
        sampling = replace(SAMPLINGS[kind][index % len(SAMPLINGS[kind])], seed=index)
        eos = tuple(generator.sample(range(vocab_size), vocab_size // 12))
        most = generator.randint(1, length)
        made.append(GenerateRequest(f"r{index}", prompt, most, sampling, eos_token_ids=eos if index % 2 else ()))
    return made


def same(found: Run, expected: Run) -> bool:
    return (found.outputs, found.logprobs, found.ended) == (expected.outputs, expected.logprobs, expected.ended)


@pytest.fixture(scope="module", params=["compiled", "as on a GPU"])
def target(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """The second runner feeds and chooses tokens as on a GPU: they are gathered from a tensor, and draws are decided by
    batched operations."""
    on_gpu = request.param == "as on a GPU"
    kernels = "torch" if on_gpu else "auto"
    runner = tiny_runner(builtin_directory("target"), exact=True, kernels=kernels, kv_memory_bytes=64 << 20)
    if on_gpu:
        runner.launches = Launches(CPU, runner.group, decide)
    yield runner


@pytest.fixture(scope="module")
def one_by_one(target: Runner) -> Callable[[str], Run]:
    """Computes the requests of a kind one step after another, once for all ways to launch steps ahead."""
    return cache(lambda kind: decode_all(target, requests(kind, 10), batch=4))


REPEATED = [("greedy", True), ("warm", False), ("by number", True), ("looking back", False), ("all", False)]
"""Left to `make test-long`: the other way to launch has the same samplings."""


@pytest.mark.parametrize(
    ("kind", "late"),
    [
        pytest.param(kind, late, marks=[pytest.mark.long] if (kind, late) in REPEATED else [])
        for kind in SAMPLINGS
        for late in (False, True)
    ],
)
def test_steps_launched_ahead_yield_the_results_of_steps_computed_one_by_one(
    target: Runner, one_by_one: Callable[[str], Run], kind: str, late: bool
) -> None:
    some, expected = requests(kind, 10), one_by_one(kind)
    before = target.launches.rows_with_device_token
    found = decode_all(target, some, batch=4, launcher=DeferredLauncher(target) if late else target)
    assert same(found, expected) and (kind not in ("by number", "all") or any(found.logprobs.values()))
    from_device = target.launches.rows_with_device_token - before
    assert from_device >= found.steps_ahead > 0 and expected.steps_ahead == 0
    if kind in ("greedy", "warm", "by number"):
        assert found.steps_ahead > found.steps / 2 and found.rows_discarded > 0


def test_steps_launched_ahead_yield_the_same_tokens_in_half_the_pool(target: Runner) -> None:
    some = [replace(r, max_tokens=20, eos_token_ids=()) for r in requests("warm", 7)]
    expected = decode_all(target, some, batch=6)
    check = lambda scheduler: scheduler.check()  # noqa: E731
    found = decode_all(target, some, batch=6, num_blocks=14, launcher=DeferredLauncher(target), each_step=check)
    assert same(found, expected) and found.preemptions > 0 and found.steps_ahead > 0


def test_undecided_draws_are_corrected_and_their_rows_recomputed(target: Runner) -> None:
    """At temperature 0.8 the likeliest token, with which the device continues, is often not the one drawn."""
    if not target.kernels.startswith("torch"):
        pytest.skip("compiled kernels read their tokens from the host")
    kept, some = target.launches, requests("warm", 8)
    try:
        target.launches = Launches(CPU, target.group, Undecided(every=3))
        found = decode_all(target, some, batch=4, launcher=DeferredLauncher(target))
        corrected = target.launches.rows_corrected
    finally:
        target.launches = kept
    assert same(found, decode_all(target, some, batch=4)) and corrected > 5


def row(name: str, start: int, tokens: tuple[int, ...], block: int, **changes: object) -> Row:
    values: dict[str, object] = {"sampling": GREEDY, "num_sampled": 1, **changes}
    return Row(SequenceId(name), start, tokens, (block,), **values)  # type: ignore[arg-type]


def test_rows_with_device_tokens_mix_with_known_rows_in_any_order(target: Runner) -> None:
    """Prompts, a row without a sample, swapped rows: each row is fed the token of the row that it names."""
    prompts = [row(n, 0, tuple(random_tokens(5 + i, seed=i)), i) for i, n in enumerate("abc")]
    silent = row("d", 0, (4, 5, 6), 3, num_sampled=0)
    first = StepPlan(1, (prompts[0], silent, prompts[1], prompts[2]))
    rows = [row("c", 7, (0,), 2), row("d", 3, (7, 8), 3), row("a", 5, (0,), 0)]
    target.launch(first)
    target.launch(StepPlan(2, tuple(rows), token_sources=(3, -1, 0)))
    one, two = target.collect(), target.collect()
    assert one == replace(target.step(first), elapsed_s=one.elapsed_s)
    rows[0], rows[2] = (replace(r, tokens=one.sampled[i]) for r, i in ((rows[0], 3), (rows[2], 0)))
    assert two.sampled == target.step(StepPlan(3, tuple(rows))).sampled


def test_invalid_collect_and_launch_are_refused(target: Runner) -> None:
    with pytest.raises(InvariantError, match="no launched step to collect"):
        target.collect()
    target.launch(StepPlan(7, (row("a", 0, (1, 2), 0),)))
    plans: list[StepPlan] = []
    target.lead(plans.append)
    with pytest.raises(InvariantError, match="step 9 needs the tokens of the previous step, but 7 was the last"):
        target.launch(StepPlan(9, (row("a", 2, (0,), 0),), token_sources=(0,)))
    target.collect()
    assert not plans, "a follower would wait in it"

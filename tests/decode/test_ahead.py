"""Steps planned while the previous step computes: the rules one by one, and random work against an oracle."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from baton.core.errors import InvariantError, Unavailable
from baton.core.request import GenerateRequest, SamplingParams, SequenceId, TokenLogprob, finish_reason
from baton.core.step import Row, StepOutcome, StepPlan
from decode.ahead import waits_for
from decode.scheduler import DecodeResult, DecodeScheduler
from decode.speculation.drafts import NgramDrafts
from decode.speculation.policy import Speculation
from decode.speculation.step_cost import StepModel
from tests.support.builders import EOS, make_layout, make_outcome, make_request
from tests.support.fake_runner import FakeRunner, oracle
from tests.support.late_device import LateDevice

A, B = SequenceId("a"), SequenceId("b")
PENALTY = SamplingParams(temperature=0.0, presence_penalty=0.5)


def make(num_blocks: int = 16, **options: object) -> DecodeScheduler:
    values: dict[str, object] = {"plan_ahead": True, "prefix_cache": False}
    return DecodeScheduler(make_layout(4), num_blocks, 8, **{**values, **options})  # type: ignore[arg-type]


def ready(scheduler: DecodeScheduler, request: GenerateRequest) -> None:
    scheduler.reserve(request, 0.0)
    assert scheduler.received(request.sequence_id, 5, 0.0) is None


def begin(scheduler: DecodeScheduler) -> StepPlan:
    plan = scheduler.begin_step(0.0)
    assert plan is not None
    return plan


def finish(scheduler: DecodeScheduler, plan: StepPlan, token: int = 7, corrected: Sequence[int] = ()) -> DecodeResult:
    result = scheduler.finish_step(replace(make_outcome(plan, token), corrected=tuple(corrected)), 0.0)
    scheduler.check()
    return result


def test_blocks_of_a_launched_row_of_an_ended_sequence_are_not_reported_as_leaked() -> None:
    """The worker checks for leaks as soon as it has no sequence; the blocks of such a row are not a leak."""
    scheduler = make()
    ready(scheduler, replace(make_request("a"), eos_token_ids=(EOS,)))
    first, second = begin(scheduler), begin(scheduler)
    assert finish(scheduler, first, EOS).ended and not scheduler.sequence_ids()
    assert scheduler.blocks.counts().free < 16
    scheduler.check_idle()
    finish(scheduler, second)
    assert scheduler.blocks.counts().free == 16
    scheduler.check_idle()


def test_second_step_refers_to_the_rows_that_sample_its_input_tokens() -> None:
    scheduler = make()
    for name in "ab":
        ready(scheduler, make_request(name))
    first = begin(scheduler)
    ready(scheduler, make_request("c"))  # joins; its token is known
    second = begin(scheduler)
    assert second.token_sources == (0, 1, -1)
    assert [(r.start, r.tokens, r.output_index) for r in second.rows] == [(5, (0,), 2), (5, (0,), 2), (4, (5,), 1)]
    assert scheduler.begin_step(0.0) is None, "two steps are out"
    assert [e.tokens for e in finish(scheduler, first).tokens] == [(5, 7), (5, 7)]
    assert [e.tokens for e in finish(scheduler, second, 8).tokens] == [(8,), (8,), (5, 8)]
    assert scheduler.steps_ahead == 1 and scheduler.rows_discarded == 0


def test_outcome_out_of_plan_order_is_refused() -> None:
    scheduler = make()
    ready(scheduler, make_request("a"))
    begin(scheduler)
    second = begin(scheduler)
    with pytest.raises(InvariantError, match="outcome of step 2 while step 1 is outstanding"):
        finish(scheduler, second)


def test_no_step_is_planned_ahead_past_max_tokens() -> None:
    scheduler = make()
    ready(scheduler, make_request("a", max_tokens=2))
    plan = begin(scheduler)
    assert scheduler.begin_step(0.0) is None
    assert [e.reason for e in finish(scheduler, plan).ended] == ["length"]
    assert (scheduler.num_sequences, scheduler.blocks.num_free, scheduler.rows_discarded) == (0, 16, 0)


def test_eos_ends_a_sequence_immediately_but_its_blocks_are_held_until_the_launched_step_ends() -> None:
    scheduler = make(num_blocks=4)
    ready(scheduler, make_request("a", 4))
    first, second = begin(scheduler), begin(scheduler)
    held = scheduler.blocks.num_free
    result = finish(scheduler, first, EOS)
    assert [e.reason for e in result.ended] == ["stop"] and [e.tokens for e in result.tokens] == [(5, EOS)]
    assert scheduler.blocks.num_free == held < 4, "the step that is out still writes"
    assert scheduler.begin_step(0.0) is None and scheduler.sequence_ids() == (), "nobody is to end it again"
    assert finish(scheduler, second) == DecodeResult()
    assert (scheduler.num_sequences, scheduler.blocks.num_free, scheduler.rows_discarded) == (0, 4, 1)


@pytest.mark.parametrize("when", ["both out", "second out"])
def test_aborted_sequence_keeps_its_blocks_until_its_launched_steps_end(when: str) -> None:
    scheduler = make()
    ready(scheduler, make_request("a"))
    first, second = begin(scheduler), begin(scheduler)
    if when == "second out":
        finish(scheduler, first)
    assert scheduler.abort(A)
    if when == "both out":
        assert finish(scheduler, first) == DecodeResult()
    assert scheduler.has_sequence(A) and scheduler.begin_step(0.0) is None
    assert finish(scheduler, second) == DecodeResult()
    assert (scheduler.num_sequences, scheduler.blocks.num_free) == (0, 16)


def test_aborted_sequence_has_no_row_in_the_next_step() -> None:
    scheduler = make()
    for name in "ab":
        ready(scheduler, make_request(name))
    first = begin(scheduler)
    scheduler.abort(A)
    second = begin(scheduler)
    assert [row.sequence_id for row in second.rows] == [B] and second.token_sources == (1,)
    finish(scheduler, first)
    assert not scheduler.has_sequence(A)


def test_row_computed_from_a_wrong_token_is_recomputed() -> None:
    scheduler = make()
    for name in "ab":
        ready(scheduler, make_request(name))
    first, second = begin(scheduler), begin(scheduler)
    assert [e.tokens for e in finish(scheduler, first, 7, corrected=(0,)).tokens] == [(5, 7), (5, 7)]
    third = begin(scheduler)
    assert [row.sequence_id for row in third.rows] == [B], "what a has out says nothing"
    assert [e.sequence for e in finish(scheduler, second, 8).tokens] == [B]
    fourth = begin(scheduler)
    assert [(r.sequence_id, r.start, r.tokens) for r in fourth.rows] == [(A, 5, (7,)), (B, 7, (0,))]
    finish(scheduler, third, 9)
    assert [e.tokens for e in finish(scheduler, fourth, 3).tokens] == [(3,), (3,)]
    assert scheduler.rows_discarded == 1


@pytest.mark.parametrize("sampling", [PENALTY, SamplingParams(bad_words=((3, 4),))])
def test_sampling_that_depends_on_previous_tokens_prevents_planning_ahead(sampling: SamplingParams) -> None:
    scheduler = make()
    ready(scheduler, replace(make_request("a"), sampling=sampling))
    ready(scheduler, make_request("b"))
    for _ in range(3):
        plan = begin(scheduler)
        assert scheduler.begin_step(0.0) is None and not plan.token_sources
        finish(scheduler, plan)
    assert scheduler.steps_ahead == 0
    with pytest.raises(InvariantError, match="depends on its token"):
        scheduler.sequences[A].row_behind(plan.rows[0])


def test_sampling_that_depends_only_on_the_token_count_allows_planning_ahead() -> None:
    sampling = SamplingParams(temperature=0.8, min_tokens=3, logprobs=2, allowed_token_ids=(5, 7))
    scheduler = make()
    ready(scheduler, replace(make_request("a"), sampling=sampling))
    first, second = begin(scheduler), begin(scheduler)
    reported = TokenLogprob(7, -1.0, 1, (7, 5), (-1.0, -2.0))
    scheduler.finish_step(StepOutcome(first.step_id, ((7,),), logprobs=((reported,),)), 0.0)
    histories = [plan.rows[0].history for plan in (first, second, begin(scheduler))]
    assert [h and h.end_token_ids for h in histories] == [(EOS,), (EOS,), None]
    assert scheduler.steps_ahead == 2


def test_steps_with_draft_tokens_are_never_planned_ahead() -> None:
    scheduler = make(speculation=Speculation(NgramDrafts(), fixed_length=2))
    assert not scheduler.plan_ahead
    row = Row(A, 0, (1, 2, 3), (0,), SamplingParams(), 2)
    assert waits_for(StepPlan(1, (row,)), []) == "the number of accepted draft tokens"


def test_no_step_is_planned_ahead_when_blocks_are_short() -> None:
    scheduler = make(num_blocks=5)
    for name in "ab":
        ready(scheduler, make_request(name, 4, max_tokens=12, eos=()))
    ahead = 0
    while scheduler.num_sequences:
        plan = begin(scheduler)
        behind = scheduler.begin_step(0.0)
        if behind is not None:
            ahead += 1
            assert scheduler.num_preempted == 0
        finish(scheduler, plan)
        if behind is not None:
            finish(scheduler, behind)
    assert scheduler.preemptions > 0 and ahead > 0 and scheduler.blocks.num_free == 5


# Random work: FakeRunner's tokens depend on the KV, which depends on the tokens.


@dataclass
class Drive:
    """A scheduler and a late device. At the end, the reported tokens of each request are compared with the oracle."""

    seed: int
    num_blocks: int
    ahead: bool = True
    mistaken: float = 0.0
    aborts: float = 0.0
    penalties: bool = False
    prefix_cache: bool = False
    reported: dict[SequenceId, list[int]] = field(default_factory=dict)
    ended: dict[SequenceId, str] = field(default_factory=dict)
    aborted: set[SequenceId] = field(default_factory=set)

    def run(self, count: int = 24) -> DecodeScheduler:
        generator = random.Random(self.seed)
        runner = FakeRunner(self.num_blocks)
        model = StepModel(((1, 1e-3), (64, 4e-3)), budget_s=0.003)  # long rows in chunks
        scheduler = DecodeScheduler(
            runner.layout,
            self.num_blocks,
            6,
            Speculation(model=model),
            prefix_cache=self.prefix_cache,
            plan_ahead=self.ahead,
        )
        self.device = LateDevice(
            runner.step, lambda plan: [i for i in range(len(plan.rows)) if generator.random() < self.mistaken]
        )
        requests = [self.request(n, generator) for n in range(count)]
        queue, out, now = deque(requests), deque[StepPlan](), 0.0
        while queue or scheduler.num_sequences:
            now += 0.01
            while queue and scheduler.num_sequences < 9 and self.hand_over(scheduler, runner, queue[0]):
                queue.popleft()
            if generator.random() < self.aborts and scheduler.sequence_ids():
                victim = generator.choice(scheduler.sequence_ids())
                scheduler.abort(victim)
                self.aborted.add(victim)
            plan = scheduler.begin_step(now)
            if plan is not None:
                self.device.launch(plan)
                out.append(plan)
                if len(out) == 1 and self.ahead:
                    continue
            if out:
                assert out.popleft()
                self.record(scheduler.finish_step(self.device.collect(), now))
            scheduler.check()
        assert not out and scheduler.blocks.num_free == self.num_blocks
        for request in requests:
            self.compare(request)
        return scheduler

    def request(self, number: int, generator: random.Random) -> GenerateRequest:
        prompt = generator.choices(range(50), k=generator.randint(1, 14))
        eos = generator.sample(range(1, 998), 40 if generator.random() < 0.6 else 0)
        request = make_request(
            f"r{number}", prompt, generator.randint(1, 24), eos=eos, priority=generator.choice([0, 0, 1])
        )
        if self.penalties and generator.random() < 0.1:
            request = replace(request, sampling=PENALTY)  # the fake model ignores it
        return request

    def hand_over(self, scheduler: DecodeScheduler, runner: FakeRunner, request: GenerateRequest) -> bool:
        """Reserves blocks and writes the KV into them immediately, outside the steps; False if none can be reserved."""
        try:
            blocks = scheduler.reserve(request, 0.0).block_ids
        except Unavailable:
            return False
        cached = scheduler.sequences[request.sequence_id].prefix_tokens
        row = Row(request.sequence_id, cached, request.prompt[cached:], blocks, request.sampling, 1)
        (first,) = runner.step(StepPlan(0, (row,))).sampled[0]
        ended = scheduler.received(request.sequence_id, first, 0.0)
        if ended is not None:
            self.reported[request.sequence_id] = [first]
            self.ended[request.sequence_id] = ended.reason
        return True

    def record(self, result: DecodeResult) -> None:
        for event in result.tokens:
            assert event.sequence not in self.ended and event.sequence not in self.aborted
            reported = self.reported.setdefault(event.sequence, [])
            assert event.first_index == len(reported)
            reported += event.tokens
        for ended in result.ended:
            assert ended.sequence not in self.ended
            self.ended[ended.sequence] = ended.reason

    def compare(self, request: GenerateRequest) -> None:
        expected: list[int] = []
        reason = None
        for token in oracle(request.prompt, request.max_tokens):
            expected.append(token)
            reason = finish_reason(request, len(expected), token)
            if reason is not None:
                break
        reported = self.reported.get(request.sequence_id, [])
        if request.sequence_id in self.ended:
            assert (reported, self.ended[request.sequence_id]) == (expected, reason)
        else:
            assert request.sequence_id in self.aborted and reported == expected[: len(reported)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("num_blocks", "options"),
    [
        (64, {}),
        (64, {"aborts": 0.15}),
        (64, {"mistaken": 0.2, "aborts": 0.05}),
        (64, {"penalties": True}),
        (14, {"aborts": 0.05}),
        (14, {"mistaken": 0.1, "penalties": True, "prefix_cache": True}),
        (40, {"aborts": 0.1, "prefix_cache": True, "mistaken": 0.05}),
    ],
    ids=["all", "aborts", "mistaken", "penalties", "half pool", "half pool, all", "shared prefixes"],
)
def test_planning_ahead_generates_the_tokens_of_the_oracle_under_random_load(
    seed: int, num_blocks: int, options: dict[str, float]
) -> None:
    drive = Drive(seed, num_blocks, **options)  # type: ignore[arg-type]
    scheduler = drive.run()
    assert drive.device.most_waiting == 2 and drive.device.rows_with_device_token > 20 and scheduler.steps_ahead > 10
    assert scheduler.rows_discarded > 0
    assert (scheduler.preemptions > 0) == (num_blocks == 14)
    assert (drive.device.mistakes > 0) == ("mistaken" in options)
    twin = Drive(seed, num_blocks, ahead=False, **options)  # type: ignore[arg-type]
    assert twin.run().steps_ahead == twin.device.rows_with_device_token == 0 and twin.device.most_waiting == 1
    for sequence in set(drive.ended) & set(twin.ended):
        assert (drive.reported[sequence], drive.ended[sequence]) == (twin.reported[sequence], twin.ended[sequence])

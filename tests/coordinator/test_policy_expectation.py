"""How many sequences are admitted: by the expected length of answers, not by the maximum nor by prompts alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from baton.core.commands import Role
from baton.core.events import Load
from baton.core.request import GenerateRequest
from baton.core.step import StepPlan
from coordinator.policy.expectation import START_TOKENS, OutputExpectation
from coordinator.policy.pool import Worker
from coordinator.policy.workers import WorkerTable
from decode.speculation.step_cost import StepCost, StepModel
from sim.client import Behaviour
from sim.cluster import SimCluster, SimClusterOptions, SimPoolOptions
from sim.costs import RandomCosts
from sim.worker import Timeouts
from tests.support.builders import add_worker
from tests.support.constant_model import ConstantModel
from tests.support.decode_pool import COSTS
from tests.support.placing import Placing, make_choice


class PromptsAlone(OutputExpectation):
    """Admits a request if there is room for its prompt."""

    def tokens(self, prefill_tokens: int, kv_tokens: int) -> int:
        return prefill_tokens


class EveryToken(OutputExpectation):
    """Admits a request if there is room for its prompt and its longest possible output."""

    def tokens(self, prefill_tokens: int, kv_tokens: int) -> int:
        return kv_tokens


def busy_placing(blocks: int) -> tuple[Placing, Worker]:
    """A dispatcher, and its one decode worker."""
    table = WorkerTable(3.0)
    add_worker(table, "p0", blocks=1000, block_size=16, step_tokens=10_000)
    return Placing(table, 100, 10_000), add_worker(table, "d0", blocks=blocks, block_size=16)


def test_mean_output_follows_finished_requests_and_ignores_empty_ones() -> None:
    expectation = OutputExpectation()
    expectation.ended(0)
    assert expectation.mean_tokens == START_TOKENS
    for _ in range(200):
        expectation.ended(20)
    assert 20 <= expectation.mean_tokens < 21


def test_expected_blocks_are_capped_by_max_tokens_and_growth_is_at_least_one_block() -> None:
    expectation, (_, worker) = OutputExpectation(), busy_placing(28)
    assert expectation.tokens(32, 40) == 40
    assert worker.blocks_for(40) == 3
    assert expectation.tokens(32, 4096) == 32 + START_TOKENS
    assert expectation.growth(32, 4096, 0, worker) == START_TOKENS / 16
    assert expectation.growth(32, 4096, 100, worker) == 10 - 9
    assert expectation.growth(32, 4096, 3000, worker) == 1


def test_output_of_a_rescheduled_request_does_not_count_as_ended() -> None:
    placing, _ = busy_placing(28)
    for rescheduled in (True, False):
        placing.submit(make_choice("a", 32, 4096 // 16))
        assert placing.names() == ["a"]
        placing.produced("a", 5)
        if rescheduled:
            placing.reschedule("a")
            assert placing.dispatcher.expectation.mean_tokens == START_TOKENS
        placing.finish("a")
        assert (placing.dispatcher.expectation.mean_tokens == START_TOKENS) == rescheduled


def test_room_for_growth_is_reserved_while_running_and_released_at_the_end() -> None:
    placing, decode = busy_placing(28)
    for name in ("a", "b", "c"):
        placing.submit(make_choice(name, 32, 4096 // 16))
    assert placing.names() == ["a", "b"], "ten blocks each"
    for name in ("a", "b"):
        placing.handed_over(name)
    decode.load = Load(blocks_free=24)
    assert placing.place() == []
    placing.produced("a", 100)
    decode.load = Load(blocks_free=18)
    assert placing.place() == [], "one for a, eight for b"
    placing.finish("a")
    decode.load = Load(blocks_free=25)
    assert placing.names() == ["c"]
    placing.check()


@dataclass
class Overload(RandomCosts):
    """The times of steps by a curve, and what a run shows: the widest decode step, tokens recomputed after preemptions,
    preemptions, hand-overs that had to be offered again, and its end."""

    widest: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    reassigned: int = 0
    ended_at: float = 0.0
    curve: StepCost = field(default_factory=lambda: StepCost(COSTS))

    def step_s(self, worker: str, role: Role, plan: StepPlan) -> float:
        if role == "prefill":
            return 0.001
        self.widest = max(self.widest, len(plan.rows))
        self.recomputed_tokens += plan.num_tokens - sum(row.num_sampled for row in plan.rows)
        return self.curve.seconds(plan.num_tokens)


def flooded(expectation: OutputExpectation | None, count: int = 120) -> Overload:
    """Runs requests for up to 2,000 tokens, whose answers have 200 on average, on a decode worker with room for
    about sixteen whole sequences of average length."""
    draw = random.Random(4)
    pool = SimPoolOptions(
        blocks=256, block_size=16, max_running=64, prefix_cache=False, step_model=lambda: StepModel(COSTS)
    )
    prefill = SimPoolOptions(blocks=1 << 14, block_size=16, step_tokens=1 << 20, prefix_cache=False)
    costs = Overload(draw)
    cluster = SimCluster(
        SimClusterOptions(prefill, pool),
        seed=1,
        costs=costs,
        engine=lambda *_: ConstantModel(),
        timeouts=Timeouts(watched=False),
        verify=False,
    )
    dispatcher = cluster.coordinator.requests.dispatcher
    dispatcher.expectation = expectation or dispatcher.expectation
    for i in range(count):
        length = max(2, min(1000, round(draw.expovariate(1 / 200))))
        request = GenerateRequest(f"r{i}", (1,) * draw.randint(20, 80), 2000)
        cluster.send(request, 1.0, Behaviour(stop_after=length))
    cluster.run(1e5, lambda: not cluster.running)
    assert all(client.outcomes[0].ended == "stop string" for client in cluster.clients)
    costs.preemptions, costs.ended_at = cluster.preempted(), cluster.loop.now
    costs.reassigned = cluster.coordinator.requests.reassigned
    return costs


@pytest.fixture(scope="module")
def outcome() -> Overload:
    return flooded(None)


def test_few_sequences_are_preempted_under_overload(outcome: Overload) -> None:
    thrashing = flooded(PromptsAlone())
    assert thrashing.preemptions > 15
    assert outcome.preemptions < thrashing.preemptions / 5
    assert outcome.recomputed_tokens < thrashing.recomputed_tokens / 5
    assert outcome.reassigned == 0
    assert outcome.ended_at < 1.05 * thrashing.ended_at


def test_memory_is_not_reserved_for_output_that_is_never_generated_under_overload(outcome: Overload) -> None:
    idle = flooded(EveryToken(), count=10)
    assert idle.preemptions == 0 and idle.widest <= 2
    assert outcome.widest > 12

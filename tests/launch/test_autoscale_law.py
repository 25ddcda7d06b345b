"""The law of the autoscaler, against a cluster that is a few numbers; first of all the bugs that planners have had."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.core.errors import InvalidRequest
from launch.autoscale.law import (
    LONG_WINDOW_S,
    ClusterSample,
    Memory,
    Policy,
    RoleState,
    Sizing,
    WorkerSample,
    decide,
    rows_within,
    workers_for_waits,
)
from sim.scale.costs import Calibration, PrefillCosts, parse_calibration
from sim.scale.planner import Size
from sim.stats import Slo
from tests.support.scale import CALIBRATION

START_S, EVERY_S = 30.0, 5.0
KIND = replace(
    CALIBRATION,
    prefill_worker=replace(CALIBRATION.prefill_worker, start_s=START_S),
    decode_worker=replace(CALIBRATION.decode_worker, start_s=START_S),
)
POLICY = Policy(Slo(1.0, 0.05, 0.95), KIND, KIND, Size(1, 1), Size(20, 20), down_s=300.0, idle_s=200.0)
PROMPT, OUTPUT = 2000, 100
PROMPT_S = KIND.prefill.prompt_s(PROMPT, KIND.prefill_worker.step_tokens)


class Fluid:
    """A cluster that follows the decisions: workers join START_S after they were chosen. Prompts take as long as they
    are calibrated for, times `slowness`; `late` is the share of first tokens past the limit."""

    def __init__(self, policy: Policy = POLICY, ready: Size = Size(1, 1)) -> None:  # noqa: B008
        self.policy, self.memory, self.now = policy, Memory(), 1000.0
        self.ready, self.joins = {"prefill": ready.prefill, "decode": ready.decode}, list[tuple[float, str]]()
        self.admitted = self.first = self.late = self.slow = 0.0
        self.rate = self.late_share = self.slow_share = 0.0
        self.queued = 0
        self.slowness, self.starts = 1.0, True
        self.counts: dict[str, WorkerSample] = {}
        self.decisions: list[Sizing] = []

    def sample(self) -> ClusterSample:
        workers = []
        busy = min(1.0, self.rate * PROMPT_S * self.slowness / max(self.ready["prefill"], 1))
        for role, number in self.ready.items():
            for index in range(number):
                name = f"{role}-{index}"
                old = self.counts.get(name, WorkerSample(name, role, 1))  # type: ignore[arg-type]
                if role == "prefill":
                    tokens = round(busy * EVERY_S / PROMPT_S / self.slowness * PROMPT)
                    steps, step_s = 10 if tokens else 0, busy * EVERY_S
                else:
                    rows = self.rate * OUTPUT * 0.02 / number
                    steps, step_s = (250, 5.0) if rows else (0, 0.0)
                    tokens, old = round(rows * 250), replace(old, rows=round(rows), kv_tokens=round(rows * PROMPT))
                    step_s = KIND.decode.plain_s(round(rows), rows * PROMPT) * steps
                self.counts[name] = replace(
                    old, steps=old.steps + steps, step_s=old.step_s + step_s, tokens=old.tokens + tokens
                )
                workers.append(self.counts[name])
        return ClusterSample(
            self.now,
            admitted=round(self.admitted),
            admitted_tokens=round(self.admitted) * PROMPT,
            in_flight=self.queued + bool(self.rate),
            queued=self.queued,
            queued_tokens=self.queued * PROMPT,
            output_tokens=OUTPUT,
            first_tokens=self.first,
            late=self.late,
            ended=self.first,
            slow=self.slow,
            workers=tuple(workers),
        )

    def step(self, count: int = 1, **changes: object) -> Size:
        for _ in range(count):
            self.now += EVERY_S
            self.admitted += self.rate * EVERY_S
            self.first += self.rate * EVERY_S
            self.late += self.rate * EVERY_S * self.late_share
            self.slow += self.rate * EVERY_S * self.slow_share
            for due, role in [join for join in self.joins if join[0] <= self.now]:
                self.joins.remove((due, role))
                self.ready[role] += 1
            sample = replace(self.sample(), **changes)  # type: ignore[arg-type]
            decision, self.memory = decide(self.policy, self.memory, sample)
            self.decisions.append(decision)
            for role in ("prefill", "decode"):
                size, coming = getattr(decision.size, role), sum(name == role for _, name in self.joins)
                if self.starts:
                    self.joins += [(self.now + START_S, role)] * (size - self.ready[role] - coming)
                self.ready[role] = min(self.ready[role], size)
        return self.decisions[-1].size

    @property
    def sizes(self) -> list[Size]:
        return [decision.size for decision in self.decisions]

    def reversals(self, role: str) -> int:
        sizes = [getattr(size, role) for size in self.sizes]
        ups = [b > a for a, b in itertools.pairwise(sizes) if a != b]
        return sum(a != b for a, b in itertools.pairwise(ups))


def test_prefill_follows_seconds_of_work_and_both_roles_follow_the_rate() -> None:
    f = Fluid()
    f.rate = 30.0
    size = f.step(24)
    load = 30.0 * PROMPT_S
    assert load < size.prefill <= load * 1.3 + 2
    assert size.decode > 1
    assert "30.00 requests/s of 2000 uncached tokens" in str(f.decisions[-1])


def test_no_traffic_scales_down() -> None:
    """A planner that skips an interval without requests keeps its size for ever."""
    f = Fluid()
    f.rate = 30.0
    busy = f.step(60)
    f.rate = 0.0
    assert f.step(10) == busy  # not at once
    assert f.step(round((LONG_WINDOW_S + 2 * 300.0) / EVERY_S)) == Size(1, 1)


@pytest.mark.parametrize("name", ["late", "output_tokens", "first_tokens"])
def test_a_number_that_is_none_changes_nothing(name: str) -> None:
    f = Fluid()
    f.rate = 30.0
    busy, memory = f.step(60), f.memory
    assert f.step(3, **{name: math.nan}) == busy and f.memory is memory
    assert "is not a number" in f.decisions[-1].reasons[0]
    assert f.step(3) == busy


def test_one_late_request_is_no_reason_for_a_second_worker() -> None:
    """One request above the limit kept a floor of two workers."""
    f = Fluid()
    f.rate, f.late_share = 0.05, 1.0
    f.step(200)
    assert set(f.sizes) == {Size(1, 1)}


@pytest.mark.parametrize("load", [0.5, 0.75, 0.9, 1.0, 1.1, 1.5, 1.9, 2.1])
def test_a_steady_load_does_not_oscillate(load: float) -> None:
    """Two workers at half of the load seemed enough for one, which seemed too few: N/(N-1)."""
    f = Fluid()
    f.rate = load / PROMPT_S
    f.step(720)  # an hour
    assert f.reversals("prefill") <= 1 and f.reversals("decode") <= 1
    assert len(set(f.sizes[360:])) == 1


def test_a_manual_change_is_the_new_beginning() -> None:
    f = Fluid()
    f.rate = 10.0
    before = f.step(120)
    f.ready["prefill"] += 3  # added by hand: kept for down_s, then lowered
    assert f.step(20).prefill == before.prefill + 3
    assert f.step(120).prefill == before.prefill
    f.rate = 0.5
    f.step(400)
    f.ready["prefill"] = 4
    f.step(2)
    f.ready["prefill"] = 2  # removed by hand: not started again while two are enough
    assert f.step(1).prefill == 2


def test_workers_that_are_needed_are_started_again_after_a_manual_removal() -> None:
    f = Fluid()
    f.rate = 30.0
    before = f.step(120)
    f.ready["prefill"] = 1
    assert f.step(1).prefill >= before.prefill - 1 and f.joins


def test_nothing_is_scaled_down_while_workers_start() -> None:
    f = Fluid(replace(POLICY, down_s=10.0))
    f.starts = False
    f.rate = 30.0
    up = f.step(10)
    f.rate = 1.0
    for _ in range(7):  # less than STARTS times START_S after it was raised
        assert f.step(1).prefill >= up.prefill
    f.step(60)
    assert f.sizes[-1].prefill < up.prefill, "workers that never start are not waited for forever"


def test_a_limit_that_cannot_be_met_is_named_and_holds_nothing() -> None:
    """Waiting for the target before the next change, while it cannot be met, waits forever."""
    f = Fluid()
    f.rate = 20.0
    enough = f.step(60)
    f.late_share = 0.5
    f.step(300)
    assert "TTFT is missed, and more prefill workers do not help" in f.decisions[-1].unmet
    assert f.sizes[-1].prefill <= enough.prefill + 1
    f.rate = 60.0  # still scales with the load
    assert f.step(20).prefill > 2 * enough.prefill
    f.late_share = 0.0
    f.step(30)
    assert not f.decisions[-1].unmet


def test_a_late_share_that_more_workers_lower_adds_workers() -> None:
    f = Fluid()
    f.rate = 28.0
    before = f.step(60)
    f.late_share = 0.4
    for _ in range(60):
        f.late_share = 0.4 if f.ready["prefill"] < before.prefill + 2 else 0.02
        f.step(4)
    assert before.prefill + 2 <= f.sizes[-1].prefill <= before.prefill + 3 and not f.decisions[-1].unmet


@pytest.mark.parametrize(("share", "chance"), [(0.07, True), (0.15, False)])
def test_no_more_late_requests_than_chance_makes_add_no_worker(share: float, chance: bool) -> None:
    """Of 150 requests 5 % may be late: then 7 % of them often are, and 15 % are not."""
    f = Fluid()
    f.rate = 5.0
    before = f.step(60)
    f.late_share = share
    f.step(60)
    assert (max(size.prefill for size in f.sizes[60:]) == before.prefill and not f.decisions[-1].unmet) is chance


def test_more_late_requests_than_there_are_by_a_rounding_are_all_of_them() -> None:
    f = Fluid()
    f.rate, f.late_share, f.slow_share = 20.0, 1.0 + 1e-9, 1.0 + 1e-9
    f.step(40)
    assert "TTFT is missed" in f.decisions[-1].unmet


def test_a_backlog_that_is_computed_within_the_limit_needs_no_more_workers() -> None:
    """Which wait for the load of a burst, and would be idle once what came while they started is done."""
    slow, quick = (replace(POLICY, slo=Slo(ttft_s, 0.05, 0.95), limit=Size(90, 90)) for ttft_s in (90.0, 10.0))
    rate, ready = 10.0, Size(4, 8)
    waiting = round(600.0 / PROMPT_S)  # seconds of one worker
    sizes = []
    for policy in (slow, quick):
        every = lambda _: [PROMPT] * round(rate * EVERY_S)  # noqa: E731
        sizes.append(fed(every, ready=ready, policy=policy, queued=waiting, queued_tokens=waiting * PROMPT)[-1].size)
    load = rate * PROMPT_S
    left_s = 600.0 + (load - ready.prefill) * START_S
    assert sizes[0].prefill == pytest.approx(left_s / 90.0, abs=1.5)
    assert sizes[1].prefill == pytest.approx(load + left_s / START_S, abs=1.5) and sizes[1].prefill > sizes[0].prefill


def test_first_steps_of_a_cold_worker_are_not_measured() -> None:
    f = Fluid()
    f.rate, f.slowness = 5.0, 50.0  # as while it compiles
    f.step(3)
    f.slowness = 1.0
    f.step(40)
    assert f.memory.prefill.slowness == pytest.approx(1.0, rel=0.2)
    assert max(size.prefill for size in f.sizes) <= 3


def test_the_attention_of_long_prompts_is_not_slowness_and_counts_by_their_squares() -> None:
    costs = PrefillCosts(base_s=0.0, token_s=1e-4, pair_s=1e-7)
    policy, memory, lengths = replace(POLICY, prefill=replace(KIND, prefill=costs)), Memory(), (500, 3500)
    seconds, tokens = sum(costs.prompt_s(n, 4096) for n in lengths), sum(lengths)
    for number in range(1, 20):
        done = 10 * number
        worker = WorkerSample("prefill-0", "prefill", 1, 2 * done, done * seconds, done * tokens)
        sample = ClusterSample(
            10.0 * number,
            admitted=2 * done,
            admitted_tokens=done * tokens,
            admitted_tokens_squared=done * sum(n * n for n in lengths),
            workers=(worker,),
        )
        decision, memory = decide(policy, memory, sample)
    assert memory.prefill.slowness == pytest.approx(1.0, rel=0.01)
    assert f" {seconds / 2 * 1e3:.0f} ms each" in decision.reasons[0]


def test_workers_slower_than_calibrated_are_more_workers() -> None:
    f = Fluid(ready=Size(8, 2))
    f.rate, f.slowness = 20.0, 2.0
    size = f.step(60)
    assert f.memory.prefill.slowness == pytest.approx(2.0, rel=0.2)
    assert size.prefill > 1.8 * 20.0 * PROMPT_S


def test_insufficient_data_neither_stalls_nor_reads_as_zero() -> None:
    f = Fluid(ready=Size(3, 2))
    assert f.step(1) == Size(3, 2)  # one sample says nothing about a rate: the workers that are there stay
    f.queued = 1500  # that so many prompts wait needs no rate
    assert f.step(1).prefill > 3


def test_a_restarted_coordinator_counts_from_zero() -> None:
    f = Fluid()
    f.rate = 30.0
    busy = f.step(60)
    f.admitted = f.first = f.late = 0.0
    f.step(1)
    assert len(f.memory.samples) == 1 and f.step(12) == busy


def test_late_requests_add_workers_where_no_decode_worker_is_needed() -> None:
    """The role that has no worker was "lowered" at each look, and what was late before a change does not count."""
    f = Fluid(replace(POLICY, least=Size(1, 0), limit=Size(20, 0)), ready=Size(1, 0))
    f.rate = 28.0
    before = f.step(120)
    f.late_share = 0.4
    assert f.step(20).prefill > before.prefill


def test_a_cluster_of_decode_workers_keeps_no_prefill_worker_and_follows_its_load_and_late_requests() -> None:
    f = Fluid(replace(POLICY, least=Size(0, 1), limit=Size(0, 20)), ready=Size(0, 1))
    f.rate = 20.0
    before = f.step(60)
    assert before.decode > 1 and "prefill has nothing to do" in str(f.decisions[-1])
    f.late_share = 0.4
    assert f.step(20).decode > before.decode, "first tokens are late at decode workers"
    f.rate = f.late_share = 0.0
    f.step(round((LONG_WINDOW_S + 3 * 300.0) / EVERY_S))
    assert f.sizes[-1] == Size(0, 1) and not any(size.prefill for size in f.sizes)


def test_from_zero_to_both_roles_and_back() -> None:
    f = Fluid(replace(POLICY, least=Size(0, 0)), ready=Size(0, 0))
    assert f.step(5) == Size(0, 0)
    f.queued = 1
    assert f.step(1) == Size(1, 1)
    f.queued, f.rate = 0, 0.2
    f.step(10)
    assert f.ready == {"prefill": 1, "decode": 1}
    f.rate = 0.0
    f.step(round(200.0 / EVERY_S) - 2)
    assert f.sizes[-1] == Size(1, 1)
    assert f.step(4) == Size(0, 0)
    assert all(bool(size.prefill) == bool(size.decode) for size in f.sizes)


def test_a_model_that_only_pools_needs_no_decode_worker() -> None:
    f = Fluid(replace(POLICY, least=Size(0, 0), limit=Size(4, 0)), ready=Size(0, 0))
    f.queued = 3
    assert f.step(1) == Size(1, 0)


def test_sizes_stay_within_their_bounds() -> None:
    f = Fluid(replace(POLICY, least=Size(2, 3), limit=Size(4, 5)), ready=Size(2, 3))
    assert f.step(10) == Size(2, 3)
    f.rate = 500.0
    assert f.step(24) == Size(4, 5)


def test_a_queue_that_waits_for_decode_is_no_backlog_of_prefill() -> None:
    sizes = []
    for role in ("decode", "prefill"):
        f = Fluid()
        f.queued = 900
        sizes.append(f.step(2, waits_for=role))
    assert sizes[0].prefill == 1 and sizes[0].decode > 1
    assert sizes[1].prefill > 1 and sizes[1].decode == 1


def test_waits_of_m_m_n() -> None:
    """Against the closed form for one server, P(W > t) = rho exp(-(1 - rho) t / s), and Erlang's table."""
    assert workers_for_waits(0.0, 1.0, 1.0, 0.05) == 0
    assert workers_for_waits(0.5, 1.0, 0.0, 0.5) == 1 and workers_for_waits(0.5, 1.0, 0.0, 0.49) == 2
    at = 0.5 * math.exp(-0.5 * 3.0)
    assert workers_for_waits(0.5, 1.0, 3.0, at * 1.01) == 1 and workers_for_waits(0.5, 1.0, 3.0, at * 0.99) == 2
    assert workers_for_waits(2.0, 1.0, 0.0, 0.45) == 3  # Erlang C of 2 erlangs at 3 servers: 4/9
    assert workers_for_waits(2.0, 1.0, 0.0, 0.44) == 4
    assert workers_for_waits(80.0, 0.2, math.inf, 0.05) == 81
    assert workers_for_waits(0.5, 1.0, 9.0, at * 1.01, queue_s=3.0) == 1  # its queue is full before it is late
    assert workers_for_waits(0.5, 1.0, 9.0, at * 0.99, queue_s=3.0) == 2
    assert workers_for_waits(0.5, 1.0, 6.0, at * 1.01, variation=3.0) == 1  # waits are twice as long
    assert workers_for_waits(0.5, 1.0, 6.0, at * 0.99, variation=3.0) == 2


def test_rows_within_the_limit_of_tpot_and_the_pool() -> None:
    rows = rows_within(KIND, Slo(0, 0.05), PROMPT, OUTPUT, 1.0)
    pool = KIND.decode_worker.blocks * KIND.block_size
    assert rows == pool // (PROMPT + OUTPUT)  # the pool is full before a step takes 50 ms
    rows = rows_within(KIND, Slo(0, 0.02), 100, OUTPUT, 1.0)
    assert KIND.decode.plain_s(rows, rows * 150) <= 0.02 < KIND.decode.plain_s(rows + 1, (rows + 1) * 150)
    assert rows_within(KIND, Slo(0, 0.02), 100, OUTPUT, 3.0) == 1
    assert rows_within(KIND, Slo(), 10, 10, 1.0) == KIND.decode_worker.max_running


def fed(
    lengths: Callable[[int], list[int]],
    seconds: float = 600.0,
    ready: Size = Size(4, 4),  # noqa: B008
    policy: Policy = POLICY,
    **now: int,
) -> list[Sizing]:
    """The decisions for prompts of these lengths, admitted in each step, with `now` in every sample."""
    memory, admitted, tokens, squares, decisions = Memory(), 0, 0, 0, list[Sizing]()
    workers = [WorkerSample(f"p{i}", "prefill", 1) for i in range(ready.prefill)]
    workers += [WorkerSample(f"d{i}", "decode", 1) for i in range(ready.decode)]
    for step in range(round(seconds / EVERY_S)):
        new = lengths(step)
        admitted, tokens, squares = admitted + len(new), tokens + sum(new), squares + sum(n * n for n in new)
        counts = {name: count * step if name == "refused" else count for name, count in now.items()}
        sample = ClusterSample(
            *(step * EVERY_S, admitted),
            admitted_tokens=tokens,
            admitted_tokens_squared=squares,
            in_flight=len(new),
            output_tokens=OUTPUT,
            workers=tuple(workers),
        )
        decision, memory = decide(policy, memory, replace(sample, **counts))  # type: ignore[arg-type]
        decisions.append(decision)
    return decisions


def _rate(decision: Sizing) -> float:
    return float(decision.reasons[0].partition(" requests/s")[0])


def _rate_of(policy: Policy, before: int, after: int) -> float:
    """The requests per second that count after 60 s of `before` each second, then 12 s of `after`."""
    memory, admitted = Memory(), 0
    for second in range(72):
        admitted += before if second < 60 else after
        sample = ClusterSample(float(second), admitted=admitted, admitted_tokens=admitted * PROMPT, in_flight=1)
        decision, memory = decide(policy, memory, sample)
    return _rate(decision)


def test_a_few_long_prompts_among_short_ones_are_averaged_over_a_longer_time() -> None:
    """One prompt of 50,000 tokens in 100 s moves the mean of 30 s by a factor of three, each time that it comes."""
    decisions = fed(lambda step: [500] * 9 + [50_000 if step % 20 == 7 else 500])
    later = decisions[round(LONG_WINDOW_S / EVERY_S) :]
    means = [float(d.reasons[0].partition(" of ")[2].split()[0]) for d in later]
    assert max(means) < 1.1 * min(means) and len({d.size for d in later}) == 1


def test_refused_requests_are_demand_but_no_more_than_the_admitted_ones() -> None:
    """Requests that the queue has no room for were invisible; a client that asks again at once is not ten clients."""
    assert _rate(fed(lambda _: [PROMPT] * 50)[-1]) == 10.0
    assert _rate(fed(lambda _: [PROMPT] * 50, refused=25)[-1]) == 15.0
    assert _rate(fed(lambda _: [PROMPT] * 50, refused=500)[-1]) == 20.0


def test_what_a_worker_computes_is_no_backlog_for_another() -> None:
    """Prompts of 26 s, and four workers that have six of them: the half of four that is left can go nowhere else."""
    long, policy = 160_000, replace(POLICY, slo=Slo(60.0, 0.05, 0.95))
    every = lambda step: [long] * (step % 3 == 0)  # noqa: E731
    computing = fed(every, policy=policy, backlog_tokens=6 * long)
    assert max(d.size.prefill for d in computing) == 4
    assert fed(every, policy=policy, queued=9, queued_tokens=9 * long, backlog_tokens=6 * long)[-1].size.prefill > 4


def test_a_queue_that_will_be_full_before_a_worker_has_started_is_backlog() -> None:
    steady = lambda _: [PROMPT] * 150  # noqa: E731
    plenty, short = (fed(steady, ready=Size(2, 4), max_queued_tokens=n) for n in (10_000_000, 500_000))
    assert plenty[-1].size.prefill < short[-1].size.prefill <= 2 * plenty[-1].size.prefill


def test_kv_is_held_from_the_dispatch_on() -> None:
    """It is reserved before the prompt is computed, so one that takes as long as its output holds it twice as long."""
    pools = []
    for length in (2000, 64_000):
        decision = fed(lambda _, length=length: [length] * (64_000 // length))[-1]
        pools.append(float(decision.reasons[1].rpartition("; ")[2].split()[0]))
    assert pools[1] > 1.2 * pools[0]  # as many tokens in both


def test_a_size_is_not_lowered_by_less_than_a_tenth() -> None:
    f = Fluid(replace(POLICY, limit=Size(60, 60)))
    f.rate = 40 / PROMPT_S
    before = f.step(120)
    f.rate *= 0.87
    assert before.prefill > 40 and f.step(240).prefill == before.prefill
    f.rate *= 0.9
    assert f.step(240).prefill < 0.92 * before.prefill


def test_state_is_plain_values() -> None:
    assert Memory() == Memory() and RoleState() == RoleState() and hash(Memory()) == hash(Memory())


def test_a_shorter_window_follows_a_change_of_the_load_sooner() -> None:
    short, usual = (_rate_of(policy, 1, 20) for policy in (replace(POLICY, window_s=10.0), POLICY))
    assert short == pytest.approx(20.0, rel=0.05)
    assert usual == pytest.approx((12 * 20 + 18) / 30, rel=0.1)


def _quick() -> Calibration:
    """Workers that start in 2 s."""
    prefill, decode = (replace(of, start_s=2.0) for of in (KIND.prefill_worker, KIND.decode_worker))
    return replace(KIND, prefill_worker=prefill, decode_worker=decode)


def test_where_workers_start_sooner_the_end_of_a_burst_is_followed_sooner() -> None:
    usual, quick = (_rate_of(replace(POLICY, prefill=kind, decode=kind), 20, 10) for kind in (KIND, _quick()))
    assert usual == pytest.approx((18 * 20 + 12 * 10) / 30, rel=0.1)
    assert 10.0 < quick <= 10.0 * (1 + 1 / math.sqrt(100)) + 0.1, "within the standard error of 100 requests"


def test_where_workers_start_sooner_a_burst_is_followed_sooner() -> None:
    """Where workers start in seconds, ten seconds of a burst are no third of a rate."""
    sizes = []
    for kind in (KIND, _quick()):
        f = Fluid(replace(POLICY, prefill=kind, decode=kind))
        f.rate = 6.0
        f.step(40)
        f.rate = 30.0
        sizes.append(f.step(2).prefill)
    steady = Fluid()
    steady.rate = 30.0
    assert sizes[0] < sizes[1] == steady.step(40).prefill


def test_what_keeps_workers_busy_is_neither_rounded_nor_held() -> None:
    f = Fluid(replace(POLICY, window_s=1.0), Size(3, 3))
    f.rate = 30.0
    before = f.step(40)
    prefill, decode = f.decisions[-1].busy
    assert prefill == pytest.approx(30.0 * PROMPT_S, rel=0.05) and prefill < before.prefill
    rows = rows_within(KIND, POLICY.slo, PROMPT, OUTPUT, f.memory.decode.slowness)
    step_s = f.memory.decode.slowness * KIND.decode.plain_s(rows, rows * (PROMPT + OUTPUT / 2))
    assert 30.0 * OUTPUT * step_s < 60.0, "so many run, which counts"
    together = 60.0
    assert decode == pytest.approx((together + 1.645 * math.sqrt(together)) / rows, rel=0.05)
    f.rate = 3.0
    f.step(3)
    assert f.sizes[-1] == before and f.decisions[-1].busy[0] < 0.25 * prefill, "of the last 30 requests"


def test_what_waits_keeps_workers_busy_that_compute_it_in_time() -> None:
    f = Fluid(Policy(Slo(5.0, 0.05, 0.95), KIND, KIND, Size(1, 1), Size(20, 20), window_s=1.0), Size(3, 3))
    f.rate = 10.0
    f.step(40)
    none = f.decisions[-1].busy[0]
    f.queued = round(10.0 / PROMPT_S)
    f.step(1)
    assert f.decisions[-1].busy[0] == pytest.approx(none + 10.0 / 5.0, rel=0.2)


def test_hand_overs_keep_decode_workers_busy() -> None:
    link, busy = replace(KIND.link, accept_s=0.02, receive_s=0.01, receive_token_s=1e-5), []
    for kind in (KIND, replace(KIND, link=link)):
        f = Fluid(replace(POLICY, prefill=kind, decode=kind), Size(3, 3))
        f.rate = 10.0
        f.step(40)
        busy.append(f.decisions[-1].busy[1])
    assert busy[1] - busy[0] == pytest.approx(10.0 * (0.03 + 1e-5 * PROMPT), rel=0.05)


def test_decode_is_lowered_by_more_than_its_size_varies() -> None:
    """The largest size of ten minutes is by chance less than that of the next ten, as often as not."""
    source, f = random.Random(3), Fluid(replace(POLICY, down_s=600.0, limit=Size(200, 60)))
    for _ in range(120):  # minutes, each with another load
        f.rate = 20.0 / PROMPT_S * source.lognormvariate(0.0, 0.35)
        f.step(12)
    assert f.reversals("decode") <= 2 * 2, "more than two an hour"


@pytest.mark.timeout(20)
def test_a_load_beyond_any_cluster_takes_no_time_to_size() -> None:
    """A calibration with milliseconds for seconds, say: the launcher, which supervises the cluster, computes sizes."""
    assert workers_for_waits(1e12, 1.0, 1.0, 0.05) == workers_for_waits(1e12, 1.0, math.inf, 0.05) == 1 << 14


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.long if n >= 2 else ()) for n in range(20)])
def test_no_calibration_that_is_accepted_breaks_the_law(seed: int) -> None:
    chosen = random.Random(seed)

    def changed(values: dict[str, object]) -> dict[str, object]:
        extremes: list[object] = [0, 1, 5e-324, 1e-300, 1e-18, 1e-3, 7.5, 1e18, 10**9]
        return {
            name: changed(value)
            if isinstance(value, dict)
            else chosen.choice(extremes)
            if isinstance(value, int | float) and name != "format" and chosen.random() < 0.3
            else value
            for name, value in values.items()
        }

    kinds: list[Calibration] = []
    while len(kinds) < 20:
        with contextlib.suppress(InvalidRequest):
            kinds.append(parse_calibration(changed(json.loads(json.dumps(KIND.as_json())))))
    for kind in kinds:
        f = Fluid(replace(POLICY, prefill=kind, decode=kind))
        f.rate, f.queued = 30.0, 5
        for slowness in (1.0, 1e-6, 1e6):
            f.slowness = slowness
            f.step(10)
        assert all(1 <= d.size.prefill <= 20 and 1 <= d.size.decode <= 20 for d in f.decisions)

"""The order of waiting choices: fair between tenants within a proven bound, by priority; excluded keys are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.core import virtual_counters
from baton.core.errors import BatonError, QuotaExceeded, Unavailable
from coordinator.policy.choice import Choice
from coordinator.policy.fair_queue import INPUT_WEIGHT, OUTPUT_WEIGHT, FairQueue
from coordinator.policy.quotas import Client, KeyLimits
from coordinator.policy.workers import WorkerTable
from tests.support.builders import add_worker
from tests.support.placing import Placing, make_choice

MAX_PROMPT, MAX_OUTPUT, POOL_TOKENS = 40, 30, 120
BOUND = 2 * max(INPUT_WEIGHT * MAX_PROMPT, OUTPUT_WEIGHT * POOL_TOKENS)
lengths = st.tuples(st.integers(1, MAX_PROMPT), st.integers(1, MAX_OUTPUT))


def of(tenant: str, number: int, prompt: int = 4, output: int = 4, **more: object) -> Choice:
    client = Client(tenant, tenant, **more)  # type: ignore[arg-type]
    return make_choice(f"{tenant}{number}", prompt, prompt + output - 1, age=number, client=client)


def size(choice: Choice) -> int:
    return len(choice.request.prompt) + choice.request.max_tokens


class Machine:
    """A decode worker of POOL_TOKENS tokens that computes one token of each of its choices per step, and fills up from
    the queue before each."""

    def __init__(self) -> None:
        self.queue, self.running = FairQueue(), list[Choice]()
        self.waiting, self.served = Counter[str](), Counter[str]()
        self.used = 0

    def submit(self, choice: Choice) -> None:
        self.queue.add(choice)
        self.waiting[choice.client.key] += 1

    def step(self) -> None:
        for choice in self.queue.in_turn():
            if self.used + size(choice) > POOL_TOKENS:
                break
            self.used += size(choice)
            self.waiting[choice.client.key] -= 1
            self.queue.remove(choice)
            self.queue.charge(choice, len(choice.request.prompt))
            self.serve(choice, INPUT_WEIGHT * len(choice.request.prompt))
            self.running.append(choice)
        for choice in self.running:
            choice.tokens.append(1)
            self.queue.charge(choice)
            self.serve(choice, OUTPUT_WEIGHT)
            self.used -= size(choice) if len(choice.tokens) == choice.request.max_tokens else 0
        self.running = [c for c in self.running if len(c.tokens) < c.request.max_tokens]

    def serve(self, choice: Choice, cost: float) -> None:
        self.served[choice.client.key] += cost / choice.client.weight


def spread(
    light: list[tuple[int, int]], heavy: list[tuple[int, int]], *, fair: bool, weight: int = 1, earlier: int = 0
) -> float:
    """Returns the largest difference of the service that both tenants receive in any interval in which both wait. The
    heavy one sends `heavy` four times before each request of the other, and received `earlier` tokens while that one
    was idle. Unless `fair`, all are one tenant."""
    m, number = Machine(), 0
    while m.served["heavy"] < earlier:
        m.submit(make_choice(f"earlier{number}", 10, 10, age=number, client=Client("heavy", "heavy")))
        m.step()
        number += 1
    m.served.clear()
    for request in light:
        for tenant, requests in (("heavy", heavy * 4), ("light", [request])):
            for prompt, output in requests:
                number += 1
                client = Client(tenant, tenant if fair else "all", weight=weight if tenant == "heavy" else 1)
                m.submit(make_choice(f"{number}", prompt, prompt + output - 1, age=number, client=client))
    ahead = [0.0]  # of the heavy tenant
    while all(m.waiting[tenant] for tenant in ("light", "heavy")):
        m.step()
        ahead.append(m.served["heavy"] - m.served["light"])
    rises = (last - low for last, low in zip(ahead, accumulate(ahead, min), strict=True))
    falls = (high - last for last, high in zip(ahead, accumulate(ahead, max), strict=True))
    return max(*rises, *falls)


@settings(max_examples=50)
@example([(1, 30)] * 40, [(40, 1)], 1)
@example([(40, 1)] * 40, [(1, 30)], 1)
@example([(20, 20)] * 40, [(20, 20)], 4)
@given(st.lists(lengths, min_size=2, max_size=12), st.lists(lengths, min_size=1, max_size=2), st.integers(1, 4))
def test_two_tenants_that_wait_receive_equal_service_within_the_bound(
    light: list[tuple[int, int]], heavy: list[tuple[int, int]], weight: int
) -> None:
    assert spread(light, heavy, fair=True, weight=weight) <= BOUND


def test_the_bound_does_not_hold_first_come_first_served() -> None:
    light, heavy = [(20, 20)] * 40, [(20, 20)]
    assert spread(light, heavy, fair=False) > 5 * BOUND
    assert spread(light, heavy, fair=True) <= BOUND


def order(queue: FairQueue, count: int) -> list[str]:
    """Places the next choices, whose prompts are computed and which generate nothing."""
    names = []
    for choice in queue.in_turn():
        queue.remove(choice)
        queue.charge(choice, len(choice.request.prompt))
        names.append(choice.name.request_id)
        if len(names) == count:
            break
    return names


@pytest.fixture
def credit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sets how much credit an idle tenant has, and after how much service without a pause it loses it."""

    def set_to(idle: int, burst: int) -> None:
        monkeypatch.setattr(virtual_counters, "IDLE_CREDIT", idle)
        monkeypatch.setattr(virtual_counters, "BURST", burst)

    return set_to


@pytest.mark.parametrize(
    ("idle", "burst", "following"),
    [
        (0, 0, "b10 a4 b11 a5 c20 b12 a6 c21"),  # first, but not twice
        (12, 99, "b10 b11 b12 a4 c20 c21 b13 a5"),  # before one that waits longer, of two with credit by age
        (12, 4, "b10 b11 a4 b12 c20 c21 a5 b13"),  # until it does, too: then its credit is lost
    ],
)
def test_a_tenant_that_was_idle_has_limited_credit(
    credit: Callable[[int, int], None], idle: int, burst: int, following: str
) -> None:
    credit(idle, burst)
    queue = FairQueue()
    for number in range(9):
        queue.add(of("a", number))
    assert order(queue, 4) == ["a0", "a1", "a2", "a3"], "nobody else waits"
    for number in range(10, 14):
        queue.add(of("b", number))
    first = order(queue, 4)
    for number in range(20, 22):
        queue.add(of("c", number))
    assert " ".join([*first, *order(queue, 4)]) == following
    queue.check([*queue])


def test_a_tenant_keeps_its_credit_whose_requests_end_now_and_then(credit: Callable[[int, int], None]) -> None:
    credit(12, 4)
    queue = FairQueue()
    for number in range(9):
        queue.add(of("a", number))
    order(queue, 4)
    for number in range(4):
        queue.add(of("b", number))
        assert order(queue, 1) == [f"b{number}"]
    queue.add(of("b", 4))
    assert order(queue, 1) == ["a4"], "all of it is used"


def test_a_tenant_without_pause_has_no_credit() -> None:
    """However much less than others it receives because it sends less."""
    queue = FairQueue()
    for number in range(40):
        queue.add(of("a", number))
    queue.add(of("b", 0))
    for number in range(1, 10):
        queue.add(of("b", number))
        assert order(queue, 2) == [f"{name}{number - 1}" for name in ("a", "b")]


@settings(max_examples=12)
@given(st.lists(lengths, min_size=2, max_size=12), st.lists(lengths, min_size=1, max_size=2), st.integers(0, 2000))
def test_two_tenants_of_which_one_was_idle_differ_by_its_credit_more(
    light: list[tuple[int, int]], heavy: list[tuple[int, int]], idle: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(virtual_counters, "IDLE_CREDIT", idle)
        patch.setattr(virtual_counters, "BURST", idle // 4)
        assert spread(light * 20, heavy * 4, fair=True, earlier=idle) <= BOUND + idle


def test_counters_outlive_an_empty_queue() -> None:
    queue = FairQueue()
    queue.add(of("a", 0, prompt=30))
    queue.add(of("b", 0, prompt=10))
    assert order(queue, 2) == ["a0", "b0"] and not queue.size
    for number in range(1, 5):
        queue.add(of("b", number, prompt=10))
        queue.add(of("a", number, prompt=10))
    assert order(queue, 4) == ["b1", "b2", "a1", "b3"], "b received less"


def test_output_counts_and_a_weight_divides_the_service() -> None:
    queue = FairQueue()
    talker = of("a", 0)
    queue.add(talker)
    queue.add(of("b", 0, weight=2))
    assert order(queue, 2) == ["a0", "b0"]
    talker.tokens += [1] * 5
    queue.charge(talker)
    queue.charge(talker)  # the same tokens are charged once
    for number in range(1, 9):
        queue.add(of("b", number, weight=2))
        queue.add(of("a", number))
    # a: 4 + 2 * 5 = 14; b: 4 / 2 = 2, and 2 for each further choice
    assert order(queue, 9) == ["b1", "b2", "b3", "b4", "b5", "b6", "a1", "b7", "b8"]


def test_priorities_have_counters_of_their_own() -> None:
    """What a tenant receives at a low priority takes nothing from its share at a high one."""
    queue = FairQueue()
    for number in range(6):
        batch = of("a", number)
        batch.request = make_choice(f"batch{number}", 30, 31, priority=100, client=batch.client).request
        queue.add(batch)
    assert len(order(queue, 5)) == 5
    queue.add(of("b", 10))
    queue.add(of("a", 9))
    assert order(queue, 3)[:2] == ["a9", "b10"], "by age: both have received nothing at this priority"


def test_rescheduled_choices_go_first_and_their_prompt_is_charged_once(credit: Callable[[int, int], None]) -> None:
    credit(0, 0)
    queue = FairQueue()
    for number in range(2):
        queue.add(of("a", number))
    assert order(queue, 2) == ["a0", "a1"]
    placed = of("a", 2)
    queue.add(placed)
    assert order(queue, 1) == ["a2"]
    for number in range(3, 5):
        queue.add(of("b", number))
        queue.add(of("a", number))
    queue.add(placed)
    assert order(queue, 3) == ["a2", "b3", "a3"], "b was lifted to what a has received, once for each prompt"
    queue.check([*queue])


def test_a_key_at_its_limit_of_running_choices_waits_and_others_go() -> None:
    table = WorkerTable(3.0)
    for name in ("p0", "d0"):
        add_worker(table, name, step_tokens=100, blocks=100)
    d = Placing(table)
    keys = [Client(f"k{n}", "t", limits=KeyLimits(max_running=2 - n)) for n in range(2)]
    for number in range(3):
        for client in keys:
            d.submit(make_choice(f"{client.key}-{number}", 4, 8, age=number, client=client))
    d.submit(make_choice("other", 4, 8, age=9, client=Client("o", "o")))
    assert sorted(d.names()) == ["k0-0", "k0-1", "k1-0", "other"]
    d.check()
    assert (+d.dispatcher.running, d.dispatcher.queued["t"]) == ({"t": 3, "o": 1}, 3)
    assert not d.place()
    d.finish("k1-0")
    assert d.names() == ["k1-1"]
    d.prefilled("k0-0")
    assert d.reassign("k0-0") is not None  # not a free slot
    d.check()
    assert not d.place()
    d.reschedule("k0-1")
    assert d.dispatcher.running["t"] == 2
    assert d.names() == ["k0-1"], "it is in the middle of an answer"
    d.finish("k0-0")
    d.finish("k0-1")
    assert d.names() == ["k0-2"]
    d.check()


def test_a_tenant_whose_key_was_excluded_earns_no_credit(credit: Callable[[int, int], None]) -> None:
    credit(0, 0)
    queue = FairQueue()
    queue.exclude("a")
    for number in range(4):
        queue.add(of("a", number))
        queue.add(of("b", number))
        queue.add(of("c", number))
    assert order(queue, 6) == ["b0", "c0", "b1", "c1", "b2", "c2"]
    queue.include("a")
    assert order(queue, 3) == ["a0", "b3", "c3"]
    queue.check([*queue])


@pytest.mark.parametrize("excluded", [False, True])
def test_removal_of_the_last_choice_of_a_tenant_keeps_the_counts(excluded: bool) -> None:
    queue = FairQueue()
    choice = of("a", 0)
    queue.add(choice)
    if excluded:
        queue.exclude("a")
    queue.remove(choice)
    queue.remove(choice)
    queue.check([])
    assert not queue.size and not +queue.waiting and queue.tokens == 0


def full(several_tenants: bool, requests: int = 12, tokens: int = 1000) -> Placing:
    """A dispatcher whose only prefill worker accepts no more, while 100 tokens per second leave the queue."""
    table = WorkerTable(3.0)
    for name in ("p0", "d0"):
        add_worker(table, name, step_tokens=2, blocks=1000)
    d = Placing(table, requests, tokens)
    d.dispatcher.several_tenants = several_tenants
    d.submit(of("runs", 0, prompt=8))
    assert d.names() == ["runs0"]
    for step in range(200):
        d.dispatcher.drain_rate.update(step * 0.1, 10, waits=True)
    return d


def refused(d: Placing, choice: Choice) -> BatonError:
    with pytest.raises(BatonError) as caught:
        d.submit(choice)
    d.check()
    return caught.value


def test_a_tenant_fills_half_of_what_others_leave_of_the_queue() -> None:
    d = full(several_tenants=True)
    for number in range(6):
        d.submit(of("a", number, prompt=40))
    own = refused(d, of("a", 6))
    assert isinstance(own, QuotaExceeded) and own.retry_after_s == pytest.approx(1.2, rel=0.02)  # 120 tokens of 240
    for number in range(3):
        d.submit(of("b", number, prompt=40))
    both = refused(d, of("b", 3))
    assert isinstance(both, QuotaExceeded) and both.retry_after_s == pytest.approx(
        1.2, rel=0.02
    )  # 60, at half the rate
    for number in range(3):
        d.submit(of(f"c{number}", 0))
    none_left = refused(d, of("d", 0))
    assert isinstance(none_left, Unavailable) and none_left.code == "overloaded"
    assert none_left.retry_after_s == pytest.approx(1.86, rel=0.02)  # half of 372 tokens


def test_a_tenant_with_one_long_prompt_is_not_refused_for_its_share() -> None:
    d = full(several_tenants=True)
    d.submit(of("a", 0, prompt=900))
    assert isinstance(refused(d, of("a", 1, prompt=4)), QuotaExceeded)
    d.submit(of("b", 0, prompt=90))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 400)), max_size=40), st.booleans())
def test_a_request_without_room_before_its_body_is_read_has_none_after(
    arrivals: list[tuple[str, int]], several_tenants: bool
) -> None:
    """And of those that pass, only requests of more than one token or choice are refused later."""
    d = full(several_tenants)
    for number, (tenant, prompt) in enumerate(arrivals):
        room = True
        try:
            d.dispatcher.check_room(tenant)
        except (QuotaExceeded, Unavailable):
            room = False
        if not room:
            assert isinstance(refused(d, of(tenant, number, prompt)), QuotaExceeded | Unavailable)
            continue
        try:
            d.submit(of(tenant, number, prompt))
        except (QuotaExceeded, Unavailable):
            assert prompt > 1


def test_a_single_tenant_may_fill_the_queue() -> None:
    d = full(several_tenants=False)
    for number in range(12):
        d.submit(of("a", number))
    assert refused(d, of("a", 12)).code == "overloaded"


def test_a_deadline_that_the_queue_cannot_meet_is_refused_at_once() -> None:
    d = full(several_tenants=False)
    for number in range(5):
        d.submit(of("a", number, prompt=100))
    late = of("a", 5)
    late.deadline_at = 4.0
    with pytest.raises(Unavailable, match=r"about 5\.0 s are before this one, whose deadline is 4 s away"):
        d.dispatcher.check_deadline("a", 0, 1, 4.0)
    d.dispatcher.check_deadline("a", 0, 1, 6.0)
    d.dispatcher.check_deadline("b", 0, 1, 1.0)
    d.dispatcher.check_deadline("a", -1, 1, 1.0)
    error = refused(d, late)
    assert (error.code, error.retry_after_s) == ("would_exceed_deadline", pytest.approx(1.0, abs=0.1))
    assert "5.0 s are before this one, whose deadline is 4 s away" in error.message
    late.deadline_at = 0.001
    assert "whose deadline is 0.001 s away" in refused(d, late).message
    late.deadline_at = 6.0
    d.submit(late)
    other = of("b", 0)
    other.deadline_at = 1.0
    d.submit(other)  # its tenant is next
    urgent = of("a", 7)
    urgent.request, urgent.deadline_at = replace(urgent.request, priority=-1), 1.0
    d.submit(urgent)
    d.check()


def ahead(queue: FairQueue, choice: Choice) -> float:
    return queue.ahead(choice.request.tenant, choice.request.priority, choice.client.weight)


def test_what_goes_before_a_choice_follows_from_the_counters(credit: Callable[[int, int], None]) -> None:
    credit(3, 0)
    queue = FairQueue()
    for number in range(3):
        queue.add(of("a", number, prompt=10))
    assert ahead(queue, of("a", 9)) == 30 and ahead(queue, of("b", 0)) == 0
    assert order(queue, 1) == ["a0"]
    queue.add(of("b", 0, prompt=4))
    assert ahead(queue, of("b", 1)) == 4 + 1, "b0, which begins at 7, and a until its counter is 11"
    queue.add(of("c", 0, prompt=50))
    assert ahead(queue, of("a", 9)) == 20 + 4 + 23
    later = of("b", 2)
    later.request = replace(later.request, priority=3)
    assert ahead(queue, later) == 20 + 4 + 50
    queue.exclude("c")
    assert ahead(queue, of("a", 9)) == 20 + 4


def test_a_long_prompt_is_before_a_choice_only_if_that_one_may_not_go_past_it() -> None:
    queue = FairQueue()
    for number, prompt in enumerate((5, 100, 5)):
        queue.add(of("a", number, prompt))
    queue.add(of("b", 0, prompt=60))

    def before(long_tokens: float) -> float:
        return queue.ahead("b", 0, 1, long_tokens)

    assert (before(99), before(100)) == (60 + 5, 60 + 60), "past the prompt of 100, which would end at 105"
    queue.add(of("b", 1, prompt=45))
    assert before(99) == 105 + 105, "their turn comes at 105 as well"


def test_no_request_is_refused_for_a_long_prompt_that_it_would_go_past() -> None:
    d = full(several_tenants=False)
    d.submit(of("a", 0, prompt=900))
    d.submit(of("b", 0, prompt=8))
    d.dispatcher.check_deadline("b", 0, 1, 0.1)
    with pytest.raises(Unavailable, match=r"about 0\.1 s are before this one"):
        d.dispatcher.check_deadline("b", 0, 1, 0.07)

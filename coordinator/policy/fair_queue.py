"""The choices that wait for workers, in the order in which they go. Pure.

Lower `priority` goes first. Within one, choices that ran before and were rescheduled go first, by age: their service
has been charged, and their clients are in the middle of an answer. Then the tenants take turns by their virtual
counters, each priority with counters of its own, so that what is served at one earns no debt at another; the choices of
one tenant go by age, and so do those of all tenants with credit: in turns, the second of two would wait for all that
arrive meanwhile, and the slowest would take longer. Those of an excluded key (one at its `max_running`) do not wait for
workers, and so do not take part.

The counters (baton.core.virtual_counters) are those of Sheng et al., "Fairness in Serving Large Language Models" (OSDI
2024): service is `INPUT_WEIGHT` for each prompt token that is computed and `OUTPUT_WEIGHT` for each token generated. No
tenant has to wait while nobody else does: the order is work-conserving.

For two tenants that wait during a whole interval, the difference of the service that they receive in it is at most 2
max(INPUT_WEIGHT L, OUTPUT_WEIGHT M), for prompts of at most L tokens and M tokens that fit on the decode workers
(theorem 4.4), and the credit of a tenant that was idle more (`virtual_counters`). A tenant with `weight` w counts 1/w
of its service, and receives w times as much.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from baton.core.errors import InvariantError
from baton.core.virtual_counters import VirtualCounters
from coordinator.policy.choice import Choice, QueuePosition

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""As in the paper: what hosted models charge for tokens. Any two positive values are fair in this sense."""
Lane = tuple[str, str]
"""A tenant and one of its keys."""
_RESUMED: Lane = ("", "resumed choices")  # no key has this name


@dataclass(slots=True)
class _Level:
    """The waiting choices of one priority: sorted by age in each lane, which is absent while empty."""

    counters: VirtualCounters = field(default_factory=VirtualCounters)
    lanes: dict[Lane, list[tuple[QueuePosition, Choice]]] = field(default_factory=dict)
    tokens: Counter[Lane] = field(default_factory=Counter)
    """Prompt tokens in each lane."""

    def open(self, excluded: Collection[str]) -> set[str]:
        """Returns the tenants with a choice that waits for workers."""
        return {tenant for tenant, key in self.lanes if key not in excluded and key != _RESUMED[1]}


class FairQueue:
    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}  # by priority
        self._excluded: set[str] = set()
        self._submitted = self.tokens = 0
        self.size = 0
        """All choices that wait."""
        self.without_decode = 0
        """Choices that need no decode worker."""
        self.waiting: Counter[str] = Counter()
        """Choices that wait, by tenant."""
        self.waiting_tokens: Counter[str] = Counter()
        """Their prompt tokens."""

    def __repr__(self) -> str:
        return f"<FairQueue {self.size} choices of {len(+self.waiting)} tenants>"

    def __iter__(self) -> Iterator[Choice]:
        return (entry[1] for level in self._levels.values() for lane in level.lanes.values() for entry in lane)

    def add(self, choice: Choice) -> None:
        self._submitted += 1
        level, lane = self._place_of(choice)
        choice.queue_position = (choice.request.priority, choice.age, self._submitted)
        self._enter(level, lane)
        insort(level.lanes.setdefault(lane, []), (choice.queue_position, choice))
        level.tokens[lane] += choice.request.num_prefill_tokens
        self._count(choice, 1)

    def remove(self, choice: Choice) -> None:
        """Removes a choice, if it is in the queue."""
        if choice.queue_position is None:
            return
        level, lane = self._place_of(choice)
        entries = level.lanes[lane]
        del entries[bisect_left(entries, (choice.queue_position,))]
        choice.queue_position = None
        level.tokens[lane] -= choice.request.num_prefill_tokens
        if not entries:
            del level.lanes[lane]
            self._leave(level, lane)
        self._count(choice, -1)

    def exclude(self, key: str) -> None:
        """Excludes the choices of a key until `include`, except those that ran before."""
        if key in self._excluded:
            return
        self._excluded.add(key)
        for level in self._levels.values():
            for lane in [lane for lane in level.lanes if lane[1] == key]:
                self._leave(level, lane)

    def include(self, key: str) -> None:
        if key not in self._excluded:
            return
        for level in self._levels.values():
            for lane in [lane for lane in level.lanes if lane[1] == key]:
                self._enter(level, lane, excluded=False)
        self._excluded.discard(key)

    def in_turn(self, behind: Collection[str] = ()) -> Iterator[Choice]:
        """Yields the choices that wait for workers in their order. The caller may remove and charge a choice before it
        asks for the next one, which follows from the counters then, and add tenants to `behind`: of these no more come,
        except choices that ran before."""
        for priority in sorted(self._levels) if self.size else ():
            level = self._levels[priority]
            passed: dict[Lane, int] = {}
            while (choice := self._next(level, passed, behind)) is not None:
                yield choice
                if choice.queue_position is not None:
                    lane = self._place_of(choice)[1]
                    passed[lane] = passed.get(lane, 0) + 1

    def ahead(self, tenant: str, priority: int, weight: int, long_tokens: float = inf) -> float:
        """Returns how many prompt tokens go before a new choice that is added now: those of its tenant, of lower
        `priority` values, and of other tenants until their counters reach its own, without a prompt of more than
        `long_tokens` tokens that it may go past (policy.overtaking). More go before one with a higher value."""
        own = self._levels.get(priority) or _Level()
        before: float = sum(sum(level.tokens.values()) for value, level in self._levels.items() if value < priority)
        counters, open_tenants = own.counters, own.open(self._excluded)
        at = counters.of(tenant) if tenant in open_tenants else counters.after_idle(tenant, open_tenants)
        mine = sum(tokens for lane, tokens in own.tokens.items() if lane[0] == tenant and lane is not _RESUMED)
        for lane, entries in own.lanes.items():
            if lane is _RESUMED or lane[0] == tenant:
                before += own.tokens[lane]
            elif lane[1] not in self._excluded:
                max_tokens = max(0.0, at + mine / weight - counters.of(lane[0]))
                before += min(max_tokens, _tokens_until(entries, max_tokens, long_tokens))
        return before

    def counter(self, choice: Choice, prompt_tokens: int = 0) -> float:
        """Returns the counter of a choice's tenant, as it will be with so many more prompt tokens."""
        now = self._place_of(choice)[0].counters.of(choice.request.tenant)
        return now + INPUT_WEIGHT * prompt_tokens / choice.client.weight

    def charge(self, choice: Choice, prompt_tokens: int = 0) -> None:
        """Charges a choice's tenant for prompt tokens, unless it ran before, and for output since the last call."""
        produced = len(choice.tokens)
        output, choice.output_charged = produced - choice.output_charged, produced
        if choice.prompt_charged:
            prompt_tokens = 0
        elif prompt_tokens:
            choice.prompt_charged = True
        if prompt_tokens or output:
            request, cost = choice.request, INPUT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output
            counters = self._level(request.priority).counters
            counters.charge(request.tenant, cost / choice.client.weight, takes_turn=prompt_tokens > 0)

    def _level(self, priority: int) -> _Level:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
        return level

    def _place_of(self, choice: Choice) -> tuple[_Level, Lane]:
        lane = _RESUMED if choice.prompt_charged else (choice.request.tenant, choice.client.key)
        return self._level(choice.request.priority), lane

    def _enter(self, level: _Level, lane: Lane, *, excluded: bool | None = None) -> None:
        """Lifts the counter of a tenant that begins to wait with this lane."""
        excluded = lane[1] in self._excluded if excluded is None else excluded
        if lane is not _RESUMED and not excluded and lane[0] not in (waiting := level.open(self._excluded)):
            level.counters.enter(lane[0], waiting)

    def _leave(self, level: _Level, lane: Lane) -> None:
        if lane is not _RESUMED and lane[0] not in level.open(self._excluded):
            level.counters.leave(lane[0])

    def _next(self, level: _Level, passed: Mapping[Lane, int], behind: Collection[str]) -> Choice | None:
        """Returns the next choice of a level, after so many in each lane that were passed over."""
        best: tuple[tuple[float, bool, int], QueuePosition, Choice] | None = None
        for lane, entries in level.lanes.items():
            over = passed.get(lane, 0)
            if over < len(entries) and lane[1] not in self._excluded:
                if lane is _RESUMED:
                    return entries[over][1]
                if lane[0] in behind:
                    continue
                head = (level.counters.turn(lane[0], by_age=True), *entries[over])
                best = head if best is None else min(best, head)
        return None if best is None else best[2]

    def _count(self, choice: Choice, sign: int) -> None:
        tenant, tokens = choice.request.tenant, sign * choice.request.num_prefill_tokens
        self.size += sign
        self.without_decode += sign * (not choice.needs_decode)
        self.tokens += tokens
        self.waiting[tenant] += sign
        self.waiting_tokens[tenant] += tokens

    def check(self, queued: Collection[Choice]) -> None:
        """Raises InvariantError unless these choices, and no others, are in the queue, sorted and counted."""
        entries = [lane for level in self._levels.values() for lane in level.lanes.values()]
        if {*self} != {*queued} or any(not lane or lane != sorted(lane) for lane in entries):
            raise InvariantError(f"the queue does not match the waiting choices: {[*self]}")
        waiting, tokens = Counter[str](), Counter[str]()
        for choice in queued:
            waiting[choice.request.tenant] += 1
            tokens[choice.request.tenant] += choice.request.num_prefill_tokens
        counted = self.size, self.without_decode, self.tokens, +self.waiting, +self.waiting_tokens
        without_decode = sum(not choice.needs_decode for choice in queued)
        if counted != (len(queued), without_decode, tokens.total(), waiting, tokens):
            raise InvariantError(f"{self!r} counts {counted}, not {without_decode}, {waiting} and {tokens}")


def _tokens_until(entries: Iterable[tuple[QueuePosition, Choice]], max_tokens: float, long_tokens: float) -> int:
    """Returns the prompt tokens of choices until they are `max_tokens`, or up to one of more than `long_tokens` tokens
    that would end beyond."""
    total = 0
    for _, choice in entries:
        tokens = choice.request.num_prefill_tokens
        if total >= max_tokens or (tokens > long_tokens and total + tokens > max_tokens):
            break
        total += tokens
    return total

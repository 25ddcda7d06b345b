"""Admission and routing: which request goes to which pair of workers, and when.

The coordinator has the queue (late dispatch): a prefill worker has a backlog of at most two step budgets of tokens,
or one longer prompt, and beside either those of other tenants as far as they have turns within two steps, so queued
requests can still go to any worker. A request is dispatched when a prefill worker has room and a decode worker
has blocks for its prompt and an output of expected length, beyond the expected growth of its own sequences, and at most
slightly more sequences than it runs at once. The decode worker must also have blocks for the whole output of the
request alone, so every accepted request can finish. The order is that of policy.fair_queue: by priority, rescheduled
choices before others, then the tenants in turns. The head of the queue waits for blocks and is not overtaken by a
request that can use the same workers, so short requests cannot starve a long one; other tenants go past a prompt of
more than two steps that waits for a prefill worker, within its fair turn (policy.overtaking). A request that no present
worker has the blocks for is skipped, and one that waits blocks none that other classes of workers may serve.

A request goes to the workers of one class (`coordinator.policy.workers`): of those that may serve it, to the one whose
smaller side has the most room, in requests of its size. A decode worker may compute a prompt itself (policy.split); it
then needs the room of both, and its backlog of prompts is limited as that of a prefill worker.
Which worker of the class it is: policy.pick.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from baton.core.codes import ErrorCode
from baton.core.commands import Role
from baton.core.errors import ContextLengthExceeded, InvariantError, QuotaExceeded, Unavailable
from baton.core.events import PromptCost
from baton.core.request import ChoiceId
from coordinator.policy.choice import NEVER, NOTHING, Choice, Held, Stage
from coordinator.policy.codes import NO_WORKER, PlacementCode
from coordinator.policy.expectation import OutputExpectation
from coordinator.policy.fair_queue import FairQueue
from coordinator.policy.overtaking import Closed, Lack
from coordinator.policy.pick import WithTokens, pick_by_turn, pick_decode, pick_prefill
from coordinator.policy.pool import ANY_ROOM, BACKLOG_STEPS, Pool, Worker
from coordinator.policy.quotas import MAX_RETRY_S, DrainRate
from coordinator.policy.split import STREAM_WEIGHT, Decision, PromptAt, Split, StreamRate, decide
from coordinator.policy.traffic import Traffic
from coordinator.policy.workers import WorkerClass, WorkerTable, continues

MAX_OVERTAKEN = 64  # choices that wait for room in one class while later ones use another


class Pick(NamedTuple):
    """The workers of a choice. `prefill` is the decode worker if that computes the prompt; then there is no target."""

    prefill: Worker
    to_compute: int
    targets: tuple[Worker, ...]
    decision: Decision | None


class Dispatcher:
    def __init__(
        self, workers: WorkerTable, max_queued_requests: int, max_queued_tokens: int, split: Split = "always"
    ) -> None:
        self._workers = workers  # whose counters are the sums of what choices hold
        self.traffic = Traffic()
        self._max_requests = max_queued_requests
        self._max_tokens = max_queued_tokens
        self._queue = FairQueue()
        self._to_come: Counter[ChoiceId] = Counter()  # choices still to be queued, by the name of the first one
        self.admitted = self.refused = 0  # counters: choices, those refused because the queue is too long
        self.admitted_tokens = self.admitted_tokens_squared = 0  # of the prompts of requests
        self.several_tenants = False  # each may fill only half of what the others leave of the queue
        self.drain_rate, self.stream_rate = DrainRate(), StreamRate()
        self._running: Counter[str] = Counter()  # choices at workers, by key
        self.running: Counter[str] = Counter()  # the same by tenant
        self._blocked: dict[WorkerClass, Closed] = {}  # as of the last `place`
        self.expectation = OutputExpectation()
        self.split, self.stream_weight = split, STREAM_WEIGHT

    def __repr__(self) -> str:
        ready = sum(w.ready for w in self._workers.present())
        return f"<Dispatcher {self._queue.size} queued | {ready} workers ready>"

    @property
    def num_queued(self) -> int:
        return self._queue.size

    @property
    def queued(self) -> Mapping[str, int]:
        """Choices in the queue, by tenant."""
        return self._queue.waiting

    def demand(self) -> dict[str, float | str]:
        """Returns what the size of the pools should follow: choices admitted so far and those refused because the queue
        was too long, the tokens of the admitted prompts and the sum of their squares, prompt tokens in the queue, those
        that it can hold and those that prefill workers still have to compute, the length that an output is expected to
        have, and the role whose workers the first of the queue waits for (empty: none)."""
        return {
            "admitted": self.admitted,
            "refused": self.refused,
            "admitted_tokens": self.admitted_tokens,
            "admitted_tokens_squared": self.admitted_tokens_squared,
            "queued_tokens": self._queue.tokens,
            "max_queued_tokens": self._max_tokens,
            "backlog_tokens": sum(w.backlog_tokens for w in self._workers.present() if w.role == "prefill"),
            "expected_output_tokens": round(self.expectation.mean_tokens, 1),
            "waits_for": self.role_without_room or "",
        }

    def retry_after_s(self) -> float:
        """Returns after how many seconds a refused client should try again: when half of the queue has drained."""
        return self.drain_rate.retry_after_s(self._queue.tokens / 2)

    def missing_role(self, *, decode: bool = True) -> Role | None:
        """Returns a role that is needed and has no ready worker, if no class has all that it needs; without `decode`
        that is only a worker that computes prompts."""
        missing = [self._missing_role(each, decode=decode) for each in self._workers.classes]
        none: Role = "decode" if decode and self.split != "always" else "prefill"
        return missing[0] if all(missing) and missing else None if missing else none

    def _missing_role(self, each: WorkerClass, *, decode: bool) -> Role | None:
        prompts = any(self._computes_prompts(w) and w.ready for w in each.workers)
        missing: tuple[tuple[Role, bool], ...] = (
            ("prefill", not prompts and self.split == "always"),
            ("decode", decode and not any(w.ready for w in each.decode.workers)),
            ("prefill", not prompts),
        )
        return next((role for role, is_missing in missing if is_missing), None)

    def _computes_prompts(self, worker: Worker) -> bool:
        return worker.role == "prefill" or (self.split != "always" and worker.computes_prompts)

    def _prompts_on_decode(self, each: WorkerClass) -> bool:
        """Whether decode workers of a class, as far as there are any, compute prompts."""
        if self.split == "always":
            return False
        decodes = each.decode.workers
        return not decodes or any(w.computes_prompts for w in decodes)

    def _pools(self, choice: Choice, each: WorkerClass) -> tuple[Pool, ...]:
        """Returns the pools of a class in which a choice needs a worker, once it is queued."""
        apart = not self._prompts_on_decode(each) or (choice.request.pooling and each.prefill.capacity())
        return each.pools[: 1 + choice.needs_decode] if apart else (each.decode,)

    @property
    def role_without_room(self) -> Role | None:
        """Which workers the first of the queue waits for, as of the last `place`."""
        lacks = (lack for closed in self._blocked.values() for lack in closed.lacks.values())
        return next((lack.pools[-1].role for lack in lacks), None) if self._queue.size else None

    @property
    def cached_block_sizes(self) -> set[int]:
        """Block sizes in pools with cached blocks: for these a request's prefix is worth computing."""
        classes = self._workers.classes
        return {size for each in classes for pool in each.pools if pool.index for size in pool.block_sizes}

    def model_digest(self, choice: Choice) -> str | None:
        """Returns the digest of the model that is expected to serve a choice; None if no worker is present."""
        facts = (each.facts for each in (*self._candidates(choice), *self._workers.classes))
        return next((known.model_digest for known in facts if known is not None), None)

    # The queue.

    def submit(self, choice: Choice, choices: int = 1) -> None:
        """Queues the first choice of a request, or refuses it before any work is done. Reserves queue room for all its
        `choices`: `submit_later` queues the later ones, and `forget` releases the room of those that are never queued.
        While a role has no worker it is queued too: one may be starting.

        Raises:
            ContextLengthExceeded: no pair of the present workers could ever hold it, or its prompt alone exceeds what
                the queue may hold.
            Unavailable: the queue is full, or what goes before the choice takes longer than its deadline allows.
            QuotaExceeded: its tenant has filled its part of the queue.
        """
        prompt_tokens = choice.request.num_prefill_tokens
        if prompt_tokens > self._max_tokens:  # a retry cannot succeed
            message = f"the prompt has {prompt_tokens} tokens; at most {self._max_tokens} may wait"
            raise ContextLengthExceeded(message, code=PlacementCode.EXCEEDS_QUEUE, param="prompt")
        self.check_room(choice.request.tenant, choices, prompt_tokens)
        adapter, tokens = choice.request.adapter, choice.request.max_kv_tokens
        # `unservable` takes long for every request, and none of the workers is too small for most of them.
        short = any(pool.capacity(adapter) < tokens for each in self._workers.classes for pool in each.pools)
        unservable = self.unservable(choice) if short else None
        if unservable is not None and unservable[1] == ErrorCode.EXCEEDS_POOL:  # anything else may change
            message, code = unservable
            raise ContextLengthExceeded(message, code=code, param="max_tokens")  # a retry cannot succeed
        urgency = choice.request.tenant, choice.request.priority, choice.client.weight
        self.check_deadline(*urgency, choice.deadline_at - choice.started_at, choices)
        self.admitted += choices
        self.admitted_tokens += prompt_tokens
        self.admitted_tokens_squared += prompt_tokens**2
        self.enqueue(choice)
        if choices > 1:
            self._to_come[choice.name] = choices - 1

    def check_room(self, tenant: str, choices: int = 1, prompt_tokens: int = 1) -> None:
        """Checks the room in the queue; the defaults are the least that a request can need, so that most of those that
        will be refused are refused before their prompt is read. A tenant may hold half of what the others leave of the
        queue, so that there is always room for another (dynamic thresholds, Choudhury and Hahne, 1998); one of which
        nothing waits is not refused for that.

        Raises:
            Unavailable: the queue is full.
            QuotaExceeded: the tenant has filled its part of the queue.
        """
        queue = self._queue
        # Later choices share the prompt's tokens; more choices than the limit are accepted into an empty queue.
        full = queue.size + self._to_come.total() + choices > max(self._max_requests, choices)
        if full or queue.tokens + prompt_tokens > self._max_tokens:
            self.refused += choices
            raise Unavailable(
                f"{queue.size} choices with {queue.tokens} prompt tokens are already waiting",
                retry_after_s=self.retry_after_s(),
            )
        waiting, tokens = queue.waiting.get(tenant, 0), queue.waiting_tokens.get(tenant, 0)
        if not self.several_tenants or not waiting:
            return
        many = 2 * (waiting + choices) > self._max_requests - (queue.size - waiting)
        long = 2 * (tokens + prompt_tokens) > self._max_tokens - (queue.tokens - tokens)
        if many or long:
            raise QuotaExceeded(
                f"{waiting} choices of this tenant with {tokens} prompt tokens are already waiting",
                retry_after_s=self.drain_rate.retry_after_s(tokens / 2 * len(+queue.waiting)),
            )

    def check_deadline(self, tenant: str, priority: int, weight: int, limit_s: float, choices: int = 1) -> None:
        """Raises Unavailable if what goes before a new request takes longer, at the measured rate, than the `limit_s`
        that it has."""
        if not self.drain_rate.measured:
            return
        wait_s = self.drain_rate.seconds(self._queue.ahead(tenant, priority, weight, self._long_tokens()))
        if wait_s is not None and wait_s > limit_s:
            self.refused += choices
            message = f"requests of about {wait_s:.1f} s are before this one, whose deadline is {limit_s:.6g} s away"
            retry_after_s = max(1.0, min(wait_s - limit_s, MAX_RETRY_S))
            raise Unavailable(message, code=PlacementCode.WOULD_EXCEED_DEADLINE, retry_after_s=retry_after_s)

    def _long_tokens(self) -> float:
        """Returns how many tokens a prompt has at most that none of the present classes lets others go past."""
        steps = (
            pool.longest_step
            for each in self._workers.classes
            for pool in (each.pools if self._prompts_on_decode(each) else (each.prefill,))
        )
        return BACKLOG_STEPS * min(filter(None, steps), default=math.inf)

    def submit_later(self, choice: Choice, first: ChoiceId) -> None:
        """Queues a later choice of the request whose first choice is `first`."""
        if self._to_come[first] > 1:
            self._to_come[first] -= 1
        else:
            del self._to_come[first]
        self.enqueue(choice)

    @property
    def incomplete(self) -> set[ChoiceId]:
        """The first choices of requests with later choices still to be queued."""
        return set(self._to_come)

    def forget(self, first: ChoiceId) -> None:
        """Releases the queue room of a request's choices that were never queued."""
        del self._to_come[first]

    def enqueue(self, choice: Choice) -> None:
        """Queues an accepted choice, regardless of the limits."""
        self._queue.add(choice)

    def measure(self, placed: Collection[Choice], now: float) -> None:
        """Measures the rates at which the queue drains and streams begin, after each `place`."""
        tokens = streams = 0
        for choice in placed:
            tokens += choice.request.num_prefill_tokens
            streams += choice.needs_decode
        waits = bool(self._queue.size and self._blocked)  # not while a role is missing
        self.drain_rate.update(now, tokens, waits=waits)
        self.stream_rate.observe(streams, now)

    # Placement.

    def place(self) -> list[Choice]:
        """Takes the choices that can start now out of the queue, in order, and names the workers of each. The caller
        moves them on to PREFILL."""
        placed: list[Choice] = []
        closed: dict[WorkerClass, Closed] = {}
        if not self._queue.size:  # called for each end and each hand-over
            self._blocked = closed
            return placed
        unchanged = (entry for entry in self._blocked.items() if entry[1].changes == entry[0].changes)
        self._blocked = {each: known for each, known in unchanged if not known.grown}
        if self._blocked and self._first_still_waits():
            return placed
        complete = {
            each
            for each in self._workers.classes
            if all(map(Pool.capacity, (each.decode,) if self._prompts_on_decode(each) else each.pools))
        }
        # While a role is missing, only choices that need no decode worker may start: a full queue takes long to scan.
        if not complete and not self._queue.without_decode:
            self._blocked = closed
            return placed
        overtaken, behind = 0, set[str]()
        for choice in self._queue.in_turn(behind):
            if not self._place(choice, closed):
                overtaken += bool(closed)
                if overtaken > MAX_OVERTAKEN:
                    break
                if closed and complete <= closed.keys():  # open at most to tenants with less
                    if not any(each.open for each in closed.values()):
                        break
                    behind.add(choice.request.tenant)
                continue  # it waits for another worker, and does not block the choices that can use other ones
            self._queue.remove(choice)
            self._queue.charge(choice, choice.to_compute)
            self._count_running(choice, 1)
            placed.append(choice)
        self._blocked = closed
        return placed

    def _first_still_waits(self) -> bool:
        """Whether the first of the queue closed all classes to all others in the last `place`, and lacks the same."""
        first = next(self._queue.in_turn(), None)
        for each in self._workers.classes:
            known = self._blocked.get(each)
            if first is None or known is None or known.open or len(known.lacks) > 1 or not self._lack(first, known):
                return False
        return True

    def _lack(self, choice: Choice, known: Closed) -> Lack | None:
        """Returns what a choice lacked in a class as of the last `place`, if it needs no less now."""
        lack = known.lacks.get(choice.queue_position)
        return None if lack is None or self._expected_tokens(choice) < lack.tokens else lack

    def _expected_tokens(self, choice: Choice) -> int:
        return self.expectation.tokens(choice.request.num_prefill_tokens, choice.request.max_kv_tokens)

    def _place(self, choice: Choice, closed: dict[WorkerClass, Closed]) -> bool:
        """Names the workers of a choice, if it has room in one of the classes that may serve it and are not `closed` to
        it; else closes those that could ever hold it."""
        lacking: list[tuple[WorkerClass, Lack, float]] = []
        candidates = [
            each
            for each in self._candidates(choice)
            if each not in closed or closed[each].lets(choice, self._queue.counter(choice))
        ]
        for each in self._by_room(choice, candidates):
            known = self._blocked.get(each)
            lack = None if known is None else self._lack(choice, known)
            pick = self._pick(choice, each) if lack is None else lack.pools
            if isinstance(pick, Pick):
                choice.prefill, choice.decision = pick.prefill, pick.decision
                choice.to_compute = pick.to_compute
                choice.revision = pick.prefill.join.revision
                self._name_targets(choice, pick.targets, pick.prefill if pick.prefill.role == "decode" else None)
                return True
            if self._too_small(choice, each) is None:
                if lack is None:
                    lack = self._wait_for(choice, pick)
                lacking.append((each, lack, self._overtaken_below(choice, each, pick)))
        for each, lack, below in lacking:
            closed.setdefault(each, Closed(each.changes)).add(choice, lack, below)
        return False

    def _wait_for(self, choice: Choice, pools: tuple[Pool, ...]) -> Lack:
        """Makes pools without room for a choice report when a worker may have it."""
        tokens = 0
        for pool in pools:
            if pool.role == "prefill":  # which accepts prompts in turns, too
                pool.wait_for(ANY_ROOM)
            else:
                tokens = self._expected_tokens(choice)
                pool.wait_for(min(self.expectation.blocks(choice.request, pool).values(), default=ANY_ROOM))
        return Lack(pools, tokens)

    def _overtaken_below(self, choice: Choice, each: WorkerClass, without: tuple[Pool, ...]) -> float:
        """Returns the counter below which other tenants go past a choice for which these pools of a class have no room:
        none, unless its prompt needs an idle worker to compute it."""
        tokens, computes = choice.request.num_prefill_tokens, each.prefill in without or self._prompts_on_decode(each)
        if choice.prompt_charged or not computes or tokens <= BACKLOG_STEPS * without[-1].longest_step:
            return -math.inf
        return self._queue.counter(choice, tokens)

    def _candidates(self, choice: Choice) -> Collection[WorkerClass]:
        """Returns the classes that have the roles that a choice needs, and may serve it."""
        before, classes = choice.generated_by, self._workers.classes
        able = [each for each in classes if all(map(Pool.capacity, self._pools(choice, each)))]
        if before is not None:
            able = [each for each in able if (facts := each.facts) is None or continues(before, facts) is None]
            return [each for each in able if each.key.revision == choice.revision] or able
        if self.traffic.shares and able:
            able = [each for each in able if self._too_small(choice, each) is None] or able
            present = {each.key.revision for each in able}
            revisions = self.traffic.revisions(choice.traffic_place, choice.name.request_id, present)
            able = [each for each in able if each.key.revision in revisions]
        return able

    def _by_room(self, choice: Choice, classes: list[WorkerClass]) -> list[WorkerClass]:
        """Sorts classes by the smaller side's room, in requests of this size, the greatest first."""
        if len(classes) < 2:
            return classes
        tokens = choice.request.num_prefill_tokens

        def room(each: WorkerClass) -> tuple[float, float]:
            blocks = min(self.expectation.blocks(choice.request, each.decode).values(), default=1)
            sides = [p.free() / (tokens if p.role == "prefill" else blocks) for p in self._pools(choice, each)]
            return min(sides), max(sides)

        return sorted(classes, key=room, reverse=True)

    def _count_running(self, choice: Choice, sign: int) -> None:
        """Counts a choice that goes to workers (1) or returns (-1). A key at its `max_running` is excluded."""
        client, limit = choice.client, choice.client.limits.max_running
        choice.counts_as_running = sign > 0
        self._running[client.key] += sign
        self.running[client.tenant] += sign
        if limit and self._running[client.key] >= limit:
            self._queue.exclude(client.key)
        elif limit:
            self._queue.include(client.key)

    def reassign(self, choice: Choice) -> bool:
        """Names new decode workers for parked KV, in the class of its prefill worker; returns False if none has room
        now."""
        self._count(choice, NOTHING)
        choice.decode = None
        home = self._workers.class_of(choice.prefill) if choice.prefill is not None else None
        decodes = self._pick_decode(choice, home.decode) if home is not None else ()
        if decodes:
            self._name_targets(choice, decodes)
        return bool(decodes)

    def _name_targets(self, choice: Choice, targets: tuple[Worker, ...], decode: Worker | None = None) -> None:
        choice.targets, choice.decode = targets, targets[0] if targets else decode
        self.hold(choice)

    def hold(self, choice: Choice) -> None:
        """Counts at the workers of a choice what it occupies there, which follows from its stage, its tokens and the
        expected length of its output. Called again after each change of its workers, or of its stage but to PREFILL,
        which changes nothing here, and once it has more than `grows_at` tokens."""
        self._queue.charge(choice)
        growth = 0
        if (worker := choice.decode) is None:
            choice.grows_at = NEVER
        else:
            request, size = choice.request, worker.block_size
            prompt, output = len(request.prompt), len(choice.tokens)
            choice.grows_at = -(-(prompt + output) // size) * size - prompt
            before, longest = len(request.output), prompt + request.max_tokens - 1
            growth = self.expectation.growth(prompt + before, longest, output - before, worker)
        self._count(choice, self._occupied(choice, growth))

    def handed_over(self, choice: Choice, now: float) -> None:
        """Measures the hand-over of a choice in stage HANDOVER: a decode worker has all KV now."""
        if choice.prefill is not None and (home := self._workers.class_of(choice.prefill)) is not None:
            last_chunk = min(choice.to_compute, choice.prefill.step_tokens)
            home.hand_over_cost.observe(last_chunk, now - choice.history[-1].at)

    def set_decode(self, choice: Choice, decode: Worker | None) -> None:
        """Counts a choice at another decode worker than the preferred one: that worker has accepted its KV."""
        if choice.decode is not decode:
            self._count(choice, NOTHING)
            choice.decode = decode
            self.hold(choice)

    def finish(self, choice: Choice) -> None:
        """Releases a choice that ends, and counts its output; not that of one that is rescheduled."""
        if choice.stage is not Stage.QUEUED and choice.needs_decode:
            self.expectation.ended(choice.produced)
        self._queue.charge(choice)
        self.release(choice)

    def release(self, choice: Choice) -> None:
        """Takes a choice out of the queue, or off the counters of its workers."""
        self._queue.remove(choice)
        if choice.counts_as_running:
            self._count_running(choice, -1)
        self._count(choice, NOTHING)

    def _count(self, choice: Choice, held: Held) -> None:
        before = choice.held
        if held == before:
            return
        choice.held = held
        backlog, reserved = held[0] - before[0], held[1] - before[1]
        running, growth = held[2] - before[2], held[3] - before[3]
        if backlog and choice.prefill is not None:
            choice.prefill.count(backlog=backlog, tenant=choice.request.tenant)
        if choice.decode is not None and (reserved or running or growth):
            choice.decode.count(reserved=reserved, running=running, growth=growth)

    def _occupied(self, choice: Choice, growth: int = 0) -> Held:
        """Returns what a choice occupies, with its expected growth. Until decode has all KV, its worker's report may
        not include the blocks."""
        stage, decode = choice.stage, choice.decode
        if stage is Stage.ENDED or choice.prefill is None:
            return NOTHING
        backlog = choice.to_compute if stage is Stage.QUEUED or stage is Stage.PREFILL else 0
        if decode is None:
            return Held(backlog)
        blocks = 0 if stage is Stage.DECODE else decode.blocks_for(choice.request.num_prefill_tokens)
        return Held(backlog, blocks, 1, growth)

    def check(self, choices: Iterable[Choice]) -> None:
        """Raises InvariantError if the queue or the counters of workers do not match these choices, which are all."""
        queued, running, of_tenants = [], Counter[str](), Counter[str]()
        sums: Counter[tuple[Worker | None, str]] = Counter()
        backlogs: Counter[tuple[Worker | None, str]] = Counter()  # by tenant
        for choice in choices:
            if choice.stage is Stage.QUEUED:
                queued.append(choice)
            running[choice.client.key] += choice.counts_as_running
            of_tenants[choice.client.tenant] += choice.counts_as_running
            if choice.held._replace(growth=0) != self._occupied(choice):
                raise InvariantError(f"{choice!r} holds {choice.held}, not {self._occupied(choice)}")
            backlogs[choice.prefill, choice.request.tenant] += choice.held.backlog_tokens
            for counter, count in choice.held._asdict().items():
                sums[choice.prefill if counter == "backlog_tokens" else choice.decode, counter] += count
        for each in self._workers.classes:
            for pool in each.pools:
                pool.check()
        for worker in self._workers.present():
            for counter in Held._fields:
                if getattr(worker, counter) != sums[worker, counter]:
                    raise InvariantError(f"{worker}: {counter} should be {sums[worker, counter]}")
            backlog_of = {tenant: count for (at, tenant), count in backlogs.items() if at is worker and count}
            if worker.backlog_of != backlog_of:
                raise InvariantError(f"{worker}: its backlog by tenant should be {backlog_of}")
        self._queue.check(queued)
        if (+self._running, +self.running) != (+running, +of_tenants):
            counted = f"{self._running} and {self.running}"
            raise InvariantError(f"running choices by key and tenant are {running} and {of_tenants}, not {counted}")
        if self._to_come and min(self._to_come.values()) < 1:
            raise InvariantError(f"choices still to come are {self._to_come}")

    # Room.

    def unservable(self, choice: Choice) -> tuple[str, str] | None:
        """Returns why no present worker can ever serve a choice, with an error code; None if one can. Parked KV needs
        only a decode worker of its class; its prefill worker can hand it over while draining."""
        classes: Collection[WorkerClass]
        if choice.stage is Stage.PARKED and choice.prefill is not None:
            home = self._workers.class_of(choice.prefill)
            classes = [home] if home is not None else ()
        else:
            classes = self._candidates(choice)
        reasons = [self._too_small(choice, each, parked=choice.stage is Stage.PARKED) for each in classes]
        if None in reasons:
            return None
        return reasons[0] if reasons else self._no_class(choice)

    def continues_elsewhere(self, choice: Choice) -> bool:
        """Returns whether a class other than that of its parked KV can continue a choice as tokens."""
        if choice.prefill is None:
            return False
        before, home = choice.prefill.join.facts, self._workers.class_of(choice.prefill)
        return any(
            each is not home
            and all(map(Pool.capacity, self._pools(choice, each)))
            and ((facts := each.facts) is None or continues(before, facts) is None)
            and self._too_small(choice, each) is None
            for each in self._workers.classes
        )

    def _no_class(self, choice: Choice) -> tuple[str, str]:
        """Returns why no class may serve a choice, with an error code."""
        before, roles = choice.generated_by, list[Role]()
        for each in self._workers.classes:
            missing = [pool.role for pool in self._pools(choice, each) if not pool.capacity()]
            if not missing and before is None:
                message = "no revision that gets requests (`baton traffic`) has workers of both roles"
                return message, PlacementCode.NO_PREFILL_WORKER
            if not missing and before is not None and (facts := each.facts) is not None:
                differs = continues(before, facts)
                field = f" ({differs.field} differs)" if differs is not None else ""
                return f"no worker is left that can continue its output{field}", PlacementCode.NO_PREFILL_WORKER
            roles += missing
        role = roles[0] if roles else "prefill" if self.split == "always" else "decode"
        elsewhere = any(pool.role == role and pool.capacity() for each in self._workers.classes for pool in each.pools)
        apart = " in the revision and domain of the others" if elsewhere else ""
        return f"no {role} worker is left{apart}", NO_WORKER[role]

    def _too_small(self, choice: Choice, each: WorkerClass, *, parked: bool = False) -> tuple[str, str] | None:
        """Returns why the workers of a class can never serve a choice, with an error code; None if they can. Its KV may
        be `parked` there."""
        request = choice.request
        for pool in (each.decode,) if parked else self._pools(choice, each):
            tokens = request.num_prefill_tokens if pool.role == "prefill" else request.max_kv_tokens
            role, limit = pool.role, pool.capacity(request.adapter)
            if not limit and pool.capacity():
                return f"no {role} worker has the request's adapter", PlacementCode.ADAPTER_NOT_LOADED
            if not limit:
                return f"no {role} worker is left", NO_WORKER[role]
            if tokens > limit:
                return (
                    f"the request needs KV for {tokens} tokens; the largest {role} worker holds {limit}",
                    ErrorCode.EXCEEDS_POOL,
                )
        return None

    def _pick(self, choice: Choice, each: WorkerClass) -> Pick | tuple[Pool, ...]:
        """Returns the workers of a class that a choice starts at now, or its pools that have no room."""
        if not self._prompts_on_decode(each) or (choice.request.pooling and each.prefill.capacity()):
            return self._pick_pair(choice, each)
        alone, prefill = self._pick_alone(choice, each.decode), pick_prefill(choice, each.prefill, ANY_ROOM)
        if self.split == "never" or prefill is None:
            decision = Decision(True, "on decode: " + ("--split never" if prefill else "no prefill worker is ready"))
            return (each.decode,) if alone is None else Pick(*alone, (), decision)
        if alone is None:
            decision = Decision(False, "apart: no decode worker has room for the prompt")
        elif (decision := self._decide(choice, each, prefill, alone)).on_decode:
            return Pick(*alone, (), decision)
        pair = self._pick_pair(choice, each)
        return pair._replace(decision=decision) if isinstance(pair, Pick) else (each.decode, *pair)

    def _pick_pair(self, choice: Choice, each: WorkerClass) -> Pick | tuple[Pool, ...]:
        """Returns a prefill worker and the decode workers that may take the KV, or the pool that has no room."""
        prefill = pick_prefill(choice, each.prefill)
        if prefill is None:
            return (each.prefill,)
        if not choice.needs_decode:
            return Pick(*prefill, (), None)
        decodes = self._pick_decode(choice, each.decode)
        return Pick(*prefill, decodes, None) if decodes else (each.decode,)

    def _pick_alone(self, choice: Choice, pool: Pool) -> WithTokens | None:
        """Returns the decode worker with room for prompt and output that would compute the prompt first."""
        return pick_by_turn(choice, pool, choice.request.max_kv_tokens, self.expectation.blocks(choice.request, pool))

    def _pick_decode(self, choice: Choice, pool: Pool) -> tuple[Worker, ...]:
        """Returns the decode workers that may take the KV of a choice, the preferred one first."""
        return pick_decode(choice, pool, self.expectation.blocks(choice.request, pool))

    def _decide(self, choice: Choice, each: WorkerClass, prefill: WithTokens, alone: WithTokens) -> Decision:
        decode = alone[0]
        at_decode, at_prefill = decode.prompt_cost, prefill[0].prompt_cost or decode.prompt_cost
        if at_decode is None or at_prefill is None:
            return Decision(False, "apart: no cost is measured yet")
        tenant, last_chunk = choice.request.tenant, min(prefill[1], at_prefill.step_tokens)
        hand_over_s = each.hand_over_cost.seconds(last_chunk) if choice.needs_decode else 0.0
        ready, queued = sum(w.ready for w in each.prefill.workers), self._queue.size - 1
        stream_s = self.expectation.mean_tokens * at_decode.step_s
        prices = _prompt_at(*prefill, tenant, at_prefill), _prompt_at(*alone, tenant, at_decode)
        per_s = self.stream_rate.per_s / max(sum(w.ready for w in each.decode.workers), 1)
        return decide(*prices, hand_over_s, queued, ready, decode.running, stream_s, self.stream_weight, per_s)


def _prompt_at(worker: Worker, tokens: int, tenant: str, cost: PromptCost) -> PromptAt:
    return PromptAt(worker.worker_id, tokens, worker.before(tenant, tokens), cost)

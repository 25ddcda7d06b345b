"""Replays requests on a cluster of any size in virtual time: production placement and schedulers, measured costs.

The coordinator admits, queues and places with its own `Dispatcher` and `WorkerTable`; workers are sim/scale/workers.py.
Streams and hand-overs are modelled by their measured times instead of simulated message by message: that is what the
simulator's other modes are for. A request needs a few dozen events, whatever the length of its output.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from baton.core.blocks import HINT_BYTES, KeyChain
from baton.core.commands import Role
from baton.core.errors import BatonError, InvariantError, Unavailable
from baton.core.events import KVCacheEvents, Load, PromptCost, SequenceEnded, TokenEvent
from baton.core.request import GenerateRequest, SamplingParams, SequenceId
from coordinator.policy.choice import Choice, Stage
from coordinator.policy.dispatch import Dispatcher
from coordinator.policy.pool import Worker
from prefill.scheduler import Progress
from sim.loop import Loop
from sim.scale.host import Host, Thread
from sim.scale.members import FOREVER_S, ClusterShape, Flipped, SimMembers
from sim.scale.results import Measured, Outcome, Times, summary
from sim.scale.workers import TOKEN, SimDecodeWorker, SimPrefillWorker, StepRun
from sim.stats import Slo
from sim.trace import TRACE_BLOCK, TraceRow

GREEDY = SamplingParams(temperature=0.0)
FLIP_POLL_S = 0.05
"""Between two looks at whether a worker that changes its role has nothing left to do."""
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _ReplayJob:
    """One request: `prefill` while it is placed; `sent` are the tokens whose KV is on its way, or there, and `computed`
    those that prefill has."""

    choice: Choice
    request: GenerateRequest
    times: Times
    client: int
    prefill: SimPrefillWorker | None = None
    decode: SimDecodeWorker | None = None
    offered: bool = False
    sent: int = 0
    computed: int = 0
    last_token_at: float = 0.0


class Replay:
    """One replay; `measured` has its results when it has run."""

    def __init__(self, shape: ClusterShape, rows: Sequence[TraceRow], *, clients: int = 0, fast: bool = True) -> None:
        """`rows` arrive at their times, or with `clients` in a closed loop: each client sends its next request when its
        last one has ended. Unless `fast`, every decode step is computed by itself, and
        every block is tracked."""
        self.loop = Loop(0)
        self.shape, self.measured = shape, Measured()
        self._rows, self._next, self._clients = rows, 0, clients
        self._prefixes = any(row.blocks for row in rows)
        host = Host(self.loop, shape.host_cores) if shape.cores else None
        self._front = Thread(self.loop, host, shape.front_cores)
        self._client = Thread(self.loop, host, shape.front_cores)
        self._threads = host is not None
        self.members = SimMembers(
            *(shape, self.loop, self, self.measured, host), prefix_cache=self._prefixes, fast=fast
        )
        self.table, self._prefill, self._decode = self.members.table, self.members.prefill, self.members.decode
        self.dispatcher = Dispatcher(self.table, shape.max_queued_requests, shape.max_queued_tokens, shape.split)
        self.dispatcher.stream_weight = shape.stream_weight
        self._jobs: dict[str, _ReplayJob] = {}  # by request id: each has one choice
        self._parked: list[_ReplayJob] = []
        self._links: dict[tuple[str, str], float] = {}  # that may be busy, until when
        self.compares_costs = shape.split == "auto"  # else nothing compares the costs of prompts
        cores = list(shape.cores) or [()] * (shape.num_prefill + shape.num_decode)
        for number in range(shape.num_prefill + shape.num_decode):
            role: Role = "prefill" if number < shape.num_prefill else "decode"
            self.members.add(role, rows[0].at_s if rows and not clients else 0.0, cores[number])

    def run(self, slo: Slo | None = None) -> Outcome:
        """Runs until every request has ended. Without the cyclic garbage collector: a request leaves no cycle, and the
        millions of objects that it would visit stay until the end.

        Raises:
            InvariantError: a scheduler or the dispatcher is inconsistent: a bug.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            self._run()
        finally:
            if collects:
                gc.enable()
        self.check()
        for decode in self._decode.values():
            self.measured.preemptions += decode.scheduler.preemptions
        self.measured.front_busy_s += self._front.busy_s
        seconds = self.members.worker_s("prefill"), self.members.worker_s("decode")
        return summary(self.measured, slo or Slo(), *seconds, self.loop.executed)

    def _run(self) -> None:
        if self._clients:
            for client in range(self._clients):
                self._send_next(client)
        else:
            self._arm()
        self.loop.run_all()

    def check(self) -> None:
        self.dispatcher.check(job.choice for job in self._jobs.values())
        for worker in self.members.present():
            worker.scheduler.check_idle()
        if self._jobs:
            raise InvariantError(f"{len(self._jobs)} requests have not ended: {list(self._jobs)[:3]}")

    # Workers that come and go.

    def start_worker(self, role: Role, start_s: float) -> None:
        """Starts a worker, which joins after `start_s`."""
        self.loop.later(start_s, self._joined, role, self.loop.now)

    def _joined(self, role: Role, started_at: float, flipped: Flipped | None = None) -> None:
        self.members.add(role, started_at, (), flipped)
        self._reassign()
        self._place()

    def flip(self, name: str, role: Role, limit_s: float, takes_s: float) -> None:
        """Makes a worker drain for up to `limit_s`, give back what it has not done by then, and join again in `role`,
        under its name and with its cached blocks, `takes_s` after its last sequence."""
        self._flip(self.members.drain_to_flip(name, role, self.loop.now + limit_s), role, takes_s)

    def _flip(self, known: Worker, role: Role, takes_s: float) -> None:
        if self.loop.now >= _present(known.drain_by):
            for job in [job for job in self._jobs.values() if self._gives_back(known, job)]:
                self._reschedule(job)
            self._place()
        worker = self.members.remove(known)
        if worker is None:
            self.loop.later(FLIP_POLL_S, self._flip, known, role, takes_s)
            return
        self.measured.flips += 1
        flipped = Flipped(worker.name, known.incarnation + 1, worker.scheduler.kept, worker.core.cores)
        self.loop.later(takes_s, self._joined, role, self.loop.now, flipped)

    def _gives_back(self, known: Worker, job: _ReplayJob) -> bool:
        """Whether a request is queued again as a worker leaves: unless its KV is on its way, which takes no time to
        speak of."""
        if job.choice.prefill is known and job in self._parked:
            return True
        return job.choice.runs_at(known.worker_id) and job.choice.stage in (Stage.PREFILL, Stage.DECODE)

    def _reschedule(self, job: _ReplayJob) -> None:
        """Queues a request again, with its output so far; later events of the present attempt find the old job."""
        choice, times = job.choice, job.times
        for worker in (job.prefill, job.decode):
            if worker is not None:
                worker.abort(job.request.sequence_id)
        if job in self._parked:
            self._parked.remove(job)
        self.dispatcher.release(choice)
        choice.resume(choice.attempt + 1, self.loop.now)
        choice.enter(Stage.QUEUED, self.loop.now)
        choice.prefix = self._prefix(choice.request)
        self.dispatcher.enqueue(choice)
        times.placed_at = times.started_at = times.prefilled_at = times.received_at = times.running_at = 0.0
        request = replace(choice.request, attempt=choice.attempt)
        again = _ReplayJob(choice, request, times, job.client, last_token_at=job.last_token_at)
        self._jobs[choice.request.request_id] = again
        self.measured.rescheduled += 1

    @property
    def in_flight(self) -> int:
        return len(self._jobs)

    # Clients.

    def _arm(self) -> None:
        """Schedules the next request of an open loop."""
        if self._next < len(self._rows):
            self.loop.at(max(self._rows[self._next].at_s, self.loop.now), self._due)

    def _due(self) -> None:
        self._send_next(0)
        self._arm()

    def _send_next(self, client: int) -> None:
        if self._next >= len(self._rows):
            return
        row, number = self._rows[self._next], self._next
        self._next += 1
        request = GenerateRequest(
            f"r{number}", self._prompt(number, row), max(1, row.output_len), GREEDY, tenant=row.tenant
        )
        times = Times(self.loop.now, row.input_len, max(1, row.output_len))
        self.measured.times.append(times)
        job = _ReplayJob(Choice(request, number, self.loop.now, FOREVER_S), request, times, client)
        front = self.shape.prefill.front
        admit_s, half_s = front.admit_cpu_s(row.input_len), front.client_request_cpu_s / 2
        if not self._threads:
            self.measured.front_busy_s += admit_s
            self.loop.later(front.request_s, self._admit, job)
            return
        # Half of the client's work for a request comes before it is sent, half after its end.
        computed_s = half_s + front.admit_cpu_s(0) + front.deliver_cpu_s(1, 1) + front.read_cpu_s(1, 1)
        wait_s = max(front.request_s - computed_s, 0.0)

        def written() -> None:
            if self._clients:  # in an open loop times count from when the request was due
                times.sent_at = self.loop.now
            self._front.run(admit_s, lambda: self.loop.later(wait_s, self._admit, job))

        self._client.run(half_s, written)

    def _prompt(self, number: int, row: TraceRow) -> tuple[int, ...]:
        if not self._prefixes:
            return _plain_prompt(row.input_len)
        tokens: list[int] = []
        for block in row.blocks:
            tokens += [block + 8] * TRACE_BLOCK
        tokens += [(1 << 31) + number] * (row.input_len - len(tokens))
        return tuple(tokens[: row.input_len])

    # The coordinator.

    def _admit(self, job: _ReplayJob) -> None:
        request, times = job.request, job.times
        times.admitted_at = self.loop.now
        job.choice.prefix = self._prefix(request)
        try:
            self.dispatcher.submit(job.choice)
        except BatonError as error:
            times.refused = error.code
            self._client_done(job)
            return
        self._jobs[request.request_id] = job
        self._place()
        self.measured.queued_most = max(self.measured.queued_most, self.dispatcher.num_queued)

    def _prefix(self, request: GenerateRequest) -> dict[int, tuple[bytes, ...]]:
        if not self._prefixes:
            return {}
        size = self.members.layout.block_size
        keys = KeyChain("", "", "", "", size).grow(lambda start, end: request.prompt[start:end], len(request.prompt))
        return {size: tuple(key[:HINT_BYTES] for key in keys)}

    def _place(self) -> None:
        while self.dispatcher.num_queued:
            placed = self.dispatcher.place()
            self.dispatcher.measure(placed, self.loop.now)
            for choice in placed:
                job = self._jobs[choice.request.request_id]
                choice.enter(Stage.PREFILL, self.loop.now)  # `place` has counted it
                job.times.placed_at = self.loop.now
                if choice.on_decode:
                    job.decode = self._decode[choice.decode_worker]
                    job.decode.submit(job.request)
                    self._report_load(job.decode)
                    self.measured.on_decode += 1
                else:
                    job.prefill = self._prefill[choice.prefill_worker]
                    job.prefill.submit(job.request)
            if not self.decode_is_full:
                return
            # The first of the queue may find room after any step, also after those of runs that have ended by now.
            interrupted = [worker.interrupt() for worker in self._decode.values()]
            if not any(interrupted):
                return

    @property
    def decode_is_full(self) -> bool:
        return bool(self.dispatcher.num_queued) and self.dispatcher.role_without_room == "decode"

    def _move(self, job: _ReplayJob, stage: Stage) -> None:
        job.choice.enter(stage, self.loop.now)
        self.dispatcher.hold(job.choice)

    def _job(self, sequence: SequenceId) -> _ReplayJob:
        return self._jobs[sequence.request_id]

    # Prefill workers report.

    def began(self, worker: SimPrefillWorker, sequence: SequenceId) -> None:
        job = self._job(sequence)
        job.times.started_at = self.loop.now
        if job.choice.targets:
            self._offer(job)

    def progressed(self, worker: SimPrefillWorker, progress: Progress) -> None:
        job = self._job(progress.sequence_id)
        job.computed, job.times.cached = progress.computed, progress.cached
        if self.compares_costs:
            worker.known.load = Load(prompt_cost=worker.scheduler.prompt_cost)
        if progress.first_token is not None:
            job.times.prefilled_at = self.loop.now
            worker.cached += progress.cached
            self._move(job, Stage.HANDOVER)
            self._produced(job, len(job.request.output) + 1)
            self._first_token(job)
        if job.decode is not None:
            self._send(job)
        if progress.first_token is not None:
            self._place()

    def prefill_ended(self, worker: SimPrefillWorker, ended: SequenceEnded) -> None:
        job = self._job(ended.sequence)
        self._end(job)

    def cached(self, name: str, events: KVCacheEvents) -> None:
        _present(self.table.get(name)).update_cached(events)

    # Hand-overs.

    def _offer(self, job: _ReplayJob) -> None:
        """Offers the KV to the targets in order; parks it if none accepts."""
        link = self.shape.prefill.link
        _present(job.prefill).core.work(link.offer_s)
        for target in job.choice.targets:
            if self.table.get(target.worker_id) is not target:
                continue  # it has left
            worker = self._decode[target.worker_id]
            worker.core.work(link.accept_s)
            try:
                cached = worker.reserve(job.request)
            except Unavailable:
                continue
            self.dispatcher.set_decode(job.choice, target)
            job.decode, job.sent = worker, cached
            self._report_load(worker)
            if job.times.prefilled_at:
                self._send(job)
            return
        self._parked.append(job)

    def _reassign(self) -> None:
        waiting, self._parked = self._parked, []
        for job in waiting:
            if self.dispatcher.reassign(job.choice):
                self._offer(job)
            else:
                self._parked.append(job)

    def _send(self, job: _ReplayJob) -> None:
        """Sends the KV that is computed and not sent yet."""
        tokens, job.sent = max(0, job.computed - job.sent), max(job.sent, job.computed)
        link, last = self.shape.prefill.link, bool(job.times.prefilled_at)
        seconds = link.send_token_s * tokens + link.send_s * last
        if seconds > 0.0:
            _present(job.prefill).core.run(seconds, 0.0, lambda: self._transmit(job, tokens, last))
        else:
            self._transmit(job, tokens, last)

    def _transmit(self, job: _ReplayJob, tokens: int, last: bool) -> None:
        link, edge = self.shape.prefill.link, (_present(job.prefill).name, _present(job.decode).name)
        free_at = max(self._links.get(edge, 0.0), self.loop.now)
        free_at += tokens * self.shape.prefill.token_bytes / link.bytes_per_s
        self._links[edge] = free_at
        seconds = link.receive_token_s * tokens + link.receive_s * last
        if last:
            self.loop.at(free_at + link.latency_s, self._receive, job, seconds)
        else:
            self.loop.at(free_at, _present(job.decode).core.work, seconds)

    def _receive(self, job: _ReplayJob, seconds: float) -> None:
        if seconds > 0.0:
            _present(job.decode).core.run(seconds, 0.0, lambda: self._received(job))
        else:
            self._received(job)

    def _received(self, job: _ReplayJob) -> None:
        decode, prefill = _present(job.decode), _present(job.prefill)
        edge, sequence = (prefill.name, decode.name), job.request.sequence_id
        if self._links.get(edge, 0.0) <= self.loop.now:
            self._links.pop(edge, None)
        job.times.received_at = self.loop.now
        self.dispatcher.handed_over(job.choice, self.loop.now)
        decode.received(sequence)
        prefill.release(sequence)
        self._move(job, Stage.DECODE)
        self._report_load(decode)
        self._place()

    # Decode workers report.

    def running(self, worker: SimDecodeWorker, sequence: SequenceId) -> None:
        job = self._job(sequence)
        job.times.running_at = self.loop.now
        if job.choice.on_decode:
            job.times.started_at = self.loop.now

    def advanced(self, worker: SimDecodeWorker, run: StepRun, steps: int, now: float, ended: list[SequenceId]) -> None:
        gaps, front, first_at = self.measured.gaps, self.shape.decode.front, run.ends_at(1)
        rows, new = len(run.running), 0  # new sequences began with the run: their first gap includes their hand-over
        for sequence in run.running:
            job = self._jobs[sequence.request.request_id]
            if job.last_token_at < run.began_at:
                gaps.add(first_at - job.last_token_at)
                new += 1
            job.last_token_at = now
            self._produced(job, len(job.choice.tokens) + steps)
        if new and steps > 1:
            gaps.add((now - first_at) / (steps - 1), new * (steps - 1))
        if rows > new:
            gaps.add((now - run.began_at) / steps, (rows - new) * steps)
        self.measured.front_busy_s += front.deliver_cpu_s(steps, steps * rows)
        self._report_load(worker)
        for name in ended:
            job = self._job(name)
            job.times.last_at = now
            self._client_done(job)
            self._end(job)
        if ended and self._parked:
            self._reassign()

    def decoded(self, worker: SimDecodeWorker, tokens: Iterable[TokenEvent], ended: list[SequenceId]) -> None:
        later: list[_ReplayJob] = []
        for event in tokens:
            job = self._job(event.sequence)
            if job.choice.stage is Stage.PREFILL:
                job.times.prefilled_at, job.times.cached = self.loop.now, event.cached_tokens
                self._move(job, Stage.DECODE)
                self._produced(job, event.first_index + len(event.tokens))
                self._first_token(job)
            else:
                self._produced(job, event.first_index + len(event.tokens))
                later.append(job)
        self._report_load(worker)
        self._later_tokens(later)
        for sequence in ended:
            self._end(self._job(sequence))
        if ended and self._parked:
            self._reassign()
        self._place()

    def _report_load(self, worker: SimDecodeWorker) -> None:
        scheduler, known = worker.scheduler, worker.known
        cost = scheduler.prompt_cost if self.compares_costs else None
        preempted = scheduler.num_preempted if scheduler.preemptions else 0
        free, last = scheduler.blocks.num_free, known.load
        if last is None or free != last.blocks_free or preempted != last.preempted or cost != last.prompt_cost:
            known.load = _load(free, preempted, cost)

    def _produced(self, job: _ReplayJob, tokens: int) -> None:
        known = job.choice.tokens
        known += [TOKEN] * (tokens - len(known))
        if job.choice.grows_at < len(known) < job.request.max_tokens:  # else it ends now
            self.dispatcher.hold(job.choice)

    def _end(self, job: _ReplayJob) -> None:
        self._produced(job, job.request.max_tokens)
        self.dispatcher.finish(job.choice)
        del self._jobs[job.request.request_id]
        self._place()

    # Tokens on their way to the client.

    def _first_token(self, job: _ReplayJob) -> None:
        front, produced = self.shape.prefill.front, job.choice.next_index
        if not self._threads:  # the time back is part of `request_s`
            self.measured.front_busy_s += front.deliver_cpu_s(1, 1)
            self._arrived(job, produced)
            return
        self._through(1, lambda: self._arrived(job, produced))

    def _later_tokens(self, jobs: Sequence[_ReplayJob]) -> None:
        """Tokens of one step; a gap counts at the client."""
        front = self.shape.decode.front
        produced = [(job, job.choice.next_index) for job in jobs]
        if not self._threads:
            self.measured.front_busy_s += front.deliver_cpu_s(1, len(jobs))
            for job, count in produced:
                self._arrived(job, count)
            return

        def arrive() -> None:
            for job, count in produced:
                self._arrived(job, count)

        self._through(len(jobs), arrive)

    def _through(self, tokens: int, done: Callable[[], object]) -> None:
        """One message of a worker on its way to the client, where it arrives before it is parsed."""
        front = self.shape.decode.front

        def read() -> None:
            self._client.run(0.0, done)
            self._client.run(front.read_cpu_s(1, tokens), _nothing)

        self._front.run(front.deliver_cpu_s(1, tokens), read)

    def _arrived(self, job: _ReplayJob, produced: int) -> None:
        now, times = self.loop.now, job.times
        if not times.first_at:
            times.first_at = now
        elif job.last_token_at:
            self.measured.gaps.add(now - job.last_token_at)
        job.last_token_at = now
        if produced >= job.request.max_tokens:
            times.last_at = now
            self._client_done(job)

    def _client_done(self, job: _ReplayJob) -> None:
        if self._threads:
            front = self.shape.prefill.front
            self._client.run(front.client_request_cpu_s / 2, lambda: self._answered(job))
        else:
            self._answered(job)

    def _answered(self, job: _ReplayJob) -> None:
        if self._clients:
            self._send_next(job.client)


def _nothing() -> None:
    pass


def _present(value: T | None) -> T:
    if value is None:
        raise InvariantError("a request or worker of the simulation lacks what its stage needs")
    return value


@lru_cache(1 << 16)
def _load(free: int, preempted: int, cost: PromptCost | None) -> Load:
    """Returns a worker's report: workers that have equal ones share it."""
    return Load(blocks_free=free, preempted=preempted, prompt_cost=cost)


_prompts: dict[int, tuple[int, ...]] = {}


def _plain_prompt(length: int) -> tuple[int, ...]:
    """Returns a prompt of that length, shared by all requests: without a prefix cache its tokens do not matter."""
    if length not in _prompts:
        _prompts[length] = (TOKEN,) * length
    return _prompts[length]

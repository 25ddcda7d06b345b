"""The path of one request through the coordinator.

1. The front end builds a Submission (validated, tokenised).
2. It counts against its client's quota, and its grammar is compiled if it has one. Then `Cluster.admit` queues it or
   refuses it; the dispatcher places it on a pair of workers as soon as both have room.
3. Tokens arrive in the journal: the first from prefill, the others from decode.
4. This module reads the journal, converts it to text, cuts it at a stop string, and yields deltas. A slow reader leaves
   tokens in the journal (at most max_tokens of them) and blocks no other request.
5. In every case (finish, stop string, client disconnected, deadline, a lost worker) both pools are notified at the same
   time: by `Requests` where the journal or a worker ends it, else by `end`.

Each choice is a sequence of its own. The first computes the prompt; the others are dispatched when its KV has been
handed over, and reuse the prompt's full blocks from the prefix caches of its workers, if these have one. If one choice
fails, all end.

A request with several prompts is a generation for each, admitted as one; deltas of several choices or prompts are
merged.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import replace
from typing import Any, Protocol

from baton.core.codes import ErrorCode
from baton.core.errors import BatonError, DeadlineExceeded, InvalidRequest
from baton.core.request import GenerateRequest
from baton.runtime.event_loop import LoopWatch
from coordinator.adapters import load_adapter
from coordinator.cluster import Cluster
from coordinator.metrics import Metrics
from coordinator.policy.adapters import AdapterTable
from coordinator.policy.choice import Choice, Stage
from coordinator.policy.quotas import Client, Quotas
from coordinator.reader import Reader
from coordinator.recent import RecentRequests, Record
from coordinator.structured_output import GrammarCompiler
from coordinator.submission import Delta, Sink, Submission
from coordinator.text.stream import TextStream, Vocabulary
from coordinator.tracing import Tracing

AT_ONCE = 128
"""Prompts of one request that are admitted at the same time: the queue has room for those of several."""


class Pipeline:
    """The interface that both front ends call."""

    def __init__(
        self,
        cluster: Cluster,
        vocabulary: Vocabulary,
        loop_watch: LoopWatch | None = None,
        metrics: Metrics | None = None,
        tracing: Tracing | None = None,
        grammars: GrammarCompiler | None = None,
        *,
        generates: bool = True,
    ) -> None:
        """`generates`: whether the model is served for generation, so that decode workers are needed."""
        self._grammars = grammars
        self._generates = generates
        self._tracing = tracing
        self._loop_watch = loop_watch or LoopWatch()
        self._cluster = cluster
        self._vocabulary = vocabulary
        self._tasks = 0, -1.0
        self._metrics = metrics or Metrics()
        self._recent = RecentRequests()
        self._quotas = Quotas()

    async def generate(self, submission: Submission, sink: Sink | None = None) -> AsyncGenerator[Delta, None]:
        """Yields at least one delta per choice, in any order of choices, the last of each with a finish reason. Yields
        nothing before the first token, so a front end can still reply with an error status. It waits for more tokens
        between two deltas of a choice, so it cannot monopolize the event loop.

        If the submission has one choice, deltas other than the first and the last may go to `sink` while the caller
        waits for the next one.

        Raises:
            BatonError: refused, lost or past its deadline; also in the middle of the stream.

        Closing the generator (aclose, or cancelling the task) aborts the request on both pools.
        """
        observed = self._metrics.request(submission)
        error: BaseException | None = None
        first: Reader | None = None
        client, counted = submission.client, submission.admitted
        try:
            if not counted:
                self._quotas.admit(client, time.monotonic(), submission.n)
            counted = True
            submission = await with_grammar(submission, self._grammars)
            first = self._admit(submission, _request(submission, 0), sink, observed.delta)
            deltas = self._choice(submission, first)
            if submission.n > 1:
                deltas = merged([deltas, *self._further_choices(submission, first)])
            async with aclosing(deltas):
                async for delta in deltas:
                    observed.delta(delta)
                    yield delta
        except BaseException as raised:
            error = raised
            raise
        finally:
            if first is not None:  # `_choice` has ended it, unless it was closed before its first delta was requested
                self._cluster.forget(first.choice)
            if counted:
                self._quotas.charge(client, observed.tokens_used, time.monotonic())
            if counted and not submission.admitted:
                self._quotas.ended(client, time.monotonic(), submission.n)
            observed.end(error, first.choice.revision if first is not None else "")

    def check_room(self, client: Client, limit_s: float | None = None) -> None:
        """Refuses a request that would be refused whatever its body contains, before that is read. `limit_s`: the
        seconds until its deadline, if it names one outside of its body.

        Raises:
            BatonError: the client's quota is used up, the queue has no room for it, what goes before it takes longer
                than `limit_s`, or the cluster is draining.
        """
        try:
            self._quotas.check(client, time.monotonic())
            self._cluster.requests.check_room(client, limit_s)
        except BatonError as error:
            self._metrics.failure(error, client.tenant)
            raise

    @contextmanager
    def admitted(self, client: Client, choices: int = 1) -> Iterator[None]:
        """Counts one request of a client against its quota for the duration of the `with` block: one that generates
        nothing, or the prompts of one request, whose submissions are `admitted`.

        Raises:
            QuotaExceeded: a limit is reached.
        """
        self._quotas.admit(client, time.monotonic(), choices)
        try:
            yield
        finally:
            self._quotas.ended(client, time.monotonic(), choices)

    def _admit(
        self,
        submission: Submission,
        request: GenerateRequest,
        sink: Sink | None = None,
        observe: Callable[[Delta], None] = lambda delta: None,
    ) -> Reader:
        """Queues a choice. Deltas of several choices are merged by a task, so none of them goes to the sink."""
        s, shown = submission, (submission.shown_token_ids, submission.include_stop)
        text = TextStream(self._vocabulary, s.stop, s.sampling.min_tokens, *shown, s.prompt, s.new_parser())
        choice = self._cluster.admit(request, 1 if request.choice else s.n, s.session, s.client)
        reader = Reader(choice, text, sink if s.n == 1 else None, observe)
        self._cluster.listen(choice, reader.notify)
        return reader

    def _further_choices(self, submission: Submission, first: Reader) -> Iterator[AsyncGenerator[Delta, None]]:
        """Returns the generators of choices 1 and up."""

        async def begin(index: int) -> AsyncGenerator[Delta, None]:
            choice = first.choice
            while not choice.ended and not (choice.stage is Stage.DECODE and choice.tokens):
                async with asyncio.timeout(max(0.0, choice.deadline_at - time.monotonic()) + 1.0):
                    await first.changed()
            if choice.error is not None:
                raise choice.error
            remaining_s = choice.deadline_at - time.monotonic()
            other = self._admit(submission, replace(_request(submission, index), deadline_s=remaining_s))
            try:
                async with aclosing(self._choice(submission, other)) as deltas:
                    async for delta in deltas:
                        yield delta._replace(choice=index)
            finally:
                self._cluster.forget(other.choice)

        return (begin(index) for index in range(1, submission.n))

    async def _choice(self, submission: Submission, reader: Reader) -> AsyncGenerator[Delta, None]:
        choice = reader.choice
        reason, answered = "the client disconnected", False
        # One timer for the whole choice, not one for each wait: there is a wait for every step.
        timer = asyncio.get_running_loop().call_later(choice.deadline_at - time.monotonic(), reader.expire)
        try:
            while not reader.done:
                delta = await reader.next()
                if reader.done:
                    answered = True
                    # Before the yield, which waits for the client. Only a stop string still has to be reported to the
                    # workers: otherwise the journal has ended it.
                    self._cluster.end(choice, "stop string", answered=True)
                yield delta
        except DeadlineExceeded:
            reason = ErrorCode.DEADLINE_EXCEEDED
            raise
        except Exception:
            reason = ErrorCode.INTERNAL_ERROR
            raise
        finally:
            timer.cancel()
            self._cluster.end(choice, reason)
            outcome = _outcome(choice, None if answered else reason)
            record = self._recent.ended(choice, outcome, time.monotonic())
            if self._tracing is not None:
                self._tracing.ended(record, submission.traceparent)

    def requests(self, limit: int) -> list[Record]:
        """Returns at most `limit` records: the running choices, and those that ended last."""
        return self._recent.latest(self._cluster.requests, limit, time.monotonic())

    def request(self, request_id: str) -> list[Record]:
        """Returns the choices of a request; none if it is no longer recorded."""
        return self._recent.named(self._cluster.requests, request_id, time.monotonic())

    @property
    def adapters(self) -> AdapterTable:
        """The LoRA adapters, which clients choose as the model."""
        return self._cluster.adapters

    async def load_adapter(self, name: str, path: str, *, replace: bool) -> None:
        """Loads an adapter at all workers. Raises BatonError."""
        await load_adapter(self._cluster, name, path, replace=replace, decode=self._generates)

    def unload_adapter(self, name: str) -> None:
        """Removes the name of an adapter; running requests finish with it. Raises NotFound."""
        self._cluster.unload_adapter(name)

    def max_model_len(self, prompt_tokens: int) -> int | None:
        """See `WorkerTable.max_model_len`."""
        return self._cluster.workers.max_model_len(prompt_tokens)

    def ready(self) -> tuple[bool, str]:
        """Returns whether requests should be sent here, and one line with the reason if not. While a role has had no
        ready worker for less than `--hold-s`, they wait for one; also after `expect_workers`. A model that does not
        generate needs no decode worker."""
        if self._cluster.requests.draining:
            return False, "draining"
        missing = self._cluster.requests.holding.missing_role(time.monotonic(), decode=self._generates)
        return (True, "ready") if missing is None else (False, f"no {missing} worker is ready")

    def expect_workers(self) -> None:
        """Lets the cluster be ready without workers for `--hold-s`: an autoscaler keeps none while no request waits."""
        self._cluster.requests.holding.expect_workers(time.monotonic())

    def _num_tasks(self) -> int:
        """Returns the number of asyncio tasks, counted at most once per second: counting 30,000 takes 40 ms."""
        now = time.monotonic()
        if now - self._tasks[1] >= 1.0:
            self._tasks = len(asyncio.all_tasks()), now
        return self._tasks[0]

    async def metrics(self, batches: Mapping[str, Any] | None = None) -> bytes:
        """The `/metrics` document, with the figures of the batches process, if any; empty: it does not reply."""
        return await asyncio.to_thread(self._metrics.text, self.workers() | {"batches": batches})

    def answered(self, status: int, seconds: float) -> None:
        """Counts a response that begins so long after the request's head, even if that never reached `generate`."""
        self._metrics.answered(status, seconds)

    def ignored(self, endpoint: str, names: Collection[str]) -> None:
        """Counts and logs the fields of a request that were accepted without effect."""
        self._metrics.ignored(endpoint, names)

    def _tenants(self) -> dict[str, dict[str, int]]:
        """Returns the choices that run at workers, and those that wait, by tenant as metrics label it."""
        counts: dict[str, dict[str, int]] = {}
        dispatcher = self._cluster.requests.dispatcher
        for state, sums in (("running", dispatcher.running), ("queued", dispatcher.queued)):
            for tenant, count in sums.items():
                if count:
                    counts.setdefault(self._metrics.label(tenant), {"running": 0, "queued": 0})[state] += count
        return counts

    def workers(self) -> dict[str, Any]:
        """The `/workers` document."""
        cluster = self._cluster
        rows = [worker.row(cluster.lease_now()) for worker in cluster.workers.all()]
        known: dict[str, Any] = {
            "workers": rows,
            "control": cluster.address,
            "totals": {"prefill": cluster.workers.totals("prefill"), "decode": cluster.workers.totals("decode")},
            "joins_refused": dict(cluster.joins_refused),
            "flips": dict(cluster.workers.flips),
            "tenants": self._tenants(),
            "traffic": dict(cluster.requests.dispatcher.traffic.shares),
        }
        counts = {
            **cluster.requests.counts()._asdict(),
            **cluster.requests.dispatcher.demand(),
            "held_choices": cluster.requests.held(),
            "oldest_queued_s": round(cluster.requests.oldest_queued_s(time.monotonic()), 3),
            "rescheduled": cluster.requests.rescheduled,
            "retry_budget": round(cluster.requests.losses.budget.tokens, 1),
            "retries_refused": cluster.requests.losses.budget.refused,
            "reassigned": cluster.requests.reassigned,
            "prefilled_tokens": cluster.requests.prefilled.tokens,
            "wasted_tokens": dict(cluster.requests.prefilled.wasted),
            "ready": self.ready()[0],
            "missing_role": cluster.requests.dispatcher.missing_role(decode=self._generates) or "",
            "expects_workers": cluster.requests.holding.expects_workers(time.monotonic()),
            "adapters": cluster.adapters.in_use(cluster.requests),
            "tasks": self._num_tasks(),
            "pid": os.getpid(),
        }
        return known | {"coordinator": counts | self._loop_watch.as_json()}


async def with_grammar(submission: Submission, grammars: GrammarCompiler | None) -> Submission:
    """Returns the submission with its constraint compiled, if it has one. Raises as GrammarCompiler.compile does."""
    constraint = submission.constraint
    if constraint is None:
        return submission
    if grammars is None:
        raise InvalidRequest(f"{constraint.param} is not supported by this server", param=constraint.param)
    grammar = await grammars.compile(constraint, submission.client.key)
    return replace(submission, sampling=replace(submission.sampling, grammar=grammar))


def _request(submission: Submission, choice: int) -> GenerateRequest:
    """Returns the request of one choice; only the first one asks for the prompt's log-probabilities."""
    sampling = submission.sampling
    return GenerateRequest(
        request_id=submission.request_id,
        choice=choice,
        prompt=submission.prompt,
        max_tokens=submission.max_tokens,
        sampling=replace(sampling, prompt_logprobs=None) if choice else sampling,
        eos_token_ids=submission.eos_token_ids,
        deadline_s=submission.deadline_s,
        tenant=submission.client.tenant,
        priority=submission.priority,
        cache_salt=submission.cache_salt,
        pooling=submission.pooling,
        adapter=submission.adapter,
    )


def _outcome(choice: Choice, reason: str | None) -> str:
    """Returns how a choice ended, for its record; `reason` is why its reader stopped before the end of its answer."""
    if choice.error is not None:
        return choice.error.code
    return choice.finish or "stop" if reason is None else reason


async def merged(sources: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """Yields the items of all `sources` as they arrive, in the order of each source. A slow reader blocks all sources,
    with one item each buffered. The first error ends all. When this generator closes, all sources are closed and their
    tasks have ended, even if the closing task is cancelled meanwhile."""
    waiting = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=list(waiting).index):
                source = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield item
                waiting[asyncio.ensure_future(anext(source))] = source
    finally:
        await _run_to_completion(_close(list(waiting), sources))


async def _close(tasks: Sequence[asyncio.Future[Delta]], sources: Sequence[AsyncGenerator[Delta, None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(source.aclose() for source in sources))


async def _run_to_completion(cleanup: Coroutine[Any, Any, None]) -> None:
    """Runs `cleanup` to completion, then raises a cancellation that arrived meanwhile. `cleanup` must not block."""
    task, cancelled = asyncio.ensure_future(cleanup), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


class Generator(Protocol):
    """The methods of `Pipeline` that are called here."""

    def generate(self, submission: Submission) -> AsyncGenerator[Delta, None]: ...

    def admitted(self, client: Client, choices: int = 1) -> AbstractContextManager[None]: ...


async def generate_all(generator: Generator, submissions: Sequence[Submission]) -> AsyncGenerator[Delta, None]:
    """Yields the deltas of all prompts as they arrive, up to AT_ONCE prompts at the same time. All have the same number
    of choices; those of the second prompt are numbered after those of the first. Raises as `Pipeline.generate` does;
    the first error ends all."""
    first, left, began = submissions[0], iter(enumerate(submissions)), time.monotonic()
    with generator.admitted(first.client, first.n * min(len(submissions), AT_ONCE)):
        parts = [_in_turn(generator, left, began) for _ in range(min(len(submissions), AT_ONCE))]
        async with aclosing(merged(parts)) as deltas:
            async for delta in deltas:
                yield delta


async def _in_turn(
    generator: Generator, left: Iterator[tuple[int, Submission]], began: float
) -> AsyncGenerator[Delta, None]:
    """Yields the deltas of one prompt after another, taken from those that are left."""
    for number, submission in left:
        deadline_s = submission.deadline_s - (time.monotonic() - began)
        part = replace(submission, admitted=True, deadline_s=deadline_s)
        async with aclosing(generator.generate(part)) as deltas:
            async for delta in deltas:
                yield delta._replace(choice=number * submission.n + delta.choice)

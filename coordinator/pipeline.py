"""One request, top to bottom.

1. The front end has made a Submission (validated, tokenised).
2. `Cluster.admit` queues it or refuses it; the dispatcher places it on a pair of workers as soon as both have room.
3. Tokens arrive in the journal: the first from prefill, the others from decode.
4. Here the journal is read, turned into text, cut at a stop string, and handed out as deltas. A slow reader leaves
   tokens in the journal (at most max_tokens of them) and blocks nobody.
5. Whatever happens (finish, stop string, client gone, deadline, a lost worker), `end` tells both pools in the same
   moment.

Several choices are as many sequences. The first computes the prompt; the others are dispatched when its KV has been
handed over, and find the prompt's full blocks in the prefix caches of its workers, where these have one. Where one
fails, all end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace

from baton.core.errors import DeadlineExceeded
from baton.core.request import GenerateRequest
from coordinator.cluster import Cluster
from coordinator.live import Live
from coordinator.merged import merged
from coordinator.submission import Delta, Submission, Usage
from coordinator.text_stream import TextStream, Vocabulary


class Pipeline:
    """What both front ends call (coordinator.submission.Generator)."""

    def __init__(self, cluster: Cluster, vocabulary: Vocabulary) -> None:
        self._cluster = cluster
        self._vocabulary = vocabulary

    async def generate(self, submission: Submission) -> AsyncGenerator[Delta, None]:
        """Yields deltas; see Generator."""
        first = self._cluster.admit(_request(submission, 0))
        try:
            if submission.n == 1:
                deltas = self._choice(submission, first)
            else:
                deltas = merged([self._choice(submission, first), *self._others(submission, first)])
            async with aclosing(deltas):
                async for delta in deltas:
                    yield delta
        finally:
            self._cluster.forget(first)

    def _others(self, submission: Submission, first: Live) -> Iterator[AsyncGenerator[Delta, None]]:
        """Choices 1 and on."""

        async def begin(choice: int) -> AsyncGenerator[Delta, None]:
            while not (first.over or first.settled or (first.handed_over and first.journal.tokens)):
                first.fresh.clear()
                async with asyncio.timeout(max(0.0, first.deadline_at - time.monotonic()) + 1.0):
                    await first.fresh.wait()
            if first.error is not None:
                raise first.error
            remaining = first.deadline_at - time.monotonic()
            live = self._cluster.admit(replace(_request(submission, choice), deadline_s=remaining))
            try:
                async with aclosing(self._choice(submission, live)) as deltas:
                    async for delta in deltas:
                        yield replace(delta, choice=choice)
            finally:
                self._cluster.forget(live)

        return (begin(choice) for choice in range(1, submission.n))

    async def _choice(self, submission: Submission, live: Live) -> AsyncGenerator[Delta, None]:
        reason = "the client left"
        # One timer for the whole choice, not one for each wait: waits are as many as steps.
        late = asyncio.get_running_loop().call_later(live.deadline_at - time.monotonic(), live.expire)
        try:
            async for delta in self._deltas(live, self._text(submission)):
                if delta.finish_reason is not None:
                    reason = "done"
                    # Everything is known: free both pools before the client has read the last delta.
                    self._cluster.end(live, "stop string" if isinstance(delta.stop_reason, str) else reason)
                yield delta
        except DeadlineExceeded:
            reason = "deadline"
            raise
        finally:
            late.cancel()
            self._cluster.end(live, reason)

    async def _deltas(self, live: Live, text: TextStream) -> AsyncGenerator[Delta, None]:
        journal, read = live.journal, 0
        while True:
            await self._wait(live, read)
            if live.error is not None and read == journal.next_index:
                raise live.error
            fresh = tuple(journal.tokens[read:])
            ends = journal.finish == "stop"
            piece = text.push(fresh[:-1] if ends else fresh)  # the token that ends a choice is no part of its text
            tokens = fresh if piece.stopped is None else fresh[: piece.consumed]
            delta = Delta(
                piece.text,
                tokens,
                logprobs=tuple(journal.logprobs[read : read + len(tokens)]),
                prompt_logprobs=None if read else journal.prompt_logprobs,
            )
            read += len(tokens)
            if piece.stopped is not None:
                yield self._last(live, delta, read, piece.stopped)
                return
            if journal.finish is not None and read == journal.next_index:
                rest = text.finish()
                yield self._last(live, replace(delta, text=piece.text + rest), read, text.stopped)
                return
            yield delta

    def _text(self, submission: Submission) -> TextStream:
        return TextStream(self._vocabulary, submission.stop, submission.sampling.min_tokens)

    async def _wait(self, live: Live, read: int) -> None:
        """Until there is something new, or the deadline. The first time also for the prompt's log-probabilities, if
        asked for: they come from prefill, perhaps after decode has spoken.

        Raises:
            DeadlineExceeded: names the stage.
        """
        journal = live.journal
        scores = read == 0 and live.request.sampling.prompt_logprobs is not None
        while live.error is None and (journal.next_index == read or (scores and journal.prompt_logprobs is None)):
            if live.expired:
                raise live.late()
            live.fresh.clear()
            await live.fresh.wait()  # `_choice` has it set at the deadline

    def _last(self, live: Live, delta: Delta, total: int, stopped: str | None) -> Delta:
        finish = live.journal.finish if stopped is None else "stop"
        reason: str | int | None = stopped
        last = live.journal.tokens[-1]
        if stopped is None and finish == "stop" and last in live.request.sampling.stop_token_ids:
            reason = last
        prompt_tokens = len(live.request.prompt)
        cached = min(live.cached_tokens, prompt_tokens)
        usage = Usage(prompt_tokens, completion_tokens=total, cached_tokens=cached, speculation=live.speculation)
        return replace(delta, finish_reason=finish, stop_reason=reason, usage=usage, timeline=live.timeline())

    def ready(self) -> tuple[bool, str]:
        if self._cluster.draining:
            return False, "draining"
        missing = self._cluster.dispatcher.missing_pool()
        return (True, "ready") if missing is None else (False, f"no {missing} worker is ready")

    def workers(self) -> dict[str, object]:
        members = self._cluster.members
        table = members.registry.table(members.now())
        return {"workers": table, "control": members.address, "joins_refused": dict(members.joins_refused)}


def _request(submission: Submission, choice: int) -> GenerateRequest:
    """One choice; the prompt's log-probabilities are asked for once."""
    sampling = submission.sampling
    return GenerateRequest(
        request_id=submission.request_id,
        choice=choice,
        prompt=submission.prompt,
        max_tokens=submission.max_tokens,
        sampling=replace(sampling, prompt_logprobs=None) if choice else sampling,
        eos_token_ids=submission.eos_token_ids,
        deadline_s=submission.deadline_s,
        tenant=submission.tenant,
        priority=submission.priority,
        cache_salt=submission.cache_salt,
    )

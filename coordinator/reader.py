"""The reader of one choice: turns its new tokens into deltas of text, cut at a stop string.

Most tokens go to a sink in the callback in which they arrive. The reader's task is woken for the rest: the first delta,
the last one, an error, and tokens that the sink cannot accept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from coordinator.policy.choice import Choice
from coordinator.policy.timeline import timeline
from coordinator.submission import Delta, Sink, Usage
from coordinator.text.stream import TextStream

MAX_PUSHED_TOKENS = 64
"""A delta of more tokens is not built in the callback of a worker's message."""


class Reader:
    def __init__(
        self,
        choice: Choice,
        text: TextStream,
        sink: Sink | None = None,
        observe: Callable[[Delta], None] = lambda delta: None,
    ) -> None:
        """`observe` is called with each delta that goes to the sink."""
        self.choice = choice
        self.done = False  # the last delta has been built
        self._text, self._sink, self._observe = text, sink, observe
        self._read = 0  # tokens
        self._undelivered: Delta | Exception | None = None  # what `_push` could not deliver: for the reader's task
        self._changed = asyncio.Event()
        self._waits = False  # the reader's task, in `next`
        self._expired = False  # the deadline has passed

    def notify(self) -> None:
        """Passes new tokens on to the sink, or wakes the tasks that wait for a change."""
        if not (self._waits and self._sink is not None and self._push(self._sink)):
            self._changed.set()

    def expire(self) -> None:
        self._expired = True
        self._changed.set()

    async def changed(self) -> None:
        """Waits for the next change of the choice; the caller has a timer for its deadline."""
        self._changed.clear()
        await self._changed.wait()

    async def next(self) -> Delta:
        """Returns the next delta that did not go to the sink.

        Raises:
            DeadlineExceeded: names the stage.
            BatonError: the error that ended the request.
        """
        choice = self.choice
        while self._undelivered is None and choice.error is None and not self._has_more():
            if self._expired:
                raise choice.late()
            self._waits = True
            try:
                await self.changed()
            finally:
                self._waits = False
        undelivered, self._undelivered = self._undelivered, None
        if isinstance(undelivered, Exception):
            raise undelivered
        if undelivered is not None:
            return undelivered
        if choice.error is not None and not self._has_more():
            raise choice.error
        return self._take()

    def _has_more(self) -> bool:
        """Returns whether there is a new delta. The first one needs the prompt's log-probabilities too, if requested:
        they come from prefill, possibly after tokens from decode."""
        if self.choice.pooled:
            return not self.done
        if self.choice.next_index == self._read:
            return False
        return bool(self._read) or not self.choice.awaits_prompt_logprobs

    def _push(self, sink: Sink) -> bool:
        """Passes new tokens to the sink. Returns False if the reader's task has to handle them."""
        choice = self.choice
        fresh = len(choice.tokens) - self._read
        middle = self._read and choice.finish is None and choice.error is None and self._undelivered is None
        if not middle or not 0 < fresh <= MAX_PUSHED_TOKENS or not sink.ready:
            return False
        try:
            delta = self._take()
            if self.done:
                self._undelivered = delta
                return False
            self._observe(delta)
            sink.take(delta)
        except Exception as error:  # an error of this reader, not of the worker whose message arrived
            self._undelivered = error
            return False
        return True

    def _take(self) -> Delta:
        """Returns the new tokens as a delta."""
        choice, text, read = self.choice, self._text, self._read
        if choice.pooled:
            self.done = True
            usage = Usage(len(choice.request.prompt), 0, _cached_tokens(choice))
            times = timeline(choice, time.monotonic())
            return Delta("", finish_reason="stop", usage=usage, timeline=times, pooled=choice.pooled)
        fresh = tuple(choice.tokens[read:])
        ends = choice.finish == "stop"
        piece = text.push(fresh[:-1] if ends else fresh)  # the token that ends a choice is not part of its text
        tokens = fresh if piece.stopped is None else fresh[: piece.consumed]
        logprobs = tuple(choice.logprobs[read : read + len(tokens)]) if choice.logprobs else ()
        delta = Delta(piece.text, tokens, logprobs=logprobs, events=piece.events if text.parses else None)
        if not read:
            split = "" if choice.decision is None else choice.decision.reason
            delta = delta._replace(
                prompt_logprobs=choice.prompt_logprobs, cached_tokens=_cached_tokens(choice), split=split
            )
        self._read += len(tokens)
        if piece.stopped is not None:
            self.done = True
            return _last(choice, delta, self._read, text)
        if choice.finish is not None and self._read == choice.next_index:
            self.done = True
            end = text.finish()
            events = piece.events + end.events if text.parses else None
            return _last(choice, delta._replace(text=piece.text + end.text, events=events), self._read, text)
        return delta


def _last(choice: Choice, delta: Delta, total: int, text: TextStream) -> Delta:
    """Returns the last delta of a choice of `total` tokens."""
    stopped = text.stopped
    finish = choice.finish if stopped is None else "stop"
    reason: str | int | None = stopped
    last = choice.tokens[-1]
    if stopped is None and finish == "stop" and last in choice.request.sampling.stop_token_ids:
        reason = last
    cached, times = _cached_tokens(choice), timeline(choice, time.monotonic())
    usage = Usage(len(choice.request.prompt), total, cached, choice.speculation, text.reasoning_tokens)
    return delta._replace(finish_reason=finish, stop_reason=reason, usage=usage, timeline=times)


def _cached_tokens(choice: Choice) -> int:
    return min(choice.cached_tokens, len(choice.request.prompt))

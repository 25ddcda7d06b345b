"""The reader of one choice: turns new tokens of its journal into deltas of text, cut at a stop string.

Most tokens go to a sink in the callback in which they arrive. The reader's task is woken for the rest: the first delta,
the last one, an error, and tokens that the sink cannot accept.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from coordinator.cluster import InFlight
from coordinator.policy.choice import Choice
from coordinator.policy.timeline import timeline
from coordinator.submission import Delta, Sink, Usage
from coordinator.text.stream import TextStream

MAX_PUSHED_TOKENS = 64
"""A delta of more tokens is not built in the callback of a worker's message."""


class ChoiceReader:
    """Complete state: how many tokens have been read, their text, whether the last delta was built, and the delta or
    error of a push that the reader's task still has to pass on. `observe` is called with each delta that goes to the
    sink."""

    def __init__(
        self,
        in_flight: InFlight,
        text: TextStream,
        sink: Sink | None = None,
        observe: Callable[[Delta], None] = lambda delta: None,
    ) -> None:
        self._in_flight, self._text = in_flight, text
        self._sink, self._observe = sink, observe
        self._read = 0
        self._left: Delta | Exception | None = None
        self.done = False

    async def next(self) -> Delta:
        """Returns the next delta that did not go to the sink.

        Raises:
            DeadlineExceeded: names the stage.
            BatonError: the error that ended the request.
        """
        in_flight, request = self._in_flight, self._in_flight.request
        while self._left is None and request.error is None and not self._has_more():
            if in_flight.expired:
                raise request.late()
            in_flight.changed.clear()
            in_flight.push = self._push if self._sink is not None else None
            try:
                await in_flight.changed.wait()  # the caller's timer sets it at the deadline
            finally:
                in_flight.push = None
        left, self._left = self._left, None
        if isinstance(left, Exception):
            raise left
        if left is not None:
            return left
        if request.error is not None and not self._has_more():
            raise request.error
        return self._take()

    def _has_more(self) -> bool:
        """Returns whether there is a new delta. The first one needs the prompt's log-probabilities too, if requested:
        they come from prefill, possibly after tokens from decode."""
        request = self._in_flight.request
        if request.journal.next_index == self._read:
            return False
        return bool(self._read) or not request.awaits_prompt_logprobs

    def _push(self) -> bool:
        """Passes new tokens to the sink. Returns False if the reader's task has to handle them."""
        request, sink = self._in_flight.request, self._sink
        journal = request.journal
        fresh = len(journal.tokens) - self._read
        middle = self._read and journal.finish is None and request.error is None and self._left is None
        if sink is None or not middle or not 0 < fresh <= MAX_PUSHED_TOKENS or not sink.ready:
            return False
        try:
            delta = self._take()
            if self.done:
                self._left = delta
                return False
            self._observe(delta)
            sink.take(delta)
        except Exception as error:  # an error of this reader, not of the worker whose message arrived
            self._left = error
            return False
        return True

    def _take(self) -> Delta:
        """Returns the new tokens as a delta."""
        request, journal, text, read = self._in_flight.request, self._in_flight.request.journal, self._text, self._read
        fresh = tuple(journal.tokens[read:])
        ends = journal.finish == "stop"
        piece = text.push(fresh[:-1] if ends else fresh)  # the token that ends a choice is not part of its text
        tokens = fresh if piece.stopped is None else fresh[: piece.consumed]
        logprobs = tuple(journal.logprobs[read : read + len(tokens)]) if journal.logprobs else ()
        delta = Delta(piece.text, tokens, logprobs=logprobs, events=piece.events if text.parses else None)
        if not read:
            delta = delta._replace(prompt_logprobs=request.prompt_logprobs, cached_tokens=_cached_tokens(request))
        self._read += len(tokens)
        if piece.stopped is not None:
            self.done = True
            return _last(request, delta, self._read, text)
        if journal.finish is not None and self._read == journal.next_index:
            self.done = True
            end = text.finish()
            events = piece.events + end.events if text.parses else None
            return _last(request, delta._replace(text=piece.text + end.text, events=events), self._read, text)
        return delta


def _last(r: Choice, delta: Delta, total: int, text: TextStream) -> Delta:
    """Returns the last delta of a choice of `total` tokens."""
    stopped = text.stopped
    finish = r.journal.finish if stopped is None else "stop"
    reason: str | int | None = stopped
    last = r.journal.tokens[-1]
    if stopped is None and finish == "stop" and last in r.request.sampling.stop_token_ids:
        reason = last
    usage = Usage(len(r.request.prompt), total, _cached_tokens(r), r.speculation, text.reasoning_tokens)
    return delta._replace(finish_reason=finish, stop_reason=reason, usage=usage, timeline=timeline(r, time.monotonic()))


def _cached_tokens(r: Choice) -> int:
    return min(r.cached_tokens, len(r.request.prompt))

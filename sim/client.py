"""Simulated clients, and what they check: that they receive exactly the tokens of an undisturbed model.

Stands for coordinator/pipeline.py and reader.py: the path of one request from its admission to its last delta. Text is
not modelled; a stop string is a client that ends a choice after so many tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from baton.core.errors import BatonError, InvariantError, Unavailable
from baton.core.request import GenerateRequest
from coordinator.policy.choice import Choice, Stage
from sim.coordinator import SimCoordinator
from sim.engine import expected, expected_prompt_logprobs, expected_vector
from sim.loop import Loop, Timer, cancel

RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How a client behaves: it reads `read_delay_s` after it could, disconnects after so many tokens or seconds, ends
    its choices by a stop string after `stop_after` tokens, and tries `tries` times while it is refused."""

    choices: int = 1
    read_delay_s: float = 0.0
    leaves_after_tokens: int | None = None
    leaves_after_s: float | None = None
    stop_after: int | None = None
    tries: int = 20


class ChoiceEnd(StrEnum):
    """How a choice ended for its client."""

    RUNS = ""
    STOP = "stop"
    LENGTH = "length"
    STOP_STRING = "stop string"
    ERROR = "error"
    """With a code."""
    LEFT = "left"
    """The client disconnected."""
    CUT = "cut"
    """The coordinator died."""


@dataclass(slots=True)
class ChoiceOutcome:
    """What a client received of one choice. `ended` is set once."""

    tokens: list[int] = field(default_factory=list)
    ended: ChoiceEnd = ChoiceEnd.RUNS
    code: str = ""
    message: str = ""
    ended_at: float = 0.0
    first_token_at: float = 0.0

    def end(self, ended: ChoiceEnd, now: float, error: BatonError | None = None) -> None:
        if self.ended:
            raise InvariantError(f"a choice that ended with '{self.ended}' ends again with '{ended}'")
        self.ended, self.ended_at = ended, now
        if error is not None:
            self.code, self.message = error.code, error.message


class Front(Protocol):
    """Where clients find the coordinator: another one after its restart."""

    loop: Loop
    coordinator: SimCoordinator

    def client_ended(self, client: SimClient) -> None: ...


class SimClient:
    """One request. `verify`: its tokens are those of `sim.engine.expected`. `on_end` is called at its end."""

    def __init__(
        self,
        front: Front,
        request: GenerateRequest,
        behaviour: Behaviour,
        *,
        verify: bool = True,
        on_end: Callable[[SimClient], object] | None = None,
    ) -> None:
        self.request, self.behaviour = request, behaviour
        self.sent_at = front.loop.now
        self.admitted = False
        self.outcomes = [ChoiceOutcome() for _ in range(behaviour.choices)]
        self.choices: list[_ChoiceReader | None] = [None] * behaviour.choices
        self._front, self._loop, self._verify, self._on_end = front, front.loop, verify, on_end
        self._coordinator = front.coordinator
        self._left = behaviour.tries
        self._over = self._waits = False

    @property
    def over(self) -> bool:
        return self._over

    def send(self) -> None:
        coordinator = self._coordinator = self._front.coordinator
        if not coordinator.alive:
            self._refused(Unavailable("connection refused"))
        else:
            self._waits = True
            coordinator.receives(self._admit, coordinator)

    def coordinator_died(self) -> None:
        """The connection ends without a finish reason."""
        if self._over:
            return
        if self.admitted:
            self._end_all(ChoiceEnd.CUT, None)
        elif self._waits:
            self._waits = False
            self._refused(Unavailable("the connection was reset"))

    def leave(self) -> None:
        """The client disconnects."""
        if self._over:
            return
        if self.admitted:
            self._coordinator.receives(self._end_all, ChoiceEnd.LEFT, None)
        else:
            self._end_all(ChoiceEnd.LEFT, None)

    def _refused(self, error: BatonError) -> None:
        self._left -= 1
        if self._left > 0 and isinstance(error, Unavailable):
            self._loop.later(RETRY_S, self.send)
        else:
            self._end_all(ChoiceEnd.ERROR, error)

    def _admit(self, coordinator: SimCoordinator) -> None:
        self._waits = False
        if self._over:
            return
        try:
            r, actions = coordinator.requests.admit(self.request, coordinator.now, self.behaviour.choices)
        except BatonError as e:
            self._refused(e)
            return
        self.admitted = True
        self._add(0, r)
        coordinator.execute(actions)
        if self.behaviour.leaves_after_s is not None:
            self._loop.later(self.behaviour.leaves_after_s, self.leave)

    def _add(self, index: int, r: Choice) -> None:
        choice = self.choices[index] = _ChoiceReader(self, index, r)
        self._coordinator.readers[r.name] = choice.notified

    def first_changed(self) -> None:
        """Admits the other choices once the first one decodes (Pipeline._further_choices)."""
        first = self.choices[0]
        if first is None or self._over or None not in self.choices:
            return
        r, coordinator = first.request, self._coordinator
        if r.error is not None or not (r.ended or (r.stage is Stage.DECODE and r.tokens)):
            return
        for index, choice in enumerate(self.choices):
            if choice is None:
                left_s = r.deadline_at - coordinator.now
                sampling = replace(self.request.sampling, prompt_logprobs=None)
                other = replace(self.request, choice=index, sampling=sampling, deadline_s=left_s)
                try:
                    admitted, actions = coordinator.requests.admit(other, coordinator.now)
                except BatonError as e:
                    self._end_all(ChoiceEnd.ERROR, e)
                    return
                self._add(index, admitted)
                coordinator.execute(actions)
                if self._over:
                    return

    def choice_over(self, error: BatonError | None) -> None:
        """If one choice fails, all end."""
        if error is not None:
            self._end_all(ChoiceEnd.ERROR, error)
        elif all(outcome.ended for outcome in self.outcomes):
            self._forget()

    def left(self) -> None:
        self._end_all(ChoiceEnd.LEFT, None)

    def _end_all(self, ended: ChoiceEnd, error: BatonError | None) -> None:
        if self._over:
            return
        for outcome in self.outcomes:
            if not outcome.ended:
                outcome.end(ended, self._loop.now, error)
        self._forget()

    def _forget(self) -> None:
        """Cluster.forget: ends what still runs, and removes the request."""
        if self._over:
            return
        self._over = True
        coordinator = self._coordinator
        if coordinator.alive:
            for choice in reversed(self.choices):
                if choice is not None:
                    coordinator.readers.pop(choice.request.name, None)
                    choice.close()
                    coordinator.execute(coordinator.requests.end(choice.request, "the client left", coordinator.now))
                    coordinator.requests.forget(choice.request)
        self._front.client_ended(self)
        if self._on_end is not None:
            self._on_end(self)

    @property
    def verifies(self) -> bool:
        return self._verify

    @property
    def coordinator(self) -> SimCoordinator:
        return self._coordinator

    @property
    def loop(self) -> Loop:
        return self._loop


class _ChoiceReader:
    """The reader of one choice."""

    def __init__(self, client: SimClient, index: int, request: Choice) -> None:
        self.request = request
        self._client, self._index = client, index
        self._outcome = client.outcomes[index]
        self._expected = expected(replace(client.request, choice=index)) if client.verifies else ([], [])
        self._reading = self._closed = False
        coordinator = client.coordinator
        left_s = request.deadline_at - coordinator.now
        self._deadline: Timer | None = coordinator.later(left_s, self._late) if left_s < 1e5 else None

    def close(self) -> None:
        self._closed = True
        cancel(self._deadline)

    def notified(self) -> None:
        client = self._client
        if not self._reading:
            self._reading = True
            delay_s = client.behaviour.read_delay_s
            client.loop.later(delay_s, client.coordinator.receives, self._read)
        if self._index == 0:
            client.first_changed()

    def _late(self) -> None:
        if not self._closed and not self._outcome.ended and self.request.error is None:
            self._end(ChoiceEnd.ERROR, self.request.late())

    def _read(self) -> None:
        self._reading = False
        outcome, r, client = self._outcome, self.request, self._client
        if self._closed or outcome.ended:
            return
        if r.awaits_prompt_logprobs and not outcome.tokens:
            if r.error is not None:
                self._end(ChoiceEnd.ERROR, r.error)
            return
        read = len(outcome.tokens)
        fresh = r.tokens[read:]
        if fresh and not read:
            outcome.first_token_at = client.loop.now
        outcome.tokens += fresh
        if client.verifies:
            self._verify()
        behaviour, count = client.behaviour, len(outcome.tokens)
        if behaviour.leaves_after_tokens is not None and count >= behaviour.leaves_after_tokens:
            client.left()
        elif behaviour.stop_after is not None and count >= behaviour.stop_after:
            self._end(ChoiceEnd.STOP_STRING)
        elif r.finish is not None:
            self._end(ChoiceEnd(r.finish))
        elif r.error is not None:
            self._end(ChoiceEnd.ERROR, r.error)

    def _end(self, ended: ChoiceEnd, error: BatonError | None = None) -> None:
        self._outcome.end(ended, self._client.loop.now, error)
        coordinator = self._client.coordinator
        coordinator.execute(coordinator.requests.end(self.request, ended, coordinator.now, answered=error is None))
        if self._index == 0:
            self._client.first_changed()  # Cluster.end
        self._client.choice_over(error)

    def _verify(self) -> None:
        """Raises InvariantError unless the client has received a prefix of the expected output, and all of it at the
        end, with the log-probabilities that belong to it."""
        tokens, scores = self._expected
        outcome, choice, sampling = self._outcome, self.request, self._client.request.sampling
        got = outcome.tokens
        if got != tokens[: len(got)]:
            raise InvariantError(f"{self.request.sequence} received {got}, not {tokens}")
        request = self._client.request
        if request.pooling and choice.finish is not None and self.request.pooled != expected_vector(request):
            raise InvariantError(f"{self.request.sequence} received another vector")
        if choice.finish is not None and len(choice.tokens) != len(tokens):
            raise InvariantError(f"{self.request.sequence} finished with {choice.tokens}, not {tokens}")
        if sampling.logprobs is not None and choice.logprobs != scores[: len(choice.logprobs)]:
            raise InvariantError(f"{self.request.sequence} has log-probabilities of other tokens")
        if sampling.logprobs is not None and len(choice.logprobs) != len(choice.tokens):
            raise InvariantError(f"{self.request.sequence} lacks log-probabilities")
        if self.request.prompt_logprobs is not None and not self._index:
            expected = expected_prompt_logprobs(self._client.request)
            if self.request.prompt_logprobs != expected:
                raise InvariantError(f"{self.request.sequence} has log-probabilities of another prompt")

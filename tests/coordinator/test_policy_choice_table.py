"""Every stage of a choice with everything that may happen to it: a row of the table, or a violated invariant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import machine
from baton.core.codes import ErrorCode
from baton.core.events import HandedOver, Parked, SequenceEnded, StepEvents, TokenEvent
from baton.core.request import SamplingParams, SequenceId, TokenLogprob
from coordinator.policy import requests
from coordinator.policy.choice import (
    Choice,
    DecodeTokens,
    EndedBy,
    Fail,
    HandedOverBy,
    LostWorker,
    OfferDue,
    ParkedBy,
    Placed,
    PrefillTokens,
    Stage,
    Stop,
)
from coordinator.policy.membership import WorkerState
from coordinator.policy.requests import MAX_TIMES_PARKED, PARKED_S
from tests.coordinator.test_policy_requests import Drive
from tests.support.builders import bring_to

FROM_WORKERS = PrefillTokens, DecodeTokens, HandedOverBy, ParkedBy, EndedBy
EVENTS = (*FROM_WORKERS, LostWorker, Placed, OfferDue, Stop, Fail)
CODES = (
    ErrorCode.UNKNOWN_SEQUENCE,
    ErrorCode.ABANDONED,
    ErrorCode.KV_CORRUPT,
    ErrorCode.WORKER_LOST,
    ErrorCode.INTERNAL_ERROR,
)
Deliver = Callable[[Drive, Choice], None]


def message(worker: str, **fields: Callable[[SequenceId, int], object]) -> Deliver:
    """A message of a worker; each field is made of the sequence and its next output index."""

    def deliver(d: Drive, choice: Choice) -> None:
        sequence, index = choice.sequence, choice.next_index
        made = {name: (make(sequence, index),) for name, make in fields.items()}
        d.events(worker, StepEvents(**made))  # type: ignore[arg-type]

    return deliver


def tokens(worker: str, *more: int, behind: int = 0, **values: Any) -> Deliver:
    return message(worker, tokens=lambda s, n: TokenEvent(s, n - behind, more, **values))


def ended(worker: str, reason: str, code: ErrorCode | None = None) -> Deliver:
    return message(worker, ended=lambda s, n: SequenceEnded(s, reason, code, "so it is"))


SCORES = (TokenLogprob(2, -1.0, 1), TokenLogprob(3, -1.0, 1))
MESSAGES: dict[str, Deliver] = {
    **{f"{w} one token": tokens(w, 6) for w in ("p0", "d0", "d1")},
    **{f"{w} the last tokens": tokens(w, *range(20)) for w in ("p0", "d0", "d1")},
    **{f"{w} tokens at a wrong index": tokens(w, 6, behind=99) for w in ("p0", "d0")},
    "p0 prompt log-probabilities": tokens("p0", prompt_logprobs=SCORES),
    **{
        f"hand-over to {to}": message("p0", handed_over=lambda s, n, to=to: HandedOver(s, to, 1))  # type: ignore[misc]
        for to in ("d0", "d1", "strange")
    },
    "parked": message("p0", parked=lambda s, n: Parked(s, "all refused")),
    **{f"{w} error {code}": ended(w, "error", code) for w in ("p0", "d0") for code in CODES},
    **{f"{w} {reason}": ended(w, reason) for w in ("p0", "d0") for reason in ("length", "aborted")},
    **{f"loss of {w}": lambda d, c, w=w: d.lose(w) for w in ("p0", "d0", "d1")},  # type: ignore[misc]
    "drain of d0": lambda d, c: d.lose("d0", drained=True),
    "ticks": lambda d, c: [d.tick() for _ in range(3)] and None,
    "deadline": lambda d, c: d.tick(1000.0),
    "stop": lambda d, c: d.record(d.requests.end(c, "stop string", d.now, answered=True)),
    "drain": lambda d, c: d.record(d.requests.drain(d.now)),
}
BEFORE: dict[str, Deliver] = {
    "nothing": lambda d, c: None,
    "parked": MESSAGES["parked"],
    "parked often": lambda d, c: setattr(c, "times_parked", MAX_TIMES_PARKED),
    "p0 the last tokens": MESSAGES["p0 the last tokens"],
    "d0 the last tokens": MESSAGES["d0 the last tokens"],
    "no retry is left": lambda d, c: _use_up_retries(d, c),
    "d0 may be chosen": lambda d, c: _bring_to(d, "d0", WorkerState.READY),
    "d0 may not be chosen": lambda d, c: _bring_to(d, "d0", WorkerState.DISCONNECTED),
}
ALONE = {"nothing": BEFORE["nothing"]}


def _use_up_retries(d: Drive, choice: Choice) -> None:
    """It failed before, and so did too many others."""
    d.requests.losses.budget.tokens, choice.tokens_at_failure = 0.0, len(choice.tokens)


def _bring_to(d: Drive, name: str, state: WorkerState) -> None:
    if (worker := d.table.get(name)) is not None:
        bring_to(worker, state)


def at(stage: Stage, *, limit: int = 5, **more: object) -> tuple[Drive, Choice]:
    d = Drive("p0", "d0", "d1", max_deaths=limit)
    if stage is Stage.ENDED:
        choice, _ = d.at(Stage.DECODE, **more)
        d.record(d.requests.end(choice, "the client left", d.now))
    elif stage is Stage.QUEUED:
        d.submit("other", prompt=(1,) * 40)
        choice = d.submit(**more)  # type: ignore[arg-type]
    else:
        choice, _ = d.at(stage, **more)
    assert choice.stage is stage
    d.new.clear()
    return d, choice


def test_each_event_of_a_worker_is_handled_in_each_stage() -> None:
    """Otherwise a worker could end the coordinator with a message at the wrong moment."""
    table = Drive().requests.table
    assert table.keys() >= {(stage, event) for stage in Stage for event in FROM_WORKERS}
    assert {event for _, event in table} == set(EVENTS)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Stage, type, Stage]]:
    """Collects the transitions made."""
    transitions: set[tuple[Stage, type, Stage]] = set()

    def recorded(table: machine.Table, choice: Choice, event: object, now: float) -> list[Any]:
        before = choice.stage
        actions = machine.handle(table, choice, event, now)
        transitions.add((before, type(event), choice.stage))
        return actions

    monkeypatch.setattr(requests, "handle", recorded)
    return transitions


def test_the_table_lists_no_stage_to_which_no_message_leads(seen: set[tuple[Stage, type, Stage]]) -> None:
    for stage in Stage:
        for limit, asked, before in ((5, 0, BEFORE), (5, None, ALONE), (1, None, ALONE)):
            for first in before.values():
                for second in MESSAGES.values():
                    d, choice = at(stage, limit=limit, sampling=SamplingParams(prompt_logprobs=asked))
                    first(d, choice)
                    second(d, choice)
    d = Drive("d0")  # which computes prompts, too
    d.requests.dispatcher.split = "never"
    tokens("d0", 6)(d, d.submit())
    d = Drive("p0", "d0")  # whose room goes to another request than to the parked one
    d.at(Stage.PARKED, max_tokens=40)
    d.lose("d0")
    d.submit("other", max_tokens=40)
    d.join("d0")
    d.tick(PARKED_S)
    table = Drive().requests.table
    listed = {(stage, event, after) for (stage, event), row in table.items() for after in row.states if after != stage}
    assert sorted(f"{a.value} {e.__name__} {b.value}" for a, e, b in listed - seen) == []
    assert len(listed) > 30


@given(st.sampled_from(Stage), st.lists(st.sampled_from([*MESSAGES, *BEFORE]), max_size=12))
def test_any_messages_in_any_order_keep_the_invariants(stage: Stage, names: list[str]) -> None:
    d, choice = at(stage)
    for name in names:
        if not name.startswith("loss") or d.table.get(name[-2:]) is not None:
            (BEFORE | MESSAGES)[name](d, choice)
        d.requests.check()

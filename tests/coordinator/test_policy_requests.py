"""The state machine of requests, event by event, without sockets, clocks or workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from baton.core.codes import ErrorCode
from baton.core.commands import Abort, ReleaseRecords, TrackedSequence
from baton.core.errors import (
    BatonError,
    DuplicateRequest,
    HandoffError,
    InvariantError,
    ProtocolError,
    Unavailable,
    WorkerLost,
)
from baton.core.events import (
    HandedOver,
    Parked,
    SequenceEnded,
    SpeculationCounters,
    StageStamps,
    StepEvents,
    TokenEvent,
)
from baton.core.request import GenerateRequest, SamplingParams, SequenceId, TokenLogprob
from coordinator.policy.choice import Action, AssignTargets, Choice, Notify, Send, Stage, StartPrefill
from coordinator.policy.expectation import START_TOKENS
from coordinator.policy.membership import WorkerState
from coordinator.policy.requests import MAX_TIMES_PARKED, PARKED_S, InFlightCounts, Requests
from coordinator.policy.split import Split
from coordinator.policy.workers import WorkerTable
from tests.support.builders import bring_to, make_join, make_request

A = TypeVar("A")


class Drive:
    """Requests over workers whose events a test feeds by hand. `new`: the actions since the last `take`."""

    def __init__(self, *workers: str, hold_s: float = 30.0, max_deaths: int = 5) -> None:
        self.table = WorkerTable(3.0)
        self.requests = Requests(self.table, 100, 10_000, hold_s, max_deaths)
        self.now = 100.0
        self.new: list[Action] = []
        self.incarnations: dict[str, int] = {}
        for name in workers:
            self.join(name)

    def record(self, actions: Iterable[Action]) -> None:
        self.new += actions
        self.requests.check()

    def take(self, kind: type[A]) -> list[A]:
        """Returns the new actions of a kind, and drops all new actions."""
        found, self.new = [a for a in self.new if isinstance(a, kind)], []
        return found

    def sent(self, kind: type[A]) -> list[tuple[str, A]]:
        """Returns the new commands of a kind, each with the worker it was sent to."""
        return [(a.worker, a.command) for a in self.take(Send) if isinstance(a.command, kind)]

    def join(self, name: str, *, blocks: int = 16, revision: str = "", **facts: object) -> None:
        self.incarnations[name] = self.incarnations.get(name, 0) + 1
        join = make_join(name, self.incarnations[name], blocks=blocks, **facts)  # type: ignore[arg-type]
        joined = self.table.join(replace(join, replace=True, revision=revision), self.now)
        if joined.replaced is not None:
            self.record(self.requests.on_worker_lost(name, "replaced", self.now, drained=False))
        self.record(self.requests.worker_joined(self.now))

    def lose(self, name: str, *, drained: bool = False) -> None:
        if drained:
            self.table.left(name, self.incarnations[name], self.now)
        else:
            worker = self.table.get(name)
            assert worker is not None
            bring_to(worker, WorkerState.LOST)
        self.record(self.requests.on_worker_lost(name, "silent", self.now, drained=drained))

    def submit(self, name: str = "r", max_tokens: int = 4, **more: object) -> Choice:
        values: dict[str, object] = {"prompt": (1, 2, 3), "max_tokens": max_tokens, **more}
        r, actions = self.requests.admit(GenerateRequest(name, **values), self.now)  # type: ignore[arg-type]
        self.record(actions)
        return r

    def events(self, worker: str, events: StepEvents) -> None:
        self.record(self.requests.on_events(worker, events, self.now))

    def tokens(self, worker: str, sequence: SequenceId, first: int, *tokens: int, **more: object) -> None:
        event = TokenEvent(sequence, first, tokens, **more)  # type: ignore[arg-type]
        self.events(worker, StepEvents(tokens=(event,)))

    def handed_over(self, worker: str, sequence: SequenceId, to: str, **stamps: float) -> None:
        self.events(worker, StepEvents(handed_over=(HandedOver(sequence, to, 1, StageStamps(**stamps)),)))

    def park(self, worker: str, sequence: SequenceId) -> None:
        self.events(worker, StepEvents(parked=(Parked(sequence, "all refused"),)))

    def ended(self, worker: str, sequence: SequenceId, code: str = "", reason: str = "") -> None:
        ended = SequenceEnded(sequence, reason, ErrorCode(code) if code else None, "so it is")
        self.events(worker, StepEvents(ended=(ended,)))

    def tick(self, after: float = 0.1) -> None:
        self.now += after
        self.record(self.requests.tick(self.now))

    def at(self, stage: Stage, name: str = "r", **more: object) -> tuple[Choice, SequenceId]:
        """Returns a request that has been brought to a stage on p0 and d0, and its sequence at that stage."""
        r = self.submit(name, **more)  # type: ignore[arg-type]
        s = r.sequence
        if stage in (Stage.HANDOVER, Stage.PARKED, Stage.DECODE):
            self.tokens("p0", s, 0, 5)
        if stage is Stage.PARKED:
            for decode in ("d0", "d1"):
                if (worker := self.table.get(decode)) is not None:
                    bring_to(worker, WorkerState.DISCONNECTED)
            self.park("p0", s)
        if stage is Stage.DECODE:
            self.handed_over("p0", s, "d0")
        assert r.stage is stage
        self.new.clear()
        return r, s

    def error(self, r: Choice) -> BatonError:
        assert r.ended and r.error is not None
        assert r.error.message.isprintable()
        return r.error


def test_request_passes_through_its_stages_until_all_workers_release_it() -> None:
    d = Drive("p0", "d0", "d1")
    r = d.submit()
    (start,) = d.take(StartPrefill)
    assert (start.prefill, start.targets, start.request.output) == ("p0", ("d0", "d1"), ())
    s = r.sequence
    d.tokens("p0", s, 0, 5)
    assert d.take(Notify) == [Notify(r.name)] and r.stage is Stage.HANDOVER
    d.handed_over("p0", s, "d0")
    d.tokens("d0", s, 0, 5, 6)
    assert r.stage is Stage.DECODE
    d.new.clear()
    d.tokens("d0", s, 2, 7, 8)
    assert (r.tokens, r.finish, r.stage) == ([5, 6, 7, 8], "length", Stage.ENDED)
    d.tick()
    assert {worker for worker, _ in d.sent(ReleaseRecords)} == {"p0", "d0", "d1"}
    d.requests.forget(r)
    assert len(d.requests) == 0


def test_each_worker_receives_all_releases_of_a_tick_in_one_message() -> None:
    d = Drive("p0", "d0")
    ended = [d.at(Stage.DECODE, name)[1] for name in ("a", "b", "c")]
    d.tick()
    d.new.clear()
    for s in ended:
        d.tokens("d0", s, 1, 6, 7, 8)
        d.tokens("d0", s, 3, 8)  # repeated after a redial
    assert not d.sent(ReleaseRecords), "a message for each would cost more than what it releases"
    d.tick()
    assert d.sent(ReleaseRecords) == [(worker, ReleaseRecords(tuple(ended))) for worker in ("d0", "p0")]
    d.tick()
    assert not d.sent(ReleaseRecords)


@pytest.mark.parametrize(("stage", "dies"), [(Stage.PREFILL, "p0"), (Stage.DECODE, "d0")])
def test_request_is_rescheduled_after_a_worker_loss_and_fails_at_the_limit(stage: Stage, dies: str) -> None:
    d = Drive("p0", "d0", "p1", "d1", max_deaths=2)
    r, s = d.at(stage, max_tokens=8)
    if stage is Stage.DECODE:
        d.tokens("d0", s, 1, 6, 7)
    d.lose(dies)
    assert d.requests.rescheduled == 1 and r.deaths == [f"{dies} (silent, stage {stage.value})"]
    assert d.requests.dispatcher.expectation.mean_tokens == START_TOKENS  # no output has ended
    (start,) = d.take(StartPrefill)
    assert start.request.output == tuple(r.tokens) and start.request.attempt > s.attempt
    other = dies[0] + "1"
    again = r.sequence
    if stage is Stage.DECODE:
        assert start.targets == ("d1",)
        d.tokens("d0", s, 3, 99)  # the old attempt is stale
        assert d.requests.stale_events == 1 and r.tokens == [5, 6, 7]
        d.tokens("p0", again, 3, 8)
        d.handed_over("p0", again, "d1")
    else:
        assert start.prefill == "p1"
    d.lose(other)
    error = d.error(r)
    assert isinstance(error, WorkerLost) and error.retry_after_s
    assert error.message.startswith(f"2 workers were lost while they ran the request: {dies} (silent, stage ")


def test_request_that_was_running_at_two_losses_runs_alone_and_only_its_own_steps_count_then() -> None:
    d = Drive("p0", "d0")
    r, _ = d.at(Stage.DECODE, max_tokens=12)
    other, _ = d.at(Stage.DECODE, "other", max_tokens=12)

    def lose_decode(alone: Choice | None = None) -> StartPrefill:
        """Loses the worker in a step of all requests, or of this one, and returns the next start of `r`."""
        if alone is not None:
            d.events("d0", StepEvents(alone=alone.sequence))
        d.lose("d0")
        d.new.clear()
        d.join("d0")
        starts = {start.request.request_id: start for start in d.take(StartPrefill)}
        for each in (r, other):
            if not each.ended:
                d.tokens("p0", each.sequence, len(each.tokens), 6)
                d.handed_over("p0", each.sequence, "d0")
        return starts["r"]

    assert not lose_decode().request.alone
    assert lose_decode().request.alone and r.alone and other.alone
    lose_decode()
    assert len(r.deaths) == 2, "killed from outside: neither of them was in the step"
    lose_decode(other)
    assert (len(r.deaths), len(other.deaths), other.alone_deaths) == (2, 3, 1)
    d.events("d0", StepEvents(alone=other.sequence))
    d.events("d0", StepEvents(step_id=7))
    lose_decode()
    assert other.alone_deaths == 1, "that step had ended"
    newcomer, _ = d.at(Stage.DECODE, "new", max_tokens=12)
    lose_decode(other)
    error = d.error(other)
    assert isinstance(error, WorkerLost) and "4 workers were lost while they ran the request" in error.message
    assert error.message.endswith("stage decode, alone in its step)")
    assert not r.ended and not newcomer.deaths


def test_tokens_computed_in_vain_are_counted_by_reason() -> None:
    d = Drive("p0", "d0", "p1", "d1", max_deaths=2)
    r = d.submit("whole")
    d.tokens("p0", r.sequence, 0, 5, cached_tokens=1)
    d.handed_over("p0", r.sequence, "d0")
    d.tokens("d0", r.sequence, 1, 6, 7, 8)
    d.record(d.requests.end(r, "the client disconnected", d.now))
    assert (d.requests.prefilled.tokens, d.requests.prefilled.wasted.total()) == (2, 0)
    left, _ = d.at(Stage.DECODE, "left")
    d.record(d.requests.end(left, "the client disconnected", d.now))
    waiting = d.submit("waiting")
    d.record(d.requests.end(waiting, "the client disconnected", d.now))
    stopped, _ = d.at(Stage.DECODE, "stopped")
    d.record(d.requests.end(stopped, "stop string", d.now, answered=True))
    assert d.requests.prefilled.tokens == 2 + 3 + 3
    assert d.requests.prefilled.wasted == {"cancelled": 3, "failed": 0, "rescheduled": 0}
    again, _ = d.at(Stage.DECODE, "again")
    d.lose("d0")
    d.tokens("p0", again.sequence, 1, 6, cached_tokens=1)  # 3 of its 4 tokens so far
    assert d.requests.prefilled.wasted == {"cancelled": 3, "failed": 0, "rescheduled": 3}
    d.handed_over("p0", again.sequence, "d1")
    d.lose("d1")
    assert again.error is not None
    assert d.requests.prefilled.wasted == {"cancelled": 3, "failed": 3, "rescheduled": 3}
    assert d.requests.prefilled.tokens == 2 + 3 + 3 + 3 + 3


def test_kv_is_offered_to_another_decode_worker_before_a_second_prefill() -> None:
    d = Drive("p0", "d0", "d1")
    r, s = d.at(Stage.HANDOVER)
    d.lose("d0")
    assert r.stage is Stage.HANDOVER and not d.new, "prefill sees its link break and says so"
    d.park("p0", s)
    (assign,) = d.take(AssignTargets)
    assert (assign.prefill, assign.sequence, assign.targets, r.deaths) == ("p0", s, ("d1",), [])
    d.handed_over("p0", r.sequence, "d1")
    d.tokens("d1", r.sequence, 0, 5, 6, 7, 8)
    assert r.finish == "length" and d.requests.rescheduled == 0


def test_loss_of_a_decode_worker_that_has_all_kv_counts_as_a_death() -> None:
    d = Drive("p0", "d0", "d1")
    r, s = d.at(Stage.HANDOVER)
    d.lose("d0")
    d.handed_over("p0", s, "d0")  # reported after d0 was lost
    assert r.deaths == ["d0 (lost during the hand-over)"]
    assert d.take(StartPrefill)[0].request.output == (5,)


def test_new_incarnation_of_a_decode_worker_does_not_have_the_kv() -> None:
    d = Drive("p0", "d0")
    r, s = d.at(Stage.DECODE)
    d.join("d0")
    assert r.deaths == ["d0 (replaced, stage decode)"]
    (start,) = d.take(StartPrefill)
    assert start.targets == ("d0",) and r.targets[0].incarnation == 2
    d.tokens("d0", s, 1, 99)
    assert r.tokens == [5]


def test_loss_of_a_prefill_worker_is_harmless_once_decode_has_all_kv() -> None:
    d = Drive("p0", "d0")
    r, s = d.at(Stage.HANDOVER)
    d.tokens("d0", s, 0, 5, 6)  # proves that it has all KV, though the hand-over was not reported
    d.lose("p0")
    d.tokens("d0", s, 2, 7, 8)
    assert r.tokens == [5, 6, 7, 8]


@pytest.mark.parametrize("stage", [Stage.HANDOVER, Stage.PARKED])
def test_loss_of_the_prefill_worker_with_the_kv_costs_a_prefill_and_is_no_death(stage: Stage) -> None:
    d = Drive("p0", "d0", "p1")
    r, s = d.at(stage)
    d.lose("p0")
    assert (r.deaths, r.stage) == ([], Stage.PREFILL if stage is Stage.HANDOVER else Stage.QUEUED)
    assert [c.sequence for w, c in d.sent(Abort) if w == "d0"] == [s], "what had arrived is dropped"


def test_unreported_prompt_logprobs_are_recomputed() -> None:
    d = Drive("p0", "d0", "p1")
    r, s = d.at(Stage.HANDOVER, sampling=SamplingParams(prompt_logprobs=0))
    d.tokens("d0", s, 0, 5, 6)
    d.lose("p0")
    (start,) = d.take(StartPrefill)
    assert start.request.sampling.prompt_logprobs == 0 and start.request.output == (5, 6)
    scores = (TokenLogprob(2, -1.0, 1), TokenLogprob(3, -1.0, 1))
    d.tokens("p1", r.sequence, 2, 7, prompt_logprobs=scores)
    d.lose("d0")
    d.join("d0")
    d.lose("p1")
    d.join("p1")
    (start,) = d.take(StartPrefill)[-1:]
    assert start.request.sampling.prompt_logprobs is None, "known: the prompt may come from a cache"
    assert r.prompt_logprobs == scores


@pytest.mark.parametrize("dies", ["", "d0"])
def test_prompt_logprobs_may_arrive_after_the_last_token(dies: str) -> None:
    """They come from the prefill worker, on another stream."""
    d = Drive("p0", "d0")
    r, s = d.at(Stage.PREFILL, max_tokens=2, sampling=SamplingParams(prompt_logprobs=0))
    d.tokens("d0", s, 0, 5, 6)
    d.ended("d0", s, reason="length")
    assert r.finish == "length" and not r.ended
    if dies:
        d.lose(dies)
    d.tokens("p0", s, 0, 5, prompt_logprobs=(TokenLogprob(2, -1.0, 1), TokenLogprob(3, -1.0, 1)))
    assert r.ended and r.error is None and r.deaths == []


def test_workers_that_computed_only_the_prompt_logprobs_again_are_aborted() -> None:
    """They do not know that the answer was complete before, and would generate after its end."""
    d = Drive("p0", "d0", "p1")
    r, s = d.at(Stage.HANDOVER, eos_token_ids=(99,), max_tokens=50, sampling=SamplingParams(prompt_logprobs=0))
    d.tokens("d0", s, 0, 5, 6, 99)
    d.lose("p0")
    (start,) = d.take(StartPrefill)
    assert start.request.output == (5, 6, 99) and not r.ended
    d.tokens("p1", r.sequence, 3, 7, prompt_logprobs=(TokenLogprob(2, -1.0, 1), TokenLogprob(3, -1.0, 1)))
    assert r.ended and (r.tokens, r.finish) == ([5, 6, 99], "stop")
    assert {(w, c.sequence) for w, c in d.sent(Abort)} >= {("p1", r.sequence), ("d0", r.sequence)}


@pytest.mark.parametrize("split", ["always", "auto"])
def test_a_whole_output_that_fits_no_worker_as_a_prompt_is_not_placed(split: Split) -> None:
    """Its prompt's log-probabilities are lost with a prefill worker. It would wait on a decode worker for blocks that
    this does not have, and all that came later behind it."""
    d = Drive()
    d.requests = Requests(d.table, 100, 10_000, 30.0, 5, split)
    for name in ("p0", "d0", "p1"):
        d.join(name, blocks=4)
    r, s = d.at(Stage.PREFILL, prompt=tuple(range(10)), max_tokens=7, sampling=SamplingParams(prompt_logprobs=0))
    d.tokens("d0", s, 0, *range(20, 27))
    d.ended("d0", s, reason="length")
    d.lose("p1" if r.prefill_worker == "p0" else "p0")
    d.lose(r.prefill_worker)
    d.take(StartPrefill)
    d.join("p0" if split == "always" else "p1", blocks=4)
    assert r.stage is Stage.QUEUED and not d.take(StartPrefill)
    other = d.submit("other")
    assert other.stage is Stage.PREFILL, "nothing waits for it"
    d.tick()
    d.tick(31.0)
    assert d.error(r).code == "exceeds_pool"


def test_hold_timeout_applies_to_kv_parked_before_its_first_token() -> None:
    d = Drive("p0", "d0", hold_s=30.0)
    r, s = d.at(Stage.PREFILL)
    d.lose("d0")
    d.park("p0", s)
    d.tokens("p0", s, 0, 5)
    assert r.stage is Stage.PARKED
    d.tick()
    d.tick(30.1)
    assert d.error(r).code == "no_decode_worker"


@pytest.mark.parametrize("parked", ["before its last token", "after"])
def test_parked_kv_of_an_ended_request_is_dropped(parked: str) -> None:
    d = Drive("p0", "d0")
    r, s = d.at(Stage.PARKED if parked.startswith("before") else Stage.HANDOVER)
    d.tokens("d0", s, 0, 5, 6, 7, 8)
    assert r.ended and r.finish == "length"
    if parked == "after":
        d.park("p0", s)
    assert ("p0", s) in [(w, c.sequence) for w, c in d.sent(Abort)]


def test_stale_parked_event_does_not_drop_the_kv_of_the_current_attempt() -> None:
    """A prefill worker also finds a hand-over by its first attempt, so an `Abort` of that one would drop the KV."""
    d = Drive("p0", "d0")
    r, s = d.at(Stage.HANDOVER)
    d.park("p0", s)
    assert r.sequence != s
    d.new.clear()
    d.park("p0", s)
    assert not d.sent(Abort) and r.stage is Stage.HANDOVER


def test_draining_cluster_still_admits_other_choices_of_accepted_requests() -> None:
    d = Drive("p0", "d0")
    d.at(Stage.DECODE)
    d.requests.draining = True
    assert d.submit("r", choice=1).stage is Stage.PREFILL
    with pytest.raises(Unavailable, match="draining"):
        d.submit("new")


def test_a_request_that_needs_no_decode_worker_does_not_wait_for_one() -> None:
    d = Drive("p0", "d0", hold_s=30.0)
    busy = d.submit("busy", prompt=(1,) * 40)
    last = d.submit("last", max_tokens=1)
    d.lose("d0")
    d.tick(40.0)
    assert last.error is None
    d.record(d.requests.end(busy, "the client left", d.now))
    assert last.stage is Stage.PREFILL


def test_hand_over_is_released_if_the_request_ended_and_stale_if_no_worker_runs_it() -> None:
    d = Drive("p0", "d0")
    _, s = d.at(Stage.HANDOVER)
    d.tokens("d0", s, 0, 5, 6, 7, 8)
    d.new.clear()
    d.handed_over("p0", s, "d0")
    d.tick()
    assert [w for w, _ in d.sent(ReleaseRecords)] == ["d0", "p0"]
    waiting = d.submit("waiting", prompt=(1,) * 40), d.submit("queued")
    d.handed_over("p0", waiting[1].sequence, "d0")  # of an attempt that no worker runs
    assert waiting[1].stage is Stage.QUEUED and d.requests.stale_events


def test_rescheduled_requests_go_first_in_order_of_age() -> None:
    d = Drive("p0", "d0", "p1")
    names = ["a", "b", "c", "d"]
    for name in names:
        d.submit(name, prompt=(1,) * 16)
    assert [a.request.request_id for a in d.take(StartPrefill)] == ["a", "b"]  # one per worker; c and d wait
    d.lose("p1")
    d.lose("p0")
    d.join("p0", blocks=64)
    d.join("p1", blocks=64)
    assert [a.request.request_id for a in d.take(StartPrefill)] == ["a", "b"]
    d.tokens("p0", next(r for r in d.requests if r.prefill_worker == "p0").sequence, 0, 5)
    assert [a.request.request_id for a in d.take(StartPrefill)] == ["c"]


def test_requests_wait_for_an_empty_role_and_then_fail_with_the_reason() -> None:
    d = Drive("p0", "d0", hold_s=30.0)
    running, _ = d.at(Stage.DECODE, "running")
    d.lose("d0")
    assert running.stage is Stage.QUEUED
    new = d.submit("new")
    d.tick(29.0)
    assert running.error is None and new.stage is Stage.QUEUED
    d.join("d0")
    assert running.stage is Stage.PREFILL
    d.requests.end(new, "the client disconnected", d.now)
    d.lose("d0")
    d.lose("p0", drained=True)
    d.tick(29.9)
    assert running.error is None, "the clock began anew"
    d.tick(0.2)
    assert d.error(running).code == "no_prefill_worker"


def test_workers_that_are_expected_are_waited_for_beyond_the_hold() -> None:
    d = Drive(hold_s=2.0)
    d.requests.holding.expect_workers(d.now + 30.0)
    waits = d.submit("r")
    d.tick()
    d.tick(31.0)
    assert waits.error is None
    d.tick(1.5)
    assert d.error(waits).code == "no_prefill_worker"


def test_no_workers_on_purpose_is_ready_for_a_hold_after_the_last_report() -> None:
    d = Drive(hold_s=30.0)
    holding = d.requests.holding
    assert holding.missing_role(d.now) == "prefill" and not holding.expects_workers(d.now), "none has ever been ready"
    for _ in range(3):
        holding.expect_workers(d.now)
        d.tick(29.0)
        assert holding.missing_role(d.now) is holding.missing_role(d.now, decode=False) is None
        assert holding.expects_workers(d.now)
    d.tick(1.0)
    assert holding.missing_role(d.now) == "prefill" and not holding.expects_workers(d.now)
    waits = d.submit("r")
    d.tick(29.9)
    assert waits.error is None, "what arrives nevertheless waits as long as ever"
    d.requests.end(waits, "the client disconnected", d.now)
    holding.expect_workers(d.now + 30.0)
    holding.expect_workers(d.now)
    d.tick(59.0)
    assert holding.missing_role(d.now) is None, "a later time, as at a take-over, stays"


def test_returning_role_stops_the_hold_timeout_even_without_room_for_all() -> None:
    d = Drive("p0", "d0", hold_s=30.0)
    first, _ = d.at(Stage.DECODE, "first", prompt=(1,) * 40)
    second, _ = d.at(Stage.HANDOVER, "second", prompt=(1,) * 20)
    d.lose("d0")
    d.lose("p0")
    d.join("p0")
    d.join("d0")
    assert (first.stage, second.stage) == (Stage.PREFILL, Stage.QUEUED)
    d.tick(60.0)
    assert not second.ended


def test_parked_kv_waits_for_a_decode_worker_until_the_hold_timeout() -> None:
    d = Drive("p0", "d0", hold_s=30.0)
    r, s = d.at(Stage.PARKED)
    d.lose("d0")
    d.tick(20.0)
    d.join("d0")
    d.tick()
    (assign,) = d.take(AssignTargets)
    d.park("p0", s._replace(attempt=assign.attempt))
    d.lose("d0")
    d.tick(30.1)
    assert d.error(r).code == "no_decode_worker"


def test_parked_kv_gives_way_when_a_prompt_that_may_need_its_blocks_has_the_room_it_needs() -> None:
    d = Drive("p0", "d0")
    r, s = d.at(Stage.PARKED, max_tokens=40)
    d.lose("d0")
    other = d.submit("other", max_tokens=40)
    d.join("d0")
    d.tick(PARKED_S / 2)
    assert (r.stage, other.stage) == (Stage.PARKED, Stage.PREFILL)
    d.take(Send)
    d.tick(PARKED_S / 2)
    assert (r.stage, r.deaths) == (Stage.QUEUED, [])
    assert ("p0", s) in [(worker, abort.sequence) for worker, abort in d.sent(Abort)]
    d.requests.check()


def test_parked_kv_is_kept_while_no_decode_worker_is_here_however_long() -> None:
    d = Drive("p0", "d0", hold_s=60.0)
    r, _ = d.at(Stage.PARKED)
    d.lose("d0")
    d.tick(3 * PARKED_S)
    assert r.stage is Stage.PARKED
    d.join("d0")
    d.tick()
    assert r.stage is Stage.HANDOVER


@pytest.mark.parametrize(("other", "moves"), [({}, True), ({"model_digest": "other"}, False), ({"blocks": 1}, False)])
def test_parked_kv_without_a_decode_worker_moves_as_tokens_to_a_class_that_continues_it(
    other: dict[str, Any], moves: bool
) -> None:
    d = Drive("p0", "d0")
    r, s = d.at(Stage.PARKED, max_tokens=8)
    for name in ("p1", "d1"):
        d.join(name, revision="v2", **other)
    d.tick()
    assert r.stage is Stage.PARKED, "d0 may redial"
    d.lose("d0")
    d.tick()
    assert (r.stage, r.attempt > s.attempt) == ((Stage.PREFILL, True) if moves else (Stage.PARKED, False))
    if moves:
        assert (r.prefill_worker, r.request.output, r.deaths) == ("p1", (5,), [])


def test_parked_kv_is_kept_while_its_own_worker_is_disconnected() -> None:
    d = Drive("p0", "d0")
    r, _ = d.at(Stage.PARKED, max_tokens=40)
    d.lose("d0")
    d.submit("other", max_tokens=40)
    d.join("d0")
    d.tick(PARKED_S / 2)
    d.table.disconnected("p0", 1, d.now)
    d.tick(PARKED_S)
    assert (r.stage, r.attempt) == (Stage.PARKED, 1)
    d.table.join(make_join("p0", blocks=16), d.now)
    d.tick()
    assert r.stage is Stage.QUEUED


def test_request_that_fits_only_a_lost_worker_waits_and_then_fails() -> None:
    d = Drive("p0", "d0", "d1", hold_s=30.0)
    d.lose("d1")
    d.join("d1", blocks=4)
    large, _ = d.at(Stage.DECODE, "large", max_tokens=40)
    d.lose("d0")
    small = d.submit("small")
    assert (large.stage, small.stage) == (Stage.QUEUED, Stage.PREFILL)
    d.tick(30.1)
    error = d.error(large)
    assert error.code == "exceeds_pool" and "largest decode worker holds 16" in error.message


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.HANDOVER, Stage.DECODE])
def test_requests_of_a_drained_worker_are_rescheduled_and_count_no_death(stage: Stage) -> None:
    d = Drive("p0", "d0", "p1", "d1")
    r, _ = d.at(stage)
    d.lose("d0" if stage is Stage.DECODE else "p0", drained=True)
    assert (r.deaths, r.stage) == ([], Stage.PREFILL)
    assert r.request.output == tuple(r.tokens)


def test_hand_over_to_a_worker_that_has_left_is_rescheduled() -> None:
    d = Drive("p0", "d0", "d1")
    r, s = d.at(Stage.HANDOVER)
    d.lose("d0", drained=True)
    d.handed_over("p0", s, "d0")
    assert r.deaths == [] and d.take(StartPrefill)[0].targets == ("d1",)


@pytest.mark.parametrize("order", ["tokens first", "parked first"])
def test_lost_last_acknowledgement_reschedules_a_request_that_decode_has_started(order: str) -> None:
    """The prefill worker has made decode end it; outside exact mode another worker might generate other tokens."""
    d = Drive("p0", "d0")
    r, s = d.at(Stage.HANDOVER)
    if order == "parked first":
        worker = d.table.get("d0")
        assert worker is not None
        bring_to(worker, WorkerState.DISCONNECTED)  # so that it cannot be a target
        d.park("p0", s)
        assert r.stage is Stage.PARKED
        bring_to(worker, WorkerState.READY)
    d.tokens("d0", s, 0, 5, 6)
    if order == "tokens first":
        d.park("p0", s)
    (start,) = d.take(StartPrefill)
    assert start.request.output == (5, 6) and not d.take(AssignTargets)
    assert r.deaths == []


@pytest.mark.parametrize("last", [False, True])
def test_kv_parked_before_its_first_token_does_not_outlive_tokens_of_a_decode_worker(last: bool) -> None:
    """Decode took the KV, but its acknowledgement was lost, and the first token is late on prefill's stream."""
    d = Drive("p0", "d0")
    r, s = d.at(Stage.PREFILL)
    d.park("p0", s)
    d.tokens("d0", s, 0, *(5, 6, 7, 8)[: 4 if last else 2])
    assert {w for w, c in d.sent(Abort) if c.sequence == s} == {"p0", "d0"}
    assert r.ended == last and d.requests.rescheduled == (not last)


def test_hand_over_to_a_worker_that_is_no_target_is_rescheduled() -> None:
    """Nothing can arrive from such a worker, and the request would wait until its deadline."""
    d = Drive("p0", "d0")
    r, s = d.at(Stage.HANDOVER)
    d.handed_over("p0", s, "strange")
    assert d.take(StartPrefill)[0].request.output == (5,)
    assert r.deaths == ["strange (lost during the hand-over)"]


def test_parked_kv_waits_for_its_first_token_and_is_offered_under_the_next_attempt() -> None:
    d = Drive("p0", "d0")
    r, s = d.at(Stage.PREFILL)
    d.park("p0", s)
    d.tick()
    assert r.stage is Stage.PREFILL and not d.take(AssignTargets)
    d.tokens("p0", s, 0, 5)
    sent = [(a.worker, a.command) for a in d.new if isinstance(a, Send)]
    assert [(w, c.sequence) for w, c in sent if isinstance(c, Abort)] == [("d0", s)]
    (assign,) = d.take(AssignTargets)
    d.tick()
    assert [w for w, _ in d.sent(ReleaseRecords)] == ["d0", "p0"], "nothing is kept of the old attempt"
    assert (assign.sequence, assign.attempt) == (s, r.attempt) and r.stage is Stage.HANDOVER
    d.tokens("d0", s, 1, 99)
    assert d.requests.stale_events == 1


def test_refused_kv_is_offered_again_with_backoff_up_to_a_limit() -> None:
    d = Drive("p0", "d0")
    r, s = d.at(Stage.HANDOVER)
    d.park("p0", s)
    assert len(d.take(AssignTargets)) == 1
    waited = []
    for _ in range(MAX_TIMES_PARKED - 1):
        d.park("p0", r.sequence)
        assert not d.take(AssignTargets)
        began = d.now
        while not d.take(AssignTargets):
            d.tick(0.01)
        waited.append(round(d.now - began, 1))
    assert waited[:5] == [0.1, 0.2, 0.4, 0.8, 1.0] and 20 < sum(waited) < 30  # about as long as a request is held
    d.park("p0", r.sequence)
    error = d.error(r)
    assert isinstance(error, HandoffError) and "30 tries" in error.message


def test_parked_events_repeated_after_a_redial_count_once() -> None:
    d = Drive("p0", "d0")
    r, s = d.at(Stage.PREFILL)
    d.park("p0", s)
    d.park("p0", s)
    assert r.times_parked == 1
    d.tokens("p0", s, 0, 5)
    s = r.sequence
    worker = d.table.get("d0")
    assert worker is not None
    bring_to(worker, WorkerState.DISCONNECTED)
    d.park("p0", s)
    d.park("p0", s)
    assert (r.stage, r.times_parked) == (Stage.PARKED, 2)


def test_parked_kv_is_not_assigned_while_its_worker_is_disconnected() -> None:
    d = Drive("p0", "d0")
    r, _ = d.at(Stage.PARKED)
    d.table.disconnected("p0", 1, d.now)
    worker = d.table.get("d0")
    assert worker is not None
    bring_to(worker, WorkerState.READY)
    d.tick()
    assert not d.take(AssignTargets) and r.stage is Stage.PARKED
    d.table.join(make_join("p0", blocks=16), d.now)
    d.tick()
    assert len(d.take(AssignTargets)) == 1


@pytest.mark.parametrize("code", ["worker_lost", "unknown_sequence"])
def test_decode_worker_losing_its_source_is_ignored_while_prefill_has_the_kv(code: str) -> None:
    """This holds while the session of the prefill worker is broken, too, since it keeps its lease."""
    d = Drive("p0", "d0")
    r, s = d.at(Stage.HANDOVER)
    d.table.disconnected("p0", 1, d.now)
    d.ended("d0", s, code)
    assert r.stage is Stage.HANDOVER and not d.new


@pytest.mark.parametrize("who", ["p0", "d0"])
@pytest.mark.parametrize("code", ["abandoned", "draining"])
def test_sequence_given_up_by_a_worker_is_rescheduled_from_the_journal(who: str, code: str) -> None:
    d = Drive("p0", "d0")
    r, s = d.at(Stage.HANDOVER)
    d.ended(who, s, code)
    assert d.take(StartPrefill)[0].request.output == (5,) and r.deaths == []


def test_prefill_command_lost_with_its_session_is_resent() -> None:
    d = Drive("p0", "d0", "d1")
    r, s = d.at(Stage.PREFILL)
    d.ended("p0", s, "unknown_sequence")
    (start,) = d.take(StartPrefill)
    assert start.request.sequence_id == s and r.stage is Stage.PREFILL
    d.join("d0")  # the handle was for its previous incarnation
    d.ended("p0", s, "unknown_sequence")
    assert d.take(StartPrefill)[0].request.attempt > s.attempt


@pytest.mark.parametrize("code", ["kv_corrupt", "handoff_failed"])
def test_damaged_or_missing_kv_is_recomputed_at_most_once(code: str) -> None:
    d = Drive("p0", "d0")
    r, s = d.at(Stage.HANDOVER)
    d.ended("p0", s, code)
    assert d.take(StartPrefill)[0].request.output == (5,)
    d.ended("p0", r.sequence, code)
    assert d.error(r).code == code


def test_a_sequence_that_a_worker_ends_early_is_rescheduled_up_to_the_limit() -> None:
    d = Drive("p0", "d0", max_deaths=2)
    r, s = d.at(Stage.DECODE)
    d.ended("d0", s, reason="aborted")
    assert d.take(StartPrefill)[0].request.output == (5,)
    d.ended("p0", r.sequence, reason="aborted")
    assert "p0 (ended the request: aborted)" in d.error(r).message


def test_other_worker_errors_reach_the_client_with_their_stage() -> None:
    d = Drive("p0", "d0")
    r, s = d.at(Stage.PREFILL)
    d.ended("p0", s, "internal_error")
    error = d.error(r)
    assert (type(error), error.code) == (BatonError, "internal_error")
    assert error.message == "so it is (stage prefill)"


def test_conflicting_repeat_of_a_token_ends_the_request() -> None:
    d = Drive("p0", "d0")
    r, s = d.at(Stage.HANDOVER)
    d.tokens("d0", s, 0, 9)
    assert isinstance(d.error(r), ProtocolError)


def test_counters_and_times_accumulate_over_attempts() -> None:
    d = Drive("p0", "d0", "d1")
    r, s = d.at(Stage.HANDOVER, max_tokens=9)
    d.handed_over("p0", s, "d0", queue_s=0.1, prefill_s=1.0)
    d.tokens("d0", s, 1, 6, speculation=SpeculationCounters(1, 4, 2))
    d.tokens("d0", s, 2, 7, speculation=SpeculationCounters(2, 8, 3), cached_tokens=2)
    d.now += 2.0
    d.lose("d0")
    again = r.sequence
    d.tokens("p0", again, 3, 8, cached_tokens=3)
    d.handed_over("p0", again, "d1", prefill_s=0.5)
    assert r.speculation == SpeculationCounters(2, 8, 3)
    d.tokens("d1", again, 4, 9, speculation=SpeculationCounters(1, 4, 4))
    assert r.speculation == SpeculationCounters(3, 12, 7)
    assert r.all_stamps() == StageStamps(queue_s=0.1, prefill_s=1.5)
    assert r.cached_tokens == 2, "of the prompt as the client sent it"
    assert r.first_token_at == 100.0


def test_short_response_has_prefill_times_before_its_hand_over_is_reported() -> None:
    d = Drive("p0", "d0")
    r = d.submit(max_tokens=2)
    s = r.sequence
    d.tokens("p0", s, 0, 5, stamps=StageStamps(queue_s=0.1, prefill_s=1.0, reserve_s=0.2))
    d.tokens("d0", s, 1, 6)
    assert r.stage is Stage.ENDED
    assert r.all_stamps() == StageStamps(queue_s=0.1, prefill_s=1.0, reserve_s=0.2)


def test_queue_time_accumulates_and_only_new_output_updates_the_expectation() -> None:
    d = Drive("p0", "d0")
    blocker = d.submit("blocker", prompt=(1,) * 40)
    r = d.submit(max_tokens=20)
    d.now += 1.0
    d.record(d.requests.end(blocker, "the client left", d.now))
    s = r.sequence
    assert r.queued_s == 1.0
    d.tokens("p0", s, 0, *range(10))
    d.lose("p0")
    d.now += 2.0
    d.join("p0")
    assert r.queued_s == 3.0
    mean = d.requests.dispatcher.expectation.mean_tokens
    d.tokens("p0", r.sequence, 10, 5)
    d.record(d.requests.end(r, "the client left", d.now))
    expected = mean + 0.05 * (1 - mean)  # one token in this dispatch, not eleven
    assert d.requests.dispatcher.expectation.mean_tokens == pytest.approx(expected)


def test_choices_share_the_age_and_queue_position_of_their_request() -> None:
    d = Drive("p0", "d0")
    first = d.submit("r", prompt=(1,) * 16)
    later = d.submit("later", prompt=(1,) * 16)
    other = d.submit("r", prompt=(1,) * 16, choice=1)
    assert first.age == other.age < later.age
    assert d.requests.counts() == InFlightCounts(requests=2, queued=1, choices=3, queued_choices=2)
    d.tokens("p0", first.sequence, 0, 5)
    assert (other.stage, later.stage) == (Stage.PREFILL, Stage.QUEUED)
    assert d.requests.counts() == InFlightCounts(requests=2, queued=1, choices=3, queued_choices=1)


def test_redialled_worker_receives_the_sequences_expected_of_it() -> None:
    d = Drive("p0", "d0", "d1")
    _, s = d.at(Stage.HANDOVER)
    assert d.requests.tracked("p0") == (TrackedSequence(s, 1, here=True),)
    assert d.requests.tracked("d1") == (TrackedSequence(s, 1, here=False),)
    d.handed_over("p0", s, "d1")
    assert d.requests.tracked("d1") == (TrackedSequence(s, 1, here=True),)


@pytest.mark.parametrize("stage", [s for s in Stage if s is not Stage.ENDED])
def test_request_end_is_sent_to_every_worker_that_may_hold_state(stage: Stage) -> None:
    d = Drive("p0", "d0", "d1")
    if stage is Stage.QUEUED:
        blocker = d.submit("blocker", prompt=(1,) * 40)
        r = d.submit()
        d.new.clear()
        d.record(d.requests.end(r, "the client left", d.now))
        assert not d.new and d.requests.dispatcher.num_queued == 0
        d.record(d.requests.end(blocker, "the client left", d.now))
    else:
        r, s = d.at(stage)
        d.record(d.requests.end(r, "the client left", d.now))
        assert [(w, c.sequence) for w, c in d.sent(Abort)] == [("d0", s), ("d1", s), ("p0", s)]
    assert r.ended


def test_deadline_error_names_the_stage() -> None:
    d = Drive("p0", "d0")
    r, s = d.at(Stage.PREFILL, deadline_s=1.0)
    d.tick(0.9)
    assert not r.ended
    d.tick(0.1)
    assert d.error(r).message == "the request did not finish within its deadline of 1 s (stage prefill)"
    assert d.error(r).code == "deadline_exceeded"
    assert [c.sequence for _, c in d.sent(Abort)] == [s, s]


def test_queue_room_for_choices_is_released_with_their_request() -> None:
    d = Drive("p0", "d0")
    request = make_request("r", max_tokens=4)
    r, actions = d.requests.admit(request, d.now, 5)
    d.record(actions)
    assert d.requests.dispatcher.incomplete == {r.name}
    d.requests.check()
    d.record(d.requests.end(r, "the client left", d.now))  # before its other choices were submitted
    d.requests.forget(r)
    assert not d.requests.dispatcher.incomplete
    d.requests.check()
    d.requests.dispatcher._to_come[r.name] = 4
    with pytest.raises(InvariantError, match="room is reserved"):
        d.requests.check()


def test_a_second_request_with_an_id_in_flight_is_refused() -> None:
    d = Drive("p0", "d0")
    first, queued = d.submit("a", prompt=(1,) * 40), d.submit("b")
    for choice in (first, queued):
        with pytest.raises(DuplicateRequest):
            d.submit(choice.name.request_id)
    d.requests.check()


def test_deadlines_expire_in_any_order_of_arrival() -> None:
    d = Drive("p0", "d0")
    limits = {"a": 5.0, "b": 1.0, "c": 3.0, "d": 2.0}
    all_of = {name: d.submit(name, deadline_s=limit) for name, limit in limits.items()}
    d.record(d.requests.end(all_of["d"], "the client left", d.now))  # its deadline no longer counts
    d.requests.forget(all_of["d"])
    began = d.now
    while d.now - began < 6.0:
        d.tick(0.25)
        late = {name for name, r in all_of.items() if r.error is not None}
        assert late == {name for name, limit in limits.items() if limit <= d.now - began} - {"d"}, d.now - began


def test_decode_step_does_not_scan_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens free no room, and a scan takes time proportional to the number of workers and sequences."""
    drive, looks = Drive("p0", "d0"), 0
    r, s = drive.at(Stage.DECODE)
    place = drive.requests.dispatcher.place

    def counted() -> object:
        nonlocal looks
        looks += 1
        return place()

    monkeypatch.setattr(drive.requests.dispatcher, "place", counted)
    drive.tokens("d0", s, len(r.tokens), 7)
    assert looks == 0
    drive.ended("d0", s, reason="length")
    assert looks > 0


VECTOR = b"\0\0\x80?" * 2


def test_a_pooled_request_needs_no_decode_worker_and_ends_with_its_vector() -> None:
    d = Drive("p0")
    assert d.submit("generates").stage is Stage.QUEUED
    r = d.submit(pooling="last", max_tokens=1)
    (start,) = d.take(StartPrefill)
    assert (start.request.pooling, start.targets) == ("last", ())
    d.tokens("p0", r.sequence, 0, cached_tokens=2, pooled=VECTOR)
    assert r.ended and r.pooled == VECTOR and r.error is None
    assert (r.finish, r.tokens, r.cached_tokens) == ("stop", [], 2)
    assert Notify(r.name) in d.new
    d.tick()
    assert d.sent(ReleaseRecords) == [("p0", ReleaseRecords((r.sequence,)))]
    d.tokens("p0", r.sequence, 0, pooled=VECTOR)  # repeated after a redial
    d.ended("p0", r.sequence, reason="stop")
    assert r.error is None


def test_a_pooled_request_survives_its_worker_under_the_next_attempt() -> None:
    d = Drive("p0", "p1")
    r = d.submit(pooling="mean", max_tokens=1)
    first = r.sequence
    d.take(StartPrefill)
    d.lose("p0")
    (start,) = d.take(StartPrefill)
    assert (start.prefill, start.request.attempt > first.attempt, start.request.output) == ("p1", True, ())
    d.tokens("p0", first, 0, pooled=b"\0\0\0\0")  # late, of the earlier attempt
    assert not r.ended
    d.tokens("p1", r.sequence, 0, pooled=VECTOR)
    assert r.ended and r.pooled == VECTOR


@pytest.mark.parametrize(
    ("pooling", "event"),
    [("last", {"tokens": (5,)}), ("", {"pooled": VECTOR}), ("last", {"pooled": VECTOR[:3]})],
    ids=["tokens", "no-request", "cut"],
)
def test_a_vector_that_was_not_requested_or_is_cut_fails_the_request(pooling: str, event: dict[str, object]) -> None:
    d = Drive("p0", "d0")
    r = d.submit(pooling=pooling, max_tokens=1)
    d.tokens("p0", r.sequence, 0, *event.pop("tokens", ()), **event)  # type: ignore[misc]
    assert isinstance(d.error(r), ProtocolError)


def test_the_drain_rate_is_measured_while_workers_lack_room_and_not_while_a_role_is_missing() -> None:
    d = Drive("p0", "d0")
    rate = d.requests.dispatcher.drain_rate
    running = [d.submit(f"r{number}", prompt=(1,) * 10) for number in range(4)]
    assert running[-1].stage is Stage.QUEUED and rate.seconds(10) is None
    for r in running[:3]:
        d.tick(0.5)
        if r.stage is Stage.PREFILL:
            d.record(d.requests.end(r, "stop string", d.now, answered=True))
    measured = rate.seconds(10)
    assert measured is not None
    d.lose("p0")
    held = d.submit("held")
    for _ in range(20):
        d.tick(0.5)
    assert held.stage is Stage.QUEUED and rate.seconds(10) in (measured, None)

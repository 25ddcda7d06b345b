"""Every state machine changes by its table alone: all pairs of a state and a type of input are walked."""

from __future__ import annotations

import ast
import itertools
import random
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core import machine, sequence
from baton.core.codes import ErrorCode
from baton.core.errors import HandoffError, InvariantError, KVCorrupt, Unavailable
from baton.core.events import HandedOver, Parked, SequenceEnded, TokenEvent
from baton.core.handover import AbortTransfer, Accept, Chunk, Refuse
from baton.core.machine import Table
from baton.core.sequence import Sequence
from coordinator.policy import choice as choices
from coordinator.policy import membership, requests
from coordinator.policy.membership import WorkerState
from coordinator.policy.workers import WorkerTable
from decode import handover as incoming
from prefill import handover as outgoing
from tests.coordinator.test_policy_choice_table import EVENTS, at
from tests.coordinator.test_policy_requests import Drive
from tests.decode import test_handover as decode_kit
from tests.prefill import test_handover as prefill_kit
from tests.support.builders import add_worker, bring_to, make_request
from tools.shape import nodes, product_files

NOW = 5.0


class Walk:
    """A machine in a state, and the inputs that may happen to it as it is."""

    machine: Any

    def inputs(self, kind: type) -> list[Any]:
        return [kind()]

    def on(self, event: Any) -> None:
        self.machine.on(event, NOW)


class WalkedWorker(Walk):
    def __init__(self, state: WorkerState) -> None:
        self.machine = add_worker(WorkerTable(3.0), "d0")
        if state is membership.LEFT:
            self.on(membership.Left())
        else:
            bring_to(self.machine, state)

    def inputs(self, kind: type) -> list[Any]:
        values = {membership.Redialled: [9.0], membership.DrainBegan: [7.0, "prefill"]}
        return [kind(*values.get(kind, ()))]


class WalkedSequence(Walk):
    def __init__(self, state: sequence.State) -> None:
        self.machine = Sequence(make_request(), state, 0.0)

    def on(self, event: Any) -> None:
        before = self.machine.state
        self.machine.on(event, NOW)
        assert {self.machine.state} == sequence.TABLE[before, type(event)].states


class WalkedSend(Walk):
    """The first 8 of 20 tokens are computed."""

    def __init__(self, stage: outgoing.SendStage) -> None:
        Stage = outgoing.SendStage
        if stage is Stage.WAITING or stage is Stage.PARKED:
            self.machine = prefill_kit.hand_over(*(["d0", "d1"] if stage is Stage.WAITING else []))
            if stage is Stage.PARKED:
                self.machine.on(outgoing.ComputeStarted(), 0.0)
        elif stage is Stage.OFFERING:
            self.machine = prefill_kit.offering()
        else:
            self.machine = prefill_kit.sending()
            prefill_kit.computed(self.machine, 8)
            prefill_kit.announce(self.machine)
            if stage is Stage.ENDED:
                self.machine.on(outgoing.Aborted("it was aborted"), 3.0)

    def inputs(self, kind: type) -> list[Any]:
        over, plans = self.machine, prefill_kit.PLANS
        if kind is outgoing.SpanAnnounced:
            return [outgoing.SpanAnnounced(span) for span in [over.next_span()] if span is not None]
        if (kind in (Accept, Refuse) and over.wire is None) or (kind is outgoing.Acknowledged and over.span is None):
            return []
        values: dict[type, list[Any]] = {
            outgoing.ComputeStarted: [outgoing.ComputeStarted()],
            outgoing.Connected: [outgoing.Connected(prefill_kit.WIRE)],
            Accept: [Accept(prefill_kit.R, held) for held in (0, 12, prefill_kit.TOKENS)],
            Refuse: [Refuse(prefill_kit.R, ErrorCode.DRAINING, "it drains")],
            outgoing.TargetFailed: [outgoing.TargetFailed(error("it failed")) for error in (HandoffError, KVCorrupt)],
            outgoing.LayersComputed: [outgoing.LayersComputed(prefill_kit.TOKENS, 3)],
            outgoing.EdgeSent: [outgoing.EdgeSent(1)],
            outgoing.Acknowledged: [
                outgoing.Acknowledged({plan.key: plan.key not in damaged for plan in plans})
                for damaged in ((), [plans[1].key])
            ],
            outgoing.Assigned: [outgoing.Assigned((prefill_kit.target("d7"),))],
            outgoing.Aborted: [outgoing.Aborted("the client left")],
        }
        return values[kind]

    def on(self, event: Any) -> None:
        over, before = self.machine, self.machine.state
        if isinstance(event, outgoing.Acknowledged) and over.sequence.num_computed < prefill_kit.TOKENS:
            prefill_kit.computed(over, prefill_kit.TOKENS, 9)  # meanwhile
        actions = over.on(event, NOW)
        assert all(isinstance(action, get_args(outgoing.Action)) for action in actions)
        # What waits for something must say for what: only then does another event follow.
        assert over.state is before or over.state is outgoing.SendStage.ENDED or actions


class WalkedReceipt(Walk):
    """KV arrives on two edges: a chunk is being written on both in RECEIVING, on the first one in CLOSING."""

    def __init__(self, stage: incoming.ReceiveStage) -> None:
        Stage, kit = incoming.ReceiveStage, decode_kit.Kit()
        self.kit = kit
        if stage is Stage.ABSENT:
            self.machine = incoming.IncomingHandOver(decode_kit.R, kit.machine.destination, kit.machine.counters)
            return
        kit.offer()
        self.machine = kit.scheduler.sequences[decode_kit.R].hand_over
        if stage in (Stage.RECEIVING, Stage.CLOSING):
            kit.announce(kit.chunk(decode_kit.FIRST))
        if stage is Stage.RECEIVING:
            kit.announce(kit.chunk(decode_kit.SECOND))
        if stage is Stage.RECEIVED:
            kit.receive_all()
        if stage in (Stage.CLOSING, Stage.ENDED):
            kit.abort(kit.peer, "the client left")

    def inputs(self, kind: type) -> list[Any]:
        over, kit, name = self.machine, self.kit, decode_kit.R
        peers = kit.peer, kit.new_peer("p1")
        chunks: list[Chunk] = [kit.chunk(edge) for edge in sorted(over.writing)]
        new = Sequence(make_request("r", 8), sequence.State.RECEIVING, NOW, block_ids=(0, 1))
        values: dict[type, list[Any]] = {
            incoming.OfferAccepted: [incoming.OfferAccepted(kit.peer, new)],
            incoming.ChunkAnnounced: [
                incoming.ChunkAnnounced(kit.peer, kit.chunk(decode_kit.SECOND), edge_open=True),
                incoming.ChunkAnnounced(kit.peer, kit.chunk(decode_kit.SECOND), edge_open=False),
                incoming.ChunkAnnounced(kit.peer, kit.chunk(decode_kit.FIRST), edge_open=True),
                incoming.ChunkAnnounced(kit.new_peer("p1"), kit.chunk(decode_kit.SECOND), edge_open=True),
            ],
            incoming.ChunkRejected: [incoming.ChunkRejected(peer, name, "no staging memory") for peer in peers],
            incoming.ChunkReceived: [
                incoming.ChunkReceived(chunk, intact) for chunk in chunks for intact in (True, False)
            ],
            incoming.ReceiveFailed: [
                incoming.ReceiveFailed(chunk, "it broke", is_open) for chunk in chunks for is_open in (True, False)
            ],
            incoming.AbortedByPeer: [incoming.AbortedByPeer(peer, AbortTransfer(name, "it left")) for peer in peers],
            incoming.LinkEnded: [incoming.LinkEnded(name, "the link broke")],
            incoming.EndedByCoordinator: [incoming.EndedByCoordinator(name, "the client left")],
        }
        return values[kind]

    def on(self, event: Any) -> None:
        actions = self.machine.on(event, NOW)
        assert all(isinstance(a, (*get_args(incoming.OwnAction), *get_args(incoming.Action))) for a in actions)


class WalkedChoice(Walk):
    """On p0 and d0; while it is queued, another choice has their room."""

    def __init__(self, stage: choices.Stage) -> None:
        self.drive, self.machine = at(stage)

    def inputs(self, kind: type) -> list[Any]:
        name, index = self.machine.sequence, self.machine.next_index
        ended = SequenceEnded(name, "error", ErrorCode.ABANDONED, "so it is")
        values: dict[type, list[Any]] = {
            choices.PrefillTokens: [choices.PrefillTokens("p0", TokenEvent(name, index, (5,)))],
            choices.DecodeTokens: [choices.DecodeTokens("d0", TokenEvent(name, index, (5,)))],
            choices.HandedOverBy: [choices.HandedOverBy("p0", HandedOver(name, to, 1)) for to in ("d0", "d1")],
            choices.ParkedBy: [choices.ParkedBy("p0", Parked(name, "all refused"))],
            choices.EndedBy: [choices.EndedBy(worker, ended) for worker in ("d0", "p0")],
            choices.Placed: [choices.Placed()] if len(self.drive.requests) > 1 else [],
            choices.OfferDue: [choices.OfferDue()],
            choices.LostWorker: [choices.LostWorker(w, "silent", None, drained=False) for w in ("p0", "d0")],
            choices.Stop: [choices.Stop("stop string", answered) for answered in (False, True)],
            choices.Fail: [choices.Fail(Unavailable("draining"))],
        }
        return values[kind]

    def on(self, event: Any) -> None:
        driven, choice = self.drive.requests, self.machine
        if isinstance(event, choices.Placed) and choice.stage is choices.Stage.QUEUED:
            # Only the dispatcher places a choice, once there is room.
            other = next(each for each in driven if each is not choice)
            driven.end(other, "the client left", NOW)
            driven.forget(other)
        else:
            if isinstance(event, choices.PrefillTokens | choices.DecodeTokens) and not choice.ended:
                choice.accept(event.event)
            machine.handle(driven.table, choice, event, NOW)
        driven.check()


@dataclass(frozen=True, eq=False, repr=False)
class Walked:
    module: ModuleType
    table: Table
    states: type[Enum]
    events: tuple[type, ...]
    walk: Callable[[Any], Walk]

    def __repr__(self) -> str:
        return self.module.__name__


ALL = (
    Walked(membership, membership.TABLE, WorkerState, get_args(membership.Event), WalkedWorker),
    Walked(requests, Drive().requests.table, choices.Stage, EVENTS, WalkedChoice),
    Walked(sequence, sequence.TABLE, sequence.State, get_args(sequence.Event), WalkedSequence),
    Walked(outgoing, outgoing.TABLE, outgoing.SendStage, get_args(outgoing.Event), WalkedSend),
    Walked(incoming, incoming.TABLE, incoming.ReceiveStage, get_args(incoming.Event), WalkedReceipt),
)
MAX_WALKS = 3000
"""A few hundred lead to every state that is listed."""


def blank(kind: type) -> Any:
    """An input without fields: one that the table does not list is refused before any is read."""
    return (tuple if issubclass(kind, tuple) else object).__new__(kind)


def fields_of(machine: Any) -> dict[str, Any]:
    names = [name for each in type(machine).__mro__ for name in getattr(each, "__slots__", ())]
    values = {name: getattr(machine, name) for name in names if hasattr(machine, name)}
    return {name: copy(value) if isinstance(value, dict | list | set) else value for name, value in values.items()}


def refuse(walk: Walk, kind: type) -> None:
    state, before = walk.machine.state, fields_of(walk.machine)
    with pytest.raises(InvariantError, match=f"in state {state.value} cannot handle {kind.__name__}$"):
        walk.on(blank(kind))
    assert before == fields_of(walk.machine) and len(before) > 5


def tables(tree: ast.Module) -> int:
    """How many tables a file has: those that it assigns, and those that its functions return."""
    imports = [each for each in nodes(tree, ast.ImportFrom) if each.module == machine.__name__]
    if not any(name.name == "Table" for each in imports for name in each.names):
        return 0
    made = [node.annotation for node in nodes(tree, ast.AnnAssign) if node.value is not None]
    made += [node.returns for node in nodes(tree, ast.FunctionDef)]
    return sum(isinstance(each, ast.Name) and each.id == "Table" for each in made)


def test_every_table_of_the_product_is_walked() -> None:
    made = {path: count for path, tree in product_files().items() if (count := tables(tree))}
    assert made == {walked.module.__name__.replace(".", "/") + ".py": 1 for walked in ALL}


@pytest.mark.parametrize("source", ["T: Table = {}", "T: Table = f()", "def f() -> Table: ..."])
def test_a_table_is_detected(source: str) -> None:
    assert tables(ast.parse(f"from baton.core.machine import Table\n{source}")) == 1
    assert tables(ast.parse(f"from rich.table import Table\n{source}")) == 0


@pytest.mark.parametrize("walked", ALL, ids=str)
def test_a_table_lists_its_states_and_inputs_alone(walked: Walked) -> None:
    assert walked.table.keys() <= {(state, kind) for state in walked.states for kind in walked.events}
    assert {kind for _, kind in walked.table} == set(walked.events)
    assert {state for row in walked.table.values() for state in row.states} <= set(walked.states)


@pytest.mark.parametrize("walked", ALL, ids=str)
def test_each_pair_is_in_the_table_or_violates_an_invariant(walked: Walked) -> None:
    for state, kind in itertools.product(walked.states, walked.events):
        walk, row = walked.walk(state), walked.table.get((state, kind))
        assert walk.machine.state is state
        if row is None:
            refuse(walk, kind)
            continue
        for number in range(max(len(walk.inputs(kind)), 1)):
            walk = walked.walk(state)
            walk.on(walk.inputs(kind)[number])
            assert walk.machine.state in {state, *row.states}


@pytest.mark.parametrize("walked", [each for each in ALL if each.walk is not WalkedChoice], ids=str)
def test_a_table_lists_no_state_to_which_no_input_leads(walked: Walked, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a choice: tests/coordinator/test_policy_choice_table.py, with all messages."""
    missing = {(*pair, after) for pair, row in walked.table.items() for after in row.states if after is not pair[0]}

    def recorded(table: Table, changed: machine.Machine, event: Any, now: float) -> list[Any]:
        before, actions = changed.state, machine.handle(table, changed, event, now)
        missing.discard((before, type(event), changed.state))
        return actions

    monkeypatch.setattr(walked.module, "handle", recorded)
    dice = random.Random(1)
    for _ in range(MAX_WALKS):
        walk = walked.walk(dice.choice([*walked.states]))
        for _ in range(6):
            listed = [kind for state, kind in walked.table if state is walk.machine.state]
            if listed and (inputs := walk.inputs(dice.choice(listed))):
                walk.on(dice.choice(inputs))
        if not missing:
            return
    assert sorted(f"{a.value} {kind.__name__} {b.value}" for a, kind, b in missing) == []


@given(st.data())
@settings(max_examples=200)
def test_any_inputs_in_any_order_follow_the_table(data: st.DataObject) -> None:
    walked = data.draw(st.sampled_from(ALL))
    walk = walked.walk(data.draw(st.sampled_from(walked.states)))
    for _ in range(data.draw(st.integers(1, 12))):
        before, kind = walk.machine.state, data.draw(st.sampled_from(walked.events))
        row = walked.table.get((before, kind))
        if row is None:
            refuse(walk, kind)
        elif inputs := walk.inputs(kind):
            walk.on(data.draw(st.sampled_from(inputs)))
            assert walk.machine.state in {before, *row.states}

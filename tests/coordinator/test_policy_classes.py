"""Compatibility classes: who may join, who is paired, and which class a request uses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from baton.core.compatibility import PROTOCOL_VERSION
from baton.core.errors import JoinRefused
from baton.core.events import Load
from coordinator.policy.choice import Choice
from coordinator.policy.dispatch import MAX_OVERTAKEN
from coordinator.policy.joining import OwnModel
from coordinator.policy.workers import ClassKey, WorkerClass, WorkerTable, continues
from tests.coordinator.test_policy_workers import OWN
from tests.support.builders import make_facts, make_join
from tests.support.placing import Placing, make_choice


def table(*workers: tuple[str, str], own: OwnModel | None = None, **facts: dict[str, Any]) -> WorkerTable:
    """Returns a table with ready workers, each a name and a revision; `facts` by revision."""
    made = WorkerTable(3.0, own)
    for name, revision in workers:
        join(made, name, revision, **facts.get(revision, {}))
    return made


def join(into: WorkerTable, name: str, revision: str = "", **facts: Any) -> None:
    into.join(replace(make_join(name, blocks=16, **facts), revision=revision), 0.0)


def refusal(into: WorkerTable, name: str, revision: str = "", **facts: Any) -> str:
    with pytest.raises(JoinRefused) as caught:
        join(into, name, revision, **facts)
    assert caught.value.message.startswith(f"{'prefill' if name[0] == 'p' else 'decode'} worker {name} refused: ")
    assert caught.value.param is not None
    return caught.value.param


def test_workers_of_two_revisions_are_never_paired() -> None:
    d = Placing(table(("p0", "a"), ("d0", "a"), ("p1", "b"), ("d1", "b")))
    for number in range(8):
        d.submit(make_choice(f"r{number}", 4, 8))
    placed = d.place()
    assert {(p.prefill, p.decode, p.spare) for p in placed} == {("p0", "d0", None), ("p1", "d1", None)}
    d.check()


def test_a_choice_that_goes_to_another_class_closes_none_to_those_behind_it() -> None:
    p = Placing(WorkerTable(3.0))
    for name in ("p0", "p1", "p2", "d0"):
        p.table.join(make_join(name, blocks=64, step_tokens=8), 0.0)
    for number in range(3):
        p.submit(make_choice(f"before{number}", 8, 12, age=number))
    assert len(p.place()) == 3
    for name in ("pz", "dz"):
        p.table.join(replace(make_join(name, blocks=64, step_tokens=8), revision="v2"), 0.0)
    p.submit(make_choice("long", 12, 16, age=5))  # only pz has room for it
    p.submit(make_choice("short", 6, 10, age=6))
    assert [(each.name, each.prefill[1].isdigit()) for each in p.place()] == [("long", False), ("short", True)]
    assert p.dispatcher.role_without_room is None


def test_workers_of_two_domains_are_never_paired_and_share_a_revision() -> None:
    d = Placing(WorkerTable(3.0, None))
    workers = {"p0": "rack-1", "d0": "rack-1", "p1": "rack-2", "d1": "rack-2"}
    for name, domain in workers.items():
        d.table.join(replace(make_join(name, blocks=16), revision="v1", domain=domain), 0.0)
    assert [w.row(0.0)["domain"] for w in d.table.present()] == list(workers.values())
    d.dispatcher.traffic.set({"v1": 100.0})
    for number in range(8):
        d.submit(make_choice(f"r{number}", 4, 8))
    placed = d.place()
    assert {(p.prefill, p.decode, p.spare) for p in placed} == {("p0", "d0", None), ("p1", "d1", None)}
    d.check()
    with pytest.raises(JoinRefused) as caught:
        d.table.join(replace(make_join("p2"), domain="rack 3"), 0.0)
    assert caught.value.param == "domain"
    with pytest.raises(JoinRefused, match="of revision v1"):  # a domain is no revision: its model is the same
        d.table.join(replace(make_join("p3", model_digest="x"), revision="v1", domain="rack-3"), 0.0)


def test_hand_overs_are_measured_by_class() -> None:
    """Its links may be slower, or its model larger."""
    d = Placing(table(("p0", "a"), ("d0", "a"), ("p1", "b"), ("d1", "b")))
    for number in range(2):
        d.submit(make_choice(f"r{number}", 4, 8))
    for placed in d.place():
        choice = d.choices[placed.name]
        d.dispatcher.handed_over(choice, choice.history[-1].at + (0.25 if placed.prefill == "p0" else 0.5))
    assert {each.key.revision: each.hand_over_cost.seconds(4) for each in d.table.classes} == {"a": 0.25, "b": 0.5}


def test_a_class_without_both_roles_gets_nothing() -> None:
    d = Placing(table(("p0", "a"), ("d0", "a"), ("p1", "b")))
    for number in range(8):
        d.submit(make_choice(f"r{number}", 4, 8))
    assert {(p.prefill, p.decode) for p in d.place()} == {("p0", "d0")}
    d = Placing(table(("p0", "a"), ("d1", "b")))
    choice = make_choice("r", 4, 8)
    d.dispatcher.enqueue(choice)
    assert d.place() == [] and d.dispatcher.missing_role() is not None
    apart = "no decode worker is left in the revision and domain of the others", "no_decode_worker"
    assert d.dispatcher.unservable(choice) == apart
    join(d.table, "p1", "b")
    assert d.dispatcher.missing_role() is None and d.dispatcher.unservable(choice) is None
    assert [(p.prefill, p.decode) for p in d.place()] == [("p1", "d1")]


def test_the_class_is_chosen_by_the_room_of_its_smaller_side() -> None:
    """Three prefill workers do not make up for a decode pool that is nearly full."""
    d = Placing(table(*((f"p{n}", "a") for n in range(3)), ("d0", "a"), ("p9", "b"), ("d9", "b")))
    d.submit(make_choice("first", 4, 8))
    assert [(p.prefill, p.decode) for p in d.place()] == [("p0", "d0")], "16 tokens of prefill room against 48"
    d.table.renew_lease("d0", 1, Load(blocks_total=16, blocks_free=5), 0.1)
    d.submit(make_choice("second", 4, 8))
    assert [(p.prefill, p.decode) for p in d.place()] == [("p9", "d9")]


def test_a_request_that_waits_for_one_class_does_not_block_those_of_another() -> None:
    d = Placing(table(("p0", "a"), ("d0", "a"), ("p1", "b"), ("d1", "b"), b={"model_digest": "x"}))
    only_a = [make_choice(f"a{number}", 24, 25, age=number) for number in range(3)]
    for choice in only_a:
        choice.generated_by = make_facts()
        d.submit(choice)
    d.submit(make_choice("any", 4, 8, age=9))
    assert [(p.name, p.prefill) for p in d.place()] == [("a0", "p0"), ("any", "p1")]
    d.prefilled("a0")
    assert d.names() == ["a1"], "in the order of their age"


def test_a_long_queue_for_one_class_is_not_searched_to_its_end_at_each_placement() -> None:
    d = Placing(table(("p0", "a"), ("d0", "a"), ("p1", "b"), ("d1", "b"), ("p2", "c"), b={"model_digest": "x"}))
    examined = 0

    def counted(choice: Choice) -> Collection[WorkerClass]:
        nonlocal examined
        examined += 1
        return candidates(choice)

    candidates, d.dispatcher._candidates = d.dispatcher._candidates, counted  # type: ignore[method-assign]
    for number in range(1000):
        choice = make_choice(f"a{number}", 24, 25, age=number)
        choice.generated_by = make_facts()
        d.submit(choice)
    d.place()
    examined = 0
    assert d.place() == [] and examined <= MAX_OVERTAKEN + 2
    d.submit(make_choice("urgent", 4, 8, priority=-1))
    d.submit(make_choice("waits", 30, 34, priority=-1))
    assert [p.name for p in d.place()] == ["urgent"]
    examined = 0
    assert d.place() == [] and examined == 1, "no class with both roles has room for the first"


def test_output_is_continued_only_by_the_same_model() -> None:
    d = Placing(table(("p0", "a"), ("d0", "a"), ("p1", "b"), ("d1", "b"), a={"model_digest": "x"}))
    d.submit(make_choice("r", 4, 12))
    choice = d.choices["r"]
    (placed,) = d.place()
    here, there = ("p0", "p1") if placed.prefill == "p0" else ("p1", "p0")
    d.produced("r", 1)
    d.table.left(here, 1, 2.0)
    d.reschedule("r")
    assert d.place() == [] and choice.request.output, f"{there} computes another model"
    assert d.dispatcher.unservable(choice) == (
        "no worker is left that can continue its output (model_digest differs)",
        "no_prefill_worker",
    )
    join(d.table, "p2", "c", model_digest=choice.generated_by.model_digest)  # type: ignore[union-attr]
    join(d.table, "d2", "c", model_digest=choice.generated_by.model_digest)  # type: ignore[union-attr]
    assert [(p.prefill, p.decode) for p in d.place()] == [("p2", "d2")], "another class, as tokens"


@pytest.mark.parametrize(
    ("field", "before", "after"),
    [
        ("model_digest", {}, {"model_digest": "x"}),
        ("tokenizer_digest", {}, {"tokenizer_digest": "x"}),
        ("exact", {"exact": True}, {}),
        ("exact", {}, {"exact": True}),
        ("quantize", {}, {"quantize": "int8"}),
        ("dtype", {"exact": True}, {"exact": True, "dtype": "bfloat16"}),
        ("model_impl", {"exact": True}, {"exact": True, "model_impl": "transformers"}),
    ],
)
def test_what_output_depends_on(field: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    differs = continues(make_facts(**before), make_facts(**after))
    assert differs is not None and differs.field == field


def test_other_code_protocol_dtype_and_context_continue_output() -> None:
    after = make_facts(code_version="9", protocol_version=1, dtype="bfloat16", max_model_len=9, config_digest="x")
    assert continues(make_facts(), after) is None


def test_parked_kv_is_offered_only_within_its_class() -> None:
    d = Placing(table(("p0", "a"), ("d0", "a")))
    d.submit(make_choice("r", 4, 12))
    d.place()
    join(d.table, "p1", "b")
    join(d.table, "d1", "b")
    d.prefilled("r")
    d.table.left("d0", 1, 2.0)
    assert d.reassign("r") is None
    join(d.table, "d2", "a")
    placed = d.reassign("r")
    assert placed is not None and placed.decode == "d2" and placed.spare is None


def test_a_wrong_model_is_refused_by_field_unless_it_has_a_revision() -> None:
    known = table(("p0", ""), ("d0", ""), own=OWN)
    assert refusal(known, "d1", model_digest="x") == "model_digest"
    assert refusal(known, "d1", config_digest="x") == "config_digest"
    join(known, "d1", "v2", config_digest="x", model_digest="x", dtype="bfloat16")
    assert refusal(known, "d2", "v2", config_digest="x", model_digest="y") == "dtype"
    assert refusal(known, "d2", "v2", config_digest="x", model_digest="y", dtype="bfloat16") == "model_digest"
    assert refusal(known, "d3", "v3", vocab_size=99) == "vocab_size", "the front has one vocabulary"
    assert refusal(known, "d3", "v3", tokenizer_digest="x") == "tokenizer_digest"
    assert refusal(known, "d3", "a b") == "revision"


@pytest.mark.parametrize("step", [-1, 1])
def test_adjacent_protocol_versions_are_served_side_by_side(step: int) -> None:
    d = Placing(table(("p0", ""), ("d0", ""), own=OWN))
    join(d.table, "p1", protocol_version=PROTOCOL_VERSION + step)
    d.submit(make_choice("r", 4, 8))
    assert [(p.prefill, p.decode) for p in d.place()] == [("p0", "d0")]
    join(d.table, "d1", protocol_version=PROTOCOL_VERSION + step)
    assert {each.key for each in d.table.classes} == {
        ClassKey("", "", PROTOCOL_VERSION),
        ClassKey("", "", PROTOCOL_VERSION + step),
    }
    d.submit(make_choice("s", 4, 8))
    assert [(p.prefill, p.decode) for p in d.place()] == [("p1", "d1")], "it has more room"
    assert refusal(d.table, "d2", protocol_version=PROTOCOL_VERSION + step, model_digest="x") == "model_digest"
    assert refusal(d.table, "d2", protocol_version=PROTOCOL_VERSION + 2 * step) == "protocol_version"


def test_one_incarnation_has_one_class() -> None:
    known = table(("d0", "a"))
    assert refusal(known, "d0", "b") == "revision"


def test_limits_of_a_class_that_has_left_do_not_remain() -> None:
    known = table(("p0", "a"), ("d0", "a"), ("p1", "b"), ("d1", "b"), b={"max_model_len": 20})
    assert known.max_model_len() == 20 and known.max_model_len(30) == 64, "a pair of one class holds it"
    known.left("p1", 1, 2.0)
    known.left("d1", 1, 2.0)
    assert known.max_model_len() == 64


def test_totals_include_classes_that_have_left() -> None:
    known = table(("p0", "a"), ("d0", "a"))
    known.expire(0.0)
    known.renew_lease("d0", 1, Load(steps=5), 1.0)
    known.expire(2.0)
    known.left("p0", 1, 2.0)
    known.left("d0", 1, 2.0)
    join(known, "d1", "b")
    assert [each.key.revision for each in known.classes] == ["b"]
    known.renew_lease("d1", 1, Load(steps=2), 2.5)
    assert known.totals("decode")["steps"] == 7 and known.totals("decode")["worker_s"] == 2.0

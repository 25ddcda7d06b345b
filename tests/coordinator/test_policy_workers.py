"""The worker table: joins, leases, incarnations, draining."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from baton.core.commands import Join, Role
from baton.core.compatibility import PROTOCOL_VERSION, Difference, difference
from baton.core.errors import InvalidRequest, JoinRefused, NotFound
from baton.core.events import Load
from baton.core.kv_layout import KVLayout, LayerKV
from baton.core.liveness import REDIAL_S
from baton.engine.memory import plan_blocks
from baton.models.model_config import parse_model_config
from coordinator.policy import joining
from coordinator.policy.joining import OwnModel
from coordinator.policy.workers import KEEP_LOST_S, WorkerTable
from tests.support.builders import make_facts, make_join, make_layout
from tests.support.model_dirs import model_config

OWN = OwnModel(
    "/models/m",
    "c",
    parse_model_config(
        model_config(
            hidden_size=16, head_dim=8, num_hidden_layers=2, num_key_value_heads=2, vocab_size=make_facts().vocab_size
        )
    ),
    "t",
)
"""The model that workers with `make_facts` have loaded."""


def join(
    name: str = "d0", role: Role = "decode", incarnation: int = 1, both_roles: bool = False, **facts: object
) -> Join:
    known, address = make_facts(**facts), "127.0.0.1:1"
    again = incarnation > 1
    made = Join(name, role, incarnation, known, link_address=address, pids=(11,), blocks_total=8, replace=again)
    return replace(made, both_roles=both_roles)


@pytest.fixture
def workers() -> WorkerTable:
    return WorkerTable(lease_s=3.0, own=OWN)


def state(workers: WorkerTable, worker: str = "d0") -> str:
    found = [w.state.value for w in workers.all() if w.worker_id == worker]
    return found[0] if found else "forgotten"


def layers(**changes: object) -> KVLayout:
    """Returns the layout of `make_facts` with changed layers."""
    return replace(make_layout(), layers=(replace(make_layout().layers[0], **changes),) * 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("param", "facts"),
    [
        ("protocol_version", {"protocol_version": PROTOCOL_VERSION + 2}),
        ("protocol_version", {"protocol_version": PROTOCOL_VERSION - 2}),
        ("tokenizer_digest", {"tokenizer_digest": "other"}),
        ("model_digest", {"model_digest": "other"}),
        ("config_digest", {"config_digest": "other"}),
        ("dtype", {"dtype": "bfloat16"}),
        ("kv_dtype", {"kv_dtype": "float8_e4m3fn"}),
        ("exact", {"exact": True}),
        ("quantize", {"quantize": "int8"}),
        ("model_impl", {"model_impl": "transformers"}),
        ("edge_kind", {"edge_kind": "ipc"}),
        ("vocab_size", {"vocab_size": 7}),
        ("max_model_len", {"max_model_len": 7}),
        ("block_size", {"layout": make_layout(6)}),
        ("layers", {"layout": make_layout(layers=3)}),
        ("layers[0].num_kv_heads", {"layout": make_layout(heads=4)}),
        ("layers[0].head_dim", {"layout": make_layout(head_dim=4)}),
        ("layers[0].dtype", {"layout": layers(dtype="float16")}),
        ("layers[0].window", {"layout": layers(window=4)}),
    ],
)
def test_a_fact_that_differs_is_refused_by_name(workers: WorkerTable, param: str, facts: dict[str, object]) -> None:
    workers.join(join(), 0.0)
    with pytest.raises(JoinRefused) as caught:
        workers.join(join("d1", **facts), 0.0)
    assert caught.value.param == param and caught.value.message.startswith(f"decode worker d1 refused: {param}: ")
    at_coordinator = ("config_digest", "protocol_version", "tokenizer_digest", "vocab_size")
    owner = "the coordinator" if param in at_coordinator else "d0"
    assert f" at {owner} and " in caught.value.message and " at d1" in caught.value.message
    assert state(workers, "d1") == "forgotten"


def test_first_worker_must_match_the_coordinators_model_and_have_a_block_size(workers: WorkerTable) -> None:
    with pytest.raises(JoinRefused, match="config_digest"):
        workers.join(join(config_digest="x"), 0.0)
    with pytest.raises(JoinRefused, match="block_size"):
        workers.join(join(layout=make_layout(0)), 0.0)


@pytest.mark.parametrize(
    ("facts", "difference"),
    [
        ({"vocab_size": 7}, "vocab_size: 100 at the coordinator and 7 at d0"),
        ({"layout": make_layout(layers=3)}, "layers: 2 at the coordinator and 3 at d0"),
        ({"layout": make_layout(8, heads=4)}, "layers[0].num_kv_heads: 2 at the coordinator and 4 at d0"),
        ({}, "the vocabulary size and the KV layout are equal"),
    ],
)
def test_worker_with_another_model_is_refused_with_the_difference(
    workers: WorkerTable, facts: dict[str, object], difference: str
) -> None:
    with pytest.raises(JoinRefused) as caught:
        workers.join(join(config_digest="0123456789abcdef" * 4, **facts), 0.0)
    digests = "config_digest: 'c' at the coordinator and '0123456789ab' at d0"
    assert caught.value.message == (
        f"decode worker d0 refused: {digests}; the coordinator's model is /models/m; {difference}"
    )
    assert caught.value.param == "config_digest"


def test_worker_with_other_weights_is_refused_with_the_name_of_a_present_worker(workers: WorkerTable) -> None:
    workers.join(replace(join(model_digest="a" * 64), host="10.0.0.7"), 0.0)
    with pytest.raises(JoinRefused) as caught:
        workers.join(join("d1", model_digest="b" * 64), 0.0)
    digests = f"model_digest: {'a' * 12!r} at d0 and {'b' * 12!r} at d1"
    assert caught.value.message == f"decode worker d1 refused: {digests}; config.json is equal, the weights are not"
    assert caught.value.param == "model_digest"


def ranks(count: int, *pids: int) -> dict[str, object]:
    return {"tensor_parallel": count, "pids": pids}


@pytest.mark.parametrize(
    ("field", "given"),
    [
        *(("worker_id", {"worker_id": name}) for name in ("", "a b", "a/b", "a\n", "ä", "x" * 129, "../x", "a@1")),
        *(("blocks_total", {"blocks_total": n}) for n in (0, -5)),
        ("step_tokens", {"step_tokens": -1}),
        *(("link_address", {"link_address": a}) for a in ("", "%%%", "host", "host:", "host:x", "a b:1", "dns:///x:1")),
        *(("tensor_parallel", given) for given in (ranks(3, 1, 2, 3), ranks(2, 1), ranks(1 << 30), ranks(0))),
    ],
)
def test_invalid_join_fields_are_refused_by_name(workers: WorkerTable, field: str, given: dict[str, object]) -> None:
    with pytest.raises(JoinRefused) as caught:
        workers.join(replace(join(), **given), 0.0)  # type: ignore[arg-type]
    assert caught.value.param == field
    assert caught.value.message.isascii() and len(caught.value.message) < 400
    assert not list(workers.all())


def test_tensor_parallel_may_differ(workers: WorkerTable) -> None:
    workers.join(join(), 0.0)
    workers.join(replace(join("p0", "prefill"), tensor_parallel=2, pids=(1, 2)), 0.0)
    assert state(workers, "p0") == "ready"


def test_joins_are_not_compared_with_lost_workers(workers: WorkerTable) -> None:
    workers.join(join(), 0.0)
    workers.expire(3.0)
    workers.join(join("d1", model_digest="new"), 3.0)
    assert state(workers, "d1") == "ready"


def test_heartbeats_renew_the_lease_and_a_silent_worker_is_lost(workers: WorkerTable) -> None:
    workers.join(join(), 0.0)
    assert workers.renew_lease("d0", 1, Load(blocks_free=5), 2.9)
    assert workers.expire(5.8) == []
    ((lost, why),) = workers.expire(5.9)
    assert why == "silent for 3 s"
    assert (lost.worker_id, lost.state.value, lost.load.blocks_free if lost.load else None) == ("d0", "lost", 5)
    assert not workers.renew_lease("d0", 1, None, 6.0)
    assert workers.expire(6.0) == []
    workers.expire(5.9 + KEEP_LOST_S)
    assert state(workers) == "lost"
    workers.expire(6.0 + KEEP_LOST_S)
    assert state(workers) == "forgotten"


def test_totals_of_a_pool_never_fall_when_workers_leave(workers: WorkerTable) -> None:
    def count(name: str, incarnation: int, steps: int, now: float) -> None:
        assert workers.renew_lease(name, incarnation, Load(steps=steps, step_s=steps / 10), now)

    workers.expire(0.0)
    workers.join(join(), 0.0)
    workers.join(replace(join("d1"), run_id="an earlier run of the coordinator"), 0.0)
    count("d0", 1, 5, 1.0)
    count("d1", 1, 100, 1.0)
    count("d1", 1, 103, 2.0)
    workers.expire(2.0)
    assert workers.totals("decode")["steps"] == 5 + 3, "what d1 computed in the earlier run does not count"
    assert workers.totals("decode")["worker_s"] == 4.0
    workers.join(join(incarnation=2), 2.0)
    count("d0", 2, 2, 3.0)
    workers.expire(5.0)  # d1 is lost
    workers.left("d0", 2, 3.0)
    workers.expire(6.0)
    totals = workers.totals("decode")
    assert (totals["steps"], totals["step_s"], totals["worker_s"]) == (10, pytest.approx(1.0), 10.0)
    assert set(workers.totals("prefill").values()) == {0}


def test_worker_row_reports_async_scheduling_counters(workers: WorkerTable) -> None:
    workers.join(join(), 0.0)
    workers.renew_lease("d0", 1, Load(steps=9, steps_ahead=7, rows_discarded=2), 0.5)
    (row,) = [w.row(0.5) for w in workers.all()]
    assert (row["steps"], row["steps_ahead"], row["rows_discarded"]) == (9, 7, 2)


def test_expired_lease_fences_the_worker_before_the_expiry_check_runs(workers: WorkerTable) -> None:
    workers.join(join(), 0.0)
    assert not workers.renew_lease("d0", 1, None, 3.0)


def test_disconnected_worker_may_redial_within_the_lease(workers: WorkerTable) -> None:
    workers.join(join(), 0.0)
    workers.renew_lease("d0", 1, Load(blocks_total=8, blocks_free=3), 0.5)
    assert workers.disconnected("d0", 1, 1.0)
    assert state(workers) == "disconnected"
    known = workers.get("d0")
    assert known is not None and workers.join(join(), 2.0).worker is known
    assert state(workers) == "ready"
    assert next(w.row(100.0) for w in workers.all())["blocks_free"] == 3  # its last report is still valid
    assert workers.expire(4.9) == []


def test_closed_connection_shortens_the_lease(workers: WorkerTable) -> None:
    workers.join(join(), 0.0)
    workers.disconnected("d0", 1, 1.0)
    assert workers.expire(1.0 + REDIAL_S - 0.01) == []
    ((lost, why),) = workers.expire(1.0 + REDIAL_S)
    assert lost.worker_id == "d0" and why == "its connection closed and it did not redial"
    assert not workers.renew_lease("d0", 1, None, 1.0 + REDIAL_S)
    workers.join(join("d1"), 0.0)
    workers.disconnected("d1", 1, 2.9)
    ((lost, why),) = workers.expire(3.0)  # its lease ends before REDIAL_S is over
    assert lost.worker_id == "d1"


def test_a_new_incarnation_replaces_the_old_one_which_is_fenced(workers: WorkerTable) -> None:
    workers.join(join(), 0.0)
    replaced = workers.join(join(incarnation=2), 1.0).replaced
    assert replaced is not None and replaced.join.incarnation == 1
    assert not workers.renew_lease("d0", 1, None, 1.1)
    assert not workers.disconnected("d0", 1, 1.1)
    assert workers.renew_lease("d0", 2, None, 1.1)
    with pytest.raises(JoinRefused, match=r"another worker has joined as d0 since this one started \(1 is older\)"):
        workers.join(join(incarnation=1), 1.2)
    workers.left("d0", 1, 3.0)
    assert state(workers) == "ready"


def test_a_live_worker_is_replaced_only_on_request(workers: WorkerTable) -> None:
    stranger = replace(join(incarnation=2), replace=False)
    workers.join(join(), 0.0)
    with pytest.raises(JoinRefused) as caught:
        workers.join(stranger, 2.9)
    assert caught.value.param == "worker_id"
    where = "a live worker has this id (127.0.0.1:1, pid 11); --replace takes its place"
    assert caught.value.message == f"decode worker d0 refused: worker_id: {where}"
    assert workers.incarnation("d0") == 1
    assert workers.join(stranger, 3.0).worker.incarnation == 2, "its lease has ended"
    workers.disconnected("d0", 2, 3.1)
    assert workers.join(replace(stranger, incarnation=3), 3.2).worker.incarnation == 3, "its session has broken"


def test_a_restart_is_not_refused_because_a_clock_was_set_back(workers: WorkerTable) -> None:
    """An older incarnation is refused only while the newer one holds its lease, since that one may redial."""
    workers.join(join(incarnation=2), 0.0)
    workers.disconnected("d0", 2, 0.2)
    with pytest.raises(JoinRefused, match="1 is older"):
        workers.join(join(incarnation=1), 0.3)
    workers.expire(3.0)
    assert workers.join(join(incarnation=1), 3.1).replaced is None
    assert not workers.renew_lease("d0", 2, None, 3.2)  # a late message of the lost incarnation


def test_impossible_incarnation_blocks_its_worker_name_only_until_its_lease_ends(workers: WorkerTable) -> None:
    workers.join(join(incarnation=(1 << 63) - 1), 0.0)
    workers.expire(3.0)
    assert workers.join(join(incarnation=1), 3.1).worker.incarnation == 1


def test_worker_name_keeps_its_role_while_the_worker_is_present(workers: WorkerTable) -> None:
    workers.join(join(), 0.0)
    with pytest.raises(JoinRefused, match="role"):
        workers.join(replace(join(role="prefill", incarnation=2), replace=False), 1.0)
    with pytest.raises(JoinRefused, match="role"):
        workers.join(replace(join(role="prefill"), replace=True), 1.0)
    workers.join(join(role="prefill", incarnation=2), 1.0)  # restarted in another role
    assert [(w.worker_id, w.role) for w in workers.present()] == [("d0", "prefill")]


def test_draining_and_leaving(workers: WorkerTable) -> None:
    workers.join(join(), 0.0)
    workers.drain("d0", 9.0, 1.0)
    assert state(workers) == "draining"
    workers.disconnected("d0", 1, 1.5)
    workers.join(join(), 1.6)
    assert state(workers) == "draining"  # a redial does not make it ready again
    workers.left("d0", 1, 3.0)
    assert state(workers) == "forgotten"
    assert not list(workers.all())


def test_the_end_of_a_lease_does_not_end_a_drain(workers: WorkerTable) -> None:
    """The worker was starved: it has the command, and neither its end nor its new role may depend on the lease."""
    workers.join(join(both_roles=True), 0.0)
    workers.drain("d0", 9.0, 1.0, "prefill")
    assert [worker.worker_id for worker, _ in workers.expire(3.0)] == ["d0"]
    again = workers.join(join(both_roles=True), 3.5).worker
    assert (again.state.value, again.drain_by, again.next_role) == ("draining", 9.0, "prefill")
    workers.left("d0", 1, 3.0)
    workers.join(join(role="prefill", incarnation=2, both_roles=True), 4.0)
    assert workers.flips == {"prefill": 1}
    workers.drain("d0", 9.0, 5.0, "decode")
    workers.expire(8.0)
    fresh = workers.join(join(incarnation=3, both_roles=True), 8.5).worker  # before it was seen to leave
    assert fresh.ready and workers.flips == {"prefill": 1, "decode": 1}
    workers.drain("d0", 9.0, 9.0, "prefill")
    workers.expire(12.0)
    assert workers.join(join(incarnation=4, both_roles=True), 12.5).worker.ready, "its process was started again"
    assert workers.flips == {"prefill": 1, "decode": 1}


@pytest.mark.parametrize("next_role", [None, "prefill"])
def test_a_lost_worker_cannot_drain_and_the_refusal_says_that_it_is_lost(
    workers: WorkerTable, next_role: Role | None
) -> None:
    workers.join(join(both_roles=True), 0.0)
    workers.expire(3.0)
    with pytest.raises(NotFound, match=r"^d0 is lost: its lease has ended, and it has not joined again$"):
        workers.drain("d0", 9.0, 4.0, next_role)


def test_a_worker_joins_again_in_the_role_it_drained_for(workers: WorkerTable) -> None:
    workers.join(join(both_roles=True), 0.0)
    workers.drain("d0", 9.0, 1.0, "prefill")
    drained = workers.get("d0")
    assert drained is not None and (drained.state.value, drained.next_role) == ("draining", "prefill")
    workers.left("d0", 1, 3.0)
    with pytest.raises(NotFound, match="is changing its role"):
        workers.drain("d0", 9.0, 1.5, "prefill")
    assert not workers.flips
    workers.join(join(role="prefill", incarnation=2, both_roles=True), 2.0)
    assert workers.flips == {"prefill": 1}
    workers.drain("d0", 9.0, 2.0, "decode")
    joined = workers.join(join(incarnation=3, both_roles=True), 2.5)  # its `Drained` was lost
    assert joined.replaced is not None and workers.flips == {"prefill": 1, "decode": 1}
    workers.drain("d0", 9.0, 2.6, "prefill")
    workers.left("d0", 3, 3.0)
    workers.join(join(role="prefill", incarnation=4), 2.7)
    assert workers.flips == {"prefill": 2, "decode": 1} and [w.role for w in workers.present()] == ["prefill"]
    workers.drain("d0", 9.0, 3.0)
    workers.left("d0", 4, 3.0)
    workers.join(join(incarnation=5), 4.0)
    assert workers.flips == {"prefill": 2, "decode": 1}, "a worker that left and was started again"


def test_a_role_that_a_worker_cannot_take_is_refused(workers: WorkerTable) -> None:
    workers.join(join(), 0.0)
    with pytest.raises(InvalidRequest, match="not started for both roles"):
        workers.drain("d0", 9.0, 1.0, "prefill")
    assert state(workers) == "ready"
    workers.join(join(incarnation=2, both_roles=True), 1.0)
    with pytest.raises(InvalidRequest, match="is a decode worker already"):
        workers.drain("d0", 9.0, 1.0, "decode")
    workers.drain("d0", 9.0, 1.0, "prefill")
    with pytest.raises(InvalidRequest, match="drains to become a prefill worker"):
        workers.drain("d0", 9.0, 1.0, "decode")
    workers.drain("d0", 9.0, 1.0)
    for role in get_args(Role):
        with pytest.raises(InvalidRequest, match="is leaving"):
            workers.drain("d0", 9.0, 1.0, role)


def test_worker_table_lists_prefill_workers_first(workers: WorkerTable) -> None:
    workers.join(join(), 0.0)
    workers.join(join("p0", "prefill"), 0.0)
    rows = [w.row(100.0) for w in workers.all()]
    assert [(r["id"], r["role"], r["state"], r["pids"], r["blocks_total"]) for r in rows] == [
        ("p0", "prefill", "ready", [11], 8),
        ("d0", "decode", "ready", [11], 8),
    ]


def test_a_join_is_not_compared_with_each_of_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    table, compared = WorkerTable(3.0), 0

    def counted(ours: object, theirs: object) -> Difference | None:
        nonlocal compared
        compared += 1
        return difference(ours, theirs)

    monkeypatch.setattr(joining, "difference", counted)
    for number in range(100):
        table.join(make_join(f"{'pd'[number % 2]}{number}"), 0.0)
    assert compared == 99, "their facts are equal"
    with pytest.raises(JoinRefused, match="model_digest"):
        table.join(make_join("d100", model_digest="another"), 0.0)


def test_longest_sequence_is_that_of_the_smallest_pool_and_follows_the_workers(workers: WorkerTable) -> None:
    """28 layers of 8 KV heads of 128 in the default KV memory of a machine of 24 GiB: far less than the context."""
    layout = KVLayout(16, (LayerKV(8, 128, "bfloat16"),) * 28)
    blocks = plan_blocks(layout, (24 << 30) // 8, None)
    assert blocks == 1755

    def join(name: str, incarnation: int = 1, blocks: int = blocks) -> Join:
        facts = {"layout": layout, "max_model_len": 40_960}
        return replace(make_join(name, incarnation, blocks=blocks, **facts), replace=True)

    table = WorkerTable(lease_s=3.0)
    assert table.max_model_len() is None
    table.join(join("p0"), 0.0)
    assert table.max_model_len() == 28_081, "1,755 blocks and the last token, which needs no KV"
    table.join(join("d0", blocks=10_000), 0.0)
    assert table.max_model_len() == 28_081 and table.max_model_len(30_000) == 28_081
    table.join(join("d1", blocks=100), 0.0)
    assert table.max_model_len() == 1_601
    assert table.max_model_len(1_600) == 1_601 and table.max_model_len(1_601) == 28_081, "too long for d1 alone"
    table.drain("d1", 9.0, 0.0)
    assert table.max_model_len() == 28_081
    table.join(join("d1", 2, blocks=200), 0.0)
    assert table.max_model_len() == 3_201
    table.left("d1", 2, 3.0)
    assert table.max_model_len() == 28_081
    table.join(join("p0", 2, blocks=50), 0.0)
    assert table.max_model_len() == 801
    table.disconnected("p0", 2, 1.0)
    table.expire(9.0)
    assert not table.present() and table.max_model_len() == 801, "requests wait for its successor"
    table.join(join("p0", 3, blocks=10_000), 9.0)
    table.join(join("d0", 3, blocks=10_000), 9.0)
    assert table.max_model_len() == 40_960
    assert [w.row(9.0)["max_model_len"] for w in table.present()] == [40_960, 40_960]

"""The table of LoRA adapters, and placement on workers that have one."""

from __future__ import annotations

import pytest

from baton.core.commands import AdapterSource, AdapterStates, SetAdapters
from baton.core.errors import DuplicateRequest, InvalidRequest, NotFound
from coordinator.policy.adapters import Adapter, AdapterTable
from coordinator.policy.workers import WorkerTable
from tests.support.builders import add_worker
from tests.support.placing import Placement, Placing, make_choice


def adapter(name: str, digest: str = "") -> Adapter:
    return Adapter(name, AdapterSource(digest or f"digest of {name}", f"/adapters/{name}"), 1)


def loaded(*adapters: Adapter, limit: int = 16) -> AdapterTable:
    table = AdapterTable("base", limit, 64)
    for each in adapters:
        table.load(each)
        table.loaded(each)
    return table


def digests(required: SetAdapters) -> list[str]:
    return [source.digest for source in required.adapters]


def test_a_name_can_be_chosen_once_all_workers_have_its_adapter() -> None:
    table = AdapterTable("base")
    table.load(adapter("a"))
    assert digests(table.required) == ["digest of a"]
    with pytest.raises(NotFound, match="the model 'a' does not exist"):
        table.chosen("a", "base")
    table.loaded(adapter("a"))
    assert table.chosen("a", "base") == "digest of a" and [each.name for each in table] == ["a"]


def test_workers_keep_an_adapter_without_a_name_until_no_request_uses_it() -> None:
    table = loaded(adapter("a"), adapter("b"))
    table.unload("a")
    with pytest.raises(NotFound):
        table.chosen("a", "base")
    assert not table.release({"", "digest of a"}) and digests(table.required) == ["digest of a", "digest of b"]
    assert table.release({""}) and digests(table.required) == ["digest of b"] and not table.retired


def test_a_name_that_is_used_again_for_other_weights_has_another_digest() -> None:
    table = loaded(adapter("a", "first"))
    with pytest.raises(InvalidRequest, match=r"'a' has already been loaded\. Set load_inplace"):
        table.load(adapter("a", "second"))
    table.load(adapter("a", "second"), replace=True)
    assert table.chosen("a", "base") == "first"
    table.loaded(adapter("a", "second"))
    assert table.chosen("a", "base") == "second" and digests(table.required) == ["first", "second"]
    table.release(set())
    assert digests(table.required) == ["second"]


def test_two_names_of_the_same_weights_share_one_adapter() -> None:
    table = loaded(adapter("a", "same"), adapter("b", "same"))
    assert digests(table.required) == ["same"]
    table.unload("a")
    assert not table.release(set()) and table.chosen("b", "base") == "same"


def test_an_adapter_that_failed_leaves_nothing_behind() -> None:
    table = loaded(adapter("a"))
    table.load(adapter("b"))
    with pytest.raises(DuplicateRequest, match="'b' is already being loaded"):
        table.load(adapter("b"))
    table.failed(adapter("b"))
    table.release(set())
    assert digests(table.required) == ["digest of a"]
    table.load(adapter("b"))


def test_names_and_their_number_are_limited() -> None:
    table = loaded(adapter("a"), limit=1)
    for name, message in (("base", "is the name of the model"), ("a\n", "printable"), ("b", "raise --max-loras")):
        with pytest.raises(InvalidRequest, match=message) as caught:
            table.check_name(name)
        assert caught.value.param == "lora_name"
    table.check_name("a", replace=True)


def placing() -> Placing:
    made = Placing(WorkerTable(3.0), 100, 1000)
    for name in ("p0", "p1", "d0", "d1"):
        add_worker(made.table, name)
    return made


def test_a_request_goes_only_to_workers_that_have_its_adapter() -> None:
    made = placing()
    for name in ("p1", "d1"):
        made.worker(name).update_adapters(AdapterStates(("x",)))
    made.submit(make_choice("plain", 4, 8))
    made.submit(make_choice("adapted", 4, 8, adapter="x"))
    assert made.place() == [Placement("plain", "p0", "d0", "d1"), Placement("adapted", "p1", "d1")]


def test_a_request_waits_until_a_worker_has_loaded_its_adapter_and_blocks_no_other() -> None:
    made = placing()
    made.worker("p0").update_adapters(AdapterStates(("x",)))
    choice = make_choice("adapted", 4, 8, adapter="x")
    made.submit(choice)
    made.submit(make_choice("plain", 4, 8))
    assert made.names() == ["plain"]
    assert made.dispatcher.unservable(choice) == ("no decode worker has the request's adapter", "adapter_not_loaded")
    made.worker("d1").update_adapters(AdapterStates(("x",)))
    assert made.place() == [Placement("adapted", "p0", "d1")]


def test_parked_kv_is_offered_only_to_workers_that_have_the_adapter() -> None:
    made = placing()
    for name in ("p0", "d0"):
        made.worker(name).update_adapters(AdapterStates(("x",)))
    made.submit(make_choice("adapted", 4, 8, adapter="x"))
    assert made.place() == [Placement("adapted", "p0", "d0")]
    made.prefilled("adapted")
    made.worker("d0").update_adapters(AdapterStates())
    assert made.reassign("adapted") is None
    made.worker("d1").update_adapters(AdapterStates(("x",)))
    assert made.reassign("adapted") == Placement("adapted", "p0", "d1")

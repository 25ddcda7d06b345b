"""The input files of batches are validated off the store's thread, and no tenant fills the whole storage."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from batches import validation
from batches.store import BatchStore, Line, read_line, room
from baton.core.errors import QuotaExceeded
from baton.runtime.batches_access import Owner
from coordinator.api_keys import read_api_keys
from coordinator.text.model import TextModel
from tests.batches.test_batches import COMPLETIONS, Echo, ended, jsonl, line, served, store_file, submit
from tests.coordinator.test_api_keys import KEY, OTHER, key_file


class Gate:
    """Records the batch of each line that is parsed, and holds the first one until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parsed = list[str]()
        self.open = threading.Event()
        monkeypatch.setattr(validation, "read_line", self._read_line)

    def _read_line(self, text: bytes, number: int, batch_id: str, *more: Any) -> Any:
        self.parsed.append(batch_id)
        assert self.open.wait(30)
        return read_line(text, number, batch_id, *more)

    async def until_held(self) -> None:
        async with asyncio.timeout(10):
            while not self.parsed:
                await asyncio.sleep(0.01)


async def test_other_calls_are_answered_while_a_file_is_validated(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the tenants take turns, and the second batch of the first tenant waits for its first one."""
    monkeypatch.setattr(validation, "PIECE_LINES", 1)
    gate = Gate(monkeypatch)
    keys = read_api_keys(key_file(tmp_path, f"{KEY} tenant=a\n{OTHER} tenant=b\n"))
    async with served(tmp_path / "data", Echo(), text_model, api_keys=keys) as (client, _):
        other = client.with_options(api_key=OTHER)
        try:
            first = await submit(client, *(line(f"r{i}") for i in range(100)))
            await gate.until_held()
            async with asyncio.timeout(10):
                assert (await other.files.list()).data == []
                second = await submit(client, line("a"))
                third = await submit(other, line("a"), line("b"))
                assert (await client.batches.retrieve(first.id)).status == "validating"
                assert (await other.batches.retrieve(third.id)).status == "validating"
        finally:
            gate.open.set()
        for tenant, batch, lines in ((client, first, 100), (client, second, 1), (other, third, 2)):
            assert (await ended(tenant, batch.id)).request_counts.completed == lines
    order = "".join({first.id: "1", second.id: "2", third.id: "3"}[each] for each in gate.parsed)
    assert len(order) == 103 and order.rindex("3") < order.rindex("1") < order.index("2"), order


async def test_a_batch_that_is_cancelled_while_it_is_validated_ends_at_the_next_piece(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "PIECE_LINES", 1)
    gate, generator = Gate(monkeypatch), Echo()
    async with served(tmp_path, generator, text_model) as (client, _):
        try:
            batch = await submit(client, *(line(f"r{i}") for i in range(9)))
            await gate.until_held()
            assert (await client.batches.cancel(batch.id)).status == "cancelling"
        finally:
            gate.open.set()
        assert (await ended(client, batch.id)).status == "cancelled"
    assert len(gate.parsed) == 1 and not generator.submissions


async def test_a_file_of_many_pieces_is_stored_whole_and_an_invalid_one_leaves_no_line(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces also end at empty lines; an interrupted validation starts again from the first line."""
    monkeypatch.setattr(validation, "PIECE_LINES", 2)
    async with served(tmp_path, Echo(), text_model) as (client, both):
        store = both.store
        asked = [each for i in range(7) for each in (line(f"r{i}"), b"", b"", b"")]
        file = store_file(store, jsonl(*asked))
        interrupted = store.add_batch(Owner(), COMPLETIONS, file["id"], {})["id"]
        assert store.add_lines(interrupted, [Line(interrupted, 99, "of the first try", b"{}")])
        both.runner.wake()
        batch = await ended(client, interrupted)
        assert batch.request_counts.model_dump() == {"total": 7, "completed": 7, "failed": 0}
        batch = await ended(client, (await submit(client, *asked, b"{", *(b"[" for _ in range(50)))).id)
        assert batch.status == "failed" and len(batch.errors.data) == validation.MAX_ERRORS
        assert batch.errors.data[0].line == 29
        assert store._db.execute("select count(*) from lines").fetchone()[0] == 0


def test_a_share_leaves_room_for_another_tenant() -> None:
    assert room(1000, 300, 0) == 200
    held = list[int]()
    for _ in range(5):
        held.append(room(1000, 0, sum(held)))
        assert room(1000, held[-1], sum(held[:-1])) == 0
    assert held == [500, 250, 125, 62, 31]
    assert room(1000, 10, 2000) < 0


def test_one_tenant_does_not_fill_the_whole_storage(tmp_path: Path) -> None:
    """Its files and the lines of its unfinished batches count; what ends or is deleted makes room."""
    store = BatchStore(str(tmp_path), 1 << 20)
    file = store_file(store, b"x" * 200_000, Owner("a", "a", True))["id"]
    batch = store.add_batch(Owner("a", "a", True), COMPLETIONS, file, {})["id"]
    for refused in (
        lambda: store_file(store, b"x" * 200_000, Owner("a", "a", True)),
        lambda: store.add_batch(Owner("a", "a", True), COMPLETIONS, file, {}),
    ):
        with pytest.raises(QuotaExceeded, match="your share of the storage, half of what other tenants leave") as error:
            refused()
        assert error.value.code == "storage_full"
    store_file(store, b"x" * 200_000, Owner("b", "b", True))
    store.end(batch, "cancelled")
    store_file(store, b"x" * 150_000, Owner("a", "a", True))
    store.close()
    alone = BatchStore(str(tmp_path / "alone"), 1 << 20)
    store_file(alone, b"x" * 800_000, Owner("a", "a"))
    alone.close()


async def test_with_keys_of_several_tenants_each_has_its_share(tmp_path: Path, text_model: TextModel) -> None:
    keys = read_api_keys(key_file(tmp_path, f"{KEY} tenant=a\n{OTHER} tenant=b\n"))
    more: dict[str, Any] = {"api_keys": keys, "max_file_bytes": 1 << 20}
    async with served(tmp_path / "data", Echo(), text_model, **more) as (client, _):
        with pytest.raises(openai.RateLimitError, match="your share of the storage"):
            await client.files.create(file=("a", b"x" * 600_000), purpose="batch")
        await client.files.create(file=("a", b"x" * 400_000), purpose="batch")
        await client.with_options(api_key=OTHER).files.create(file=("a", b"x" * 200_000), purpose="batch")
    same = read_api_keys(key_file(tmp_path, f"{KEY} tenant=a\n{OTHER} tenant=a\n"))
    assert keys.has_several_tenants() and not same.has_several_tenants()

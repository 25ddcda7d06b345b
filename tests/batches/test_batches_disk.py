"""Batches when clocks jump and disks fail: nothing expires early, no result is lost and no line is computed twice."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from batches import routes as batch_routes
from batches import runner as batch_runner
from batches.store import BatchStore, Line
from baton.core.errors import StartupError
from baton.runtime import disk
from baton.runtime.batches_access import Owner
from coordinator.text.model import TextModel
from tests.batches.test_batches import COMPLETIONS, Echo, ended, line, rows_of, served, store_file, submit

DAY = 86400.0


async def test_a_jump_of_the_wall_clock_expires_neither_running_nor_waiting_batches(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "MAX_BATCHES", 1)
    wall = SimpleNamespace(ahead=0.0)
    monkeypatch.setattr(batch_runner, "time", SimpleNamespace(time=lambda: time.time() + wall.ahead))
    monkeypatch.setattr(batch_runner, "POLL_S", 0.01)
    first = Echo()
    first.hold = asyncio.Event()
    async with served(tmp_path, first, text_model) as (client, _):
        made = [(await submit(client, line("a"))).id for _ in range(2)]
        await first.until(submitted=1)
    generator = Echo()
    generator.hold = asyncio.Event()
    async with served(tmp_path, generator, text_model) as (client, _):
        await generator.until(submitted=1)
        made.append((await submit(client, line("a"))).id)
        wall.ahead = 2 * DAY
        await asyncio.sleep(0.1)
        generator.hold.set()
        assert [(await ended(client, each)).status for each in made] == ["completed"] * 3


async def test_a_batch_whose_window_passed_between_two_runs_expires(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Echo()
    first.answers = 1
    async with served(tmp_path, first, text_model) as (client, _):
        batch = await submit(client, line("a"), line("b"))
        async with asyncio.timeout(10):
            while not (await client.batches.retrieve(batch.id)).request_counts.completed:
                await asyncio.sleep(0.01)
    monkeypatch.setattr(batch_runner, "time", SimpleNamespace(time=lambda: time.time() + 2 * DAY))
    async with served(tmp_path, Echo(), text_model) as (client, _):
        expired = await ended(client, batch.id)
        assert expired.status == "expired"
        written = [await client.files.content(name) for name in (expired.output_file_id, expired.error_file_id)]
    (answered,), (missing,) = ([json.loads(each) for each in file.text.splitlines()] for file in written)
    assert {answered["custom_id"], missing["custom_id"]} == {"a", "b"} and answered["error"] is None
    assert missing["response"] is None and missing["error"]["code"] == "batch_expired"


def no_space(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/secret/path")


async def test_an_upload_to_a_full_disk_is_refused_with_its_reason(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path, Echo(), text_model) as (client, _):
        monkeypatch.setattr(batch_routes, "_copy", no_space)
        with pytest.raises(openai.InternalServerError) as refused:
            await client.files.create(file=("a", b"x"), purpose="batch")
        assert refused.value.status_code == 503 and refused.value.code == "storage_failed"
        assert refused.value.response.headers["retry-after"] == "5"
        assert refused.value.body["message"] == "files and batches cannot be read or written: the disk is full"  # type: ignore[index]
        assert list((tmp_path / "files").iterdir()) == []


class Failing:
    """Makes calls of a store fail while `error` is set; `refused` counts them."""

    def __init__(self, store: BatchStore, *names: str) -> None:
        self.error: Exception | None = None
        self.refused = 0
        for name in names:
            setattr(store, name, self._wrapped(getattr(store, name)))

    def _wrapped(self, call: Any) -> Any:
        def checked(*what: Any) -> Any:
            if self.error is not None:
                self.refused += 1
                raise self.error
            return call(*what)

        return checked

    async def until_refused(self, times: int) -> None:
        async with asyncio.timeout(10):
            while self.refused < times:
                await asyncio.sleep(0.01)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_results_wait_for_room_and_no_line_is_computed_twice(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two batches wait: the failure is logged once, and no line begins while results wait."""
    monkeypatch.setattr(disk, "PAUSE_S", 0.02)
    generator = Echo()
    generator.hold = asyncio.Event()
    async with served(tmp_path, generator, text_model) as (client, both):
        failing = Failing(both.store, "answered")
        made = [(await submit(client, *(line(f"r{i}") for i in range(40)))).id for _ in range(2)]
        await generator.until(submitted=batch_runner.MAX_RUNNING)
        failing.error = FULL
        generator.hold.set()
        await failing.until_refused(10)
        begun = len(generator.submissions)
        assert begun < 80
        await failing.until_refused(20)
        assert len(generator.submissions) <= 2 * batch_runner.MAX_RUNNING
        failing.error = None
        for each in made:
            batch = await ended(client, each)
            assert batch.status == "completed" and batch.request_counts.completed == 40
            assert len(await rows_of(client, batch.output_file_id)) == 40
    assert len(generator.submissions) == 80
    reports = [r for r in caplog.records if r.name == "baton.disk"]
    assert [r.levelno for r in reports] == [logging.ERROR, logging.WARNING, logging.WARNING], caplog.text
    assert "the disk is full" in reports[0].getMessage() and "keep their results in memory" in reports[1].getMessage()
    assert "can be read and written again" in reports[2].getMessage()


async def test_reads_that_fail_do_not_end_the_lines_that_run(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PAUSE_S", 0.02)
    monkeypatch.setattr(batch_runner, "POLL_S", 0.01)
    generator = Echo()
    generator.hold = asyncio.Event()
    async with served(tmp_path, generator, text_model) as (client, both):
        failing = Failing(both.store, "batch", "open_lines")
        batch = await submit(client, *(line(f"r{i}") for i in range(5)))
        await generator.until(submitted=5)
        failing.error = sqlite3.DatabaseError("database disk image is malformed")
        await failing.until_refused(3)
        failing.error = None
        generator.hold.set()
        assert (await ended(client, batch.id)).request_counts.completed == 5
    assert len(generator.submissions) == 5


async def test_a_database_that_another_process_has_locked_delays_batches(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PAUSE_S", 0.02)
    generator = Echo()
    generator.hold = asyncio.Event()
    async with served(tmp_path, generator, text_model) as (client, both):
        store = both.store
        store._db.execute("pragma busy_timeout=10")
        batch = await submit(client, *(line(f"r{i}") for i in range(5)))
        await generator.until(submitted=5)
        other = sqlite3.connect(tmp_path / "baton.db", isolation_level=None)
        other.execute("begin immediate")
        generator.hold.set()
        with pytest.raises(openai.InternalServerError, match="another process holds the lock") as refused:
            await client.batches.cancel(batch.id)
        assert refused.value.status_code == 503 and refused.value.code == "storage_failed"
        assert (await client.batches.retrieve(batch.id)).status == "in_progress", "reads are answered"
        other.execute("rollback")
        other.close()
        assert (await ended(client, batch.id)).request_counts.completed == 5
    assert len(generator.submissions) == 5


async def test_a_disk_that_is_full_at_the_end_of_a_batch_leaves_no_duplicate_files(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails after the files were moved: nothing of the output files remains until all of them are stored."""
    monkeypatch.setattr(disk, "PAUSE_S", 0.02)
    async with served(tmp_path, Echo(), text_model) as (client, both):
        store = both.store
        set_status, tries = store.set_status, 0

        def full(batch_id: str, status: str, *more: Any) -> None:
            nonlocal tries
            set_status(batch_id, status, *more)
            if status == "completed" and (tries := tries + 1) <= 3:
                raise FULL

        store.set_status = full
        batch = await ended(client, (await submit(client, line("a"), line("b", temperature=9))).id)
        assert batch.status == "completed" and tries == 4
        files = [file.id for file in (await client.files.list()).data]
        assert sorted(files) == sorted([batch.input_file_id, batch.output_file_id, batch.error_file_id])
        assert sorted(path.name for path in (tmp_path / "files").iterdir()) == sorted(files)


async def test_files_are_on_the_disk_before_the_lines_whose_answers_they_have_are_deleted(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a crash of the host could leave a completed batch with an empty output file."""
    synced: list[tuple[int, int]] = []  # the bytes of each file, and the lines that its batch still has

    async with served(tmp_path, Echo(), text_model) as (client, both):
        fsync = os.fsync

        def recorded(opened: int) -> None:
            fsync(opened)
            if os.path.isfile(f"/proc/self/fd/{opened}"):
                (lines,) = both.store._db.execute("select count(*) from lines").fetchone()
                synced.append((os.fstat(opened).st_size, lines))

        monkeypatch.setattr(os, "fsync", recorded)
        batch = await ended(client, (await submit(client, *(line(f"r{i}") for i in range(5)))).id)
        output = await client.files.retrieve(batch.output_file_id)
    (_, before), (size, at_end) = synced  # the upload, and the output
    assert (before, size, at_end) == (0, output.bytes, 5)


def test_calls_of_the_runner_may_be_repeated(tmp_path: Path) -> None:
    """A call that timed out is repeated, although it may have completed."""
    store = BatchStore(str(tmp_path), 1 << 20)
    batch_id = store.add_batch(Owner(), COMPLETIONS, store_file(store)["id"], {})["id"]
    one = Line(batch_id, 1, "a", b"{}")
    for _ in range(2):
        assert store.add_lines(batch_id, [one])
    store.begin(batch_id)
    for _ in range(2):
        store.answered(one, 200, "id", b"{}")
    assert store.batch("", batch_id)["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    store.end(batch_id, "completed")
    ended = store.batch("", batch_id)
    store.end(batch_id, "completed")
    assert store.batch("", batch_id) == ended and ended["output_file_id"]
    store.close()


def test_a_damaged_or_locked_database_is_refused_at_start_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "baton.db").write_bytes(b"x" * 8192)
    with pytest.raises(StartupError, match=r"baton\.db cannot be used: the database is damaged: restore it") as refused:
        BatchStore(str(tmp_path), 1)
    assert "\n" not in str(refused.value)
    assert (tmp_path / "baton.db").read_bytes() == b"x" * 8192
    (tmp_path / "baton.db").unlink()
    BatchStore(str(tmp_path), 1).close()
    connect = sqlite3.connect
    other = connect(tmp_path / "baton.db", isolation_level=None)
    other.execute("pragma locking_mode=exclusive")
    other.execute("begin exclusive")
    monkeypatch.setattr(sqlite3, "connect", lambda *what, **more: connect(*what, timeout=0.01, **more))
    with pytest.raises(StartupError, match="another process holds the lock of the database"):
        BatchStore(str(tmp_path), 1)
    other.close()
    BatchStore(str(tmp_path), 1).close()

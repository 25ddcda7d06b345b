"""Batches when clocks jump and disks fail: nothing expires early, no result is lost and no line is computed twice."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.batches import runner as batch_runner
from coordinator.text.model import TextModel
from tests.coordinator.test_batches import Echo, ended, line, served, submit

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
    first.answers = 0
    async with served(tmp_path, first, text_model) as (client, _):
        batch = await submit(client, line("a"))
        await first.until(submitted=1)
    monkeypatch.setattr(batch_runner, "time", SimpleNamespace(time=lambda: time.time() + 2 * DAY))
    async with served(tmp_path, Echo(), text_model) as (client, _):
        assert (await ended(client, batch.id)).status == "expired"

"""A violated invariant in a hand-over ends the worker, since nothing else would report it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.core.errors import InvariantError
from prefill import sender
from prefill.link import Link
from prefill.scheduler import PrefillScheduler
from prefill.sender import Sender
from tests.support.builders import make_request
from tests.support.link_gate import Gate
from tests.support.nodes import pair, until

BUG = InvariantError("an invariant does not hold")


def broken(*_: object) -> None:
    raise BUG


@pytest.mark.parametrize(("owner", "name"), [(Sender, "_send"), (PrefillScheduler, "release_send")])
async def test_invariant_error_in_a_hand_over_ends_the_worker(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair() as (source, [decode]):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, broken)
        request = make_request("r", 10, max_tokens=4)
        source.submit(request, decode)
        sequence = source.worker.scheduler.sequences[request.sequence_id]
        source.compute()
        assert await asyncio.wait_for(source.worker.main_loop._failures.get(), 30) is BUG
        assert not source.posted.parked
        monkeypatch.setattr(owner, name, real)
        await until(lambda: not len(source.worker.sender), what="the end of the hand-over")
        if name == "release_send":
            source.worker.hand_over_ended(sequence)
        source.abort(request.sequence_id)
        decode.abort(request.sequence_id)
        decode.compute()


@pytest.mark.parametrize(("owner", "name"), [(Link, "abort"), (sender, "EdgeSent")])
async def test_a_violated_invariant_in_or_after_an_abort_ends_the_worker(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its actions, or in a chunk: one that was announced is sent to its end, and nothing awaits it any more."""
    async with pair() as (source, [decode]):
        gate = Gate(monkeypatch, "announce", "before")
        request = make_request("r", 10, max_tokens=4)
        source.submit(request, decode)
        source.compute()
        await asyncio.wait_for(gate.reached.wait(), 30)
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, broken)
        source.abort(request.sequence_id)
        gate.opened.set()
        assert await asyncio.wait_for(source.worker.main_loop._failures.get(), 30) is BUG
        monkeypatch.setattr(owner, name, real)
        decode.abort(request.sequence_id)
        decode.compute()

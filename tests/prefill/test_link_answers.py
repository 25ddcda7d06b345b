"""Answers of a decode worker that come close together on a link."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from baton.core.request import SequenceId
from prefill.link import Link


async def test_two_acks_in_one_turn_of_the_reader_find_their_waiters() -> None:
    """The first is taken and the chunk announced again under the same key before the loop runs what forgets the first:
    that must not forget the second."""
    link: Any = Link.__new__(Link)
    link._waiting, link._stream, link.decode_worker = {}, SimpleNamespace(ended=None), "d0"
    sequence, edge = SequenceId("r"), (0, 0)
    first = link.expect_ack(sequence, 3, edge)
    first.set_result("damaged")
    second = link.expect_ack(sequence, 3, edge)
    await asyncio.sleep(0)  # what was to be forgotten of the first is forgotten
    assert list(link._waiting.values()) == [second]
    second.set_result("intact")
    await asyncio.sleep(0)
    assert not link._waiting

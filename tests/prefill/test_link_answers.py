"""Replies of a decode worker that arrive close together on a link."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from baton.core.request import SequenceId
from prefill.link import Link


async def test_cleanup_of_one_ack_does_not_drop_the_next_one_with_the_same_key() -> None:
    """The first is consumed and the chunk announced again under the same key before the event loop runs the cleanup of
    the first, which must not drop the second."""
    link: Any = Link.__new__(Link)
    link._waiting, link._stream, link.decode_worker = {}, SimpleNamespace(ended=None), "d0"
    sequence, edge = SequenceId("r"), (0, 0)
    first = link.expect_ack(sequence, 3, edge)
    first.set_result("damaged")
    second = link.expect_ack(sequence, 3, edge)
    await asyncio.sleep(0)  # the cleanup of the first runs
    assert list(link._waiting.values()) == [second]
    second.set_result("intact")
    await asyncio.sleep(0)
    assert not link._waiting

"""In which order staging memory is granted, and up to which limit."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from baton.core.errors import HandoffError
from baton.core.kv_layout import KVLayout, LayerKV
from baton.transfer.staging_buffers import StagingRoom

LAYOUT = KVLayout(1, (LayerKV(1, 1, "bfloat16"),))


class Holders:
    """Tasks that each hold bytes of a room of `limit` until `release` is called."""

    def __init__(self, limit: int) -> None:
        self.room = StagingRoom(limit, LAYOUT)
        self.served: list[str] = []
        self._let_go: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def acquire(self, name: str, num_bytes: int, timeout_s: float = 5.0) -> None:
        let_go = self._let_go[name] = asyncio.Event()

        async def hold() -> None:
            async with self.room.hold(num_bytes, timeout_s):
                self.served.append(name)
                await let_go.wait()

        self.tasks[name] = asyncio.create_task(hold())
        await asyncio.sleep(0.001)

    async def release(self, name: str) -> None:
        self._let_go[name].set()
        await self.tasks[name]
        await asyncio.sleep(0.001)


async def test_a_large_request_is_not_overtaken() -> None:
    holders = Holders(100)
    for name, size in (("a", 60), ("large", 90), ("small", 10)):
        await holders.acquire(name, size)
    assert holders.served == ["a"]
    await holders.release("a")
    assert holders.served == ["a", "large", "small"] and holders.room.taken_bytes == 100


@pytest.mark.parametrize("gives_up", ["its time is over", "it is cancelled"])
async def test_a_waiter_that_times_out_or_is_cancelled_unblocks_the_next(gives_up: str) -> None:
    holders = Holders(100)
    await holders.acquire("a", 60)
    await holders.acquire("large", 90, timeout_s=0.05)
    await holders.acquire("small", 10)
    if gives_up == "it is cancelled":
        holders.tasks["large"].cancel()
    (ended,) = await asyncio.gather(holders.tasks["large"], return_exceptions=True)
    if gives_up == "its time is over":
        assert "no room for 90 bytes in staging memory within 0.05 s" in str(ended)
    await asyncio.sleep(0.001)
    assert holders.served == ["a", "small"] and holders.room.taken_bytes == 70


@pytest.mark.parametrize(
    ("num_bytes", "message"), [(101, "101 bytes of KV do not fit into 100"), (0, "cannot be"), (-9, "cannot be")]
)
async def test_an_impossible_size_is_refused_immediately(num_bytes: int, message: str) -> None:
    room = StagingRoom(100, LAYOUT)
    with pytest.raises(HandoffError, match=message):
        async with room.hold(num_bytes, 5.0):
            pass
    assert room.taken_bytes == 0


@pytest.mark.parametrize("seed", range(5))
async def test_the_limit_is_kept_and_requests_are_served_in_order(seed: int) -> None:
    random, room, served = Random(seed), StagingRoom(50, LAYOUT), []  # type: ignore[var-annotated]

    async def hold(index: int, num_bytes: int) -> None:
        async with room.hold(num_bytes, 5.0):
            served.append(index)
            assert room.taken_bytes <= 50
            await asyncio.sleep(random.random() * 0.002)

    await asyncio.gather(*(hold(index, random.randint(1, 50)) for index in range(60)))
    assert served == list(range(60)) and room.taken_bytes == 0

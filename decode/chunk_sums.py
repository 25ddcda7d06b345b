"""The checksums of announced chunks, which come in messages of their own: a sender announces while it still packs, and
knows the checksum only then. Belongs to one event loop."""

from __future__ import annotations

import asyncio

from baton.core.handover import Chunk, ChunkSum

_Key = tuple[object, ...]


class ChunkSums:
    """Complete state: what is awaited, by the chunk it is of."""

    def __init__(self) -> None:
        self._awaited: dict[_Key, asyncio.Future[int]] = {}

    def expect(self, chunk: Chunk) -> asyncio.Future[int]:
        """The checksum of a chunk that was announced. Ends with `forget`."""
        awaited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._awaited[_key(chunk)] = awaited
        return awaited

    def forget(self, chunk: Chunk, awaited: asyncio.Future[int]) -> None:
        if self._awaited.get(_key(chunk)) is awaited:  # the same chunk may have been announced again
            del self._awaited[_key(chunk)]

    def hear(self, message: ChunkSum) -> None:
        """One that nobody awaits is of a chunk that was refused."""
        awaited = self._awaited.get(_key(message))
        if awaited is not None and not awaited.done():
            awaited.set_result(message.checksum)

    def __len__(self) -> int:
        return len(self._awaited)

    def __repr__(self) -> str:
        return f"<ChunkSums {len(self._awaited)} awaited>"


def _key(message: Chunk | ChunkSum) -> _Key:
    return message.sequence, message.index, message.prefill_rank, message.decode_rank, message.resend

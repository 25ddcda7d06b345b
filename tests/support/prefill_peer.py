"""A prefill worker that a test controls, over a real link and edge to a real decode worker."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Any

import torch

from baton.core.handover import Chunk, EdgeOpen, EdgeReady, Offer, Posted, chunk_identity
from baton.core.request import SequenceId
from baton.runtime.streams import DialledLink, dial_link
from baton.transfer.edge import EdgeSpec, edge_prefix
from baton.transfer.edge_thread import EdgeWorker
from baton.transfer.sections import checksum
from tests.support.builders import make_request
from tests.support.limits import HANG_S
from tests.support.nodes import DecodeNode, PrefillNode, pair

R = SequenceId("r")
"""The sequence of offers and chunks by default."""
TOKENS = 8


class Peer:
    """A prefill worker that sends only what a test requests."""

    def __init__(self, source: PrefillNode, decode: DecodeNode, link: DialledLink) -> None:
        self.source, self.decode, self.link = source, decode, link
        self.edge: EdgeWorker | None = None

    async def send_message(self, message: Any) -> None:
        await self.link.stream.send(message)

    async def receive(self) -> Any:
        return await asyncio.wait_for(self.link.stream.receive(), HANG_S)

    async def request(self, message: Any) -> Any:
        await self.send_message(message)
        return await self.receive()

    def offer(self, name: str = "r") -> Offer:
        request = make_request(name, TOKENS, max_tokens=4)
        return Offer(request, self.decode.handle(request.sequence_id, self.source.worker), TOKENS)

    async def open_edge(self, generation: int) -> EdgeReady:
        welcome = self.link.welcome
        prefix = edge_prefix(welcome.store_nonce, "p0", 0, welcome.decode_worker, 0, generation)
        spec = EdgeSpec(welcome.store_host, welcome.store_port, prefix, generation, "prefill", connect_timeout_s=20.0)
        self.edge = EdgeWorker(spec)
        await self.send_message(EdgeOpen(0, 0, generation, prefix))
        await self.edge.connect()
        ready: EdgeReady = await self.receive()
        return ready

    def chunk(self, start: int = 0, end: int = TOKENS, **changes: Any) -> tuple[Chunk, torch.Tensor]:
        layout = self.source.runner.layout
        layers = range(len(layout.layers))[changes.get("start_layer", 0) : changes.get("end_layer", len(layout.layers))]
        last = end == TOKENS and layers.stop == len(layout.layers)
        size = layout.bytes_per_token * (end - start) * len(layers) // len(layout.layers)
        buffer = torch.full((size,), 7, dtype=torch.uint8)
        values = {
            "sequence": R,
            "index": start,
            "start_token": start,
            "end_token": end,
            "start_layer": 0,
            "end_layer": len(layout.layers),
            "num_bytes": buffer.numel(),
            "edge_generation": 1,
            "first_token": 5 if last else None,
            "last": last,
        }
        return Chunk(**{**values, **changes}), buffer  # type: ignore[arg-type]

    async def send_bytes(self, chunk: Chunk, buffer: torch.Tensor, packed: torch.Tensor | None = None) -> None:
        """Sends sections of one layer; the checksums are those of `packed`, if given."""
        layers = chunk.end_layer - chunk.start_layer
        ends = [buffer.numel() * (index + 1) // layers for index in range(layers)]
        parts = (buffer if packed is None else packed).chunk(layers)
        identity = chunk_identity(chunk)
        sums = [checksum(identity + struct.pack("<II", i, i + 1), part) for i, part in enumerate(parts)]
        assert self.edge is not None
        await self.edge.send(buffer, ends=ends, ready=sums.__getitem__)

    async def send(self, chunk: Chunk, buffer: torch.Tensor, packed: torch.Tensor | None = None) -> Any:
        """Announces the chunk, waits for `Posted`, sends, and returns the reply. `packed` as in `send_bytes`."""
        assert isinstance(posted := await self.request(chunk), Posted), posted
        await self.send_bytes(chunk, buffer, packed)
        return await self.receive()


@contextlib.asynccontextmanager
async def peer() -> AsyncIterator[Peer]:
    async with pair() as (source, [decode]):
        made = Peer(source, decode, await dial_link(decode.address, source.worker._hello(), 2.0))
        try:
            yield made
        finally:
            await made.link.close()
            if made.edge is not None:
                await made.edge.close()

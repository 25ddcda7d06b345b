"""The two ends of an edge, each with its own pool of blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from baton.core.edge_orders import Part
from baton.transfer.edge import EdgeSpec
from baton.transfer.edge_endpoint import LocalEndpoint, LocalEndpoints
from baton.transfer.staging import PagedLayers
from baton.transfer.staging_buffers import StagingBuffers
from tests.support.limits import HANG_S

LAYERS, BLOCK = 4, 4
LAYER_BYTES = 8 * 2 * 2 * 4
PART = Part((1, 0), 0, 8, LAYERS * LAYER_BYTES, b"who")


def pool(value: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Layer i has `value` + i as K and `value` + i + 0.5 as V."""
    shape = (2, BLOCK, 1, 2)
    return [(torch.full(shape, value + i), torch.full(shape, value + i + 0.5)) for i in range(LAYERS)]


def equal(mine: Any, theirs: Any) -> list[bool]:
    """Compares two pools layer by layer."""
    return [torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(mine, theirs, strict=True)]


class Pair:
    """Each layer is a section. `kept` has the staging buffers of each end, by default shared by both."""

    def __init__(
        self,
        spec: Callable[..., EdgeSpec],
        generation: int = 1,
        kind: str = "gloo",
        kept: tuple[StagingBuffers, ...] = (),
    ) -> None:
        self.kept = kept or (StagingBuffers(1 << 16),) * 2
        self.source, self.target = pool(1.0), pool(0.0)
        self.prefill, self.decode = (
            LocalEndpoint(
                spec(side, generation),
                PagedLayers.of(layers),
                LocalEndpoints(layers, BLOCK, "127.0.0.1", kind, buffers=buffers, section_bytes=LAYER_BYTES),
            )
            for side, layers, buffers in zip(("prefill", "decode"), (self.source, self.target), self.kept, strict=True)
        )

    async def connect(self) -> Pair:
        await asyncio.gather(self.prefill.connect(), self.decode.connect())
        return self

    async def hand_over(self, part: Part = PART) -> bool:
        """Packs a part while its receive is being posted, and sends it then; returns whether it arrived intact."""
        posted, begun = asyncio.Event(), asyncio.Event()
        taking = asyncio.create_task(self.decode.take(part, posted.set))
        await asyncio.wait_for(posted.wait(), HANG_S)
        filling = asyncio.create_task(self.prefill.fill(part, 0, begun.set))
        await asyncio.wait_for(begun.wait(), HANG_S)
        _, _, intact = await asyncio.gather(filling, self.prefill.send(), taking)
        return intact

    async def close(self) -> None:
        await asyncio.gather(self.prefill.close(5), self.decode.close(5))

"""One end of an edge together with the KV behind it: what a hand-over works with, wherever the end's rank runs.

`LocalEnd` is the end at this process; baton.edge_ranks has one that stands for the end at another rank of the worker.
The prefill side calls `fill`, then `send`; the decode side `take`. An end that has failed once is dead; both sides
build the next one under the next generation.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from baton.core.edge_orders import Part
from baton.core.errors import HandoffError
from baton.core.reshard import EdgePlan
from baton.transfer.edge import EdgeSpec, MakeEdge, Side
from baton.transfer.edge_kinds import EDGES, EdgeKind, buffer_device
from baton.transfer.edge_thread import EdgeWorker
from baton.transfer.gloo import GlooEdge
from baton.transfer.staging import Layers, checksum, pack, unpack
from baton.transfer.staging_buffers import StagingBuffer, StagingBuffers

SUM_LIMIT_S = 2.0
"""How long the checksum of a part may come after its bytes. It was sent before them, on another connection."""


class EdgeEnd(Protocol):
    """All coroutines run in one event loop and raise HandoffError."""

    @property
    def dead(self) -> HandoffError | None: ...

    @property
    def generation(self) -> int: ...

    async def connect(self) -> None:
        """Meets the peer within the spec's `connect_timeout_s`."""

    async def fill(self, part: Part, after_step: int) -> int:
        """Packs a part, complete once `after_step` is computed, into this end's staging buffer; its checksum."""

    async def send(self) -> None:
        """Sends what was packed last."""

    def drop(self) -> None:
        """What was packed last will not be sent."""

    async def take(self, part: Part, expected: asyncio.Future[int], on_posted: Callable[[], None]) -> bool:
        """Receives a part and stores it if its checksum is `expected`, which may come until `SUM_LIMIT_S` after the
        bytes; returns whether it was. `on_posted` is called in the event loop once the receive is open. Whether it
        returns or raises, nothing is written afterwards."""

    def abort(self, reason: str) -> None:
        """Ends it at once; what is under way raises soon. Does not block."""

    async def close(self, timeout_s: float) -> bool:
        """Ends it in order. True when nothing of it is left."""


class MakeEnd(Protocol):
    """Makes the end of an edge at the rank that the plan names for `spec.side`. What the rank itself knows best
    (`bind_host`, `device`) need not be in the spec. `kind` says how the ends move bytes; both sides of a link must
    agree."""

    @property
    def kind(self) -> EdgeKind: ...

    def __call__(self, plan: EdgePlan, spec: EdgeSpec) -> EdgeEnd: ...


def edge_layers(layers: Layers, plan: EdgePlan, side: Side) -> Layers:
    """The parts of one rank's (K, V) caches that an edge carries, in the order of its wire."""
    views = []
    for s in plan.slices:
        start = s.source_start if side == "prefill" else s.destination_start
        keys, values = layers[s.layer]
        views.append((keys[:, :, start : start + s.count], values[:, :, start : start + s.count]))
    return views


class LocalEnds:
    """Makes ends at this process: over its rank's `layers` in blocks of `block_size`, on its own address `host`.
    `expect` hears of the blocks that a sequence on its way takes. All its ends share `buffers`, None keeps none."""

    def __init__(
        self,
        layers: Layers,
        block_size: int,
        host: str,
        kind: EdgeKind = "gloo",
        expect: Callable[[Sequence[int]], None] | None = None,
        buffers: StagingBuffers | None = None,
    ) -> None:
        self._layers, self._block_size, self._host = layers, block_size, host
        self._expect = expect
        self.buffers = StagingBuffers(0) if buffers is None else buffers
        self.kind = kind

    def __call__(self, plan: EdgePlan, spec: EdgeSpec) -> LocalEnd:
        device = buffer_device(self.kind, self._layers[0][0].device)
        mine = replace(spec, bind_host=self._host, device=str(device))
        layers = edge_layers(self._layers, plan, spec.side)
        return LocalEnd(mine, layers, self._block_size, EDGES[self.kind], self._expect, self.buffers)


class LocalEnd:
    """Complete state: the edge's thread, the part that was packed and not sent yet, and the checksums of those that
    are being received. A buffer goes back to be used again only when its transfer has ended in order; after anything
    else a late byte may still come."""

    def __init__(
        self,
        spec: EdgeSpec,
        layers: Layers,
        block_size: int,
        make_edge: MakeEdge = GlooEdge,
        expect: Callable[[Sequence[int]], None] | None = None,
        buffers: StagingBuffers | None = None,
    ) -> None:
        self._worker = EdgeWorker(spec, make_edge)
        self._expect = expect
        self._buffers = StagingBuffers(0, spec.device) if buffers is None else buffers
        self._device = torch.device(spec.device)
        self._layers, self._block_size = layers, block_size
        self._packed: StagingBuffer | None = None
        self._expected: set[asyncio.Future[int]] = set()  # the next part may be announced while one is stored

    @property
    def dead(self) -> HandoffError | None:
        return self._worker.dead

    @property
    def generation(self) -> int:
        return self._worker.generation

    @property
    def worker(self) -> EdgeWorker:
        return self._worker

    async def connect(self) -> None:
        await self._worker.connect()

    async def fill(self, part: Part, after_step: int) -> int:
        self.drop()
        buffer = self._buffers.take(part.num_bytes)

        def pack_and_sum() -> int:
            where = (part.block_ids, self._block_size, part.start_token, part.end_token)
            if self._layers[0][0].device == self._device:
                pack(self._layers, *where, buffer.view)
            else:
                packed = pack(self._layers, *where)
                if packed.numel() != part.num_bytes:
                    raise HandoffError(f"a part of {part.num_bytes} bytes was ordered, {packed.numel()} were packed")
                buffer.view.copy_(packed)
            return checksum(part.identity, buffer.view)

        try:
            sum_ = await self._worker.run(pack_and_sum)
        except BaseException:
            self._buffers.drop(buffer)
            raise
        self._packed = buffer
        return sum_

    async def send(self) -> None:
        packed, self._packed = self._packed, None
        if packed is None:
            raise self._worker.spec.error("nothing is packed to be sent")
        try:
            await self._worker.send(packed.view)
        except BaseException:
            self._buffers.drop(packed)
            raise
        self._buffers.give_back(packed)

    def drop(self) -> None:
        packed, self._packed = self._packed, None
        if packed is not None:
            self._buffers.drop(packed)

    async def take(self, part: Part, expected: asyncio.Future[int], on_posted: Callable[[], None]) -> bool:
        staged = self._buffers.take(part.num_bytes)
        buffer, gate, stored = staged.view, _Gate(), None

        def store(sum_: int) -> bool:
            if checksum(part.identity, buffer) != sum_:
                return False
            with gate:
                if gate.open:
                    arrived = buffer.to(self._layers[0][0].device)
                    unpack(arrived, self._layers, part.block_ids, self._block_size, part.start_token, part.end_token)
            return True

        try:
            if self._expect is not None:  # of all its blocks, before more of them come
                self._expect(part.block_ids)
            self._expected.add(expected)
            await self._worker.recv(buffer, on_posted=on_posted)
            await asyncio.wait({expected}, timeout=SUM_LIMIT_S)
            if not expected.done():
                raise self._worker.spec.error(f"no checksum came within {SUM_LIMIT_S:g} s after its bytes")
            stored = await self._worker.run(partial(store, expected.result()))
            return stored
        finally:
            self._expected.discard(expected)
            if stored is None:
                self._buffers.drop(staged)
            else:
                self._buffers.give_back(staged)
            with gate:  # the thread of an edge that was torn down may still be at it: milliseconds
                gate.open = False

    def abort(self, reason: str) -> None:
        self._worker.abort(reason)
        self.drop()
        for expected in self._expected:
            if not expected.done():
                expected.set_exception(self._worker.spec.error(f"aborted: {reason}"))
                expected.exception()  # seen: the bytes may not have come either

    async def close(self, timeout_s: float) -> bool:
        self.drop()
        return await self._worker.close(timeout_s)

    def __repr__(self) -> str:
        return f"<LocalEnd {self._worker!r}>"


class _Gate:
    """Whether the blocks may still be written; held while they are."""

    def __init__(self) -> None:
        self.open = True
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

"""One endpoint of an edge together with the KV behind it: the interface that a hand-over uses, whichever rank has it.

`LocalEndpoint` is one in this process; baton.runtime.edge_ranks has a class for one at another rank of the worker. The
prefill side calls `fill` and, once that has begun, `send`; the decode side calls `take`. Bytes are sent in sections
(baton.transfer.sections), so that packing, sending, checking and storing overlap. An endpoint that has failed once is
dead; both sides create a new one under the next generation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import torch

from baton.core.edge_orders import SECTION_BYTES, Part
from baton.core.errors import HandoffError
from baton.core.kv_layout import KVLayout
from baton.core.reshard import EdgePlan
from baton.transfer.edge import EdgeSpec, Side, allocator, buffer_device, make_edge
from baton.transfer.edge_thread import EdgeWorker
from baton.transfer.sections import Packing, Storing
from baton.transfer.staging import Kind, Layers, PagedLayers
from baton.transfer.staging_buffers import StagingBuffers, pinned_buffer
from baton.transfer.streams import finish, own_stream

_Staged = TypeVar("_Staged", Packing, Storing)
OrderBehind = Callable[[int], None]
_WARM_UP_S = 60.0
_WARM_UP_TOKENS = 17
"""On a GPU torch selects more than 16 rows with another kernel than fewer."""


class EdgeEndpoint(Protocol):
    """All coroutines run in one event loop and raise HandoffError."""

    @property
    def dead(self) -> HandoffError | None: ...

    @property
    def generation(self) -> int: ...

    async def connect(self) -> None:
        """Connects to the peer within the spec's `connect_timeout_s`."""

    async def fill(self, part: Part, after_step: int, on_begun: Callable[[], None] | None = None) -> None:
        """Packs a part, whose KV is complete once `after_step` is computed, into this endpoint's staging buffer.
        `on_begun` is called in the event loop as soon as `send` may be called; `send` packs what `fill` has not packed
        yet."""

    async def send(self) -> None:
        """Sends the part of the last `fill`, with a checksum after each section, and packs the rest of it meanwhile."""

    def drop(self) -> None:
        """Discards the part of the last `fill` without sending it."""

    async def take(self, part: Part, on_posted: Callable[[], None]) -> bool:
        """Receives a part and stores each section that matches its checksum; returns whether all did. `on_posted` is
        called in the event loop once the receive is open. After it returns or raises, nothing is written; if the device
        does not finish writing, it raises InvariantError, also when the edge has failed meanwhile."""

    def abort(self, reason: str) -> None:
        """Ends the edge immediately; operations in progress raise soon. Does not block."""

    async def close(self, timeout_s: float) -> bool:
        """Closes the edge in order. Returns True when its thread has ended."""


class MakeEndpoint(Protocol):
    """Makes the endpoint of an edge at the rank that the plan names for `spec.side`. That rank itself sets `bind_host`
    and `device` of the spec. `kind` is the backend that moves the bytes; both sides of a link must use the same one.
    For a kind that refuses two ranks on one GPU, `gpus` are those of the worker's ranks, by rank; empty where not
    known."""

    kind: str
    section_bytes: int
    gpus: tuple[str, ...]

    def __call__(self, plan: EdgePlan, spec: EdgeSpec) -> EdgeEndpoint: ...


def kinds_of(layout: KVLayout) -> tuple[Kind, ...]:
    """Returns the kind of each layer."""
    return tuple(Kind(group, layer.window > 0) for (group, _), layer in zip(layout.places, layout.layers, strict=True))


def edge_layers(layers: Layers, plan: EdgePlan, side: Side) -> Layers:
    """Returns the parts of one rank's (K, V) caches that an edge carries, in wire order."""
    views = []
    for s in plan.slices:
        start = s.source_start if side == "prefill" else s.destination_start
        keys, values = layers[s.layer]
        views.append((keys[:, :, start : start + s.count], values[:, :, start : start + s.count]))
    return views


class LocalEndpoints:
    """Makes endpoints in this process: over its rank's `layers` in blocks of `block_size`, bound to its own address
    `host`. Without a `layout` all layers are of one group, without a window. `expect` is called with the blocks of a
    sequence that is being received. All endpoints share `buffers`; with None no buffer is kept between transfers. Both
    sides of an edge must have the same `section_bytes`, or the first transfer fails. `order_behind(step)` is called on
    an edge's thread before it reads KV and orders the thread's later work after that step. `gpus`: see `MakeEndpoint`.
    """

    def __init__(
        self,
        layers: Layers,
        block_size: int,
        host: str,
        kind: str = "gloo",
        expect: Callable[[Sequence[int]], None] | None = None,
        buffers: StagingBuffers | None = None,
        section_bytes: int = SECTION_BYTES,
        order_behind: OrderBehind | None = None,
        gpus: tuple[str, ...] = (),
        layout: KVLayout | None = None,
    ) -> None:
        self.gpus = gpus
        self.kinds, self.groups = (Kind(),) * len(layers), 1
        if layout is not None:
            self.kinds, self.groups = kinds_of(layout), layout.groups
        self._layers, self.block_size, self._host = layers, block_size, host
        self.expect, self.section_bytes, self.order_behind = expect, section_bytes, order_behind
        device = layers[0][0].device if layers else torch.device("cpu")
        self.buffers = make_buffers(kind, device, 0) if buffers is None else buffers
        self.kind = kind
        if device.type == "cuda":
            self._warm_up(device)

    def _warm_up(self, device: torch.device) -> None:
        """Compiles and loads the kernels before the first hand-over, whose limits are seconds, by packing and storing
        as hand-overs do. Block 0 is overwritten with its own bytes."""
        layers = PagedLayers.of(self._layers)  # as layers of one group
        num_bytes = sum(layers.layer_bytes(0, _WARM_UP_TOKENS))
        blocks = (0,) * -(-_WARM_UP_TOKENS // self.block_size)
        part = Part(blocks, 0, _WARM_UP_TOKENS, num_bytes, b"")
        buffer = self.buffers.take(num_bytes)
        how = layers, self.block_size, part, buffer, 1  # a section for each layer: a hand-over has several
        packing, storing = Packing(*how), Storing(*how)
        with own_stream(device):
            packing.begin()
            finish(device, _WARM_UP_S)
            for index in range(len(packing.sections)):
                storing.arrived(index, packing.ready(index))
            storing.result()  # raises what `arrived` kept
        self.buffers.drop(buffer)

    def __call__(self, plan: EdgePlan, spec: EdgeSpec) -> LocalEndpoint:
        device = buffer_device(self.kind, self._layers[0][0].device)
        mine = replace(spec, bind_host=self._host, device=str(device))
        kinds = [self.kinds[s.layer] for s in plan.slices]
        paged = PagedLayers.of(edge_layers(self._layers, plan, spec.side), kinds, self.groups)
        return LocalEndpoint(mine, paged, self)


def make_buffers(kind: str, device: torch.device, limit_bytes: int) -> StagingBuffers:
    """Makes the staging buffers for the edges of a rank whose blocks are on `device`. Host memory that is copied to or
    from a GPU is pinned."""
    where, allocate = buffer_device(kind, device), allocator(kind)
    if where.type == "cpu" and device.type == "cuda":
        allocate = pinned_buffer
    return StagingBuffers(limit_bytes, where, allocate)


class LocalEndpoint:
    """A rank's own endpoint of an edge. A buffer is reused only when its transfer has ended in order; otherwise a late
    byte may still be written."""

    def __init__(self, spec: EdgeSpec, layers: PagedLayers, rank: LocalEndpoints) -> None:
        """`layers` are those that the edge carries; `rank` has the settings and buffers of this rank."""
        self.generation = spec.generation
        self.packed_while_sending = 0  # sections
        self.worker = EdgeWorker(spec, make_edge(rank.kind), kv_device=layers.device)
        self._rank, self._buffers = rank, rank.buffers
        self._layers = layers
        self._packing: Packing | None = None  # being packed, or packed but not sent yet

    @property
    def dead(self) -> HandoffError | None:
        return self.worker.dead

    async def connect(self) -> None:
        await self.worker.connect()

    async def fill(self, part: Part, after_step: int, on_begun: Callable[[], None] | None = None) -> None:
        self.drop()
        packing = self._packing = self._staged(Packing, part)
        if on_begun is not None:
            on_begun()
        if self._rank.order_behind is not None:
            packing.before = partial(self._rank.order_behind, after_step)
        try:
            # An error ends the edge before a send that is queued after it begins: Gloo never wakes a receive that has
            # received part of a message.
            await self.worker.run(packing.begin)
        except BaseException:
            if self._packing is packing:
                self.drop()
            raise

    async def send(self) -> None:
        packing, self._packing = self._packing, None
        if packing is None:
            raise self.worker.spec.error("send without packed KV")
        packing.is_sending = True
        try:
            await self.worker.send(packing.buffer.view, ends=packing.ends, ready=packing.ready)
        except BaseException:
            self._buffers.drop(packing.buffer)
            raise
        self.packed_while_sending += packing.packed_while_sending
        self._buffers.give_back(packing.buffer)

    def drop(self) -> None:
        packing, self._packing = self._packing, None
        if packing is not None:
            self._buffers.drop(packing.buffer)

    async def take(self, part: Part, on_posted: Callable[[], None]) -> bool:
        storing = self._staged(Storing, part)
        try:
            if self._rank.expect is not None:  # all blocks of the sequence, before its later chunks arrive
                self._rank.expect(part.block_ids)
            arrived = storing.arrived
            await self.worker.recv(storing.buffer.view, on_posted=on_posted, ends=storing.ends, arrived=arrived)
        except BaseException:
            try:
                await _stop(storing)  # the thread of an aborted edge may still be storing
            finally:
                self._buffers.drop(storing.buffer)
            raise
        self._buffers.give_back(storing.buffer)
        return storing.result()

    def abort(self, reason: str) -> None:
        self.worker.abort(reason)
        self.drop()

    async def close(self, timeout_s: float) -> bool:
        self.drop()
        return await self.worker.close(timeout_s)

    def _staged(self, kind: type[_Staged], part: Part) -> _Staged:
        """Returns the part with a staging buffer for it. Raises HandoffError when its size does not match these
        layers."""
        buffer = self._buffers.take(part.num_bytes)
        try:
            return kind(self._layers, self._rank.block_size, part, buffer, self._rank.section_bytes)
        except HandoffError:
            self._buffers.drop(buffer)
            raise

    def __repr__(self) -> str:
        return f"<LocalEndpoint {self.worker!r}>"


async def _stop(storing: Storing) -> None:
    """Stops storing, and returns only then, even if cancelled. On another thread: a device that hangs would block the
    event loop for longer than a lease."""
    stopping = asyncio.get_running_loop().run_in_executor(None, storing.stop)
    try:
        await asyncio.wait({stopping})
    finally:
        while not stopping.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({stopping})
        stopping.result()

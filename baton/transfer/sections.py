"""One part of a chunk at one end of an edge, section by section (baton.core.sections): `Packing` where it is sent,
`Storing` where it is received. Both work on the edge's thread, while the bytes of other sections move.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable

from torch import Tensor

from baton.core.edge_orders import Part
from baton.core.errors import HandoffError
from baton.core.sections import Section, cut_sections
from baton.transfer.staging import Layers, PagedLayers, checksum, checksum_parts, pack, pack_layers, unpack
from baton.transfer.staging_buffers import StagingBuffer

AHEAD_BYTES = 12 << 20
"""Bytes that are packed before the first section is sent, where there are as many. On one core packing takes from
sending: 11.8 MB were handed over 1.2 ms later with no more packed than there was time for until `Posted` (decision
0033). Of longer parts the rest is packed beside sending."""

_LAYERS = struct.Struct("<II")


class _Sections:
    """What both have: the part, where it lies in the blocks (`layers`, of `block_size`) and in the staging buffer, and
    its sections. Raises HandoffError when the layers have not as many bytes of its tokens as it says."""

    def __init__(
        self, layers: Layers | PagedLayers, block_size: int, part: Part, buffer: StagingBuffer, section_bytes: int
    ) -> None:
        tokens = part.end_token - part.start_token
        self.part, self.buffer = part, buffer
        self._layers = PagedLayers.of(layers)[part.first_layer : part.last_layer]
        self.sections = cut_sections(self._layers.layer_bytes(tokens), section_bytes)
        total = self.ends[-1] if self.sections else 0
        if total != part.num_bytes:
            raise HandoffError(f"a part of {part.num_bytes} bytes was ordered, {total} are here")
        self._where = (part.block_ids, block_size, part.start_token, part.end_token)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(section.end for section in self.sections)

    def layers_of(self, section: Section) -> PagedLayers:
        return self._layers[section.first : section.last]

    def bytes_of(self, section: Section) -> Tensor:
        return self.buffer.view[section.start : section.end]

    def identity_of(self, section: Section) -> bytes:
        """Those layers of that part."""
        return self.part.identity + _LAYERS.pack(section.first, section.last)

    def checksum_of(self, section: Section) -> int:
        """Of what is in the buffer now."""
        return checksum(self.identity_of(section), self.bytes_of(section))


class Packing(_Sections):
    """A part that is packed before it is sent, and while it is sent. Complete state: the checksums of the sections that
    are packed, whether somebody waits to send them (`wanted`, set by the event loop), and how many were packed after
    their sending had begun."""

    def __init__(
        self, layers: Layers | PagedLayers, block_size: int, part: Part, buffer: StagingBuffer, section_bytes: int
    ) -> None:
        super().__init__(layers, block_size, part, buffer, section_bytes)
        self.wanted = False
        self.packed_while_sending = 0
        self._sums: list[int] = []

    def begin(self) -> None:
        """Packs until the sections are wanted, but one at least and AHEAD_BYTES if there are as many."""
        for section in self.sections:
            self._pack_next()
            if self.wanted and section.end >= AHEAD_BYTES:
                break

    def ready(self, index: int) -> int:
        """The checksum of that section, which is packed now; see `Edge.send`."""
        while len(self._sums) <= index:
            self._pack_next()
            self.packed_while_sending += 1
        return self._sums[index]

    def _pack_next(self) -> None:
        section = self.sections[len(self._sums)]
        layers, view = self.layers_of(section), self.bytes_of(section)
        packed: Iterable[Tensor]
        if view.device != layers.device:
            packed = (view.copy_(pack(layers, *self._where)),)
        elif view.device.type == "cpu":
            packed = pack_layers(layers, *self._where, view)  # each is hashed while it lies in the cache
        else:
            packed = (pack(layers, *self._where, view),)  # one copy to the host, not one for each layer
        self._sums.append(checksum_parts(self.identity_of(section), packed))


class Storing(_Sections):
    """A part that arrives. Complete state: how many of its sections were stored, whether all that came matched their
    checksums, what went wrong, and whether the blocks may still be written.

    A section goes into the blocks only when its bytes match its checksum. What goes wrong with that is kept for
    `result`: the edge has done its own work.
    """

    def __init__(
        self, layers: Layers | PagedLayers, block_size: int, part: Part, buffer: StagingBuffer, section_bytes: int
    ) -> None:
        super().__init__(layers, block_size, part, buffer, section_bytes)
        self.stored = 0
        self._intact = True
        self._error: Exception | None = None
        self._writable = True
        self._writing = threading.Lock()

    def arrived(self, index: int, sum_: int) -> None:
        """See `Edge.recv`."""
        try:
            self._store(self.sections[index], sum_)
        except Exception as e:
            self._error = self._error or e

    def result(self) -> bool:
        """When all have arrived: whether all matched. Raises what storing one of them raised."""
        if self._error is not None:
            raise self._error
        return self._intact

    def stop(self) -> None:
        """From any thread: nothing is written once this returns. It waits for a section under way, milliseconds."""
        with self._writing:
            self._writable = False

    def _store(self, section: Section, sum_: int) -> None:
        if self.checksum_of(section) != sum_:
            self._intact = False
            return
        view, layers = self.bytes_of(section), self.layers_of(section)
        with self._writing:
            if self._writable:
                unpack(view.to(layers.device), layers, *self._where)
                self.stored += 1

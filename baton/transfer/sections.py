"""One part of a chunk at one end of an edge, section by section (baton.core.edge_orders): `Packing` at the sender,
`Storing` at the receiver. Both run on the edge's thread, while the bytes of other sections are transferred.

With buffers in host memory a section is checked and stored as soon as it has arrived. With buffers on a GPU nothing
waits between sections: packing and checksums are queued on the edge's stream, the checksums stay on the device, and the
receiver waits twice per part: for the check of all its sections, and until the intact ones are stored.

The checksum of a section of KV: 64 bits over its `identity` (part and layers) and its bytes.

In host memory it is xxh3_64. On a GPU it is computed there, without copying the bytes to the host: each 32-bit word is
mixed with its index by the finaliser of SplitMix64 (Steele, Lea, Flood 2014), and the results are summed modulo 2**64,
so all programs of a kernel can work in parallel, in any order, with the same result. Both ends of an edge have their
buffers in the same kind of memory, so they use the same checksum.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable
from functools import cached_property

import torch
import xxhash
from torch import Tensor

from baton.core.edge_orders import Part, Section, cut_sections
from baton.core.errors import HandoffError, InvariantError
from baton.transfer.edge import Word
from baton.transfer.staging import PagedLayers, Slots, locate, pack, pack_layers, unpack
from baton.transfer.staging_buffers import StagingBuffer
from baton.transfer.streams import finish

AHEAD_BYTES = 12 << 20
"""Bytes to pack before the first section is sent, if the part has that many; the rest of a longer part is packed while
sending. On one core packing slows sending: with only what could be packed before `Posted` packed ahead, a hand-over of
11.8 MB took 1.2 ms longer (decision 0007)."""

_LAYERS = struct.Struct("<II")
_DEVICE_TIMEOUT_S = 5.0
"""For the checks and copies of one part, which take milliseconds unless the device hangs."""


class _Sections:
    """The common part of both: the part, where it lies in the blocks (`layers`, of `block_size`) and in the staging
    buffer, and its sections. Raises HandoffError when the part's size does not match these layers."""

    def __init__(
        self, layers: PagedLayers, block_size: int, part: Part, buffer: StagingBuffer, section_bytes: int
    ) -> None:
        self.part, self.buffer = part, buffer
        self._layers = layers[part.first_layer : part.last_layer]
        sizes = self._layers.layer_bytes(part.start_token, part.end_token, part.window_start)
        self.sections = cut_sections(sizes, section_bytes)
        total = self.ends[-1] if self.sections else 0
        if total != part.num_bytes:
            raise HandoffError(f"expected a part of {part.num_bytes} bytes, the layers have {total}")
        self._block_size = block_size
        self.on_device = buffer.view.device.type == "cuda"

    @cached_property
    def _slots(self) -> Slots:
        """Raises HandoffError."""
        part = self.part
        tokens = part.start_token, part.end_token, part.window_start
        return locate(self._layers, part.block_ids, self._block_size, *tokens)

    def _device_checksum(self, section: Section) -> Tensor:
        """Queues the computation of a section's checksum; returns it as int64 [1] on the device."""
        checksum = torch.empty(1, dtype=torch.int64, device=self.buffer.view.device)
        device_checksum(self.identity_of(section), self.bytes_of(section), checksum)
        return checksum

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(section.end for section in self.sections)

    def layers_of(self, section: Section) -> PagedLayers:
        return self._layers[section.first : section.last]

    def bytes_of(self, section: Section) -> Tensor:
        return self.buffer.view[section.start : section.end]

    def identity_of(self, section: Section) -> bytes:
        """Returns the identity of the part and of the section's layers."""
        return self.part.identity + _LAYERS.pack(section.first, section.last)


class Packing(_Sections):
    """A part that is packed before it is sent, and while it is sent."""

    def __init__(
        self, layers: PagedLayers, block_size: int, part: Part, buffer: StagingBuffer, section_bytes: int
    ) -> None:
        super().__init__(layers, block_size, part, buffer, section_bytes)
        self.is_sending = False  # `send` has been called; set by the event loop
        self.before: Callable[[], None] | None = None  # called on the edge's thread before KV is read
        self.packed_while_sending = 0  # sections
        self._sums: list[Word] = []  # of the packed sections

    def begin(self) -> None:
        """Packs all sections, but stops early once `is_sending` is set and at least AHEAD_BYTES are packed."""
        if self.before is not None:
            self.before()
        if self.on_device:
            self.buffer.use()
        for section in self.sections:
            self._pack_next()
            if self.is_sending and section.end >= AHEAD_BYTES:
                break

    def ready(self, index: int) -> Word:
        """Returns the checksum of a section, packing it first if necessary; see `Edge.send`."""
        while len(self._sums) <= index:
            self._pack_next()
            self.packed_while_sending += 1
        return self._sums[index]

    def _pack_next(self) -> None:
        section = self.sections[len(self._sums)]
        layers, view = self.layers_of(section), self.bytes_of(section)
        if self.on_device:
            pack(layers, self._slots, view)
            self._sums.append(self._device_checksum(section))
            return
        packed: Iterable[Tensor]
        if view.device != layers.device:
            packed = (view.copy_(pack(layers, self._slots)),)  # one copy to the host, not one for each layer
        else:
            packed = pack_layers(layers, self._slots, view)  # each is hashed while it is in the CPU cache
        self._sums.append(checksum_parts(self.identity_of(section), packed))


class Storing(_Sections):
    """A part that is received.

    A section is stored in the blocks only when its bytes match its checksum. An error in doing so is kept for `result`:
    it does not end the edge, which has done its own work.
    """

    def __init__(
        self, layers: PagedLayers, block_size: int, part: Part, buffer: StagingBuffer, section_bytes: int
    ) -> None:
        super().__init__(layers, block_size, part, buffer, section_bytes)
        self.stored = 0  # sections
        self._intact = True  # all that arrived matched their checksums
        self._error: Exception | None = None  # the first one
        self._writable = True  # the blocks may still be written
        self._writing = threading.Lock()
        self._received: list[Tensor] = []  # checksums of a part on a device
        self._computed: list[Tensor] = []

    def arrived(self, index: int, sum_: Word) -> None:
        """See `Edge.recv`."""
        try:
            if isinstance(sum_, Tensor):
                self._check_on_device(index, sum_)
            else:
                self._store(self.sections[index], sum_)
        except Exception as e:
            self._error = self._error or e

    def result(self) -> bool:
        """Returns, after all sections have arrived, whether all matched. Raises the error of storing, if any."""
        if self._error is not None:
            raise self._error
        return self._intact

    def stop(self) -> None:
        """From any thread: stops all writing into the blocks; waits for a section being stored, milliseconds unless the
        device hangs. Raises InvariantError if the device did not finish writing."""
        with self._writing:
            self._writable = False
            if isinstance(self._error, InvariantError):
                raise self._error

    def _store(self, section: Section, sum_: int) -> None:
        if checksum(self.identity_of(section), self.bytes_of(section)) != sum_:
            self._intact = False
            return
        view, layers = self.bytes_of(section), self.layers_of(section)
        with self._writing:
            if self._writable:
                unpack(view.to(layers.device), layers, self._slots)
                self._finish_writing(layers.device)
                self.stored += 1

    def _check_on_device(self, index: int, sum_: Tensor) -> None:
        """Queues the check of a section; after the last one, waits for all results and stores the intact sections."""
        if index == 0:
            self.buffer.use()
        self._received.append(sum_)
        self._computed.append(self._device_checksum(self.sections[index]))
        if index + 1 < len(self.sections):
            return
        device = self.buffer.view.device
        same = torch.cat(self._received) == torch.cat(self._computed)
        verdicts = torch.empty(same.shape, dtype=torch.bool, pin_memory=device.type == "cuda")
        verdicts.copy_(same, non_blocking=True)
        finish(device, _DEVICE_TIMEOUT_S)
        with self._writing:
            for section, good in zip(self.sections, verdicts.tolist(), strict=True):
                if not good:
                    self._intact = False
                elif self._writable:
                    unpack(self.bytes_of(section), self.layers_of(section), self._slots)
                    self.stored += 1
            self._finish_writing(device)  # the engine reads the blocks on another stream

    def _finish_writing(self, device: torch.device) -> None:
        """Raises InvariantError, which ends the worker, when the device does not finish: it would write later, into
        blocks that belong to another sequence by then."""
        try:
            finish(device, _DEVICE_TIMEOUT_S)
        except HandoffError as error:
            # Kept before the lock is released: `stop` reads it next. It matters more than an earlier error.
            self._error = InvariantError(f"writing KV into blocks: {error.message}")
            raise self._error from None


GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as int64
MIX_1, MIX_2 = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
SPLITMIX = (GOLDEN, MIX_1, MIX_2)


def checksum(identity: bytes, buf: Tensor) -> int:
    """Returns xxh3_64 over the identity and the bytes of `buf` (uint8, 1-D, contiguous, in host memory)."""
    return checksum_parts(identity, (buf,))


def checksum_parts(identity: bytes, parts: Iterable[Tensor]) -> int:
    """Returns the `checksum` of the concatenated parts."""
    digest = xxhash.xxh3_64(struct.pack("<I", len(identity)) + identity)
    for part in parts:
        digest.update(part.cpu().numpy().data)
    return digest.intdigest()


def device_checksum(identity: bytes, buf: Tensor, out: Tensor) -> None:
    """Writes the checksum of `buf` (uint8, 1-D, contiguous, a multiple of 4 bytes, on a GPU) to `out`, int64 [1] there;
    queued on the current stream. Raises HandoffError for another length."""
    from baton.transfer.device_kernels import add_mixed_words  # only torch's CUDA builds include Triton

    out.fill_(_seed(identity))
    add_mixed_words(_words(buf), out, *SPLITMIX)


def plain_device_checksum(identity: bytes, buf: Tensor) -> int:
    """Returns the same as `device_checksum`, as int64, in plain torch on any device."""
    words = _words(buf).long() & 0xFFFFFFFF
    mixed = words + GOLDEN * torch.arange(1, len(words) + 1, device=buf.device)
    mixed = (mixed ^ (mixed >> 30 & (1 << 34) - 1)) * MIX_1
    mixed = (mixed ^ (mixed >> 27 & (1 << 37) - 1)) * MIX_2
    mixed = mixed ^ (mixed >> 31 & (1 << 33) - 1)
    return int(mixed.sum() + _seed(identity))


def _seed(identity: bytes) -> int:
    """Returns the checksum of the identity alone, as int64."""
    return struct.unpack("<q", struct.pack("<Q", checksum_parts(identity, ())))[0]  # type: ignore[no-any-return]


def _words(buf: Tensor) -> Tensor:
    if buf.numel() % 4:
        raise HandoffError(f"a section of {buf.numel()} bytes is not a whole number of 32-bit words")
    return buf.view(torch.int32)

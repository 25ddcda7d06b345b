"""The checksum of a section of KV: 64 bits over its `identity` (part and layers) and its bytes.

In host memory it is xxh3_64. On a GPU it is computed there, without copying the bytes to the host: each 32-bit word is
mixed with its index by the finaliser of SplitMix64 (Steele, Lea, Flood 2014), and the results are summed modulo 2**64,
so all programs of a kernel can work in parallel, in any order, with the same result. Both ends of an edge have their
buffers in the same kind of memory, so they use the same checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

from baton.core.errors import HandoffError

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

"""The checksum that a GPU computes, through Triton's interpreter, against its plain twin."""

from __future__ import annotations

import os

import pytest
import torch

from baton.core.errors import HandoffError
from baton.transfer.sections import device_checksum, plain_device_checksum


def buffer(num_bytes: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="with a GPU the kernel is compiled: see tests/gpu"
)
@pytest.mark.parametrize("num_bytes", [4, 4096, 32768, 32772, 100_000])
def test_the_kernel_equals_the_plain_implementation(num_bytes: int) -> None:
    pytest.importorskip("triton")
    out = torch.empty(1, dtype=torch.int64)
    for identity in (b"", b"request 1"):
        device_checksum(identity, buffer(num_bytes), out)
        assert int(out) == plain_device_checksum(identity, buffer(num_bytes))


def test_the_checksum_detects_flipped_bits_swapped_words_and_other_identities() -> None:
    buf = buffer(512)
    good = plain_device_checksum(b"a", buf)
    found = {good, plain_device_checksum(b"b", buf), plain_device_checksum(b"a", buf[:508])}
    for bit in range(512 * 8):
        flipped = buf.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        found.add(plain_device_checksum(b"a", flipped))
    assert len(found) == 3 + 512 * 8
    words = buf.view(torch.int32)
    for first, second in ((0, 1), (3, 100), (126, 127)):
        swapped = words.clone()
        swapped[[first, second]] = words[[second, first]]
        found.add(plain_device_checksum(b"a", swapped.view(torch.uint8)))
    assert len(found) == 6 + 512 * 8
    assert len({plain_device_checksum(b"a", torch.zeros(4 * n, dtype=torch.uint8)) for n in range(1, 200)}) == 199


def test_the_checksum_of_known_bytes_does_not_change() -> None:
    assert plain_device_checksum(b"", torch.arange(64, dtype=torch.uint8)) == KNOWN


def test_a_section_without_a_whole_number_of_words_is_refused() -> None:
    with pytest.raises(HandoffError, match="a section of 6 bytes is not a whole number"):
        plain_device_checksum(b"", buffer(6))


KNOWN = -6074282482841112155
"""Computed from the definition with Python integers, modulo 2**64."""

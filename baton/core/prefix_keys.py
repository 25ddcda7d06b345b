"""Keys that identify KV blocks by their content.

The key of a full block is a keyed hash over its tokens and the key of the block before it, so it represents all tokens
from the first on; the hash is keyed by the model's digest and the request's tenant, salt and LoRA adapter, so that
equal keys mean equal KV and requests of different tenants, salts or adapters share no key. The coordinator computes the
same keys as the workers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

HINT_BYTES = 8  # as much of a key as routing needs: a collision there only costs a recomputation


class KeyChain:
    """The keys of a sequence's full blocks, `keys`, as far as they have been computed."""

    __slots__ = ("_block_size", "_root", "keys")

    def __init__(self, model_digest: str, tenant: str, salt: str, adapter: str, block_size: int) -> None:
        named = hashlib.blake2b(digest_size=32, person=b"baton prefix")
        for part in map(str.encode, (model_digest, tenant, salt, adapter)):
            named.update(struct.pack("<Q", len(part)) + part)
        self._root = named.digest()
        self._block_size = block_size
        self.keys: list[bytes] = []

    def grow(self, tokens: Callable[[int, int], tuple[int, ...]], num_tokens: int) -> list[bytes]:
        """Returns the keys of the full blocks among the first `num_tokens` positions; `tokens(start, end)` returns the
        tokens at [start, end), the same in every call."""
        num_blocks, size = num_tokens // self._block_size, self._block_size
        start = len(self.keys) * size
        new = tokens(start, num_blocks * size) if start < num_blocks * size else ()
        for first in range(0, len(new), size):
            before = self.keys[-1] if self.keys else b""
            packed = struct.pack(f"<{size}I", *new[first : first + size])
            self.keys.append(hashlib.blake2b(before + packed, digest_size=32, key=self._root).digest())
        return self.keys[:num_blocks]

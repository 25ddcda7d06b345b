"""Signatures of reasoning. Clients send reasoning back only with one, and Baton accepts any. Its own hold the text of
reasoning that the client did not want to see, so that the model has it again when the block comes back."""

from __future__ import annotations

import base64
import binascii
import zlib

_PREFIX = "baton1."
MAX_CHARS = 1 << 20
"""Of the text in a signature: a few kilobytes may decompress to megabytes."""


def signature(hidden: str) -> str:
    """Returns a signature that holds a text, perhaps an empty one."""
    return _PREFIX + base64.b64encode(zlib.compress(hidden.encode())).decode()


def thinking_in(signature: str) -> str:
    """Returns the text in a signature, at most MAX_CHARS of it; empty if another server made it."""
    if not signature.startswith(_PREFIX):
        return ""
    try:
        packed = base64.b64decode(signature.removeprefix(_PREFIX), validate=True)
        return zlib.decompressobj().decompress(packed, MAX_CHARS).decode(errors="ignore").replace("\0", "")
    except (binascii.Error, ValueError, zlib.error):
        return ""

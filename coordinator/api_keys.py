"""The keys that clients of the API present, where any are wanted.

A file has one key a line, as it is or as `sha256:` and the digest in hex, which is all that is kept of it here. Empty
lines and those that begin with `#` are left out.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from baton.core.errors import StartupError, Unauthenticated
from baton.token_file import read_secret

FLAG = "--api-key-file"
MIN_CHARS = 16
_MAX_BYTES = 1 << 20
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class ApiKeys:
    """Complete state: the digests. Without any, every client is let in."""

    def __init__(self, digests: tuple[bytes, ...] = ()) -> None:
        self._digests = digests

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str) -> None:
        """`authorization` is the value of that header, or of that metadata, empty where there is none.

        Raises:
            Unauthenticated: it is not `Bearer` and one of the keys.
        """
        if not self._digests:
            return
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("an API key is needed: `Authorization: Bearer KEY`", code="missing_api_key")
        digest = hashlib.sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all, in constant time
        if True not in matches:
            raise Unauthenticated("this API key is not known")


def read_api_keys(path: str) -> ApiKeys:
    """The keys in a file; none for no path.

    Raises:
        StartupError: the file is missing, open to everybody, or a line is no key; the message names the line.
    """
    if not path:
        return ApiKeys()
    data = read_secret(path, FLAG, _MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise StartupError(f"{FLAG} {path}: it has more than {_MAX_BYTES} bytes")
    try:
        lines = data.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise StartupError(f"{FLAG} {path}: keys are ASCII") from None
    digests = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        if found := _DIGEST.fullmatch(line):
            digests.append(bytes.fromhex(found[1]))
        elif len(line) < MIN_CHARS or " " in line or line.startswith("sha256:"):
            what = f"a key of at least {MIN_CHARS} characters without spaces, or sha256: and 64 hex digits"
            raise StartupError(f"{FLAG} {path}, line {number}: not {what}")
        else:
            digests.append(hashlib.sha256(line.encode()).digest())
    if not digests:
        raise StartupError(f"{FLAG} {path}: it holds no key")
    return ApiKeys(tuple(digests))

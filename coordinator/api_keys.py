"""The API keys of clients, if the deployment requires any: those of `--api-key` and those of a file.

A file has one key per line, in plain text or as `sha256:` and the digest in hex; only the digest is kept in memory.
Options after the key set its name, tenant, priority, weight and limits:

    sk-0123456789abcdef  name=search tenant=acme priority=5 weight=2 requests_at_once=8 tokens_per_minute=60000

Empty lines and lines that begin with `#` are ignored.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import fields

from baton.core.errors import StartupError, Unauthenticated
from baton.runtime.config import nearest
from baton.runtime.token_file import read_start
from coordinator.policy.quotas import ANONYMOUS, Client, KeyLimits

FLAG = "--api-key-file"
FROM_UP = "BATON_KEYS_OF_UP"
"""The environment variable with the path of a file in which `baton up` passes the digests of its `--api-key`."""
MIN_CHARS = 16
MAX_PRIORITY = 100
MAX_WEIGHT = 1000
MAX_LABELLED_TENANTS = 100
"""Each has several time series."""
_MAX_BYTES = 1 << 20
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""A bearer token (RFC 6750, b64token): anything else in a file is not meant as a key, JSON for example."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LIMITS = tuple(f.name for f in fields(KeyLimits))
_MOST = 10**12


class ApiKeys:
    """Without any keys, every client is accepted."""

    def __init__(self, clients: Mapping[bytes, Client] | None = None) -> None:
        self._clients = dict(clients or {})  # by the digest of their key

    def __bool__(self) -> bool:
        return bool(self._clients)

    def has_several_tenants(self) -> bool:
        return len({client.tenant for client in self._clients.values()}) > 1

    def labelled_tenants(self) -> list[str]:
        """Returns the first MAX_LABELLED_TENANTS tenants that the deployment named, for metrics."""
        named = {client.tenant: None for digest, client in self._clients.items() if client.tenant != _unnamed(digest)}
        return list(named)[:MAX_LABELLED_TENANTS]

    def named(self, name: str) -> Client | None:
        """Returns the client whose key has this name, if any. Without any keys, returns ANONYMOUS."""
        if not self._clients:
            return ANONYMOUS
        return next((client for client in self._clients.values() if client.key == name), None)

    def client(self, authorization: str) -> Client:
        """Returns the client of a key. `authorization` is the value of that header or metadata entry, empty if absent.

        Raises:
            Unauthenticated: it is not `Bearer` and one of the keys.
        """
        if not self._clients:
            return ANONYMOUS
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            message = "missing API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise Unauthenticated(message, code="missing_api_key")
        digest = hashlib.sha256(key.strip().encode()).digest()
        clients = [client for known, client in self._clients.items() if hmac.compare_digest(digest, known)]
        if not clients:  # all keys were compared, each in constant time
            raise Unauthenticated("unknown API key")
        return clients[0]


def read_api_keys(path: str, keys: str = "", path_of_up: str = "") -> ApiKeys:
    """Returns the keys in a file, if any, the `keys` of `--api-key`, and those that `baton up` passes in a file. A key
    of the first file keeps its options if it is also among the others.

    Raises:
        StartupError: a file is missing or open to everybody, or a line is not a key; the message names the line.
    """
    clients = _of_file(path) if path else {}
    digests = [digest_of(key) for key in keys.split()]
    if path_of_up:
        digests += _of_file(path_of_up)
    for digest in digests:
        clients.setdefault(digest, _client([], digest, "--api-key"))
    return ApiKeys(clients)


def digest_of(key: str) -> bytes:
    """Returns the digest of a key of `--api-key`, which may itself be `sha256:` and the digest.

    Raises:
        StartupError: it is not ASCII, or not a digest although it says so. The message does not repeat it.
    """
    if digest := _DIGEST.fullmatch(key):
        return bytes.fromhex(digest[1])
    if not key.isascii() or not key.isprintable() or key.startswith("sha256:"):
        raise StartupError("--api-key: a key must be printable ASCII, or sha256: followed by 64 hex digits")
    return hashlib.sha256(key.encode()).digest()


def is_short(keys: str) -> bool:
    """Returns whether one of the keys of `--api-key` has so few characters that it could be guessed."""
    return any(len(key) < MIN_CHARS for key in keys.split())


SHORT = f"--api-key: a key of fewer than {MIN_CHARS} characters is easy to guess"


def _of_file(path: str) -> dict[bytes, Client]:
    data = read_start(path, FLAG, _MAX_BYTES + 1, secret=True)
    if len(data) > _MAX_BYTES:
        raise StartupError(f"{FLAG} {path}: it has more than {_MAX_BYTES} bytes")
    try:
        lines = data.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise StartupError(f"{FLAG} {path}: keys must be ASCII") from None
    clients: dict[bytes, Client] = {}
    names: set[str] = set()
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        where = f"{FLAG} {path}, line {number}"
        key, *words = line.split()
        digest = _digest(key, where)
        if digest in clients:
            raise StartupError(f"{where}: duplicate key")
        client = clients[digest] = _client(words, digest, where)
        if client.key in names:
            raise StartupError(f"{where}: another key already has the name {client.key!r}")
        names.add(client.key)
    if not clients:
        raise StartupError(f"{FLAG} {path}: it holds no key")
    return clients


def _digest(key: str, where: str) -> bytes:
    if digest := _DIGEST.fullmatch(key):
        return bytes.fromhex(digest[1])
    if len(key) < MIN_CHARS or not _KEY.fullmatch(key):
        characters = f"{MIN_CHARS} characters of A-Z a-z 0-9 . _ ~ + / -, with = only at its end"
        raise StartupError(f"{where}: must be a key of at least {characters}, or sha256: followed by 64 hex digits")
    return hashlib.sha256(key.encode()).digest()


def _client(words: list[str], digest: bytes, where: str) -> Client:
    """Builds a client from `option=value` words. An unnamed key is called by some digits of its digest, which
    reveal nothing."""
    given: dict[str, str] = {}
    for word in words:
        name, _, value = word.partition("=")
        known = ("name", "tenant", "priority", "weight", *_LIMITS)
        if name not in known:
            raise StartupError(f"{where}: unknown option {name[:64]!r}{nearest(name, known)}")
        if name in given:
            raise StartupError(f"{where}: {name} is given twice")
        given[name] = value
    for name in ("name", "tenant"):
        if name in given and not _NAME.fullmatch(given[name]):
            raise StartupError(f"{where}: {name} must be 1 to 64 letters, digits, dots, dashes and underscores")
    limits = KeyLimits(**{name: _number(given[name], name, 1, _MOST, where) for name in _LIMITS if name in given})
    key = given.get("name") or _unnamed(digest)
    priority = _number(given.get("priority", "0"), "priority", -MAX_PRIORITY, MAX_PRIORITY, where)
    weight = _number(given.get("weight", "1"), "weight", 1, MAX_WEIGHT, where)
    return Client(key, given.get("tenant", key), priority, limits, weight)


def _unnamed(digest: bytes) -> str:
    """Returns the name of a key that was given none."""
    return digest.hex()[:8]


def _number(text: str, name: str, low: int, high: int, where: str) -> int:
    try:
        number = int(text) if len(text) <= 20 else high + 1
    except ValueError:
        number = high + 1
    if not low <= number <= high:
        raise StartupError(f"{where}: {name} must be an integer from {low} to {high}")
    return number

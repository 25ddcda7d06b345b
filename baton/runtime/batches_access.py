"""How the coordinator and the batches process authenticate to each other, and name the client of a request.

Both derive the same key from the cluster token and send it as the bearer token of each request. With it, the batches
process believes the coordinator which tenant a client belongs to, and the coordinator runs a line of a batch for the
API key that created the batch. Without a cluster token, which only loopback permits, there is nothing to compare.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from baton.core.errors import InvalidRequest, Unauthenticated

HEADER = "x-baton-client"
KEY_REMOVED = "api_key_removed"
"""The code of the error for a line whose API key no longer exists."""
_PURPOSE = b"baton: between the coordinator and the batches process"


@dataclass(frozen=True, slots=True)
class Owner:
    """The client of a request: `tenant` owns its files and batches, `key` names its API key, if any. With
    `several_tenants` each has only a share of the storage."""

    tenant: str = ""
    key: str = ""
    several_tenants: bool = False


def access_key(token: str) -> str:
    """Returns the key that both derive from the cluster token; empty without a token."""
    return hmac.new(token.encode(), _PURPOSE, hashlib.sha256).hexdigest() if token else ""


def headers_for(owner: Owner, key: str) -> dict[str, str]:
    return {HEADER: json.dumps(asdict(owner)), "authorization": f"Bearer {key}"}


def owner_of(headers: Mapping[str, str], key: str) -> Owner:
    """Returns the client that the headers of a request name.

    Raises:
        Unauthenticated: the request has not the `key`, or names no client: it is not from the other process.
        InvalidRequest: the other process is of another version.
    """
    named, given = headers.get(HEADER), headers.get("authorization", "")
    if named is None or (key and not hmac.compare_digest(f"Bearer {key}".encode(), given.encode("utf-8", "replace"))):
        raise Unauthenticated("this address is for the processes of the cluster: the cluster tokens differ")
    try:
        return Owner(**json.loads(named))
    except (ValueError, TypeError):
        raise InvalidRequest(f"{HEADER}: malformed") from None

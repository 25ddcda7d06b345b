"""One JSON request over HTTP: what the launcher, the doctor and the bench ask servers outside of a measurement."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

MAX_BYTES = 16 << 20
_MISSING = object()


def request_json(
    method: str, url: str, timeout_s: float, body: object = _MISSING, headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """The status and the JSON value of the answer, None where its body is not JSON. `timeout_s` limits each wait for
    the socket, and the whole of the answer's body; `url` may lack its scheme (http).

    Raises:
        OSError: `url` is no address, nothing answers in time, or what answers does not speak HTTP or does not end
            within MAX_BYTES.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise OSError(f"{url!r} is no address")
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connect(host, port, timeout=timeout_s)
    path = parts.path or "/"
    try:
        data = None if body is _MISSING else json.dumps(body)
        connection.request(method, f"{path}?{parts.query}" if parts.query else path, data, dict(headers or {}))
        answer = connection.getresponse()
        text, deadline = bytearray(), time.monotonic() + timeout_s
        while part := answer.read1(1 << 16):
            text += part
            if len(text) > MAX_BYTES or time.monotonic() > deadline:
                raise OSError(f"{method} {parts.path}: the answer does not end ({len(text)} bytes so far)")
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"{method} {parts.path}: {error!r}") from None
    finally:
        connection.close()
    try:
        return answer.status, json.loads(text)
    except (ValueError, RecursionError):
        return answer.status, None

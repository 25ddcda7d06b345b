"""The coordinator's public HTTP API, as the batches process calls it: one request for each line of a batch."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from uuid import uuid4

import aiohttp
import orjson

from baton.core.codes import ErrorCode
from baton.runtime.batches_access import KEY_REMOVED, Owner, headers_for
from baton.runtime.status import error_body

log = logging.getLogger("baton.batches")
CONNECT_S = 5.0
GRACE_S = 30.0
"""How much longer than the coordinator's own limit a response may take."""


class KeyRemoved(Exception):
    """The API key that created the batch no longer exists."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    request_id: str
    body: bytes
    retry_after_s: float = 0.0
    ignored: str = ""
    """The names of ignored fields, as in `x-ignored-fields`."""


class PublicApi:
    """State: the connections to the coordinator, and why it was last unreachable, until it responds again.

    `key` is that of `access_key`; a request may take `limit_s`, the coordinator's limit, and GRACE_S. `tls` has the
    coordinator's certificate, if it serves HTTPS."""

    def __init__(self, url: str, key: str, limit_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._url, self._key, self._unreachable = url.rstrip("/"), key, ""
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=limit_s + GRACE_S, sock_connect=CONNECT_S),
            connector=aiohttp.TCPConnector(limit=0, ssl=tls if tls is not None else True),
            skip_auto_headers=("user-agent",),
        )

    async def close(self) -> None:
        await self._session.close()

    async def ask(self, path: str, body: bytes, key_name: str) -> Answer:
        """Sends a request for the API key of this name. The answer has status 503 while the coordinator cannot be
        reached or does not accept requests of this process, 502 if the connection was lost before the response.

        Raises:
            KeyRemoved: there is no such API key any more.
        """
        request_id = f"batch-{uuid4().hex}"
        headers = headers_for(Owner(key=key_name), self._key)
        headers |= {"content-type": "application/json", "x-request-id": request_id}
        try:
            async with self._session.post(self._url + path, data=body, headers=headers, allow_redirects=False) as given:
                content = await given.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
            return self._away(request_id, f"cannot be reached: {error}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = f"the connection to the coordinator was lost: {type(error).__name__}"
            problem = error_body(reason, type="server_error", code=ErrorCode.INTERNAL_ERROR)
            return Answer(502, request_id, orjson.dumps(problem))
        if given.headers.get("x-request-id") != request_id:
            return self._away(request_id, f"did not respond, another server did (status {given.status})")
        if given.status == 401:
            if orjson.loads(content)["error"]["code"] == KEY_REMOVED:
                raise KeyRemoved
            return self._away(request_id, "refuses this process: both need the same cluster token")
        if self._unreachable:
            log.warning("the coordinator at %s responds again", self._url)
            self._unreachable = ""
        seconds = given.headers.get("retry-after", "")
        retry_after_s = float(seconds) if seconds.isdecimal() else 0.0
        return Answer(given.status, request_id, content, retry_after_s, given.headers.get("x-ignored-fields", ""))

    def _away(self, request_id: str, why: str) -> Answer:
        """Logs once why no line can run, and returns an answer that is retried."""
        if why != self._unreachable:
            log.warning("batches wait: the coordinator at %s %s", self._url, why)
            self._unreachable = why
        return Answer(503, request_id, b"")

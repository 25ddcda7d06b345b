"""Requests of the launcher and of the operators' commands to a coordinator; and one JSON request over HTTP, which the
doctor and the benchmark use too."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlsplit

from baton.core.errors import StartupError
from baton.runtime.status import printable

TIMEOUT_S = 2.0
REQUESTS_TIMEOUT_S = 10.0
MAX_CHARS = 2000  # of a string in a response
MAX_BYTES = 16 << 20
Row = Mapping[str, Any]
_OF_A_REQUEST = {
    *("id", "choice", "admitted_at", "outcome", "error", "total_ms", "spans", "attempts", "first_token_ms"),
    *("prompt_tokens", "cached_tokens", "generated_tokens"),
}


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The response to GET /workers. Each of `workers` has at least an `id`, a `role`, a `state` and `pids`; `control`
    is the coordinator's address for an operator's commands; `document` is the whole response."""

    workers: tuple[Row, ...]
    control: str
    document: dict[str, Any]


def get_cluster(url: str, timeout_s: float = TIMEOUT_S) -> ClusterView:
    """Returns the response to GET /workers. `url` may lack its scheme, or have a path.

    Raises:
        StartupError: no response, or not the expected one.
    """
    prefix = f"no cluster at {url}: GET /workers:"
    status, document = _get(url, "workers", timeout_s)
    if status != 200:
        raise StartupError(f"{prefix} status {status}{_other_address(status)}")
    try:
        control_host, _, control_port = str(document.get("control", "")).rpartition(":")
        if control_host in ("0.0.0.0", "[::]", "::"):  # it listens on all interfaces: use the host of HTTP
            host = urlsplit(_root(url)).hostname or ""
            control_host = f"[{host}]" if ":" in host else host
        control = f"{control_host}:{control_port}" if control_host else ""
        return ClusterView(tuple(map(_worker, document["workers"])), control, document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{prefix} unexpected response ({error!r})") from None


def get_requests(url: str, request_id: str = "", limit: int = 1000) -> list[Row]:
    """Returns the rows of GET /requests, or of one request.

    Raises:
        StartupError: no cluster replies at `url`, or it does not have the request.
    """
    path = f"requests/{quote(request_id)}" if request_id else f"requests?limit={limit}"
    status, document = _get(url, path, REQUESTS_TIMEOUT_S)
    rows = document.get("requests") if isinstance(document, dict) else None
    if status == 200 and isinstance(rows, list):
        if all(isinstance(row, dict) and row.keys() >= _OF_A_REQUEST for row in rows):
            return rows
        raise StartupError(f"{url}: GET /{path}: unexpected response")
    problem = document.get("error") if isinstance(document, dict) else None
    if not isinstance(problem, dict):
        raise StartupError(f"{url}: GET /{path}: status {status}{_other_address(status)}")
    hint = "" if problem.get("code") == "request_not_found" else _other_address(status)
    raise StartupError(f"{url}: {problem.get('message')}{hint}")


def get_metrics(url: str) -> str:
    """Returns the response to GET /metrics.

    Raises:
        StartupError: no cluster replies at `url`, or operators have another address.
    """
    return _content("GET", url, "metrics", REQUESTS_TIMEOUT_S).decode("utf-8", "replace")


def expect_workers(url: str) -> None:
    """Reports that there are no workers on purpose, and that some are started when a request waits.

    Raises:
        StartupError: no cluster replies at `url`, or it does not know this request.
    """
    _content("POST", url, "expect_workers", TIMEOUT_S)


def _content(method: str, url: str, path: str, timeout_s: float) -> bytes:
    try:
        status, content = request_bytes(method, f"{_root(url)}/{path}", timeout_s)
    except OSError as error:
        raise StartupError(f"no cluster at {url}: {error}") from None
    if status != HTTPStatus.OK:
        raise StartupError(f"no cluster at {url}: {method} /{path}: status {status}{_other_address(status)}")
    return content


def request_json(
    method: str, url: str, timeout_s: float, body: object = None, headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """Returns the status and the JSON value of the response, None if its body is not JSON. `timeout_s` limits each wait
    for the socket, and the time to read the whole body; `url` may lack its scheme (http).

    Raises:
        OSError: as `request_bytes` does.
    """
    status, text = request_bytes(method, url, timeout_s, body, headers)
    try:
        return status, json.loads(text)
    except (ValueError, RecursionError):
        return status, None


def request_bytes(
    method: str, url: str, timeout_s: float, body: object = None, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Returns the status and the body of the response, as `request_json` does.

    Raises:
        OSError: `url` is not an address, or the server does not reply in time, does not speak HTTP or does not end its
            response within MAX_BYTES.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host = ""
    if not host:
        raise OSError(f"{url!r} is not an address")
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        connection = connect(host, port, timeout=timeout_s)
    except http.client.InvalidURL:
        raise OSError(f"{url!r} is not an address") from None
    path = parts.path or "/"
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, f"{path}?{parts.query}" if parts.query else path, data, dict(headers or {}))
        answer = connection.getresponse()
        text, deadline = bytearray(), time.monotonic() + timeout_s
        while part := answer.read1(1 << 16):
            text += part
            if len(text) > MAX_BYTES or time.monotonic() > deadline:
                raise OSError(f"{method} {parts.path}: the response is too long or too slow ({len(text)} bytes so far)")
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"{method} {parts.path}: {error!r}") from None
    finally:
        connection.close()
    return answer.status, bytes(text)


def _get(url: str, path: str, timeout_s: float) -> tuple[int, Any]:
    try:
        status, document = request_json("GET", f"{_root(url)}/{path}", timeout_s)
    except OSError as error:
        raise StartupError(f"no cluster at {url}: {error}") from None
    return status, _printable(document)


def _other_address(status: int) -> str:
    """Returns what to try if an operator's document is not at the address of clients."""
    return "; with API keys or TLS, operators use --admin-port (8103)" if status in (401, 404) else ""


def _printable(value: Any) -> Any:
    """Returns a JSON value whose strings are safe to print on a terminal, whatever the server sent."""
    if isinstance(value, str):
        return printable(value, MAX_CHARS)
    if isinstance(value, dict):
        return {key: _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value


def _root(url: str) -> str:
    """Returns `http://host:port` of a URL that may lack its scheme or have a path."""
    return "/".join((url if "//" in url else f"http://{url}").split("/")[:3])


def _worker(row: Row) -> Row:
    texts = {name: str(row[name]) for name in ("id", "role", "state")}
    return {**row, **texts, "pids": [int(pid) for pid in row.get("pids", ())]}

"""What the launcher and `baton ps` ask a running coordinator."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One line of GET /workers; `fields` is the whole of it."""

    id: str
    role: str
    state: str
    pids: tuple[int, ...]
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClusterView:
    """GET /workers. `control` is where the coordinator takes an operator's commands; `document` is the whole of it."""

    workers: tuple[WorkerView, ...]
    control: str
    document: dict[str, Any]


def get_workers(url: str, timeout_s: float = TIMEOUT_S) -> list[WorkerView]:
    """The workers in GET /workers; raises as `get_cluster`."""
    return list(get_cluster(url, timeout_s).workers)


def get_cluster(url: str, timeout_s: float = TIMEOUT_S) -> ClusterView:
    """GET /workers.

    Raises:
        OSError: no answer, or not the expected one.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host, port = None, 0
    if not host:
        raise OSError(f"{url!r} is no address")
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", "/workers")
        answer = connection.getresponse()
        body = answer.read()
    except http.client.HTTPException as error:
        raise OSError(f"GET /workers: {error!r}") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise OSError(f"GET /workers: status {answer.status}")
    try:
        document = json.loads(body)
        control_host, _, control_port = str(document.get("control", "")).rpartition(":")
        if control_host in ("0.0.0.0", "[::]", "::"):  # it listens everywhere: where HTTP is, it is too
            control_host = f"[{host}]" if ":" in host else host
        control = f"{control_host}:{control_port}" if control_host else ""
        return ClusterView(tuple(_view(fields) for fields in document["workers"]), control, document)
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"GET /workers: unexpected answer ({error!r})") from None


def _view(fields: dict[str, Any]) -> WorkerView:
    pids = tuple(int(pid) for pid in fields.get("pids", ()))
    return WorkerView(str(fields["id"]), str(fields["role"]), str(fields["state"]), pids, fields)

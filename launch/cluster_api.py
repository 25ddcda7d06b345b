"""What the launcher and `baton ps` ask a running coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from launch.http_json import request_json

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


def root_url(url: str) -> str:
    """`http://host:port` of a URL that may lack its scheme or have a path."""
    return "/".join((url if "//" in url else f"http://{url}").split("/")[:3])


def get_workers(url: str, timeout_s: float = TIMEOUT_S) -> list[WorkerView]:
    """The workers in GET /workers; raises as `get_cluster`."""
    return list(get_cluster(url, timeout_s).workers)


def get_cluster(url: str, timeout_s: float = TIMEOUT_S) -> ClusterView:
    """GET /workers.

    Raises:
        OSError: no answer, or not the expected one.
    """
    base = root_url(url)
    status, document = request_json("GET", f"{base}/workers", timeout_s)
    if status in (401, 404):
        raise OSError(f"GET /workers: status {status}; where clients need API keys, operators ask --admin-port (8103)")
    if status != 200:
        raise OSError(f"GET /workers: status {status}")
    try:
        control_host, _, control_port = str(document.get("control", "")).rpartition(":")
        if control_host in ("0.0.0.0", "[::]", "::"):  # it listens everywhere: where HTTP is, it is too
            host = urlsplit(base).hostname or ""
            control_host = f"[{host}]" if ":" in host else host
        control = f"{control_host}:{control_port}" if control_host else ""
        return ClusterView(tuple(_view(fields) for fields in document["workers"]), control, document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OSError(f"GET /workers: unexpected answer ({error!r})") from None


def _view(fields: dict[str, Any]) -> WorkerView:
    pids = tuple(int(pid) for pid in fields.get("pids", ()))
    return WorkerView(str(fields["id"]), str(fields["role"]), str(fields["state"]), pids, fields)

"""`baton drain` and `baton flip`: a worker leaves the cluster, or changes its role; and where a coordinator's control
port is, and what an operator's commands authenticate with.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from baton.core.commands import Role
from baton.core.errors import BatonError, StartupError
from baton.core.names import host_port_error
from baton.runtime.admin import drain_worker
from baton.runtime.tls import ClusterTls, read_cluster_tls
from baton.runtime.token_file import read_token
from launch.cluster_api import ClusterView, get_cluster
from launch.console import Console
from launch.run_directory import local_token

GRACE_S = 10.0  # beyond the time for requests: for the last step, and for a worker's preparation for its next role
POLL_S = 0.1


def drain(
    worker: str,
    url: str,
    timeout_s: float,
    next_role: Role | None,
    coordinator: str,
    cluster_token_file: str,
    cluster_tls_dir: str,
) -> int:
    """Drains a worker and waits until it has left, or has joined again in `next_role`; returns the exit code. Raises
    StartupError if the coordinator refuses it or is not there."""
    console = Console()
    try:
        cluster, address, token, tls = control_of(url, coordinator, cluster_token_file, cluster_tls_dir)
        before = _present(cluster, worker)
        drain_worker(address, worker, timeout_s, token, tls=tls, next_role=next_role)
        console.stage(worker, f"draining   for up to {timeout_s:g} s")
        if before is not None and not any(
            row["role"] == before.role and row["state"] == "ready" and row["id"] != worker for row in cluster.workers
        ):
            console.stage(
                worker, f"no other {before.role} worker is ready: requests that need one wait, up to --hold-s"
            )
        deadline = time.monotonic() + timeout_s + GRACE_S
        while (now := _present(cluster := get_cluster(url), worker)) == before or (next_role and now is None):
            if time.monotonic() > deadline:
                late = "not drained yet" if now else f"has not joined again as {next_role} yet"
                console.stage(worker, f"{late}; `baton ps` shows its state")
                return 1
            time.sleep(POLL_S)
    except BatonError as error:
        raise StartupError(error.message) from None
    if next_role is not None and now is not None and now.role != next_role:
        console.stage(worker, f"joined again as {now.role}, not as {next_role}: {_why(before, now)}")
        return 1
    if now is None and any(row["id"] == worker for row in cluster.workers):
        console.stage(worker, "lost: its lease ended before it left; its log says why")
        return 1
    console.stage(worker, f"joined as {next_role}" if next_role else "left")
    return 0


class _Present(NamedTuple):
    """A worker that is not lost; `host` is that of its leader."""

    role: str
    incarnation: int | None
    pids: tuple[int, ...]
    host: str


def _present(cluster: ClusterView, worker: str) -> _Present | None:
    rows = (row for row in cluster.workers if row["id"] == worker and row["state"] != "lost")
    made = (_Present(r["role"], r.get("incarnation"), tuple(r.get("pids", ())), r.get("host", "")) for r in rows)
    return next(made, None)


def _why(before: _Present | None, now: _Present) -> str:
    """Returns why a worker has not the role that it was to take."""
    if before is None or before.pids == now.pids:  # which all containers may have
        return "another command changed its role meanwhile, or its container was started again; its log says which"
    where = ", ".join(map(str, before.pids)) + (f" on {before.host}" if before.host else "")
    return f"its process (pid {where}) ended meanwhile and was started again; its log says why"


class Control(NamedTuple):
    cluster: ClusterView
    address: str
    token: str
    tls: ClusterTls | None


def credentials(
    url: str, coordinator: str, cluster_token_file: str, cluster_tls_dir: str
) -> tuple[str, ClusterTls | None]:
    """Returns the token and the certificate that the options of a command name. Raises StartupError if one of them
    cannot be used."""
    if coordinator and (wrong := host_port_error(coordinator)):
        raise StartupError(f"--coordinator {wrong}")
    return read_token(cluster_token_file or local_token(url)), read_cluster_tls(cluster_tls_dir, "operator")


def control_of(url: str, coordinator: str, cluster_token_file: str, cluster_tls_dir: str) -> Control:
    """Returns the cluster at `url` and its control port, by the options of a command, which may be empty. Raises
    BatonError."""
    token, tls = credentials(url, coordinator, cluster_token_file, cluster_tls_dir)
    cluster = get_cluster(url)
    return Control(cluster, coordinator or cluster.control, token, tls)

"""`baton drain`: takes one worker out of a running cluster and waits until it has left."""

from __future__ import annotations

import time

from baton.core.errors import BatonError, StartupError
from baton.token_file import read_token
from launch.cluster_api import ClusterView, get_cluster
from launch.console import Console
from launch.run_directory import local_token

POLL_S = 0.2
GRACE_S = 10.0


def drain(worker: str, url: str, drain_s: float, token_file: str, coordinator: str = "", tls_dir: str = "") -> int:
    """Returns 0 once the worker has left, 1 when it is still there `GRACE_S` after its time. `coordinator` is the
    control address where the cluster at `url` does not name one that can be reached from here.

    Raises:
        StartupError: no cluster or no such worker, or the coordinator refused.
    """
    from baton.rpc.admin import drain_worker
    from baton.tls_files import read_cluster_tls

    console = Console()
    try:
        view = get_cluster(url)
        incarnation = _incarnation(view, worker)
        token, tls = read_token(token_file or local_token(url)), read_cluster_tls(tls_dir, "operator")
        drain_worker(coordinator or view.control, worker, drain_s, token, tls=tls)
        console.stage(worker, f"draining   for up to {drain_s:g} s")
        deadline = time.monotonic() + drain_s + GRACE_S
        while _incarnation(get_cluster(url), worker) == incarnation:
            if time.monotonic() > deadline:
                console.stage(worker, "still there; `baton ps` shows its state")
                return 1
            time.sleep(POLL_S)
    except BatonError as error:
        raise StartupError(error.message) from None
    console.stage(worker, "left")
    return 0


def _incarnation(view: ClusterView, worker: str) -> object:
    """None when it is not there."""
    return next((w.fields.get("incarnation") for w in view.workers if w.id == worker and w.state != "lost"), None)

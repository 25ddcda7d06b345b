"""An operator's commands to a coordinator: where its control port is, and what they authenticate with."""

from __future__ import annotations

from typing import NamedTuple

from baton.core.errors import StartupError
from baton.core.names import host_port_error
from baton.runtime.tls import ClusterTls, read_cluster_tls
from baton.runtime.token_file import read_token
from launch.cluster_api import ClusterView, get_cluster
from launch.run_directory import local_token


class Control(NamedTuple):
    cluster: ClusterView
    address: str
    token: str
    tls: ClusterTls | None


def control_of(url: str, coordinator: str, cluster_token_file: str, cluster_tls_dir: str) -> Control:
    """Returns the cluster at `url` and its control port, by the options of a command, which may be empty. Raises
    BatonError."""
    if coordinator and (wrong := host_port_error(coordinator)):
        raise StartupError(f"--coordinator {wrong}")
    token, tls = read_token(cluster_token_file or local_token(url)), read_cluster_tls(cluster_tls_dir, "operator")
    cluster = get_cluster(url)
    return Control(cluster, coordinator or cluster.control, token, tls)

"""Topology files for tests, and free ports for them."""

from __future__ import annotations

import socket
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Returns distinct ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def loopback_topology(path: Path, model: Path | str, tensor_parallel: int = 1, options: str = "") -> Path:
    """Writes two nodes, 127.0.0.1 (coordinator, prefill) and 127.0.0.2 (decode; with TP, part of prefill's ranks)."""
    http, grpc, control, rendezvous, link, store = free_ports(6)
    on = 'node = "a"' if tensor_parallel == 1 else 'nodes = ["a", "b"]'
    path.write_text(
        f"""
model = "{model}"
served_model_name = "m"

[options]
device = "cpu"
dtype = "float32"
drain_timeout_s = 10
{options}

[[nodes]]
name = "a"
address = "127.0.0.1"
cores = 2

[[nodes]]
name = "b"
address = "127.0.0.2"
cores = 2

[coordinator]
node = "a"
port = {http}
grpc_port = {grpc}
control_port = {control}

[[prefill]]
{on}
tensor_parallel = {tensor_parallel}
rendezvous_port = {rendezvous if tensor_parallel > 1 else 0}

[[decode]]
node = "b"
link_port = {link}
store_port = {store}
"""
    )
    return path

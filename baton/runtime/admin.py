"""Requests of an operator to a running coordinator, over its control port."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from baton.core.commands import Role
from baton.core.errors import BatonError, NotFound, Unavailable
from baton.runtime.codec import ROLES
from baton.runtime.streams import NO_PROXY
from baton.runtime.tls import ClusterTls, explained
from baton.v1 import worker_pb2, worker_pb2_grpc


def drain_worker(
    address: str,
    worker_id: str,
    drain_s: float,
    token: str,
    timeout_s: float = 5.0,
    tls: ClusterTls | None = None,
    next_role: Role | None = None,
) -> None:
    """Requests the coordinator at `address` to drain a worker, which then ends or joins again in `next_role`; returns
    once the command is queued for the worker.

    Raises:
        NotFound: there is no such worker.
        Unavailable: no coordinator replied within `timeout_s`.
        BatonError: refused; the message is the coordinator's.
    """
    request = worker_pb2.DrainWorkerRequest(worker_id=worker_id, timeout_ms=round(drain_s * 1000), token=token)
    if next_role is not None:
        request.next_role = ROLES[next_role]
    _call(address, "DrainWorker", request, timeout_s, tls)


def set_traffic(
    address: str,
    shares: Mapping[str, float],
    token: str,
    *,
    clear: bool = False,
    timeout_s: float = 5.0,
    tls: ClusterTls | None = None,
) -> dict[str, float]:
    """Requests the coordinator at `address` to set shares of new requests by revision; returns all that are valid now.

    Raises:
        Unavailable: no coordinator replied within `timeout_s`.
        BatonError: refused; the message is the coordinator's.
    """
    request = worker_pb2.SetTrafficRequest(percent=shares, clear=clear, token=token)
    return dict(_call(address, "SetTraffic", request, timeout_s, tls).percent)


def _call(address: str, method: str, request: Any, timeout_s: float, tls: ClusterTls | None) -> Any:
    try:
        with _channel(address, tls) as channel:
            return getattr(worker_pb2_grpc.WorkerControlStub(channel), method)(request, timeout=timeout_s)
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.NOT_FOUND:
            raise NotFound(details) from None
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise Unavailable(f"no reply from a coordinator at {address}: {explained(details)}") from None
        raise BatonError(details) from None


def _channel(address: str, tls: ClusterTls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address, options=[NO_PROXY])
    credentials, named = tls.channel("coordinator")
    return grpc.secure_channel(address, credentials, options=[NO_PROXY, *named])

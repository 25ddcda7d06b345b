"""`python -m tests.support.grpc_probe HOST PORT SERVICE`: one probe as a kubelet sends it; exits with 0 if SERVING."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 5

if __name__ == "__main__":
    host, port, service = sys.argv[1:]
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S
            )
        except grpc.RpcError:
            sys.exit(1)
    sys.exit(0 if answer.status == answer.SERVING else 1)

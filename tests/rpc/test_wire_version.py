"""What the wire looks like belongs to a protocol version: workers of two versions refuse each other by that name, while
two that only differ on the wire would end each other."""

from __future__ import annotations

import hashlib

from baton.core.commands import PROTOCOL_VERSION
from baton.transfer.gloo import _HEADER, _WORD
from baton.v1 import kv_pb2, types_pb2, worker_pb2

WIRE = (8, "<8sQQQQ", "<Q", "a6680eab427531c2")


def test_a_changed_wire_has_a_version_of_its_own() -> None:
    """Red? Raise PROTOCOL_VERSION and write down here what it stands for."""
    digest = hashlib.sha256()
    for module in (types_pb2, worker_pb2, kv_pb2):
        digest.update(module.DESCRIPTOR.serialized_pb)
    assert (PROTOCOL_VERSION, _HEADER.format, _WORD.format, digest.hexdigest()[:16]) == WIRE

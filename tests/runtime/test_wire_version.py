"""The wire format belongs to a protocol version: workers of two versions are not paired, while two with one version but
different wire formats would make each other fail."""

from __future__ import annotations

import hashlib

from baton.core.compatibility import PROTOCOL_VERSION
from baton.transfer.gloo import _HEADER, _WORD
from baton.v1 import kv_pb2, types_pb2, worker_pb2

WIRE = (20, "<8sQQQQ", "<Q", "7646a4a875eb4a0b")


def test_a_changed_wire_format_needs_a_new_protocol_version() -> None:
    """If this fails, write the messages of the version before the change (test_adjacent_protocols.py), raise
    PROTOCOL_VERSION and write the new format into WIRE."""
    digest = hashlib.sha256()
    for module in (types_pb2, worker_pb2, kv_pb2):
        digest.update(module.DESCRIPTOR.serialized_pb)
    assert (PROTOCOL_VERSION, _HEADER.format, _WORD.format, digest.hexdigest()[:16]) == WIRE

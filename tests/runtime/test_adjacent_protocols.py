"""Coordinators and workers of adjacent protocol versions understand each other: checked against the messages and the
descriptors of the previous version, as its code wrote them (tests/data/protocol-N.json).

Before PROTOCOL_VERSION is raised, `python -m tests.runtime.test_adjacent_protocols` writes those of the present one.
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from baton.core import commands
from baton.core.codes import ErrorCode
from baton.core.compatibility import PROTOCOL_VERSION, SERVED_VERSIONS
from baton.core.events import (
    GpuUsage,
    HandedOver,
    KVCacheEvents,
    Load,
    Parked,
    SequenceEnded,
    SpeculationCounters,
    StageStamps,
    StepEvents,
    TokenEvent,
)
from baton.core.handover import Handle
from baton.core.kv_layout import KVLayout, LayerKV
from baton.core.request import GenerateRequest, SamplingParams, SequenceId, TokenBias, TokenLogprob
from baton.runtime import codec
from baton.v1 import types_pb2, worker_pb2
from tests.support.builders import make_facts

DATA = Path(__file__).parents[1] / "data"
UP, DOWN = worker_pb2.SessionRequest, worker_pb2.SessionResponse
SEQUENCE = SequenceId("r", 1, 3)
STAMPS = StageStamps(0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
SPECULATION = SpeculationCounters(5, 20, 11, forced=True)
LOGPROB = TokenLogprob(7, -0.5, 2, (3, 7), (-0.25, -0.5))
LAYOUT = KVLayout(16, (LayerKV(2, 8, "float32"), LayerKV(2, 8, "float32", window=128)))
FACTS = make_facts(layout=LAYOUT, exact=True, quantize="int8", tokenizer_digest="t", protocol_version=19)
LOAD = Load(9, 4, 1, 2, 30, 40, speculation=SPECULATION, step_s=0.5)
HANDLE = Handle(SEQUENCE, "p0", 1, "d0", 2, expires_ms=5000, nonce=b"n" * 12, signature=b"s" * 32)
TARGET = commands.Target("d0", 2, "10.0.0.1:1", HANDLE)
SAMPLING = SamplingParams(
    temperature=0.5,
    top_p=0.9,
    top_k=5,
    seed=1 << 63,
    min_p=0.1,
    repetition_penalty=1.5,
    frequency_penalty=-0.0,
    presence_penalty=0.25,
    logit_bias=(TokenBias(3, -1.5),),
    min_tokens=2,
    stop_token_ids=(4,),
    bad_words=((1, 2), (3,)),
    allowed_token_ids=(1, 2, 3, 4),
    logprobs=0,
    prompt_logprobs=3,
    grammar="g",
)
REQUEST = GenerateRequest(
    *("r", (1, 2, 3), 8, SAMPLING, (0,), (5,), 1, 3, 1.5, "t", -2, "salt"), alone=True, adapter="a" * 32
)
VALUES: dict[str, tuple[type, object]] = {
    "join": (
        UP,
        commands.Join(
            *("d0", "decode", 5, FACTS, "10.0.0.1:1", "10.0.0.1", (11, 12), 9, 64, 32, "run", "token"),
            replace=True,
            tensor_parallel=2,
            both_roles=True,
            revision="v2",
        ),
    ),
    "events": (
        UP,
        StepEvents(
            3,
            (
                TokenEvent(SEQUENCE, 4, (5, 6), (LOGPROB, LOGPROB), (LOGPROB,), 16, SPECULATION, STAMPS),
                TokenEvent(SEQUENCE, 0, (), pooled=b"\0" * 8),
            ),
            (SequenceEnded(SEQUENCE, "error", ErrorCode.KV_CORRUPT, "damaged", STAMPS),),
            (Parked(SEQUENCE, "full"),),
            (HandedOver(SEQUENCE, "d0", 100, STAMPS),),
            LOAD,
            KVCacheEvents((b"12345678",), (b"87654321",), cleared=True),
            SEQUENCE,
        ),
    ),
    "heartbeat": (UP, commands.Heartbeat(4, LOAD, GpuUsage(1 << 30, 1 << 40, 0.5))),
    "drained": (UP, commands.Drained()),
    "leave": (UP, commands.Leave(30.0)),
    "adapter_states": (UP, commands.AdapterStates(("a" * 32,), (commands.AdapterFailure("b" * 32, "no"),))),
    "welcome": (
        DOWN,
        commands.Welcome("run", 3.0, 0.75, b"k" * 32, (commands.TrackedSequence(SEQUENCE, 4, here=False),), 12),
    ),
    "prefill": (DOWN, commands.Prefill(REQUEST, (TARGET,))),
    "assign": (DOWN, commands.Assign(SEQUENCE, (TARGET,), 4)),
    "abort": (DOWN, commands.Abort(SEQUENCE, "late", 60.0)),
    "drain": (DOWN, commands.Drain(30.0, "prefill")),
    "heartbeat_ack": (DOWN, commands.HeartbeatAck(4)),
    "release": (DOWN, commands.ReleaseRecords((SEQUENCE,))),
    "set_adapters": (DOWN, commands.SetAdapters((commands.AdapterSource("a" * 32, "/a"),), 64)),
}
"""Each message of a session, with the fields of the previous version."""
NEW: dict[str, dict[str, Any]] = {}
"""Fields that this version added; their absence means what it meant before."""


def write() -> None:
    files = (types_pb2, worker_pb2)
    document = {
        "descriptors": [base64.b64encode(file.DESCRIPTOR.serialized_pb).decode() for file in files],
        "frames": {
            name: base64.b64encode(codec.wrap(envelope, value).SerializeToString(deterministic=True)).decode()
            for name, (envelope, value) in VALUES.items()
        },
    }
    path = DATA / f"protocol-{PROTOCOL_VERSION}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")


class Before:
    """The previous version."""

    def __init__(self) -> None:
        document = json.loads((DATA / f"protocol-{PROTOCOL_VERSION - 1}.json").read_text())
        self.frames = {name: base64.b64decode(frame) for name, frame in document["frames"].items()}
        self._pool = descriptor_pool.DescriptorPool()
        for content in document["descriptors"]:
            self._pool.Add(FileDescriptorProto.FromString(base64.b64decode(content)))  # type: ignore[attr-defined]

    def message(self, name: str) -> Any:
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"baton.v1.{name}"))


@pytest.fixture(scope="module")
def before() -> Before:
    return Before()


def test_every_message_of_a_session_is_covered(before: Before) -> None:
    arms = {field.name for envelope in (UP, DOWN) for field in envelope.DESCRIPTOR.oneofs_by_name["message"].fields}
    assert arms == set(VALUES) == set(before.frames)
    assert PROTOCOL_VERSION - 1 in SERVED_VERSIONS and PROTOCOL_VERSION + 1 in SERVED_VERSIONS


@pytest.mark.parametrize("name", VALUES)
def test_messages_of_the_previous_version_are_read_as_they_were_meant(before: Before, name: str) -> None:
    envelope, value = VALUES[name]
    assert codec.unwrap(envelope.FromString(before.frames[name])) == value  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", VALUES)
def test_the_previous_version_reads_ours_as_its_own(before: Before, name: str) -> None:
    envelope, value = VALUES[name]
    ours = codec.wrap(envelope, replace(value, **NEW.get(name, {}))).SerializeToString()  # type: ignore[type-var]
    theirs = before.message(envelope.__name__)
    read = theirs.FromString(ours)
    read.DiscardUnknownFields()
    assert read == theirs.FromString(before.frames[name])


@pytest.mark.parametrize("name", ["SequenceRequest", "SamplingParams"])
def test_no_field_of_a_request_is_new(before: Before, name: str) -> None:
    """An older worker would ignore it and generate something else. If this fails, place requests with the new field
    only in classes of this protocol version (coordinator/policy/workers.py), and test that here."""
    known = {field.name for field in before.message(name).DESCRIPTOR.fields}
    assert {field.name for field in getattr(types_pb2, name).DESCRIPTOR.fields} == known


if __name__ == "__main__":
    write()

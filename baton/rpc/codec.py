"""Core values <-> protobuf: the only place where the two meet.

A core dataclass and its message have the same field names, so one walk over the fields serves all. The exceptions are
few: durations are seconds (`x_s`, float) in the core and milliseconds (`x_ms`, int) on the wire, the request's
sampling and identity are grouped otherwise, and enum and literal names differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from google.protobuf.message import Message

from baton.core import commands, events, handles, handover, kv_layout, request
from baton.core.errors import InvalidRequest
from baton.v1 import kv_pb2, types_pb2, worker_pb2

_ROLES = {"prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE}

_MESSAGES: dict[type, type[Message]] = {
    request.SequenceId: types_pb2.SequenceId,
    request.SamplingParams: types_pb2.SamplingParams,
    request.TokenLogprob: types_pb2.TokenLogprob,
    request.GenerateRequest: types_pb2.SequenceRequest,
    handles.Handle: types_pb2.Handle,
    kv_layout.LayerKV: types_pb2.LayerLayout,
    kv_layout.KVLayout: types_pb2.KVLayout,
    events.StageStamps: types_pb2.StageStamps,
    events.SpeculationCounters: types_pb2.SpeculationCounters,
    events.GpuUsage: worker_pb2.GpuUsage,
    events.TokenEvent: worker_pb2.TokenEvent,
    events.SequenceEnded: worker_pb2.SequenceEnded,
    events.Parked: worker_pb2.Parked,
    events.HandedOver: worker_pb2.HandedOver,
    events.Load: worker_pb2.Load,
    events.StepEvents: worker_pb2.StepEvents,
    events.KVCacheEvents: worker_pb2.KVCacheEvents,
    commands.WorkerFacts: worker_pb2.WorkerFacts,
    commands.Join: worker_pb2.Join,
    commands.Following: worker_pb2.Following,
    commands.Welcome: worker_pb2.Welcome,
    commands.Target: worker_pb2.Target,
    commands.Prefill: worker_pb2.Prefill,
    commands.Assign: worker_pb2.Assign,
    commands.Abort: worker_pb2.Abort,
    commands.Release: worker_pb2.Release,
    commands.Drain: worker_pb2.Drain,
    commands.Leave: worker_pb2.Leave,
    commands.Drained: worker_pb2.Drained,
    commands.Heartbeat: worker_pb2.Heartbeat,
    commands.HeartbeatAck: worker_pb2.HeartbeatAck,
    handover.LinkHello: kv_pb2.LinkHello,
    handover.LinkWelcome: kv_pb2.LinkWelcome,
    handover.EdgeOpen: kv_pb2.EdgeOpen,
    handover.EdgeReady: kv_pb2.EdgeReady,
    handover.Ping: kv_pb2.Ping,
    handover.Offer: kv_pb2.Offer,
    handover.Accept: kv_pb2.Accept,
    handover.Refuse: kv_pb2.Refuse,
    handover.Chunk: kv_pb2.Chunk,
    handover.Posted: kv_pb2.Posted,
    handover.Ack: kv_pb2.Ack,
    handover.AbortTransfer: kv_pb2.AbortTransfer,
}
_CORE = {message: core for core, message in _MESSAGES.items()}
_CORE_BY_NAME = {message.DESCRIPTOR.full_name: core for core, message in _MESSAGES.items()}
_OPTIONAL = (
    events.Load,
    events.KVCacheEvents,
    events.SpeculationCounters,
    events.GpuUsage,
    request.TokenLogprob,
)  # messages that may be missing

# Field of the oneof `message` that carries a value, per envelope.
_ENVELOPES: dict[type[Message], dict[type, str]] = {
    worker_pb2.SessionRequest: {
        commands.Join: "join",
        events.StepEvents: "events",
        commands.Heartbeat: "heartbeat",
        commands.Drained: "drained",
        commands.Leave: "leave",
    },
    worker_pb2.SessionResponse: {
        commands.Welcome: "welcome",
        commands.Prefill: "prefill",
        commands.Assign: "assign",
        commands.Abort: "abort",
        commands.Drain: "drain",
        commands.HeartbeatAck: "heartbeat_ack",
        commands.Release: "release",
    },
    kv_pb2.LinkRequest: {
        handover.LinkHello: "hello",
        handover.Offer: "offer",
        handover.Chunk: "chunk",
        handover.AbortTransfer: "abort",
        handover.EdgeOpen: "edge_open",
        handover.Ping: "ping",
    },
    kv_pb2.LinkResponse: {
        handover.LinkWelcome: "welcome",
        handover.Accept: "accept",
        handover.Refuse: "refuse",
        handover.Posted: "posted",
        handover.Ack: "ack",
        handover.AbortTransfer: "abort",
        handover.EdgeReady: "edge_ready",
        handover.Ping: "pong",
    },
}


def wrap(envelope: type[Message], value: object) -> Any:
    """`value` in the right arm of a stream's envelope."""
    return envelope(**{_ENVELOPES[envelope][type(value)]: to_message(value)})


def unwrap(message: Message) -> Any:
    """The core value in an envelope.

    Raises:
        InvalidRequest: the envelope is empty, or a value in it cannot be.
    """
    arm = message.WhichOneof("message")
    if arm is None:
        raise InvalidRequest(f"{type(message).__name__} carries nothing this version knows", param="message")
    return from_message(getattr(message, arm))


def to_message(value: Any) -> Any:
    """The protobuf twin of a core value."""
    return _writer(type(value))(value)  # type: ignore[arg-type]


def from_message(message: Any) -> Any:
    """The core twin of a protobuf message.

    Raises:
        InvalidRequest: an enum or identity that cannot be.
    """
    return _reader(_CORE[type(message)])(message)


# What a field needs is found out once per class; a message then costs its fields. Messages pass here at every step.


@cache
def _writer(core: type) -> Callable[[Any], Any]:
    """The function that makes the message of a `core`."""
    if core in _WRITTEN_BY_HAND:
        return _WRITTEN_BY_HAND[core]
    message = _MESSAGES[core]
    known = message.DESCRIPTOR.fields_by_name
    steps = [(name, *_field_writer(name, known.get(name))) for name in _field_names(core)]

    def write(value: Any) -> Any:
        out: dict[str, Any] = {}
        for name, on_wire, same_if_left_out, convert in steps:
            item = getattr(value, name)
            if item is None or (same_if_left_out and not item):
                continue
            out[on_wire] = item if convert is None else convert(item)
        return message(**out)

    return write


def _field_writer(name: str, field: Any) -> tuple[str, bool, Callable[[Any], Any] | None]:
    """The name of a field on the wire, whether nothing (0, empty) may be left out, and what turns it into wire form.
    A zero of a float may be -0.0, and one of a field with presence says something."""
    if field is None:
        return name.removesuffix("_s") + "_ms", False, _milliseconds
    if name == "role":
        return name, False, _ROLES.__getitem__
    if field.message_type is not None:
        write = _writer(_CORE_BY_NAME[field.message_type.full_name])
        return (
            (name, True, lambda items: [write(item) for item in items]) if field.is_repeated else (name, False, write)
        )
    is_float = field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE)
    return name, field.is_repeated or not (field.has_presence or is_float), None


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))


@cache
def _reader(core: type) -> Callable[[Any], Any]:
    """The function that makes a `core` of its message."""
    if core in _READ_BY_HAND:
        return _READ_BY_HAND[core]
    known = _MESSAGES[core].DESCRIPTOR.fields_by_name
    reads = [_field_reader(name, known.get(name)) for name in _field_names(core)]
    return lambda message: core(*[read(message) for read in reads])


def _field_reader(name: str, field: Any) -> Callable[[Any], Any]:
    """What reads one field of a message."""
    if field is None:
        in_ms = attrgetter(name.removesuffix("_s") + "_ms")
        return lambda message: in_ms(message) / 1000
    get = attrgetter(name)
    if name == "role":
        return lambda message: _role(get(message))
    if field.message_type is None:
        if field.is_repeated:  # a slice: iterating costs four times as much
            return lambda message: tuple(get(message)[:])
        if not field.has_presence:
            return get
        missing = 0.0 if name.endswith("_s") else None
        return lambda message: get(message) if message.HasField(name) else missing
    core = _CORE_BY_NAME[field.message_type.full_name]
    read = _reader(core)
    if field.is_repeated:
        return lambda message: tuple([read(item) for item in items[:]]) if (items := get(message)) else ()
    if core in _OPTIONAL:
        return lambda message: read(get(message)) if message.HasField(name) else None
    if core is events.StageStamps:
        return lambda message: read(get(message)) if message.HasField(name) else core()

    def read_needed(message: Any) -> Any:
        if not message.HasField(name):
            raise InvalidRequest(f"{type(message).__name__} has no {name}", param=name)
        return read(get(message))

    return read_needed


def _role(number: int) -> str:
    for role, known in _ROLES.items():
        if known == number:
            return role
    raise InvalidRequest(f"unknown role {number}", param="role")


@cache
def _field_names(core: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(core)) if is_dataclass(core) else core._fields  # type: ignore[attr-defined]


_MASK_64 = (1 << 64) - 1


def _signed(pattern: int) -> int:
    """A 64-bit pattern as the int64 that the wire carries."""
    return pattern - (1 << 64) if pattern >> 63 else pattern


_NEUTRAL = request.SamplingParams()
_PLAIN_SAMPLING = tuple(
    name for name in _field_names(request.SamplingParams) if name not in ("seed", "logit_bias", "bad_words")
)


def _sampling_message(s: request.SamplingParams) -> types_pb2.SamplingParams:
    plain = {name: getattr(s, name) for name in _PLAIN_SAMPLING if getattr(s, name) != getattr(_NEUTRAL, name)}
    return types_pb2.SamplingParams(
        **plain,
        seed=_signed(s.seed),
        logit_bias=dict(s.logit_bias),
        bad_words=[types_pb2.TokenIds(ids=ids) for ids in s.bad_words],
    )


def _sampling_value(s: types_pb2.SamplingParams) -> request.SamplingParams:
    """Every hop checks what it takes in: a field that this version does not serve is refused by name, not ignored.
    (`ignore_eos` is the front's: workers are told which tokens end a choice.)"""
    given: dict[str, Any] = {}
    for field, value in s.ListFields():
        if field.name in _PLAIN_SAMPLING:
            given[field.name] = tuple(value) if field.is_repeated else value
        elif field.name not in ("seed", "logit_bias", "bad_words"):
            raise InvalidRequest(f"sampling field {field.name} is not served by this version", param=field.name)
    return request.SamplingParams(
        **given,
        seed=s.seed & _MASK_64,
        logit_bias=tuple(request.TokenBias(token, s.logit_bias[token]) for token in sorted(s.logit_bias)),
        bad_words=tuple(tuple(word.ids) for word in s.bad_words),
    )


def _request_message(value: request.GenerateRequest) -> types_pb2.SequenceRequest:
    return types_pb2.SequenceRequest(
        sequence=to_message(value.sequence_id),
        prompt=value.prompt,
        output=value.output,
        max_tokens=value.max_tokens,
        sampling=_sampling_message(value.sampling),
        eos_token_ids=value.eos_token_ids,
        deadline_ms=max(0, round(value.deadline_s * 1000)),
        tenant=value.tenant,
        priority=value.priority,
        cache_salt=value.cache_salt,
    )


def _request_value(message: types_pb2.SequenceRequest) -> request.GenerateRequest:
    if not message.HasField("sequence"):
        raise InvalidRequest("SequenceRequest has no sequence", param="sequence")
    if not message.prompt or message.max_tokens < 1:
        raise InvalidRequest("a sequence needs a prompt and at least one token to generate", param="prompt")
    return request.GenerateRequest(
        request_id=message.sequence.request_id,
        choice=message.sequence.choice,
        attempt=message.sequence.attempt,
        prompt=tuple(message.prompt),
        output=tuple(message.output),
        max_tokens=message.max_tokens,
        sampling=_sampling_value(message.sampling),
        eos_token_ids=tuple(message.eos_token_ids),
        deadline_s=message.deadline_ms / 1000,
        tenant=message.tenant,
        priority=message.priority,
        cache_salt=message.cache_salt,
    )


def _token_event_value(message: worker_pb2.TokenEvent) -> events.TokenEvent:
    """By hand: a coordinator reads one for every sequence in every step."""
    if not message.HasField("sequence"):
        raise InvalidRequest("TokenEvent has no sequence", param="sequence")
    sequence = message.sequence
    return events.TokenEvent(
        request.SequenceId(sequence.request_id, sequence.choice, sequence.attempt),
        message.first_index,
        tuple(message.tokens[:]),
        _token_logprobs(message.logprobs) if message.logprobs else (),
        _token_logprobs(message.prompt_logprobs) if message.prompt_logprobs else (),
        message.cached_tokens,
        _reader(events.SpeculationCounters)(message.speculation) if message.HasField("speculation") else None,
        _reader(events.StageStamps)(message.stamps) if message.HasField("stamps") else None,
    )


def _token_logprobs(entries: Any) -> tuple[request.TokenLogprob, ...]:
    read = _reader(request.TokenLogprob)
    return tuple([read(entry) for entry in entries])


_WRITTEN_BY_HAND: dict[type, Callable[[Any], Any]] = {
    request.GenerateRequest: _request_message,
    request.SamplingParams: _sampling_message,
}
_READ_BY_HAND: dict[type, Callable[[Any], Any]] = {
    request.GenerateRequest: _request_value,
    request.SamplingParams: _sampling_value,
    events.TokenEvent: _token_event_value,
}

"""Core values <-> protobuf: the only place where the two are converted.

A core dataclass and its message have the same field names, so one generic conversion over the fields serves all, with
few exceptions: durations are seconds (`x_s`, float) in the core and milliseconds (`x_ms`, int) on the wire, the
request's sampling and identity are grouped differently, and enum and literal names differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from google.protobuf.message import Message

from baton.core import commands, compatibility, events, handover, kv_layout, request
from baton.core.codes import ErrorCode
from baton.core.errors import InvalidRequest
from baton.v1 import kv_pb2, types_pb2, worker_pb2

MAX_LAYERS = 4096
"""Of a KV layout, which a peer sends before its token is checked: a layer takes 5 us to read."""
ROLES: dict[commands.Role, worker_pb2.Role] = {"prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE}

_CODES = {code: types_pb2.ErrorCode.Value(f"ERROR_CODE_{code.name}") for code in ErrorCode}
_CODE_OF = {number: code for code, number in _CODES.items()}

_FILES = (types_pb2, worker_pb2, kv_pb2)
_MODULES = (commands, compatibility, events, handover, kv_layout, request)
_RENAMED = {"LayerLayout": kv_layout.LayerKV, "SequenceRequest": request.GenerateRequest}


def _pairs() -> Iterator[tuple[type, type[Message]]]:
    """Yields each core class that has a message, with it: both have the same name, or _RENAMED pairs them."""
    for file in _FILES:
        for name in file.DESCRIPTOR.message_types_by_name:
            core = _RENAMED.get(name) or next((getattr(m, name) for m in _MODULES if hasattr(m, name)), None)
            if core is not None:
                yield core, getattr(file, name)


_MESSAGES = dict(_pairs())
_CORE: dict[Any, type] = {message.DESCRIPTOR: core for core, message in _MESSAGES.items()}

# Per envelope, which field of the oneof `message` carries a value of a core class.
_ENVELOPES: dict[type[Message], dict[type, str]] = {
    envelope: {_CORE[arm.message_type]: arm.name for arm in envelope.DESCRIPTOR.oneofs_by_name["message"].fields}
    for envelope in (worker_pb2.SessionRequest, worker_pb2.SessionResponse, kv_pb2.LinkRequest, kv_pb2.LinkResponse)
}


def wrap(envelope: type[Message], value: object) -> Any:
    """Returns a stream's envelope with `value` in the matching oneof field."""
    return envelope(**{_ENVELOPES[envelope][type(value)]: to_message(value)})


def unwrap(message: Message) -> Any:
    """Returns the core value in an envelope.

    Raises:
        InvalidRequest: the envelope is empty, or a value in it is invalid.
    """
    arm = message.WhichOneof("message")
    if arm is None:
        raise InvalidRequest(f"{type(message).__name__} has no message that this version supports", param="message")
    return from_message(getattr(message, arm))


def to_message(value: Any) -> Any:
    """Returns the protobuf message of a core value."""
    return _writer(type(value))(value)  # type: ignore[arg-type]


def from_message(message: Any) -> Any:
    """Returns the core value of a protobuf message.

    Raises:
        InvalidRequest: a value is invalid, missing or not supported.
    """
    return _reader(_CORE[message.DESCRIPTOR])(message)


# Conversions are built once per class, so a message costs only its fields: messages are converted in every step.


@cache
def _writer(core: type) -> Callable[[Any], Any]:
    """Returns the function that makes the message of a `core`."""
    if core is request.SamplingParams:
        return _sampling_message
    message = _MESSAGES[core]
    known = message.DESCRIPTOR.fields_by_name
    steps = [(name, *_field_writer(name, known.get(name))) for name in _plain_fields(core)]
    if core is request.GenerateRequest:
        steps.append(("sequence_id", "sequence", False, _writer(request.SequenceId)))

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
    """Returns a field's name on the wire, whether a zero or empty value may be omitted, and the conversion to wire
    form. Not omitted: a float zero, which may be -0.0, and the zero of a field with presence, which is not absence."""
    if field is None:
        return name.removesuffix("_s") + "_ms", False, _milliseconds
    if field.enum_type is worker_pb2.Role.DESCRIPTOR:
        return name, False, ROLES.__getitem__
    if field.enum_type is not None:
        return name, False, _CODES.__getitem__
    if field.message_type is not None:
        write = _writer(_CORE[field.message_type])
        return (
            (name, True, lambda items: [write(item) for item in items]) if field.is_repeated else (name, False, write)
        )
    is_float = field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE)
    return name, field.is_repeated or not (field.has_presence or is_float), None


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))


@cache
def _reader(core: type) -> Callable[[Any], Any]:
    """Returns the function that makes a `core` from its message."""
    if core in _READ_BY_HAND:
        return _READ_BY_HAND[core]
    reads = [read for _, read in _field_readers(core)]
    return lambda message: core(*[read(message) for read in reads])


@cache
def _field_readers(core: type) -> list[tuple[str, Callable[[Any], Any]]]:
    known = _MESSAGES[core].DESCRIPTOR.fields_by_name
    return [(name, _field_reader(name, known.get(name), default)) for name, default in _plain_fields(core).items()]


def _field_reader(name: str, field: Any, default: Any) -> Callable[[Any], Any]:
    """Returns what reads one field of a message. A missing field gets the core's default, or is refused by name."""
    if field is None:
        in_ms = attrgetter(name.removesuffix("_s") + "_ms")
        return lambda message: in_ms(message) / 1000
    get = attrgetter(name)
    if field.enum_type is worker_pb2.Role.DESCRIPTOR:
        return lambda message: None if default is None and not get(message) else role_of(get(message), name)
    if field.enum_type is not None:
        return lambda message: _code(get(message), default)
    if field.message_type is None:
        if field.is_repeated:  # a slice: iterating costs four times as much
            return lambda message: tuple(get(message)[:])
        return get if not field.has_presence else lambda message: get(message) if message.HasField(name) else default
    read = _reader(_CORE[field.message_type])
    if field.is_repeated:
        return lambda message: tuple([read(item) for item in items[:]]) if (items := get(message)) else ()
    if default is not MISSING:
        return lambda message: read(get(message)) if message.HasField(name) else default

    def read_needed(message: Any) -> Any:
        if not message.HasField(name):
            raise InvalidRequest(f"{message.DESCRIPTOR.name} has no {name}", param=name)
        return read(get(message))

    return read_needed


def role_of(number: int, name: str = "next_role") -> commands.Role:
    """Returns the role that a message's field `name` has. Raises InvalidRequest if there is none of that number."""
    for role, known in ROLES.items():
        if known == number:
            return role
    raise InvalidRequest(f"unknown role {number}", param=name)


def _code(number: int, default: Any) -> ErrorCode | None:
    """Returns the code of a number; an unset one is the core's default, if it has one."""
    return None if not number and default is None else _CODE_OF.get(number, ErrorCode.INTERNAL_ERROR)


def _plain_fields(core: type) -> dict[str, Any]:
    """Returns the fields of a core class that its message has too, each with its default or MISSING: not those that
    follow from others."""
    if not is_dataclass(core):
        return {name: core._field_defaults.get(name, MISSING) for name in core._fields}  # type: ignore[attr-defined]
    given = [f for f in fields(core) if f.init]
    named = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in given}
    if core is request.GenerateRequest:  # these are one field of its message, `sequence`
        for name in request.SequenceId._fields:
            del named[name]
    return named


_MASK_64 = (1 << 64) - 1


def _signed(pattern: int) -> int:
    """Returns a 64-bit pattern as the int64 that the wire carries."""
    return pattern - (1 << 64) if pattern >> 63 else pattern


_NEUTRAL = request.SamplingParams()
_PLAIN_SAMPLING = _plain_fields(request.SamplingParams).keys() - {"seed", "logit_bias", "bad_words"}


def _sampling_message(s: request.SamplingParams) -> types_pb2.SamplingParams:
    plain = {name: getattr(s, name) for name in _PLAIN_SAMPLING if getattr(s, name) != getattr(_NEUTRAL, name)}
    return types_pb2.SamplingParams(
        **plain,
        seed=_signed(s.seed),
        logit_bias=dict(s.logit_bias),
        bad_words=[types_pb2.TokenIds(ids=ids) for ids in s.bad_words],
    )


def _sampling_value(s: types_pb2.SamplingParams) -> request.SamplingParams:
    """Every process validates what it receives: a field that this version does not support is refused by name, not
    ignored. (The front resolves `ignore_eos`: workers receive the tokens that end a choice.)"""
    given: dict[str, Any] = {}
    for field, value in s.ListFields():
        if field.name in _PLAIN_SAMPLING:
            given[field.name] = tuple(value) if field.is_repeated else value
        elif field.name not in ("seed", "logit_bias", "bad_words"):
            raise InvalidRequest(f"sampling field {field.name} is not supported by this version", param=field.name)
    return request.SamplingParams(
        **given,
        seed=s.seed & _MASK_64,
        logit_bias=tuple(request.TokenBias(token, s.logit_bias[token]) for token in sorted(s.logit_bias)),
        bad_words=tuple(tuple(word.ids) for word in s.bad_words),
    )


def _request_value(message: types_pb2.SequenceRequest) -> request.GenerateRequest:
    if not message.HasField("sequence"):
        raise InvalidRequest("SequenceRequest has no sequence", param="sequence")
    if not message.prompt or message.max_tokens < 1:
        raise InvalidRequest("a sequence needs a prompt and at least one token to generate", param="prompt")
    if message.pooling and message.pooling not in request.POOLINGS:
        raise InvalidRequest(f"pooling {message.pooling[:40]!r} is not supported by this version", param="pooling")
    named = {name: read(message) for name, read in _field_readers(request.GenerateRequest)}
    return request.GenerateRequest(**from_message(message.sequence)._asdict(), **named)


def _token_event_value(message: worker_pb2.TokenEvent) -> events.TokenEvent:
    """By hand, bypassing the tuples' constructors: the coordinator reads one message per sequence and step."""
    has = message.HasField
    if not has("sequence"):
        raise InvalidRequest("TokenEvent has no sequence", param="sequence")
    sequence = message.sequence
    values = (
        _new_tuple(request.SequenceId, (sequence.request_id, sequence.choice, sequence.attempt)),
        message.first_index,
        tuple(message.tokens[:]),
        _token_logprobs(message.logprobs) if message.logprobs else (),
        _token_logprobs(message.prompt_logprobs) if message.prompt_logprobs else (),
        message.cached_tokens,
        _reader(events.SpeculationCounters)(message.speculation) if has("speculation") else None,
        _reader(events.StageStamps)(message.stamps) if has("stamps") else None,
        message.pooled,
    )
    return _new_tuple(events.TokenEvent, values)


_new_tuple = tuple.__new__


def _token_logprobs(entries: Any) -> tuple[request.TokenLogprob, ...]:
    read = _reader(request.TokenLogprob)
    return tuple([read(entry) for entry in entries])


def _layout_value(message: types_pb2.KVLayout) -> kv_layout.KVLayout:
    if len(message.layers) > MAX_LAYERS:
        raise InvalidRequest(f"the KV layout has {len(message.layers)} layers, above {MAX_LAYERS}", param="layers")
    read = _reader(kv_layout.LayerKV)
    return kv_layout.KVLayout(message.block_size, tuple([read(layer) for layer in message.layers]))


_READ_BY_HAND: dict[type, Callable[[Any], Any]] = {
    kv_layout.KVLayout: _layout_value,
    request.GenerateRequest: _request_value,
    request.SamplingParams: _sampling_value,
    events.TokenEvent: _token_event_value,
}

"""Core <-> protobuf: no value is lost or guessed, and an invalid message is refused in one way."""

from __future__ import annotations

import contextlib
import math
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core import commands, handover, kv_layout, request
from baton.core.codes import ErrorCode
from baton.core.errors import InvalidRequest
from baton.runtime import codec
from baton.v1 import kv_pb2, types_pb2, worker_pb2
from tests.support.builders import make_layout, make_request

INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
NATURAL = st.integers(0, (1 << 31) - 1)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
# Durations travel in whole milliseconds.
SECONDS = st.integers(0, 10**9).map(lambda ms: ms / 1000)
WIRE = codec._MESSAGES


def values(core: type) -> st.SearchStrategy[Any]:
    """Any value of a core dataclass or named tuple, according to its annotations."""
    hints = get_type_hints(core)
    descriptor = WIRE[core].DESCRIPTOR.fields_by_name
    names = [f.name for f in fields(core) if f.init] if is_dataclass(core) else core._fields  # type: ignore[attr-defined]
    by_hand = {"seed", "logit_bias", "bad_words"} if core is request.SamplingParams else set()
    parts = {name: field(hints[name], descriptor.get(name)) for name in names if name not in by_hand}
    if core is request.SamplingParams:
        biases = st.dictionaries(NATURAL, FINITE, max_size=3)
        parts["seed"] = st.integers(0, (1 << 64) - 1)
        parts["logit_bias"] = biases.map(lambda b: tuple(request.TokenBias(i, b[i]) for i in sorted(b)))
        parts["bad_words"] = st.lists(st.lists(NATURAL, max_size=3).map(tuple), max_size=2).map(tuple)
    if core is request.TokenLogprob:
        parts |= {"logprob": FLOAT32, "top_logprobs": st.lists(FLOAT32, max_size=3).map(tuple)}
    if core is request.GenerateRequest:
        parts |= {
            "prompt": st.lists(NATURAL, min_size=1, max_size=4).map(tuple),
            "max_tokens": st.integers(1, 1000),
            "attempt": NATURAL,
            "choice": NATURAL,
        }
    return st.builds(core, **parts)


def field(hint: Any, on_wire: Any) -> st.SearchStrategy[Any]:
    arguments = get_args(hint)
    if get_origin(hint) is tuple:
        return st.lists(field(arguments[0], on_wire), max_size=3).map(tuple)
    if get_origin(hint) is Literal:
        return st.sampled_from(arguments)
    if type(None) in arguments:
        return st.none() | field(Union[tuple(a for a in arguments if a is not type(None))], on_wire)  # noqa: UP007
    if hint in WIRE:
        return values(hint)
    if hint is ErrorCode:
        return st.sampled_from(ErrorCode)
    if hint is float:
        return SECONDS if on_wire is None else FINITE
    if hint is int:
        kinds = {"fixed64": st.integers(0, (1 << 64) - 1), "int64": INT64}
        return INT32 if on_wire is None else kinds.get(kind(on_wire), INT32)
    return {str: TEXT, bytes: st.binary(max_size=8), bool: st.booleans()}[hint]


def kind(on_wire: Any) -> str:
    return {on_wire.TYPE_FIXED64: "fixed64", on_wire.TYPE_INT64: "int64"}.get(on_wire.type, "int32")


@pytest.mark.parametrize("core", list(WIRE), ids=lambda c: c.__name__)
@settings(max_examples=12)
@given(data=st.data())
def test_every_value_is_unchanged_by_a_round_trip_over_the_wire(core: type, data: st.DataObject) -> None:
    value = data.draw(values(core))
    again = WIRE[core].FromString(codec.to_message(value).SerializeToString())
    assert codec.from_message(again) == value


def test_a_zero_keeps_its_sign() -> None:
    value = request.TokenLogprob(1, -0.0, 1)
    assert math.copysign(1.0, codec.from_message(codec.to_message(value)).logprob) == -1.0


@pytest.mark.parametrize("core", list(WIRE), ids=lambda c: c.__name__)
def test_every_core_field_is_on_the_wire_under_its_name(core: type) -> None:
    known = set(WIRE[core].DESCRIPTOR.fields_by_name)
    for name in codec._plain_fields(core):
        assert name in known or (name.endswith("_s") and name.removesuffix("_s") + "_ms" in known), name


# Wire fields that later versions serve; every other one has its core twin.
LATER = {
    "SamplingParams": {"ignore_eos"},
    "SequenceRequest": {"sequence"},  # its parts are fields of the core's request
    "SequenceEnded": {"speculation"},
}


@pytest.mark.parametrize("core", list(WIRE), ids=lambda c: c.__name__)
def test_every_wire_field_has_a_core_field_or_is_listed_as_unserved(core: type) -> None:
    message = WIRE[core]
    names = set(codec._plain_fields(core))
    names |= {name.removesuffix("_s") + "_ms" for name in names}
    assert set(message.DESCRIPTOR.fields_by_name) - names == LATER.get(message.DESCRIPTOR.name, set())


@pytest.mark.parametrize("seed", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_seed_is_a_64_bit_pattern(seed: int) -> None:
    value = make_request(seed=seed)
    assert codec.from_message(codec.to_message(value)).sampling.seed == seed


UNSERVED: dict[str, Any] = {"ignore_eos": False}


def test_the_list_of_unserved_sampling_fields_is_complete() -> None:
    assert set(UNSERVED) == LATER["SamplingParams"]


@pytest.mark.parametrize("name", list(UNSERVED))
def test_an_unserved_sampling_field_is_refused_by_name(name: str) -> None:
    message = codec.to_message(commands.Prefill(make_request()))
    message.request.sampling.MergeFrom(types_pb2.SamplingParams(**{name: UNSERVED[name]}))
    with pytest.raises(InvalidRequest, match=name) as caught:
        codec.unwrap(worker_pb2.SessionResponse(prefill=message))
    assert caught.value.param == name


def test_unset_sampling_fields_are_neutral() -> None:
    message = codec.to_message(make_request())
    message.ClearField("sampling")
    assert codec.from_message(message).sampling == request.SamplingParams()


@pytest.mark.parametrize("envelope", list(codec._ENVELOPES), ids=lambda e: e.DESCRIPTOR.name)
def test_each_arm_of_an_envelope_is_known_and_round_trips(envelope: Any) -> None:
    arms = codec._ENVELOPES[envelope]
    assert set(arms.values()) == set(envelope.DESCRIPTOR.fields_by_name)
    for core in arms:
        value = _least(core)
        assert codec.unwrap(envelope.FromString(codec.wrap(envelope, value).SerializeToString())) == value


def _least(core: Any) -> Any:
    """A value with only the required fields set."""
    hints = get_type_hints(core)
    parts: dict[str, Any] = {}
    for f in fields(core):
        if f.default is not MISSING or f.default_factory is not MISSING or not f.init:
            continue
        hint = hints[f.name]
        if hint is request.SequenceId:
            parts[f.name] = request.SequenceId("r")
        elif hint is request.GenerateRequest:
            parts[f.name] = make_request()
        elif hint is ErrorCode:
            parts[f.name] = ErrorCode.INTERNAL_ERROR
        elif is_dataclass(hint):
            parts[f.name] = _least(hint)
        elif get_origin(hint) is Literal:
            parts[f.name] = get_args(hint)[0]
        elif get_origin(hint) is tuple:
            parts[f.name] = ()
        else:
            parts[f.name] = hint()
    return core(**parts)


@pytest.mark.parametrize(
    "nonsense",
    [
        worker_pb2.SessionRequest(),
        worker_pb2.SessionRequest(join=worker_pb2.Join()),
        worker_pb2.SessionRequest(join=worker_pb2.Join(facts=types_pb2.Compatibility(layout=types_pb2.KVLayout()))),
        worker_pb2.SessionRequest(join=worker_pb2.Join(role=worker_pb2.Role.ROLE_DECODE)),
        worker_pb2.SessionRequest(
            join=worker_pb2.Join(role=worker_pb2.Role.ROLE_DECODE, facts=types_pb2.Compatibility())
        ),
        worker_pb2.SessionRequest(events=worker_pb2.StepEvents(tokens=[worker_pb2.TokenEvent(tokens=[1])])),
        worker_pb2.SessionResponse(),
        worker_pb2.SessionResponse(prefill=worker_pb2.Prefill()),
        worker_pb2.SessionResponse(prefill=worker_pb2.Prefill(request=types_pb2.SequenceRequest())),
        worker_pb2.SessionResponse(
            prefill=worker_pb2.Prefill(request=types_pb2.SequenceRequest(prompt=[1], max_tokens=1))
        ),
        worker_pb2.SessionResponse(abort=worker_pb2.Abort(reason="x")),
        worker_pb2.SessionResponse(assign=worker_pb2.Assign(attempt=2)),
        kv_pb2.LinkRequest(),
        kv_pb2.LinkRequest(hello=kv_pb2.LinkHello()),
        kv_pb2.LinkRequest(offer=kv_pb2.Offer()),
        kv_pb2.LinkRequest(chunk=kv_pb2.Chunk(index=1)),
        kv_pb2.LinkResponse(),
        kv_pb2.LinkResponse(accept=kv_pb2.Accept()),
    ],
    ids=lambda m: str(m).replace("\n", "")[:60] or f"empty {type(m).__name__}",
)
def test_a_malformed_message_raises_invalid_request(nonsense: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.unwrap(nonsense)
    assert caught.value.param


def test_a_layout_of_too_many_layers_is_refused_before_any_is_read() -> None:
    message = codec.to_message(make_layout())
    del message.layers[1:]
    for layers, kept in ((codec.MAX_LAYERS, True), (codec.MAX_LAYERS + 1, False)):
        message.layers.extend([message.layers[0]] * (layers - len(message.layers)))
        if kept:
            assert len(codec.from_message(message).layers) == layers
        else:
            with pytest.raises(InvalidRequest, match=r"^the KV layout has 4097 layers, above 4096$"):
                codec.from_message(message)


def test_an_unknown_role_is_refused() -> None:
    join = codec.to_message(_least(commands.Join))
    join.role = 7
    with pytest.raises(InvalidRequest, match="role 7"):
        codec.from_message(join)


def test_every_error_code_is_on_the_wire_under_its_name() -> None:
    on_wire = {name.removeprefix("ERROR_CODE_") for name in types_pb2.ErrorCode.DESCRIPTOR.values_by_name}
    assert on_wire == {code.name for code in ErrorCode} | {"UNSPECIFIED"}


@pytest.mark.parametrize("number", [999, -1])
def test_an_error_code_of_a_newer_peer_is_an_internal_error(number: int) -> None:
    sequence = types_pb2.SequenceId(request_id="r")
    ended = worker_pb2.SequenceEnded(sequence=sequence, reason="error", code=number)  # type: ignore[arg-type]
    refused = kv_pb2.Refuse(sequence=sequence, code=number)  # type: ignore[arg-type]
    for message in (ended, refused):
        again = type(message).FromString(message.SerializeToString())
        assert codec.from_message(again).code is ErrorCode.INTERNAL_ERROR


def test_an_unset_error_code_is_none_or_an_internal_error() -> None:
    sequence = types_pb2.SequenceId(request_id="r")
    assert codec.from_message(worker_pb2.SequenceEnded(sequence=sequence, reason="stop")).code is None
    assert codec.from_message(kv_pb2.Refuse(sequence=sequence)).code is ErrorCode.INTERNAL_ERROR


@settings(max_examples=40)
@given(st.binary(max_size=60))
def test_any_bytes_that_parse_become_a_value_or_an_invalid_request(raw: bytes) -> None:
    for envelope in codec._ENVELOPES:
        try:
            message = envelope.FromString(raw)
        except Exception:  # not protobuf at all: gRPC rejects it earlier
            continue
        with contextlib.suppress(InvalidRequest):
            codec.unwrap(message)


def test_a_negative_duration_is_read_as_zero() -> None:
    late = codec.from_message(codec.to_message(request.GenerateRequest("r", (1,), 1, deadline_s=-5.0)))
    assert late.deadline_s == 0.0


def test_every_core_message_class_has_a_wire_message() -> None:
    defined = {c for m in (commands, handover, kv_layout) for c in vars(m).values() if is_dataclass(c)}
    assert {c for c in defined if c.__module__.startswith("baton.core.")} <= set(WIRE)

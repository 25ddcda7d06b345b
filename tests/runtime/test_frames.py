"""Frames between ranks: each is decoded to what was encoded, and nothing else is accepted."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.plan_tables import ShortPlan
from baton.core.request import SamplingParams, SequenceId, TokenBias
from baton.core.step import History, Row, StepPlan
from baton.runtime.frames import VERSION, Failed, FrameError, FrameReader, Hello, RankHeartbeat, RankStop, encode

IDS = st.integers(0, 2**31 - 1)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    top_k=IDS,
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.lists(st.builds(TokenBias, IDS, st.floats(-100, 100)), max_size=2).map(tuple),
    bad_words=st.lists(st.lists(IDS, max_size=2).map(tuple), max_size=2).map(tuple),
    logprobs=st.none() | IDS,
)
HISTORIES = st.builds(History, prompt=st.just((1, 2)), output=st.lists(IDS, max_size=3).map(tuple))
ROWS = st.builds(
    Row,
    sequence_id=st.builds(SequenceId, st.text(max_size=20), IDS, IDS),
    start=IDS,
    tokens=st.lists(IDS, max_size=30).map(tuple),
    block_ids=st.lists(IDS, max_size=30).map(tuple),
    sampling=SAMPLING,
    num_sampled=IDS,
    output_index=IDS,
    history=st.none() | HISTORIES,
    scored=st.lists(IDS, max_size=3).map(tuple),
)
FRAMES = st.one_of(
    st.builds(
        ShortPlan,
        plan=st.builds(
            StepPlan,
            step_id=IDS,
            rows=st.lists(ROWS, max_size=4).map(tuple),
            token_sources=st.lists(st.integers(-1, 9), max_size=4).map(tuple),
            drafted=st.lists(st.integers(0, 9), max_size=4).map(tuple),
        ),
        kept=st.lists(IDS, max_size=4).map(tuple),
    ),
    st.builds(Hello, token=st.text(max_size=40), rank=IDS, pid=IDS),
    st.builds(RankHeartbeat, number=IDS),
    st.builds(RankStop, reason=st.text(max_size=40)),
    st.builds(Failed, message=st.text(max_size=40)),
)
ROW = Row(SequenceId("r"), 0, (1, 2), (5,), SamplingParams(temperature=0.5, seed=2**64 - 1), 1)
PLAN = ShortPlan(StepPlan(3, (ROW,)), (0,))
GOOD = encode(PLAN)
KIND_PLAN, KIND_HEARTBEAT = 23, 2


def raw(kind: int, body: bytes, version: int = VERSION, length: int | None = None) -> bytes:
    return struct.pack(">IBB", len(body) + 2 if length is None else length, version, kind) + body


@given(frames=st.lists(FRAMES, max_size=5), cuts=st.lists(st.integers(1, 200), min_size=1, max_size=5))
def test_frames_are_decoded_unchanged_however_the_stream_is_split(frames: list[Any], cuts: list[int]) -> None:
    stream, reader, found = b"".join(map(encode, frames)), FrameReader(), []
    start = turn = 0
    while start < len(stream):
        found += reader.feed(stream[start : start + cuts[turn % len(cuts)]])
        start += cuts[turn % len(cuts)]
        turn += 1
    assert found == frames
    assert [type(row.sequence_id) for f in found if isinstance(f, ShortPlan) for row in f.plan.rows] == [
        SequenceId for f in frames if isinstance(f, ShortPlan) for _ in f.plan.rows
    ]


@pytest.mark.parametrize("cut", range(len(GOOD)))
def test_a_frame_split_at_any_byte_is_decoded_once_complete(cut: int) -> None:
    reader = FrameReader()
    assert reader.feed(GOOD[:cut]) == []
    assert reader.feed(GOOD[cut:]) == [PLAN]


@pytest.mark.parametrize("cut", range(6, len(GOOD) - 1))
def test_a_truncated_frame_is_refused(cut: int) -> None:
    """The length claims that the frame is complete."""
    with pytest.raises(FrameError):
        FrameReader().feed(raw(KIND_PLAN, GOOD[6:cut]))


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (raw(KIND_HEARTBEAT, msgpack.packb([1]), version=VERSION + 1), f"version {VERSION + 1}, expected {VERSION}"),
        (raw(99, msgpack.packb([1])), "unknown kind 99"),
        (raw(KIND_HEARTBEAT, b"", length=2**32 - 1), "frame of 4294967295 bytes"),
        (raw(KIND_HEARTBEAT, b"", length=1), "too short"),
        (raw(KIND_HEARTBEAT, b""), "not msgpack"),
        (raw(KIND_HEARTBEAT, msgpack.packb([1]) + b"\0"), "not msgpack"),
        (raw(KIND_HEARTBEAT, msgpack.packb([1, 2])), "tuple where RankHeartbeat is expected"),
        (raw(KIND_HEARTBEAT, msgpack.packb([True])), "bool where int is expected"),
        (raw(KIND_HEARTBEAT, msgpack.packb([1.0])), "float where int is expected"),
        (raw(KIND_HEARTBEAT, msgpack.packb({"number": 1})), "not msgpack"),
        (raw(KIND_HEARTBEAT, msgpack.packb([msgpack.ExtType(5, b"x")])), "not msgpack"),
        (raw(KIND_HEARTBEAT, b"\x91" * 5000), "not msgpack"),
        (raw(KIND_HEARTBEAT, b"\xdd\xff\xff\xff\xff"), "not msgpack"),
        (raw(KIND_PLAN, msgpack.packb([[1, [1], [], [], []], []])), "int where Row is expected"),
        (raw(4, msgpack.packb([b"text"])), "bytes where str is expected"),
        (raw(4, b"\x91\xa1\xff"), "not msgpack"),
    ],
)
def test_an_invalid_frame_is_refused_with_the_reason(stream: bytes, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        FrameReader().feed(stream)


def test_a_frame_over_the_size_limit_of_the_reader_is_refused() -> None:
    with pytest.raises(FrameError, match="exceeds 64"):
        FrameReader(64).feed(encode(Failed("x" * 100))[:10])


@given(noise=st.binary(max_size=300), prefix=st.integers(0, len(GOOD)))
def test_random_bytes_raise_only_frame_error(noise: bytes, prefix: int) -> None:
    for stream in (noise, GOOD[:prefix] + noise, raw(KIND_PLAN, noise)):
        try:
            FrameReader().feed(stream)
        except FrameError:
            continue


@given(position=st.integers(0, len(GOOD) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_raises_only_frame_error(position: int, bit: int) -> None:
    damaged = bytearray(GOOD)
    damaged[position] ^= 1 << bit
    with contextlib.suppress(FrameError):
        FrameReader().feed(bytes(damaged))


def test_unknown_kinds_and_values_that_do_not_fit_are_not_sent() -> None:
    for odd in ("text", SamplingParams(), RankHeartbeat(2**70), Failed("x" * (33 << 20)), Failed({})):  # type: ignore[arg-type]
        try:
            FrameReader().feed(encode(odd))
        except FrameError:
            continue
        pytest.fail(f"{odd!r:.40} went through")

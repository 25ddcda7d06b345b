"""A handle is the right to one hand-over: with any field changed it is refused as stale, with no other error."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import StaleHandle
from baton.core.handover import ExpiredHandle, Handle, SpentHandles, sign, verify
from baton.core.request import SequenceId
from tests.support.builders import make_handle

KEY = b"k" * 32
HANDLE = sign(KEY, make_handle())
EXPECTED: dict[str, Any] = {
    "sequence": HANDLE.sequence,
    "source": "p0",
    "destination": "d0",
    "incarnation": 2,
    "source_incarnation": 1,
    "now_ms": 4999.0,
}

# Any text, including lone surrogates that UTF-8 refuses, and integers beyond 64 bits.
texts = st.text(st.characters(exclude_categories=()), max_size=8)
integers = st.one_of(st.integers(-3, 3), st.integers(-(2**70), 2**70))
values = {
    "sequence": st.builds(SequenceId, texts, integers, integers),
    "source_worker": texts,
    "source_incarnation": integers,
    "destination_worker": texts,
    "destination_incarnation": integers,
    "expires_ms": integers,
    "nonce": st.binary(max_size=20),
    "signature": st.one_of(
        st.binary(max_size=40),
        st.integers(0, 31).map(lambda n: HANDLE.signature[:n]),
        st.integers(0, 255).map(lambda bit: flip(HANDLE.signature, bit)),
    ),
}


def flip(data: bytes, bit: int) -> bytes:
    return (int.from_bytes(data) ^ 1 << bit).to_bytes(len(data))


mutations = st.sampled_from(sorted(values)).flatmap(lambda name: st.tuples(st.just(name), values[name]))


def test_signed_handle_is_valid_at_its_destination() -> None:
    verify(KEY, HANDLE, **EXPECTED)


@settings(max_examples=400)
@given(mutations)
def test_handle_with_any_field_changed_is_stale(mutation: tuple[str, Any]) -> None:
    name, value = mutation
    if value == getattr(HANDLE, name):
        return
    with pytest.raises(StaleHandle):
        verify(KEY, replace(HANDLE, **{name: value}), **EXPECTED)


@given(st.binary(min_size=1, max_size=64).filter(lambda key: key != KEY))
def test_handle_of_another_cluster_is_stale(key: bytes) -> None:
    with pytest.raises(StaleHandle, match="not signed"):
        verify(key, HANDLE, **EXPECTED)


@pytest.mark.parametrize(
    ("expected", "value", "field"),
    [
        ("sequence", SequenceId("r", 0, 2), "sequence"),
        ("source", "p1", "source_worker"),
        ("source_incarnation", 2, "source_incarnation"),
        ("destination", "d1", "destination_worker"),
        ("incarnation", 3, "destination_incarnation"),
        ("now_ms", 5000.0, "expires_ms"),
    ],
)
def test_valid_handle_presented_at_the_wrong_place_is_stale(expected: str, value: object, field: str) -> None:
    with pytest.raises(StaleHandle) as caught:
        verify(KEY, HANDLE, **{**EXPECTED, expected: value})
    assert caught.value.param == field and isinstance(caught.value, ExpiredHandle) == (field == "expires_ms")


def test_signature_distinguishes_bytes_of_neighbouring_fields() -> None:
    one, two = make_handle(source_worker="ab", destination_worker="c"), make_handle(source_worker="a")
    assert sign(KEY, one).signature != sign(KEY, replace(two, destination_worker="bc")).signature


def test_every_field_is_signed() -> None:
    assert {f.name for f in fields(Handle)} == set(values)


def test_spent_handles_are_kept_until_they_expire() -> None:
    spent, handle = SpentHandles(), make_handle(expires_ms=12_000, signature=b"s")
    spent.spend(handle, 10_000.0)
    with pytest.raises(StaleHandle, match="already used"):
        spent.spend(handle, 11_900.0)
    spent.spend(make_handle(expires_ms=27_000, signature=b"t"), 25_000.0)
    assert len(spent) == 1

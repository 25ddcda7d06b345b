"""What must be equal between members, the first field that differs, and the message about it."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from baton.core.compatibility import Compatibility, Difference, difference
from baton.core.kv_layout import KVLayout, LayerKV
from tests.support.builders import make_facts, make_layout

OTHER_LAYER = {"num_kv_heads": 3, "head_dim": 9, "dtype": "bfloat16", "kind": "latent", "window": 128, "value_dim": 5}


def other(value: object) -> object:
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else f"no {value}"


@pytest.mark.parametrize("name", sorted({f.name for f in fields(Compatibility)} - {"layout"}))
def test_field_that_differs_is_named_with_both_values(name: str) -> None:
    ours = make_facts()
    value = other(getattr(ours, name))
    expected = Difference(name, ascii(getattr(ours, name)), ascii(value))
    assert difference(ours, replace(ours, **{name: value}), one_worker=True) == expected
    assert difference(ours, replace(ours)) is None


def test_two_workers_may_have_different_code_and_one_may_not_report_every_field() -> None:
    assert difference(make_facts(), make_facts(code_version="9.9")) is None
    assert difference(make_facts(), make_facts(tokenizer_digest="")) is None
    assert difference(make_facts(), make_facts(tokenizer_digest="u")) == ("tokenizer_digest", "'t'", "'u'")


@pytest.mark.parametrize("name", [f.name for f in fields(LayerKV)])
def test_layer_field_that_differs_is_named(name: str) -> None:
    layout = make_layout(layers=3)
    changed = replace(layout.layers[1], **{name: OTHER_LAYER[name]})
    theirs = make_facts(layout=KVLayout(layout.block_size, (layout.layers[0], changed, layout.layers[2])))
    expected = (f"layers[1].{name}", ascii(getattr(layout.layers[1], name)), ascii(OTHER_LAYER[name]))
    assert difference(make_facts(layout=layout), theirs) == expected


def test_number_of_layers_is_named() -> None:
    assert difference(make_layout(layers=2), make_layout(layers=3)) == ("layers", "2", "3")


@pytest.mark.parametrize(("ours", "theirs"), [(16, 32), (32, 16), (1, 7), (8, 8)])
def test_block_sizes_may_differ_where_one_divides_the_other(ours: int, theirs: int) -> None:
    assert difference(make_layout(ours), make_layout(theirs)) is None


@pytest.mark.parametrize(("ours", "theirs"), [(4, 6), (4, 0), (4, -4)])
def test_other_block_sizes_are_a_difference(ours: int, theirs: int) -> None:
    assert difference(make_layout(ours), make_layout(theirs)) == ("block_size", str(ours), str(theirs))


def test_version_is_named_before_anything_else_and_config_before_weights() -> None:
    theirs = make_facts(model_digest="x", config_digest="y", layout=make_layout(16), protocol_version=99)
    assert difference(make_facts(), theirs) == ("protocol_version", str(make_facts().protocol_version), "99")
    assert difference(make_facts(), make_facts(model_digest="x", config_digest="y")) == ("config_digest", "'c'", "'y'")


def test_message_names_both_ends_and_explains() -> None:
    differs = difference(make_facts(dtype="bfloat16"), make_facts())
    assert differs is not None
    assert differs.between("d0", "p1") == (
        "dtype: 'bfloat16' at d0 and 'float32' at p1; auto depends on the machine: set --dtype"
    )


@pytest.mark.parametrize("value", ["x" * 100_000, "x\n\x1b[31m", "\u202e" * 100])
def test_value_of_a_peer_is_shown_as_one_short_line_of_ascii(value: str) -> None:
    for name in ("dtype", "model_digest"):
        differs = difference(make_facts(), make_facts(**{name: value}))
        assert differs is not None and differs.theirs.isascii() and differs.theirs.isprintable()
        assert len(differs.theirs) <= 80

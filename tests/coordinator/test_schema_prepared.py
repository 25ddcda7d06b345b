"""JSON schemas of requests are applied as they are meant: closed objects, large integers, references, patterns."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.core.errors import InvalidRequest
from baton.engine.grammar_automaton import GrammarError, compile_grammar, load_tokenizer
from baton.runtime.model_source import builtin_directory
from coordinator import structured_output
from coordinator.openai.json_schema import prepared
from coordinator.structured_output import Constraint, compile_here, to_grammar

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}}
CLOSED_POINT = POINT | {"additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return load_tokenizer(builtin_directory("target"), 4096)


def accepts(tokenizer: LLTokenizer, schema: dict[str, Any], text: str, *, strict: bool = False) -> bool:
    """Whether a whole output is possible. Each of its tokens must be in the mask before it."""
    value = json.dumps(prepared(schema, "f", strict=strict))
    matcher: LLMatcher = compile_grammar(tokenizer, to_grammar(Constraint("json_schema", value, "f")))
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


def test_strict_closes_objects_at_every_depth_and_changes_no_others() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": POINT,
            "b": {"type": "array", "items": {"anyOf": [POINT, {"type": ["object", "null"]}]}},
            "c": {"$ref": "#/$defs/p"},
            "open": {"type": "object", "additionalProperties": {"type": "object"}},
            "additionalProperties": {"const": {"type": "object"}},
        },
        "$defs": {"p": POINT},
    }
    closed = prepared(schema, "f", strict=True)
    assert closed["additionalProperties"] is False and closed["properties"]["a"] == CLOSED_POINT
    alternatives = closed["properties"]["b"]["items"]["anyOf"]
    assert alternatives == [CLOSED_POINT, {"type": ["object", "null"], "additionalProperties": False}]
    assert closed["$defs"]["p"] == CLOSED_POINT
    assert closed["properties"]["open"]["additionalProperties"] == {"type": "object", "additionalProperties": False}
    assert closed["properties"]["additionalProperties"] == {"const": {"type": "object"}}
    assert prepared(schema, "f", strict=False) == schema
    assert "additionalProperties" not in POINT


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [POINT, {"type": "object", "properties": {"y": {"type": "integer"}}}]},
        {"allOf": [{"$ref": "#/$defs/a b"}, {"properties": {"y": {"type": "integer"}}}], "$defs": {"a b": POINT}},
        POINT | {"anyOf": [{"properties": {"y": {"type": "integer"}}}]},
        {"type": "object", "properties": {"y": {"type": "integer"}}, "$ref": "#/$defs/p", "$defs": {"p": POINT}},
    ],
)
def test_strict_leaves_parts_open_that_describe_one_object_together(
    tokenizer: LLTokenizer, schema: dict[str, Any]
) -> None:
    assert accepts(tokenizer, schema, '{"x": 1, "y": 2}', strict=True) or accepts(
        tokenizer, schema, '{"y": 2, "x": 1}', strict=True
    )


def test_strict_output_has_no_other_properties(tokenizer: LLTokenizer) -> None:
    assert accepts(tokenizer, POINT, '{"x": 1, "y": 2}') and not accepts(
        tokenizer, POINT, '{"x": 1, "y": 2}', strict=True
    )


LARGE = 2**53


@pytest.mark.parametrize("bound", [LARGE + 1, LARGE + 3, 2**60 + 1, 2**63 - 1, -LARGE - 1, -(2**60) - 1])
@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_outputs_are_within_integer_bounds_beyond_2_53(tokenizer: LLTokenizer, keyword: str, bound: int) -> None:
    schema = {"type": "integer", keyword: bound}
    if (bound > 0) is (keyword in ("minimum", "exclusiveMinimum")):  # only integers beyond 2**53 are within
        with pytest.raises(InvalidRequest, match=f"{keyword} has the integer"):
            prepared(schema, "response_format", strict=False)
        return
    allowed = 0
    for value in (base + step for base in (LARGE, -LARGE, bound) for step in (-4096, -2, -1, 0, 1, 2, 4096)):
        if accepts(tokenizer, schema, str(value)):
            jsonschema.validate(value, schema)
            allowed += 1
    assert allowed


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"const": {"a": [LARGE + 1]}}, "const"),
        ({"properties": {"a": {"enum": [1, LARGE + 1]}}}, "enum"),
        ({"type": "integer", "multipleOf": LARGE + 1}, "multipleOf"),
    ],
)
def test_other_integers_that_are_no_doubles_are_refused(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{keyword} has the integer {LARGE + 1}") as refused:
        prepared(schema, "response_format", strict=False)
    assert (refused.value.param, refused.value.code) == ("response_format", "invalid_grammar")


@pytest.mark.parametrize("name", ["my def", "List[int]", "größe", 'a"b', "a%20b", "a/b~c"])
def test_references_to_any_name_are_followed(tokenizer: LLTokenizer, name: str) -> None:
    reference = "#/$defs/" + name.replace("~", "~0").replace("/", "~1").replace("%", "%25")
    schema = {"$defs": {name: {"type": "integer"}}, "type": "array", "items": {"$ref": reference}}
    assert accepts(tokenizer, schema, "[1]") and not accepts(tokenizer, schema, '["a"]')


PATTERNS: list[tuple[dict[str, Any], bool]] = [
    ({"properties": {"ab": {}}, "patternProperties": {"^ab$": {}}, "additionalProperties": False}, False),
    ({"properties": {"a": {}, "ab": {}}, "patternProperties": {"^ab?$": {}}, "additionalProperties": False}, False),
    ({"properties": {"a": {}}, "patternProperties": {"^ab?$": {}}, "additionalProperties": False}, True),
    ({"properties": {"ab": {}}, "patternProperties": {"^ab$": {}, "^c": {}}, "additionalProperties": False}, True),
    ({"properties": {"ab": {}}, "patternProperties": {"^ab$": {}}}, True),
]


@pytest.mark.parametrize(("schema", "admitted"), PATTERNS)
@pytest.mark.parametrize("kind", ["json_schema", "lark"])
def test_patterns_that_leave_no_name_after_the_properties_are_refused(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any], admitted: bool, kind: Any
) -> None:
    """Otherwise an output would fail after the comma behind the last property."""
    monkeypatch.setattr(structured_output, "_tokenizer", tokenizer)
    text = json.dumps({"type": "array", "items": {"type": "object"} | schema})
    constraint = Constraint(kind, text if kind == "json_schema" else f"start: a\na: %json {text}", "f")
    if admitted:
        compile_here(constraint)
    else:
        with pytest.raises(GrammarError, match="match only names in properties"):
            compile_here(constraint)


COMPACT = '{"a":1,"b":[true,{"c":null}]}'


@pytest.mark.parametrize("how", [{"separators": (",", ":")}, {}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}])
def test_compact_and_indented_json_match(tokenizer: LLTokenizer, how: dict[str, Any]) -> None:
    text = json.dumps(json.loads(COMPACT), **how)
    assert accepts(tokenizer, {"type": "object"}, text)


@pytest.mark.parametrize("gap", ["  ", "\n\n", " \n", "\n" + " " * 33, "\t", "\n \t"])
def test_more_whitespace_does_not_match_unless_it_is_requested(tokenizer: LLTokenizer, gap: str) -> None:
    text = '{"a":' + gap + "1}"
    assert not accepts(tokenizer, {"type": "object"}, text)
    loose = Constraint("json_schema", '{"type":"object"}', "f", whitespace=r"\s{1,40}")
    assert compile_grammar(tokenizer, to_grammar(loose)).consume_tokens(tokenizer.tokenize_str(text))

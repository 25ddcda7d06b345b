"""Tool calls and reasoning in texts of several families of models, however the text is split."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.runtime.config import TOOL_FORMATS
from coordinator.text.parser import Arguments, CallBegun, Event, Reasoning, Text
from coordinator.text.tagged_calls import argument_json, argument_types
from coordinator.text.tool_calls import FORMATS, detect_format, make_parser
from tests.support.model_dirs import CHATML
from tests.support.tool_templates import ARGUMENTS, NAMES, SCHEMA, TEMPLATES, WRITERS, ToolCallText, tool_call_texts

FUNCTIONS: dict[str, dict[str, Any]] = dict.fromkeys((*NAMES, "f"), SCHEMA)
ONE_CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
Found = tuple[str, str, list[tuple[str, str]]]


def parse(
    form: str | None, pieces: Iterable[str], *, thinks: bool = False, thinking: bool = False, one_call: bool = False
) -> Found:
    """Returns content, reasoning, and calls with their arguments as text. Checks the order of events: a call begins
    before its arguments, and the next call begins after them."""
    parser = make_parser(form, FUNCTIONS, thinks=thinks, thinking=thinking, one_call=one_call)
    assert parser is not None
    events: list[Event] = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallBegun):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            assert event.text and event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    content = "".join(event.text for event in events if isinstance(event, Text))
    return content, "".join(event.text for event in events if isinstance(event, Reasoning)), calls


@pytest.mark.parametrize("most_cuts", [20, pytest.param(400, marks=pytest.mark.long)])
@pytest.mark.parametrize("form", FORMATS)
def test_texts_of_each_model_family_parse_the_same_when_split_anywhere(form: str, most_cuts: int) -> None:
    for row in tool_call_texts(form, 60):
        whole = parse(form, [row.text])
        check(row, whole)
        assert parse(form, row.text) == whole, "character by character"
        cuts = random.Random(row.text).sample(range(len(row.text)), min(most_cuts, len(row.text)))
        for cut in cuts:
            assert parse(form, [row.text[:cut], row.text[cut:]]) == whole, (row.text, cut)


@pytest.mark.parametrize("form", FORMATS)
def test_only_the_first_call_is_returned_if_calls_are_not_parallel(form: str) -> None:
    several = [row for row in tool_call_texts(form, 20) if len(row.calls) > 1]
    for row in several:
        content, reasoning, calls = parse(form, row.text, thinks=True, one_call=True)
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [row.calls[0]], row.text
        assert (content.strip(), reasoning) == (row.content.strip(), row.reasoning)
    assert several


def check(row: ToolCallText, found: Found) -> None:
    content, reasoning, calls = found
    assert [(name, json.loads(arguments)) for name, arguments in calls] == list(row.calls), row.text
    assert (content.strip(), reasoning) == (row.content.strip(), row.reasoning)


NO_CALLS = {
    "hermes": ["plain", "a <tool_ call> b", '<tool_call>\n{"nam": 1}\n</tool_call> c', "<tool_call>hello", "<tool_cal"],
    "llama3": ["plain", '{"a": 1} is JSON', "{not json", '{"name": 3}', "  { }", '["name"]', 'x {"name": "f"}'],
    "mistral": ["plain", "[TOOL_ CALLS]", "[1, 2]", "[TOOL_CALL"],
    "harmony": [],
    "qwen3_coder": [
        "plain", "<tool_call>hello", "<tool_call>\n<function", "<tool_call>\n<function= >", "<function=a>", "<func",
        "<tool_call>\n\n<functions=f>", "<function=f", "a <function=\nf> b", '<tool_call>{"nam": 1}</tool_call> c',
    ],
    "glm45": [
        "plain", "<tool_call>hello", "<tool_call>hello world</tool_call>", "<tool_call><arg_key>a", "<tool_call>f\n<",
        "<tool_call>f\n<arg_value>", '<tool_call>{"nam": 1}</tool_call> c',
    ],
    "deepseek_v3": ["plain", "<｜tool▁call", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n", "``` a"],
    "deepseek_v31": ["plain", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>", "<｜tool▁sep｜>f{}"],
}  # fmt: skip


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in NO_CALLS.items() for text in texts])
def test_text_that_is_no_call_is_content(form: str, text: str) -> None:
    for pieces in ([text], text):
        content, _, calls = parse(form, pieces)
        assert not calls and content == text


@pytest.mark.parametrize(
    ("types", "text", "expected"),
    [
        ("string", "12", "12"),
        ("string", '"quoted"', '"quoted"'),
        ("", "12", "12"),  # the schema does not say
        ("integer", "12", 12),
        ("integer", " 12\n", 12),
        ("integer", "9" * 30, int("9" * 30)),
        ("number", "12", 12),
        ("number", "1e3", 1000.0),
        ("boolean", "True", True),
        ("boolean", "true", True),
        ("boolean", "yes", "yes"),
        ("null", "None", None),
        ("string null", "null", None),
        ("string null", "none of them", "none of them"),
        ("string integer", "007", "007"),
        ("array", "['a', None]", ["a", None]),
        ("object", '{"a": [1]}', {"a": [1]}),
        ("object", "[1]", [1]),  # not what the schema allows
        ("object", "{'a': 1e999}", "{'a': 1e999}"),
        ("number", "NaN", "NaN"),
        ("array", "[" * 5000, "[" * 5000),
        ("integer", "__import__('os')", "__import__('os')"),
    ],
)
def test_text_of_an_argument_becomes_a_value_of_its_type(types: str, text: str, expected: Any) -> None:
    value = json.loads(argument_json(text, frozenset(types.split())))
    assert value == expected and type(value) is type(expected)


def test_types_of_an_argument_are_read_through_references_and_unions() -> None:
    schema = {
        "properties": {
            "one": {"$ref": "#/$defs/one"},
            "some": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/one"}, {"type": "null"}]},
            "listed": {"enum": ["a", 1]},
            "fixed": {"const": 1.5},
            "both": {"type": ["array", "null"]},
            "loop": {"$ref": "#/properties/loop"},
            "any": {},
        },
        "$defs": {"one": {"type": "integer"}},
    }
    expected = {
        "one": "integer", "some": "string integer null", "listed": "string integer", "fixed": "number",
        "both": "array null", "loop": "", "any": "", "unknown": "",
    }  # fmt: skip
    assert {name: argument_types(schema, name) for name in expected} == {
        name: frozenset(types.split()) for name, types in expected.items()
    }


def test_end_tags_that_are_missing_end_a_call_of_qwen3_coder() -> None:
    unclosed = "<tool_call>\n<function=f>\n<parameter=city>\nRome\n<parameter=text>\na\nb\n</function>\n</tool_call>"
    arguments = '{"city": "Rome", "text": "a\\nb"}'
    assert parse("qwen3_coder", [unclosed + "\n\nDone."]) == ("Done.", "", [("f", arguments)])
    assert parse("qwen3_coder", ["<function=f>\n</function>\n", ONE_CALL]) == ("", "", [("f", "{}"), ("f", "{}")])


@pytest.mark.parametrize("form", FORMATS)
def test_truncated_call_keeps_its_name_and_partial_arguments(form: str) -> None:
    row = WRITERS[form]("", [("f", ARGUMENTS[9])], json.dumps, 0)
    cut = row.text.index("word word")
    content, _, calls = parse(form, [row.text[:cut]])
    assert [name for name, _ in calls] == [row.calls[0][0]] and content.strip() == row.content.strip()
    assert calls[0][1].startswith("{") and "list" in calls[0][1]


def test_arguments_are_emitted_while_they_are_generated() -> None:
    parser = make_parser("hermes", FUNCTIONS, thinks=False)
    assert parser is not None
    seen = [parser.push(c) for c in '<tool_call>{"name": "f", "arguments": {"a": "xyz']
    assert sum(len(events) for events in seen) >= 8


@settings(max_examples=200, deadline=None)
@given(
    form=st.sampled_from([*FORMATS]),
    text=st.text(alphabet='{}[]"\\:;,<>/|name tool_call think', max_size=60),
    cut=st.data(),
)
def test_any_text_parses_the_same_in_any_split_and_never_fails(form: str, text: str, cut: st.DataObject) -> None:
    at = cut.draw(st.integers(0, len(text)))
    for lead in ("", *FORMATS[form], '{"name": "f", '):
        whole = parse(form, [lead + text])
        assert parse(form, [lead + text[:at], text[at:]]) == whole
        assert parse(form, lead + text) == whole
        whole = parse(form, [lead + text], thinks=True)
        assert parse(form, [lead + text[:at], text[at:]], thinks=True) == parse(form, lead + text, thinks=True) == whole


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, ("yes", "\nhm\n")),
        ("hm</think>yes", True, ("yes", "hm")),
        ("yes", False, ("yes", "")),
        ("  <thin", False, ("  <thin", "")),
        ("<think>hm", False, ("", "hm")),
        ("hm </thi", True, ("", "hm </thi")),
        ("a <think> b </think>", False, ("a <think> b ", "")),
        ("a </think> b </think> c", False, ("a b c", "")),
        ("</think>\n\nyes", False, ("yes", "")),
        ("<think></think>", False, ("", "")),
    ],
)
def test_reasoning_is_separated_from_the_content(text: str, thinking: bool, expected: tuple[str, str]) -> None:
    for pieces in ([text], text):
        assert parse(None, pieces, thinks=True, thinking=thinking)[:2] == expected


def test_call_markers_inside_reasoning_are_not_calls() -> None:
    text = '<think>a <tool_call> b</think>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert parse("hermes", text, thinks=True) == ("", "a <tool_call> b", [("f", "{}")])


def test_call_format_is_detected_from_the_template() -> None:
    assert {form: detect_format(template) for form, template in TEMPLATES.items()} == {form: form for form in FORMATS}
    assert detect_format(CHATML) is None and detect_format("") is None
    assert detect_format("{{ tools }}") is None
    llama = "<|start_header_id|>parameters"
    for call in ("{{ call.function | tojson }}", "{{ {'name': call.name} | tojson }}", '{"name": "{{ call.name }}"}'):
        assert detect_format(llama + "{{ tools }}<tool_call>" + call + "</tool_call>") == "hermes"
    # The same markers, but no JSON between them.
    for form, call in (("glm45", "{{ name }}<arg_key>{{ key }}</arg_key>"), ("qwen3_coder", "\n<function={{ name }}>")):
        assert detect_format(llama + '{{ tools }}"name"<tool_call>' + call + "</tool_call>") == form


def test_the_option_has_every_format() -> None:
    assert set(TOOL_FORMATS) == set(FORMATS)


def test_no_parser_is_made_without_functions_or_a_format() -> None:
    for form in (*FORMATS, None):
        assert make_parser(form, {}, thinks=False) is None
    assert make_parser(None, FUNCTIONS, thinks=False) is None


def test_text_after_a_call_keeps_its_inner_blanks() -> None:
    for text in (ONE_CALL + "\n I will wait", ONE_CALL + " I" + " will" + " wait"):
        for pieces in ([text], text, [ONE_CALL, " I", " will", " wait"]):
            assert parse("hermes", pieces) == ("I will wait", "", [("f", "{}")])


def test_call_without_an_end_marker_does_not_consume_the_next_call() -> None:
    broken = ONE_CALL.removesuffix("</tool_call>")
    assert parse("hermes", broken + "\n" + ONE_CALL) == ("", "", [("f", "{}"), ("f", "{}")])


BROKEN = {
    "hermes": (
        "<tool_call>\n{{}}\n</tool_call>\n",
        ['{"name": "f", "arguments": {"a": 1}', '{"arguments": {"a": 1}, "name": "f"'],
        ["nonsense", '{"nam": 1}', '{"arguments": {"a": Infinity}, "name": "f"}', '{"name": 3'],
    ),
    "llama3": ("{{}}; ", ['{"name": "f", "parameters": {"a": 1}'], ['{"nam": 1}']),
    "mistral": ("{{}}, ", ['{"name": "f", "arguments": {"a": 1}'], ['{"nam": 1}', "{}"]),
}


@pytest.mark.parametrize("form", BROKEN)
def test_a_call_without_its_last_brace_ends_before_the_next_call(form: str) -> None:
    pattern, cut, _ = BROKEN[form]
    for broken in cut:
        for end in ("", "}"):
            text = "".join(pattern.replace("{{}}", call) for call in (broken + end, '{"name": "f", "arguments": {}}'))
            text = f"[TOOL_CALLS][{text.rstrip(', ')}]" if form == "mistral" else text.removesuffix("; ")
            for pieces in ([text], text):
                assert parse(form, pieces)[2] == [("f", '{"a": 1}'), ("f", "{}")], text


@pytest.mark.parametrize("form", BROKEN)
def test_calls_after_a_call_that_cannot_be_parsed_are_calls(form: str) -> None:
    pattern, _, bad = BROKEN[form]
    for broken in bad:
        text = "".join(pattern.replace("{{}}", call) for call in (broken, '{"name": "f", "arguments": {}}'))
        text = f"[TOOL_CALLS][{text.rstrip(', ')}]" if form == "mistral" else text.removesuffix("; ")
        for pieces in ([text], text):
            content, _, calls = parse(form, pieces)
            assert (calls, broken in content) == ([("f", "{}")], True), (text, content)


def test_null_arguments_are_an_empty_object() -> None:
    for call in ('{"name": "f", "arguments": null}', '{"arguments": null, "name": "f"}', '{"name": "f"}'):
        for pieces in ([call], call):
            assert parse("hermes", ["<tool_call>", *pieces, "</tool_call>"])[2] == [("f", "{}")]


def test_an_end_tag_of_reasoning_in_arguments_is_kept() -> None:
    text = ONE_CALL.replace("{}}", '{"a": "</think>"}}')
    for pieces in ([text], text):
        assert parse("hermes", pieces, thinks=True)[2] == [("f", '{"a": "</think>"}')]


def test_llama_json_with_a_name_is_a_call_only_if_the_function_exists() -> None:
    text = '{"name": "Alice", "age": 30}'
    for pieces in ([text], text):
        assert parse("llama3", pieces) == (text, "", [])
        assert parse("llama3", ['{"name": "f", ', '"parameters": {}}'])[2] == [("f", "{}")]


def test_a_tool_named_behind_the_role_is_called_in_harmony_format() -> None:
    text = ' to=functions.f<|channel|>commentary json<|message|>{"a":1}<|call|>'
    for pieces in ([text], text):
        assert parse("harmony", pieces) == ("", "", [("f", '{"a":1}')])


def test_text_forced_by_a_grammar_is_content_in_harmony_format() -> None:
    for pieces in (['{"a": 1}'], '{"a": 1}'):
        assert parse("harmony", pieces) == ('{"a": 1}', "", [])

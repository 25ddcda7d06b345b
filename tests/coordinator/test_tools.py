"""Tools over HTTP: prompts that name them, calls in whole answers and streams, calls that a grammar forces."""

from __future__ import annotations

import json
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from starlette.applications import Starlette
from tokenizers import AddedToken

from baton.engine.grammar_automaton import load_tokenizer
from baton.runtime.model_source import builtin_directory
from coordinator import structured_output
from coordinator.http.app import HttpSettings, create_app
from coordinator.openai.schema import ChatBody
from coordinator.openai.tools import Function, calls_grammar
from coordinator.openai.validation import parse
from coordinator.structured_output import GrammarCompiler
from coordinator.text.model import TextModel
from coordinator.text.parser import Arguments, CallBegun
from coordinator.text.tool_calls import FORMATS, make_parser
from tests.coordinator.test_schema_openai import fits
from tests.support import tokenizers_kit
from tests.support.fake_generator import FakeGenerator, reply
from tests.support.model_dirs import text_dir
from tests.support.requests_kit import CHAT, GOOD, events
from tests.support.tool_templates import TEMPLATES

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The <|im_end|> weather.",
        "parameters": WEATHER,
        "strict": True,
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
DEEP = '{"a": ' * 120 + "1" + "}" * 120
ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TWO = f'Let me see.\n{ONE}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


@cache
def model_of(form: str, special: tuple[str, ...] = ()) -> TextModel:
    tokenizer = tokenizers_kit.renamed(tokenizers_kit.byte_level())
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    with tempfile.TemporaryDirectory() as directory:
        return TextModel.load(
            text_dir(Path(directory), tokenizer, template=TEMPLATES[form], config={"max_position_embeddings": 4096})
        )


@pytest.fixture(params=["hermes"])
def model(request: pytest.FixtureRequest) -> TextModel:
    return model_of(request.param)


@pytest.fixture
def app(generator: FakeGenerator, model: TextModel, monkeypatch: pytest.MonkeyPatch) -> Starlette:
    monkeypatch.setattr(structured_output, "_tokenizer", load_tokenizer(builtin_directory("target"), 4096))
    generator.grammars = GrammarCompiler(Path(), 4096, lambda: ThreadPoolExecutor(1))
    return create_app(generator, model, HttpSettings("tiny", created=1))


async def whole(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(CHAT, json=GOOD[CHAT] | {"tools": [TOOL, NOW]} | fields)
    assert answer.status_code == 200, answer.text
    fits("CreateChatCompletionResponse", answer.json())
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def streamed(client: httpx.AsyncClient, **fields: Any) -> tuple[dict[str, Any], str]:
    """Returns the message, assembled as clients do it, and the finish reason."""
    answer = await client.post(CHAT, json=GOOD[CHAT] | {"tools": [TOOL, NOW], "stream": True} | fields)
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}
    finish = ""
    for event in events(answer):
        fits("CreateChatCompletionStreamResponse", event)
        (choice,) = event["choices"]
        finish = choice["finish_reason"] or finish
        for name in ("content", "reasoning", "reasoning_content"):
            message[name] += choice["delta"].get(name) or ""
        for part in choice["delta"].get("tool_calls", ()):
            if part["index"] == len(message["tool_calls"]):
                assert part["function"]["name"] and part["type"] == "function"
                message["tool_calls"].append({key: part[key] for key in ("id", "type", "function")})
            else:
                assert part["index"] == len(message["tool_calls"]) - 1 and "name" not in part["function"]
                message["tool_calls"][-1]["function"]["arguments"] += part["function"]["arguments"]
    return message, finish


@pytest.mark.parametrize("pieces", [1, 3, 1000])
async def test_tool_calls_are_equal_in_whole_and_streamed_responses(
    client: httpx.AsyncClient, generator: FakeGenerator, pieces: int
) -> None:
    size = -(-len(TWO) // pieces)
    generator.script = reply(*(TWO[i : i + size] for i in range(0, len(TWO), size)))
    choice = await whole(client)
    message = choice["message"]
    called = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert called == [("get_weather", '{"city": "Rome"}'), ("now", "{}")]
    assert choice["finish_reason"] == "tool_calls" and message["content"] == "Let me see.\n"
    found, finish = await streamed(client)
    assert finish == "tool_calls" and found["content"] == message["content"]
    ids = [[call.pop("id") for call in calls] for calls in (found["tool_calls"], message["tool_calls"])]
    assert found["tool_calls"] == message["tool_calls"]
    assert all(len(name) == 9 and name.isalnum() for name in ids[0] + ids[1]) and len({*ids[0], *ids[1]}) == 4


async def test_tool_call_ids_are_unique_across_requests_with_the_same_id(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.script = reply(ONE)
    headers, body = {"x-request-id": "mine"}, GOOD[CHAT] | {"tools": [TOOL]}
    answers = [(await client.post(CHAT, json=body, headers=headers)).json() for _ in range(2)]
    assert {answer["id"] for answer in answers} == {"chatcmpl-mine"}
    assert len({answer["choices"][0]["message"]["tool_calls"][0]["id"] for answer in answers}) == 2


async def test_calls_after_the_first_are_left_out_if_they_are_not_parallel(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.script = reply(*TWO)
    message = (await whole(client, parallel_tool_calls=False))["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
    found, finish = await streamed(client, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in found["tool_calls"]] == ["get_weather"] and finish == "tool_calls"


async def test_call_alone_has_no_content_and_a_truncated_call_ends_with_length(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.script = reply(ONE)
    assert (await whole(client))["message"]["content"] is None
    generator.script = reply(ONE[:50], finish="length")
    choice = await whole(client)
    assert choice["finish_reason"] == "length" and choice["message"]["tool_calls"]
    assert (await streamed(client))[1] == "length"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (r'{"name": "f\ud800", "arguments": {"a": "\udfff"}}', ("f\ufffd", r'{"a": "\udfff"}')),
        (r'{"arguments": "\udfff", "name": "\ud83d\ude00"}', ("\U0001f600", "\ufffd")),
        (r'{"arguments": {"\ud800": "\udfff"}, "name": "\udfff"}', ("\ufffd", r'{"\ud800": "\udfff"}')),
    ],
)
async def test_lone_surrogate_in_a_call_does_not_fail_the_response(
    client: httpx.AsyncClient, generator: FakeGenerator, call: str, expected: tuple[str, str]
) -> None:
    generator.script = reply(*f"<tool_call>{call}</tool_call>")
    for message in ((await whole(client))["message"], (await streamed(client))[0]):
        ((found,),) = [message["tool_calls"]]
        assert (found["function"]["name"], found["function"]["arguments"]) == expected
    tools = [{"type": "function"} | TOOL["function"]]
    answer = await client.post("/v1/responses", json={"input": "Hi", "tools": tools})
    (item,) = answer.json()["output"]
    assert (item["name"], item["arguments"]) == expected


async def test_response_without_a_call_is_unchanged(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = reply("Hel", "lo <tool", " or not")
    choice = await whole(client)
    assert choice["message"]["content"] == "Hello <tool or not" and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert (await streamed(client))[0]["content"] == "Hello <tool or not"


async def test_calls_are_not_parsed_without_tools(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = reply(ONE)
    for fields in ({"tools": []}, {"tool_choice": "none"}, {"tools": None}):
        assert (await whole(client, **fields))["message"]["content"] == ONE


async def test_prompt_contains_the_tools_but_no_control_tokens_from_them(
    client: httpx.AsyncClient, generator: FakeGenerator, model: TextModel
) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"x": "<|im_start|>"}'}}
    history = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon <|im_end|>"},
    ]
    await whole(client, messages=history)
    await whole(client, messages=history, tool_choice="none")
    with_tools, without = (submission.prompt for submission in generator.submissions)
    text = model.decode(with_tools, skip_special_tokens=False)
    assert '"name": "get_weather"' in text and '"city"' in text and "</tools>" in text
    assert '{"name": "now", "arguments": {"x": "<|im_start|>"}}' in text and "noon <|im_end|>" in text
    assert "get_weather" not in model.decode(without, skip_special_tokens=False)
    controls = {i for name in ("<|im_start|>", "<|im_end|>") if (i := model.tokenizer.token_to_id(name)) is not None}
    written = [i for i in with_tools if i in controls]
    assert len(written) == 2 * 4 + 1, "one pair for the tools and each message, and the beginning of the answer"


async def test_tokenize_counts_the_prompt_of_the_same_chat(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    chat = {"messages": GOOD[CHAT]["messages"], "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    for more in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        tokens = (await client.post("/tokenize", json=chat | more)).json()["tokens"]
        assert (await client.post(CHAT, json=chat | more)).status_code == 200
        assert tokens == list(generator.submissions[-1].prompt)
    plain = (await client.post("/tokenize", json={"messages": chat["messages"]})).json()["count"]
    assert plain < len(tokens)
    for wrong, param in (
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"tools": [TOOL, TOOL]}, "tools"),
    ):
        answer = await client.post("/tokenize", json=chat | wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_forced_calls_have_a_grammar(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = reply(ONE)
    assert (await whole(client))["finish_reason"] == "tool_calls"
    assert (await whole(client, tool_choice="required"))["finish_reason"] == "tool_calls"
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert (await whole(client, tool_choice=named))["finish_reason"] == "stop"
    assert (await whole(client, tool_choice="required", parallel_tool_calls=False))["message"]["tool_calls"]
    auto, required, chosen, single = (submission.sampling.grammar for submission in generator.submissions)
    assert auto == "" and "now" in required and "get_weather" in required and "call){0,15}" in required
    assert "get_weather" in chosen and "now" not in chosen and "call){0," not in chosen + single


async def test_forced_call_goes_before_an_output_format(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = reply(ONE)
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True}}
    named = {"type": "function", "function": {"name": "get_weather"}}
    for forced in ("required", named):
        for output in ({}, {"response_format": wanted}, {"structured_outputs": {"regex": "a"}}):
            assert (await whole(client, tool_choice=forced, **output))["message"]["tool_calls"]
        grammars = {submission.sampling.grammar for submission in generator.submissions}
        assert len(grammars) == 1 and "content" not in grammars.pop()
        generator.submissions.clear()


async def test_strict_functions_and_whitespace_apply_to_arguments(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.script = reply(ONE)

    async def grammar(strict: bool, **fields: object) -> str:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        function = {"name": "get_weather", "parameters": schema, "strict": strict}
        tools = [{"type": "function", "function": function}]
        answer = await client.post(CHAT, json=GOOD[CHAT] | {"tools": tools, "tool_choice": "required"} | fields)
        assert answer.status_code == 200, answer.text
        return generator.submissions[-1].sampling.grammar

    closed, loose = '"additionalProperties":false', {"structured_outputs": {"whitespace_pattern": "[ z]*"}}
    assert closed in await grammar(True) and closed not in await grammar(False)
    assert "[ z]*" in await grammar(True, **loose) and "[ z]*" not in await grammar(True)


async def test_output_format_is_allowed_with_optional_tool_calls(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.script = reply('{"a": 1}')
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": WEATHER, "strict": True}}
    assert (await whole(client, response_format=wanted))["message"]["content"] == '{"a": 1}'
    assert "calls | content" in generator.submissions[0].sampling.grammar
    answer = await client.post(CHAT, json=GOOD[CHAT] | {"tools": [TOOL], "structured_outputs": {"regex": "a"}})
    assert (answer.status_code, "cannot be combined with tool calls" in answer.text) == (400, True)


async def test_invalid_tool_schema_is_refused_only_when_it_is_needed(client: httpx.AsyncClient) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "banana"}}}
    assert (await client.post(CHAT, json=GOOD[CHAT] | {"tools": [bad]})).status_code == 200
    answer = await client.post(CHAT, json=GOOD[CHAT] | {"tools": [bad], "tool_choice": "required"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools") and "banana" in answer.text


async def test_token_ids_are_streamed_once_with_tool_calls(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = reply(*TWO)
    answer = await client.post(CHAT, json=GOOD[CHAT] | {"tools": [TOOL], "stream": True, "return_token_ids": True})
    ids = [i for event in events(answer) for i in event["choices"][0].get("token_ids", [])]
    assert ids == list(range(len(TWO)))


async def test_the_official_client_runs_a_conversation_with_a_tool(
    official: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    generator.script = reply(*TWO)
    messages: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
    tools: list[Any] = [TOOL, NOW]
    answer = await official.chat.completions.create(model="tiny", messages=messages, tools=tools)
    message = answer.choices[0].message
    assert message.tool_calls and message.tool_calls[0].type == "function"
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Rome"}
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}]
    generator.script = reply("It is sunny.")
    async with official.chat.completions.stream(model="tiny", messages=messages, tools=tools) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "It is sunny."
    generator.script = reply(*TWO)
    async with official.chat.completions.stream(model="tiny", messages=messages, tools=tools) as stream:
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls and [call.function.name for call in calls] == ["get_weather", "now"]
    assert calls[0].function.parsed_arguments == {"city": "Rome"}  # parsed, since the tool is strict


@pytest.mark.parametrize("form", FORMATS)
def test_forced_calls_of_every_format_are_parsed_back(form: str) -> None:
    """Random walks through the grammar are parsed; the marker is a special token of the built-in tokenizer."""
    tokenizer = load_tokenizer(builtin_directory("target"), 4096)
    marker = FORMATS[form][0] if form != "harmony" else "<|message|>"
    functions = [Function(**TOOL["function"]), Function(**NOW["function"])]
    for most in (1, 3):
        grammar = "\n".join(calls_grammar(form, functions, {marker: 4}, most))
        for seed in range(12):
            text = walk(tokenizer, grammar, seed).replace("<|assistant|>", marker)
            parser = make_parser(form, {"get_weather": WEATHER, "now": {}}, thinks=False)
            assert parser is not None
            parsed = parser.push(text) + parser.finish()
            names = [event.name for event in parsed if isinstance(event, CallBegun)]
            assert 1 <= len(names) <= most and set(names) <= {"get_weather", "now"}, text
            for index, name in enumerate(names):
                arguments = "".join(e.text for e in parsed if isinstance(e, Arguments) and e.index == index)
                jsonschema.validate(json.loads(arguments), WEATHER if name == "get_weather" else {"maxProperties": 0})
            assert all(isinstance(event, CallBegun | Arguments) for event in parsed), text


def walk(tokenizer: LLTokenizer, grammar: str, seed: int) -> str:
    matcher, chosen, tokens = LLMatcher(tokenizer, grammar), random.Random(seed), []
    assert not matcher.is_error(), matcher.get_error()
    while not matcher.is_stopped():
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = sorted(set(np.flatnonzero(mask).tolist()) - set(tokenizer.eos_tokens))
        if not allowed or (matcher.is_accepting() and chosen.random() < 0.5):
            break
        tokens.append(chosen.choice(allowed))
        matcher.consume_token(tokens[-1])
    return tokenizer.decode_str(tokens)


async def test_call_markers_that_are_special_tokens_are_detected(generator: FakeGenerator) -> None:
    for form in FORMATS:
        model = model_of(form, tuple(FORMATS[form]))
        assert set(model.marker_ids) - {"<think>"} == set(FORMATS[form])  # it is not a special token
        app = create_app(generator, model, HttpSettings("tiny", created=1))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
            assert (await client.post(CHAT, json=GOOD[CHAT] | {"tools": [TOOL]})).status_code == 200
            assert generator.submissions[-1].shown_token_ids == frozenset(model.marker_ids[m] for m in FORMATS[form])
            if form != "harmony":
                assert (await client.post(CHAT, json=GOOD[CHAT])).status_code == 200
                assert generator.submissions[-1].shown_token_ids == frozenset()
        marker = next(iter(model.marker_ids))
        stream = model.vocabulary, (), 0, frozenset([model.marker_ids[marker]])
        from coordinator.text.stream import TextStream

        ids = model.encode("a" + marker + "b", add_special_tokens=False)
        assert TextStream(*stream).push(ids).text == f"a{marker}b"
        assert TextStream(model.vocabulary).push(ids).text == "ab"


async def test_reasoning_is_returned_separately_from_the_content(tmp_path: Path, generator: FakeGenerator) -> None:
    template = TEMPLATES["hermes"] + "{% if add_generation_prompt %}<think>\n{% endif %}{# ends at </think> #}"
    directory = text_dir(tmp_path / "m", template=template, config={"max_position_embeddings": 4096})
    model = TextModel.load(directory)
    app = create_app(generator, model, HttpSettings("tiny", created=1))
    generator.script = reply("Hm", "m.</thi", "nk>\n\n", "Yes.")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        message = (await whole(client))["message"]
        assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hmm.", "Hmm.", "Yes.")
        found, _ = await streamed(client)
        assert (found["reasoning_content"], found["reasoning"], found["content"]) == ("Hmm.", "Hmm.", "Yes.")


async def test_reasoning_that_is_continued_has_no_tag_in_the_content(tmp_path: Path, generator: FakeGenerator) -> None:
    template = TEMPLATES["hermes"] + "{# <think> </think> #}"
    directory = text_dir(tmp_path / "m", template=template, config={"max_position_embeddings": 4096})
    app = create_app(generator, TextModel.load(directory), HttpSettings("tiny", created=1))
    generator.script = reply("nd so", "</think>\n\nYes.")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        for begun, expected in (("<think>A", ("nd so", "Yes.")), ("<think>A</think> B", (None, "nd soYes."))):
            messages = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": begun}]
            message = (await whole(client, messages=messages, continue_final_message=True))["message"]
            assert (message.get("reasoning"), message["content"]) == expected


async def test_tools_of_a_template_without_tools_are_called_in_the_generic_form(
    client: httpx.AsyncClient, generator: FakeGenerator, tmp_path: Path, app: Starlette
) -> None:
    model = TextModel.load(text_dir(tmp_path / "none", config={"max_position_embeddings": 4096}))
    app = create_app(generator, model, HttpSettings("tiny", created=1))
    generator.script = reply(*TWO)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        for choice in ("auto", "required", {"type": "function", "function": {"name": "get_weather"}}):
            message = (await whole(client, tool_choice=choice))["message"]
            assert message["content"] == "Let me see.\n" and len(message["tool_calls"]) == 2
            assert "get_weather" in model.decode(generator.submissions[-1].prompt)
        assert [bool(s.sampling.grammar) for s in generator.submissions] == [False, True, True]
        await whole(client, tool_choice="none")
        assert "get_weather" not in model.decode(generator.submissions[-1].prompt)


async def test_calls_in_an_unknown_format_stay_text_and_cannot_be_forced(
    generator: FakeGenerator, tmp_path: Path
) -> None:
    template = TEMPLATES["hermes"].replace("tool_call>", "seed:tool_call>")
    model = TextModel.load(text_dir(tmp_path / "m", template=template, config={"max_position_embeddings": 4096}))
    assert model.tool_format is None
    app = create_app(generator, model, HttpSettings("tiny", created=1))
    generator.script = reply(*TWO)
    message = {"role": "user", "content": "Hello"}
    forms: list[tuple[str, dict[str, Any], Any]] = [
        (CHAT, GOOD[CHAT] | {"tools": [TOOL]}, "required"),
        ("/v1/responses", {"input": "Hello", "tools": [{"type": "function", "name": "get_weather"}]}, "required"),
        (
            "/v1/messages",
            {"messages": [message], "max_tokens": 9, "tools": [{"name": "get_weather", "input_schema": WEATHER}]},
            {"type": "any"},
        ),
    ]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        for path, body, forced in forms:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200 and "<tool_call>" in answer.text, answer.text
            assert "get_weather" in model.decode(generator.submissions[-1].prompt)
            refused = await client.post(path, json=body | {"tool_choice": forced})
            assert (refused.status_code, "calls cannot be forced" in refused.text) == (400, True), refused.text
        assert (await client.post("/tokenize", json={"messages": [message], "tools": [TOOL]})).status_code == 200


@pytest.mark.parametrize(
    "arguments", [DEEP, "{", "3", '"a"', "[1]", "nonsense", '{"a": "\\u0000"}', '{"a": "\\ud800"}', ""]
)
async def test_a_call_that_the_model_wrote_is_accepted_in_the_history(
    client: httpx.AsyncClient, generator: FakeGenerator, model: TextModel, arguments: str
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [*GOOD[CHAT]["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    await whole(client, messages=history)
    shown = json.dumps(arguments, ensure_ascii=False) if arguments else "{}"
    assert f'"arguments": {shown}' in model.decode(generator.submissions[-1].prompt)
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}
    answer = await client.post("/v1/responses", json={"input": [{"role": "user", "content": "Hello"}, item]})
    assert answer.status_code == 200
    assert f'"arguments": {shown}' in model.decode(generator.submissions[-1].prompt)


def test_integers_of_any_size_in_the_history_keep_their_digits() -> None:
    number = 123456789012345678901234567890
    call = {"id": "a", "function": {"name": "f", "arguments": json.dumps({"a": number, "b": [-number, 1.5]})}}
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]}
    (found,) = parse(ChatBody, json.dumps(body).encode()).chat()[1].tool_calls
    assert found["function"]["arguments"] == {"a": number, "b": [-number, 1.5]}


@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        ({"properties": {"a": {"type": "integer"}}}, True),
        ({"description": "any"}, True),
        ({"type": ["object", "null"]}, True),
        ({"anyOf": [{"type": "object"}, {"type": "string"}]}, True),
        ({"type": "array"}, False),
        ({"type": "string"}, False),
        ({"enum": [1]}, False),
    ],
)
async def test_forced_arguments_are_an_object_or_the_tool_is_refused(
    client: httpx.AsyncClient, generator: FakeGenerator, schema: dict[str, Any], allowed: bool
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    fields = {"tools": [tool], "tool_choice": "required"}
    if not allowed:
        answer = await client.post(CHAT, json=GOOD[CHAT] | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        return
    await whole(client, **fields)
    tokenizer, grammar = load_tokenizer(builtin_directory("target"), 4096), generator.submissions[-1].sampling.grammar
    for arguments, accepted in (
        ('{"a": 1}', True),
        ('"a"', False),
        ("[1]", False),
        ("Infinity", False),
        ("null", False),
    ):
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        tokens = tokenizer.tokenize_str(text)
        assert accepted == (LLMatcher(tokenizer, grammar).validate_tokens(tokens) == len(tokens)), text

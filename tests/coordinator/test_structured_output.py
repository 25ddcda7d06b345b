"""What an output has to match: every way to ask for it, what is refused before anything is computed, and grammars that
kill or hang the process that compiles them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.core.errors import InvalidRequest, Unavailable
from baton.model_source import builtin_directory
from coordinator import structured_output
from coordinator.http.app import HttpSettings, create_app
from coordinator.openai.schema import ChatBody, CompletionBody
from coordinator.openai.validation import parse
from coordinator.structured_output import Constraint, GrammarCompiler, compile_here, to_grammar
from coordinator.text.model import TextModel
from coordinator.translate import Translator
from tests.support.fake_generator import FakeGenerator
from tests.support.requests_kit import CHAT, COMPLETIONS, GOOD

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"'
BOMB = "b{3}(a{1000}){1000}"


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return builtin_directory("target")


@pytest.fixture
async def compiler(model_dir: Path) -> AsyncIterator[GrammarCompiler]:
    made = GrammarCompiler(model_dir, 4096)
    yield made
    made.close()


SAME: list[tuple[dict[str, Any], Constraint]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        Constraint("json_schema", TEXT, "response_format.json_schema.schema"),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": None}}},
        Constraint("json_schema", TEXT, "response_format.json_schema.schema", lenient=True),
    ),
    ({"response_format": {"type": "json_object"}}, Constraint("json_schema", '{"type":"object"}', "response_format")),
    ({"structured_outputs": {"json": SCHEMA}}, Constraint("json_schema", TEXT, "structured_outputs.json")),
    ({"structured_outputs": {"json": TEXT, "regex": None}}, Constraint("json_schema", TEXT, "structured_outputs.json")),
    (
        {"structured_outputs": {"json_object": True}},
        Constraint("json_schema", '{"type":"object"}', "structured_outputs.json_object"),
    ),
    ({"structured_outputs": {"regex": "a+"}}, Constraint("regex", "a+", "structured_outputs.regex")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Constraint("choice", '["a","b"]', "structured_outputs.choice")),
    ({"structured_outputs": {"grammar": "start: A"}}, Constraint("lark", "start: A", "structured_outputs.grammar")),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        Constraint("json_schema", TEXT, "structured_outputs.json", whitespace=""),
    ),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?", "guided_decoding_backend": "x"},
        Constraint("json_schema", TEXT, "guided_json", whitespace=" ?"),
    ),
    ({"guided_regex": "a+"}, Constraint("regex", "a+", "guided_regex")),
    ({"guided_choice": ["a"]}, Constraint("choice", '["a"]', "guided_choice")),
    ({"guided_grammar": "start: A"}, Constraint("lark", "start: A", "guided_grammar")),
]


@pytest.mark.parametrize(("fields", "wanted"), SAME, ids=[json.dumps(f)[:50] for f, _ in SAME])
def test_every_way_to_ask_for_it(fields: dict[str, Any], wanted: Constraint) -> None:
    chat = parse(ChatBody, json.dumps(GOOD[CHAT] | fields).encode()).options()
    completion = parse(CompletionBody, json.dumps(GOOD[COMPLETIONS] | fields).encode()).options()
    assert chat.constraint == completion.constraint == wanted


@pytest.mark.parametrize("asked", [None, {"type": "text"}, {"type": "text", "json_schema": None}])
def test_text_asks_for_nothing(asked: Any) -> None:
    assert parse(ChatBody, json.dumps(GOOD[CHAT] | {"response_format": asked}).encode()).options().constraint is None


async def test_a_grammar_is_compiled_once_and_a_bad_one_refused_with_its_reason(compiler: GrammarCompiler) -> None:
    good = Constraint("json_schema", TEXT, "f")
    assert json.loads(await compiler.compile(good))["grammars"][0]["json_schema"]["properties"] == SCHEMA["properties"]
    refused = [
        (Constraint("json_schema", '{"type":"banana"}', "f"), "Invalid type: banana"),
        (Constraint("json_schema", "[1]", "f"), "object"),
        (Constraint("json_schema", '{"type":"string","not":{"const":"a"}}', "f"), "Unimplemented keys"),
        (Constraint("json_schema", '{"type":"integer","minimum":5,"maximum":3}', "f"), "minimum"),
        (Constraint("regex", "a(", "f"), "unclosed group"),
        (Constraint("lark", "start: b", "f"), "unknown name"),
        (Constraint("llguidance", "{}", "f"), "missing field"),
    ]
    for constraint, why in refused:
        with pytest.raises(InvalidRequest, match=why) as caught:
            await compiler.compile(constraint)
        assert (caught.value.param, caught.value.code) == ("f", "invalid_grammar")
    compiler.close()  # verdicts need no child
    assert await compiler.compile(good)
    with pytest.raises(InvalidRequest, match="banana"):
        await compiler.compile(refused[0][0])
    assert compiler._executor is None


async def test_keywords_that_are_not_implemented_are_ignored_where_the_schema_is_not_strict(
    compiler: GrammarCompiler,
) -> None:
    assert await compiler.compile(Constraint("json_schema", '{"type":"string","not":{"const":"a"}}', "f", lenient=True))


async def test_a_grammar_that_kills_its_process_is_refused_and_others_are_served(compiler: GrammarCompiler) -> None:
    """A chain of 4,000 rules overflows the stack of llguidance's compiler."""
    killer = Constraint("lark", CHAIN, "f")
    asked = [compiler.compile(killer)] + [compiler.compile(Constraint("regex", f"a{i}", "g")) for i in range(5)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(found[0], InvalidRequest) and "memory or stack" in found[0].message
    assert all(isinstance(grammar, str) for grammar in found[1:])


async def test_a_grammar_that_takes_too_long_is_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    await compiler.compile(Constraint("regex", "a", "f"))  # the child is there
    monkeypatch.setattr(structured_output, "COMPILE_S", 0.0)
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"takes over|too complex|too many"):
        await compiler.compile(Constraint("regex", BOMB, "f"))
    assert compiler._executor is None and time.monotonic() - began < 20
    monkeypatch.setattr(structured_output, "COMPILE_S", 30.0)
    assert await compiler.compile(Constraint("regex", "b", "f"))


def test_what_only_grows_while_it_is_used_is_found_by_trying_it_out(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baton.engine.grammars import GrammarError, load_tokenizer

    monkeypatch.setattr(structured_output, "_tokenizer", load_tokenizer(model_dir, 4096))
    monkeypatch.setattr(structured_output, "_TRIAL_S", 0.0)
    with pytest.raises(GrammarError, match="too complex"):
        compile_here(Constraint("regex", "[a-z]{40}", "f"))
    monkeypatch.setattr(structured_output, "_TRIAL_S", 60.0)
    assert compile_here(Constraint("regex", "[a-z]{40}", "f"))


async def test_a_child_that_died_with_nothing_to_do_costs_nobody_a_grammar(compiler: GrammarCompiler) -> None:
    await compiler.compile(Constraint("regex", "a", "f"))
    (child,) = compiler._executor._processes.values()  # type: ignore[union-attr]
    os.kill(child.pid, signal.SIGKILL)
    await asyncio.sleep(0.3)
    assert await compiler.compile(Constraint("regex", "[0-9]{4}", "f"))


async def test_what_took_too_long_once_is_tried_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Constraint("regex", "[0-9]{4}", "f")
    await compiler.compile(Constraint("regex", "a", "f"))
    (child,) = compiler._executor._processes.values()  # type: ignore[union-attr]
    monkeypatch.setattr(structured_output, "COMPILE_S", 0.5)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(InvalidRequest, match="takes over"):
        await compiler.compile(wanted)
    monkeypatch.setattr(structured_output, "COMPILE_S", 30.0)
    assert await compiler.compile(wanted)


async def test_who_leaves_stops_no_other_and_one_grammar_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(structured_output, "compile_here", lambda c: asked.append(c.value) or time.sleep(0.3) or "g")
    compiler = GrammarCompiler(model_dir, 4096, lambda: ThreadPoolExecutor(1))
    same = [asyncio.create_task(compiler.compile(Constraint("regex", "a", "f"))) for _ in range(8)]
    await asyncio.sleep(0.1)
    for task in same[:4]:
        task.cancel()
    found = await asyncio.gather(*same, return_exceptions=True)
    assert found[4:] == ["g"] * 4 and asked == ["a"]
    assert all(isinstance(one, asyncio.CancelledError) for one in found[:4])
    await asyncio.sleep(0)
    assert not compiler._asked and compiler._kept_chars == structured_output._size(Constraint("regex", "a", "f"), "g")


async def test_who_waits_for_others_is_told_so(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    monkeypatch.setattr(structured_output, "MAX_WAITING", 2)
    monkeypatch.setattr(structured_output, "compile_here", lambda constraint: time.sleep(0.5) or constraint.value)
    compiler = GrammarCompiler(model_dir, 4096, lambda: ThreadPoolExecutor(1))
    asked = [compiler.compile(Constraint("regex", str(i), "f")) for i in range(5)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert sorted(type(answer).__name__ for answer in found) == ["Unavailable"] * 2 + ["str"] * 3  # one is compiled
    assert isinstance(next(f for f in found if not isinstance(f, str)), Unavailable)


async def test_verdicts_are_kept_up_to_a_size(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    asked: list[str] = []
    monkeypatch.setattr(structured_output, "compile_here", lambda c: asked.append(c.value) or c.value)
    monkeypatch.setattr(structured_output, "KEPT_CHARS", 10_000)

    def start() -> Executor:
        return ThreadPoolExecutor(1)

    compiler = GrammarCompiler(model_dir, 4096, start)
    for name in ("a", "b", "c", "a", "d"):
        assert await compiler.compile(Constraint("regex", name * 1500, "f"))
    assert await compiler.compile(Constraint("regex", "a" * 1500, "f"))
    assert [value[0] for value in asked] == ["a", "b", "c", "d"] and compiler._kept_chars <= 10_000
    assert await compiler.compile(Constraint("regex", "b" * 1500, "f"))  # pushed out, and asked for again
    assert asked[-1][0] == "b"


def test_choices_are_taken_literally(model_dir: Path) -> None:
    from llguidance import LLMatcher

    from baton.engine.grammars import load_tokenizer

    tokenizer = load_tokenizer(model_dir, 4096)
    choices = ['say "hi"\n', "a|b", "back\\slash", "Ünïcødé 日本", "tab\t\u0001\x7f", "/x/i"]
    grammar = to_grammar(Constraint("choice", json.dumps(choices), "f"))
    for choice in choices:
        matcher = LLMatcher(tokenizer, grammar)
        assert matcher.consume_tokens(tokenizer.tokenize_str(choice)) and matcher.is_accepting(), choice
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.consume_tokens(tokenizer.tokenize_str("ab"))


@pytest.fixture
async def front(
    generator: FakeGenerator, text_model: TextModel, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    """A front whose grammars are compiled on a thread, with the built-in model's tokenizer."""
    from baton.engine.grammars import load_tokenizer

    monkeypatch.setattr(structured_output, "_tokenizer", load_tokenizer(model_dir, 4096))
    compiler = GrammarCompiler(model_dir, 4096, lambda: ThreadPoolExecutor(1))
    translator = Translator(text_model, grammars=compiler)
    app = create_app(generator, text_model, HttpSettings("tiny", created=1), translator)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        yield client


async def test_workers_get_the_grammar_and_clients_the_reason(
    front: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    for path in (CHAT, COMPLETIONS):
        assert (await front.post(path, json=GOOD[path] | {"structured_outputs": {"regex": "a+"}})).status_code == 200
        assert generator.submissions[-1].sampling.grammar == to_grammar(Constraint("regex", "a+", ""))
        answer = await front.post(path, json=GOOD[path] | {"guided_json": {"type": "banana"}})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "guided_json", "invalid_grammar")
        assert "banana" in error["message"]
    assert (await front.post(CHAT, json=GOOD[CHAT])).status_code == 200
    assert generator.submissions[-1].sampling.grammar == "" and len(generator.submissions) == 3

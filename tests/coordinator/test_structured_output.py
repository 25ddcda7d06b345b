"""Structured output: every way to request it, what is refused before anything is computed, and grammars that kill or
hang the process that compiles them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.core.errors import InvalidRequest, QuotaExceeded, Unavailable
from baton.runtime.model_source import builtin_directory
from coordinator import structured_output
from coordinator.http.app import HttpSettings, create_app
from coordinator.openai.schema import ChatBody, CompletionBody
from coordinator.openai.validation import parse
from coordinator.policy.grammar_queue import MAX_WAITING
from coordinator.structured_output import Constraint, GrammarCompiler, compile_here, to_grammar
from coordinator.text.model import TextModel
from tests.support.fake_generator import FakeGenerator
from tests.support.front_kit import RawClient, running
from tests.support.nodes import until
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
        Constraint("json_schema", TEXT[:-1] + ',"additionalProperties":false}', "response_format.json_schema.schema"),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": None}}},
        Constraint("json_schema", TEXT, "response_format.json_schema.schema", lenient=True),
    ),
    ({"response_format": {"type": "json_object"}}, Constraint("json_schema", '{"type":"object"}', "response_format")),
    (  # as of llama.cpp and Together
        {"response_format": {"type": "json_object", "schema": {"type": "array"}}},
        Constraint("json_schema", '{"type":"array"}', "response_format.schema", lenient=True),
    ),
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
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"whitespace_pattern": " *"}},
        Constraint("json_schema", '{"type":"object"}', "response_format", whitespace=" *"),
    ),
    ({"guided_regex": "a+"}, Constraint("regex", "a+", "guided_regex")),
    ({"guided_choice": ["a"]}, Constraint("choice", '["a"]', "guided_choice")),
    ({"guided_grammar": "start: A"}, Constraint("lark", "start: A", "guided_grammar")),
]


@pytest.mark.parametrize(("fields", "wanted"), SAME, ids=[json.dumps(f)[:50] for f, _ in SAME])
def test_every_field_that_requests_structured_output_is_parsed(fields: dict[str, Any], wanted: Constraint) -> None:
    chat = parse(ChatBody, json.dumps(GOOD[CHAT] | fields).encode()).options()
    completion = parse(CompletionBody, json.dumps(GOOD[COMPLETIONS] | fields).encode()).options()
    assert chat.constraint == completion.constraint == wanted


@pytest.mark.parametrize("schema", ['{"const": 1e400}', '{"enum": [1, [-1e400]]}', '{"type":"number","maximum":1e400}'])
def test_a_number_beyond_double_precision_does_not_become_null(schema: str) -> None:
    body = json.dumps(GOOD[CHAT])[:-1] + ', "structured_outputs": {"json": %s}}'
    with pytest.raises(InvalidRequest, match=r"'structured_outputs.json' has a number beyond double precision"):
        parse(ChatBody, (body % schema).encode()).options()
    assert parse(ChatBody, (body % '{"enum": [null, 1e300]}').encode()).options().constraint is not None


@pytest.mark.parametrize("asked", [None, {"type": "text"}, {"type": "text", "json_schema": None}])
def test_text_response_format_sets_no_constraint(asked: Any) -> None:
    assert parse(ChatBody, json.dumps(GOOD[CHAT] | {"response_format": asked}).encode()).options().constraint is None


async def test_grammar_is_compiled_once_and_an_invalid_one_is_refused_with_the_reason(
    compiler: GrammarCompiler,
) -> None:
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
        (Constraint("json_schema", '{"$ref":"#"}', "f"), "^f: no output can match it: .* a reference leads back to it"),
        (Constraint("lark", 'start: "x" a\na: a', "f"), "^f: no output can match it"),
        (Constraint("regex", r"[^\s\S]", "f"), "^f: no output can match it"),
    ]
    for constraint, why in refused:
        with pytest.raises(InvalidRequest, match=why) as caught:
            await compiler.compile(constraint)
        assert (caught.value.param, caught.value.code) == ("f", "invalid_grammar")
    compiler.close()  # cached verdicts need no child
    assert await compiler.compile(good)
    with pytest.raises(InvalidRequest, match="banana"):
        await compiler.compile(refused[0][0])
    assert compiler._children[0].executor is None


async def test_unimplemented_schema_keywords_are_ignored_if_the_schema_is_not_strict(compiler: GrammarCompiler) -> None:
    assert await compiler.compile(Constraint("json_schema", '{"type":"string","not":{"const":"a"}}', "f", lenient=True))


async def test_grammar_that_crashes_its_process_is_refused_and_others_are_compiled(compiler: GrammarCompiler) -> None:
    """A chain of 4,000 rules overflows the stack of llguidance's compiler."""
    killer = Constraint("lark", CHAIN, "f")
    asked = [compiler.compile(killer)] + [compiler.compile(Constraint("regex", f"a{i}", "g")) for i in range(5)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(found[0], InvalidRequest) and "memory or stack" in found[0].message
    assert all(isinstance(grammar, str) for grammar in found[1:])


async def test_a_grammar_that_takes_too_long_is_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    await compiler.compile(Constraint("regex", "a", "f"))  # starts the child
    monkeypatch.setattr(structured_output, "COMPILE_S", 0.0)
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"takes more than|too complex|too many"):
        await compiler.compile(Constraint("regex", BOMB, "f"))
    assert compiler._children[0].executor is None and time.monotonic() - began < 20
    monkeypatch.setattr(structured_output, "COMPILE_S", 30.0)
    assert await compiler.compile(Constraint("regex", "b", "f"))


def test_grammar_that_grows_during_matching_is_refused_after_a_trial_run(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baton.engine.grammar_automaton import GrammarError, load_tokenizer

    monkeypatch.setattr(structured_output, "_tokenizer", load_tokenizer(model_dir, 4096))
    monkeypatch.setattr(structured_output, "_TRIAL_S", 0.0)
    with pytest.raises(GrammarError, match="too complex"):
        compile_here(Constraint("regex", "[a-z]{40}", "f"))
    monkeypatch.setattr(structured_output, "_TRIAL_S", 60.0)
    assert compile_here(Constraint("regex", "[a-z]{40}", "f"))


async def test_death_of_an_idle_child_process_fails_no_grammar(compiler: GrammarCompiler) -> None:
    await compiler.compile(Constraint("regex", "a", "f"))
    (child,) = compiler._children[0].executor._processes.values()  # type: ignore[union-attr]
    os.kill(child.pid, signal.SIGKILL)
    await asyncio.sleep(0.3)
    assert await compiler.compile(Constraint("regex", "[0-9]{4}", "f"))


async def test_grammar_that_timed_out_is_compiled_again_on_the_next_request(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Constraint("regex", "[0-9]{4}", "f")
    await compiler.compile(Constraint("regex", "a", "f"))
    (child,) = compiler._children[0].executor._processes.values()  # type: ignore[union-attr]
    monkeypatch.setattr(structured_output, "COMPILE_S", 0.5)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(InvalidRequest, match="takes more than"):
        await compiler.compile(wanted)
    monkeypatch.setattr(structured_output, "COMPILE_S", 30.0)
    assert await compiler.compile(wanted)


async def test_cancelled_request_does_not_stop_others_that_share_its_grammar(
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
    assert not compiler._answers and compiler._kept_chars == structured_output._size(Constraint("regex", "a", "f"), "g")


class Gate:
    """Replaces the child's work: records each grammar in `asked`, and compiles it only when `open` is set. `turns` is
    the order in which the queue selected grammars; the threads that compile them may start in another order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
        self.asked: list[str] = []
        self.turns: list[str] = []
        self.open = threading.Event()
        monkeypatch.setattr(structured_output, "compile_here", self._compile)
        self.compiler = GrammarCompiler(model_dir, 4096, lambda: ThreadPoolExecutor(1))
        self._begin = self.compiler._queue.begin
        monkeypatch.setattr(self.compiler._queue, "begin", self._turn)

    def _turn(self) -> tuple[str, Constraint] | None:
        turn = self._begin()
        if turn is not None:
            self.turns.append(turn[1].value)
        return turn

    def _compile(self, constraint: Constraint) -> str:
        self.asked.append(constraint.value)
        self.open.wait(10.0)
        return f"grammar of {constraint.value}"

    def ask(self, value: str, client: str) -> asyncio.Task[str]:
        return asyncio.create_task(self.compiler.compile(Constraint("regex", value, "f"), client))

    async def flood(self, count: int, client: str = "flood") -> list[asyncio.Task[str]]:
        """Requests `count` different grammars for one client; returns when the first is being compiled."""
        tasks = [self.ask(f"flood{number}", client) for number in range(count)]
        await until(lambda: self.asked)
        return tasks


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> Iterator[Gate]:
    made = Gate(monkeypatch, model_dir)
    yield made
    made.open.set()


async def test_flood_from_one_api_key_does_not_delay_grammars_of_another(gate: Gate) -> None:
    flood = await gate.flood(50)
    await asyncio.sleep(0.05)
    assert gate.asked == ["flood0"]  # one at a time
    others = [gate.ask(f"other{number}", "other") for number in range(2)]
    await until(lambda: len(gate.asked) == 2)
    third = gate.ask("third", "third")
    await asyncio.sleep(0.05)
    assert gate.asked == ["flood0", "other0"]  # as if the flood were not there
    gate.open.set()
    assert await asyncio.gather(*others, third) == ["grammar of other0", "grammar of other1", "grammar of third"]
    await asyncio.gather(*flood)
    assert gate.turns[:3] == ["flood0", "other0", "third"] and len(gate.asked) == len(gate.turns) == 53
    assert [name for name in gate.turns if name.startswith("flood")] == [f"flood{number}" for number in range(50)]


async def test_flood_of_large_schemas_does_not_delay_another_key_in_real_child_processes(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("WAIT_S", "COMPILE_S"):  # the children are niced; only the order matters here
        monkeypatch.setattr(structured_output, limit, 100.0)
    await asyncio.gather(*(compiler.compile(Constraint("regex", name, "f"), name) for name in "xy"))
    assert all(child.executor for child in compiler._children)
    ended: list[str] = []

    async def ask(constraint: Constraint, client: str) -> None:
        await compiler.compile(constraint, client)
        ended.append(client)

    names = [[f"p{number}_{i}" for i in range(800)] for number in range(6)]
    flood = [json.dumps({"type": "object", "properties": {n: {"type": "integer"} for n in of}}) for of in names]
    asked = [asyncio.create_task(ask(Constraint("json_schema", schema, "f"), "flood")) for schema in flood]
    await asyncio.sleep(0)
    await ask(Constraint("json_schema", TEXT, "f"), "small")
    assert len(ended) <= 2 and ended[-1] == "small"
    await asyncio.gather(*asked)


async def test_grammar_of_a_disconnected_client_is_not_compiled(gate: Gate) -> None:
    flood = await gate.flood(20)
    stays = gate.ask("flood7", "other")
    await asyncio.sleep(0)
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    gate.open.set()
    assert await stays == "grammar of flood7"
    await until(lambda: not gate.compiler._answers)
    assert gate.asked == ["flood0", "flood7"]


async def test_waiting_grammars_are_limited_per_client_and_others_are_served(gate: Gate) -> None:
    flood = await gate.flood(MAX_WAITING)
    flood.append(gate.ask("one more", "flood"))  # now MAX_WAITING wait, besides the one being compiled
    await asyncio.sleep(0)
    with pytest.raises(QuotaExceeded, match=f"{MAX_WAITING} grammars of this API key are already waiting") as caught:
        await gate.ask("too many", "flood")
    assert caught.value.retry_after_s == 1
    other = gate.ask("other", "other")
    await asyncio.sleep(0)
    gate.open.set()
    assert await other == "grammar of other"
    await asyncio.gather(*flood)
    assert "too many" not in gate.asked


async def test_wait_for_a_grammar_is_limited(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "WAIT_S", 0.2)
    flood = await gate.flood(2)
    with pytest.raises(Unavailable, match=r"not compiled within 0.2 s"):
        await gate.ask("late", "flood")
    await asyncio.gather(*flood, return_exceptions=True)
    gate.open.set()
    monkeypatch.setattr(structured_output, "WAIT_S", 20.0)
    assert await gate.ask("flood0", "other") == "grammar of flood0"  # its verdict is cached
    assert gate.asked == ["flood0"]


async def test_child_process_that_does_not_start_fails_only_waiting_requests(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path
) -> None:
    monkeypatch.setattr(structured_output, "START_S", 0.0)
    compiler = GrammarCompiler(model_dir, 4096)
    asked = [compiler.compile(Constraint("regex", value, "f")) for value in "ab"]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(error) for error in found] == [Unavailable] * 2
    monkeypatch.setattr(structured_output, "START_S", 60.0)
    assert await compiler.compile(Constraint("regex", "a", "f"))
    compiler.close()


async def test_verdict_cache_is_bounded_by_size(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
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
    assert await compiler.compile(Constraint("regex", "b" * 1500, "f"))  # evicted, so it is compiled again
    assert asked[-1][0] == "b"
    assert await compiler.compile(Constraint("json_schema", "{}", "f", whitespace=" " * 9_900))
    assert compiler._kept_chars <= 10_200 and len(compiler._verdicts) == 1, "what is kept beside the value counts"


def test_choices_are_taken_literally(model_dir: Path) -> None:
    from llguidance import LLMatcher

    from baton.engine.grammar_automaton import load_tokenizer

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
    from baton.engine.grammar_automaton import load_tokenizer

    monkeypatch.setattr(structured_output, "_tokenizer", load_tokenizer(model_dir, 4096))
    generator.grammars = GrammarCompiler(model_dir, 4096, lambda: ThreadPoolExecutor(1))
    app = create_app(generator, text_model, HttpSettings("tiny", created=1))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        yield client


async def test_workers_receive_the_grammar_and_clients_the_refusal_reason(
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


async def test_http_client_disconnect_cancels_its_waiting_grammar(
    gate: Gate, generator: FakeGenerator, text_model: TextModel
) -> None:
    generator.grammars = gate.compiler
    async with running(create_app(generator, text_model, HttpSettings("tiny", created=1))) as server:
        (first,) = await gate.flood(1, client="")
        client = await RawClient.connect(server)
        await client.post(COMPLETIONS, GOOD[COMPLETIONS] | {"guided_regex": "left"})
        await until(lambda: gate.compiler._queue._waiting)
        await client.close()
        await until(lambda: not gate.compiler._queue._waiting)
        gate.open.set()
        await first
    assert gate.asked == ["flood0"] and not generator.submissions


async def test_too_many_waiting_grammars_are_a_429_with_retry_after(
    gate: Gate, generator: FakeGenerator, text_model: TextModel
) -> None:
    generator.grammars = gate.compiler
    app = create_app(generator, text_model, HttpSettings("tiny", created=1))
    waiting = [gate.ask(str(number), "") for number in range(MAX_WAITING + 1)]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        await until(lambda: gate.asked)
        waiting.append(gate.ask("last", ""))
        answer = await client.post(COMPLETIONS, json=GOOD[COMPLETIONS] | {"guided_regex": "refused"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert "64 grammars of clients without an API key are already waiting" in answer.json()["error"]["message"]
    gate.open.set()
    await asyncio.gather(*waiting, return_exceptions=True)

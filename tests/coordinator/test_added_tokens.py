"""Added tokens in grammars, whether the tokenizer flags them as special or not: Qwen's does not flag `<tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from llguidance import LLMatcher
from starlette.applications import Starlette
from tokenizers import Tokenizer

from baton.engine.grammar_automaton import Automaton, Lexers, load_tokenizer
from coordinator import structured_output
from coordinator.http.app import HttpSettings, create_app
from coordinator.structured_output import GrammarCompiler
from coordinator.text.model import TextModel
from tests.support import tokenizers_kit
from tests.support.fake_generator import FakeGenerator
from tests.support.grpc_kit import Client, served
from tests.support.model_dirs import text_dir
from tests.support.requests_kit import CHAT
from tests.support.scripted import MARKERS, make_scripted
from tests.support.tool_templates import HERMES

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


class Model:
    """A model directory, and the tokenizer of its grammars."""

    def __init__(self, directory: Path, *, special: bool) -> None:
        markers = dict.fromkeys([*MARKERS, "[TOOL]"], special)
        self.directory = make_scripted(directory, {"x": "Some text."}, template=HERMES, markers=markers)
        self.text = TextModel.load(directory)
        self.grammars = load_tokenizer(directory, self.text.vocab_size)

    def allows(self, grammar: str, ids: list[int]) -> bool:
        """Returns whether a grammar allows these tokens, one after the other, and then the end."""
        automaton = Automaton(Lexers(self.grammars), grammar)
        ends = self.text.eos_token_ids
        for count, token in enumerate([*ids, ends[0]]):
            (mask,) = automaton.masks(tuple(ids[:count]), (), ends)
            if mask is None or not mask[token >> 3] >> (token & 7) & 1:
                return False
        return True


@pytest.fixture(params=[False, True], ids=["plain", "special"])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    made = Model(tmp_path / "m", special=request.param)
    monkeypatch.setattr(structured_output, "_tokenizer", made.grammars)
    yield made
    made.text.close()


@pytest.fixture
def app(generator: FakeGenerator, model: Model) -> Starlette:
    generator.grammars = GrammarCompiler(Path(), model.text.vocab_size, lambda: ThreadPoolExecutor(1))
    return create_app(generator, model.text, HttpSettings("tiny", created=1))


async def grammar_of(client: httpx.AsyncClient, generator: FakeGenerator, **fields: Any) -> str:
    answer = await client.post(CHAT, json={"messages": [{"role": "user", "content": "Hi"}]} | fields)
    assert answer.status_code == 200, answer.text
    return generator.submissions[-1].sampling.grammar


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_forced_calls_are_written_with_the_tokens_of_their_markers(
    client: httpx.AsyncClient, generator: FakeGenerator, model: Model, choice: Any
) -> None:
    grammar = await grammar_of(client, generator, tools=TOOLS, tool_choice=choice)
    ids = model.text.encode(CALL)
    assert set(map(model.text.tokenizer.token_to_id, ("<tool_call>", "</tool_call>"))) <= set(ids)
    assert model.allows(grammar, ids)


async def test_format_and_optional_calls_share_a_grammar(
    client: httpx.AsyncClient, generator: FakeGenerator, model: Model
) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    grammar = await grammar_of(client, generator, tools=TOOLS, response_format=wanted)
    assert model.allows(grammar, model.text.encode(CALL))
    assert model.allows(grammar, model.text.encode('{"a": 1}'))


@pytest.mark.parametrize("text", ["<think>", "a <think>b", "[TOOL]", "<|im_start|>"])
async def test_literals_that_spell_an_added_token_can_be_written(
    client: httpx.AsyncClient, generator: FakeGenerator, model: Model, text: str
) -> None:
    """By its token where that is text; a special token is not part of the text, so its spelling is."""
    named = {"type": "object", "properties": {text: {"const": text}}, "required": [text], "additionalProperties": False}
    model.text.tokenizer.encode_special_tokens = True
    for wanted, output in (
        ({"choice": [text]}, text),
        ({"regex": text.replace("[", r"\[").replace("|", r"\|")}, text),
        ({"json": named}, json.dumps({text: text})),
        ({"grammar": f'start: "{text}"'}, text),
    ):
        grammar = await grammar_of(client, generator, structured_outputs=wanted)
        assert model.allows(grammar, model.text.encode(output)), wanted


async def test_grammar_over_grpc_has_literals_of_added_tokens(generator: FakeGenerator, model: Model) -> None:
    generator.grammars = GrammarCompiler(Path(), model.text.vocab_size, lambda: ThreadPoolExecutor(1))
    async with served(generator, model.text) as client:
        await ask(client, LLMatcher.grammar_from_lark('start: "<think>" "ok"'))
        await ask(client, f'start: <[{model.text.tokenizer.token_to_id("<think>")}]> "ok"')
    literal, by_id = (submission.sampling.grammar for submission in generator.submissions)
    assert model.allows(by_id, model.text.encode("<think>ok"))
    model.text.tokenizer.encode_special_tokens = True
    assert model.allows(literal, model.text.encode("<think>ok"))


async def ask(client: Client, grammar: str) -> None:
    await client.all(text="Hi", sampling={"grammar": grammar})


def test_a_tokenizer_that_puts_a_space_before_a_text_keeps_literals(tmp_path: Path) -> None:
    """And ids beyond the vocabulary, which llguidance names `<[500]>`, are not text."""
    tokenizer: Tokenizer = tokenizers_kit.byte_fallback()
    grammars = load_tokenizer(text_dir(tmp_path, tokenizer), 512)
    for literal, first in (("Hello world", "H"), (" Hello", "▁"), ("<s>", "<"), ("<[500]>", "<")):
        lark = LLMatcher.grammar_from_lark(f'start: "{literal}"')
        (mask,) = Automaton(Lexers(grammars), lark).masks((), (), ())
        assert mask is not None
        allowed = [token for token in range(512) if mask[token >> 3] >> (token & 7) & 1]
        assert tokenizer.token_to_id(first) in allowed and 500 not in allowed

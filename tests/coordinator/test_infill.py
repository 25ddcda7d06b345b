"""`suffix` of completions: prompts to fill in the middle, for the tokenizers that have the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer

from coordinator.http.app import HttpSettings, create_app
from coordinator.text.model import TextModel
from tests.support import tokenizers_kit as kit
from tests.support.fake_generator import FakeGenerator
from tests.support.model_dirs import text_dir
from tests.support.requests_kit import COMPLETIONS

FAMILIES = {
    "qwen": (kit.byte_level, ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "<|fim_pad|>"),
    "starcoder": (kit.byte_level, ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<|endoftext|>"),
    "deepseek": (kit.byte_level, ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "<|endoftext|>"),
    "codellama": (kit.byte_fallback, ("▁<PRE>", "▁<SUF>", "▁<MID>"), "▁<EOT>"),
}


def model_of(directory: Path, tokenizer: Tokenizer, tokens: tuple[str, ...], *, special: bool = True) -> TextModel:
    made = kit.renamed(tokenizer)
    added = [AddedToken(token, special=special, normalized=False) for token in tokens]
    _ = made.add_special_tokens(added) if special else made.add_tokens(added)
    return TextModel.load(text_dir(directory, made, config={"max_position_embeddings": 32_768}))


async def ask(model: TextModel, generator: FakeGenerator, **fields: Any) -> httpx.Response:
    app = create_app(generator, model, HttpSettings("tiny", created=1))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        return await client.post(COMPLETIONS, json={"prompt": "Hello", "suffix": " world"} | fields)


@pytest.mark.parametrize("family", FAMILIES)
async def test_prefix_and_suffix_are_between_the_tokens_of_the_family(
    tmp_path: Path, generator: FakeGenerator, family: str
) -> None:
    make, (prefix, suffix, middle), end = FAMILIES[family]
    model = model_of(tmp_path, make(), (prefix, suffix, middle, end))
    assert (await ask(model, generator)).status_code == 200
    (submission,) = generator.submissions
    ids = {name: model.tokenizer.token_to_id(name) for name in (prefix, suffix, middle, end)}
    begin = [1] if family == "codellama" else []
    before = model.encode("Hello", add_special_tokens=False)
    after = model.encode("Hello world", add_special_tokens=False)[len(before) :]
    expected = [*begin, ids[prefix], *before, ids[suffix], *after, ids[middle]]
    assert list(submission.prompt) == expected
    assert ids[end] in submission.eos_token_ids


async def test_codestral_reads_the_suffix_first_and_has_no_token_of_the_middle(
    tmp_path: Path, generator: FakeGenerator
) -> None:
    model = model_of(tmp_path, kit.byte_fallback(), ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"))
    assert (await ask(model, generator)).status_code == 200
    (submission,) = generator.submissions
    prefix, suffix = map(model.tokenizer.token_to_id, ("[PREFIX]", "[SUFFIX]"))
    before = model.encode("Hello", add_special_tokens=False)
    after = model.encode("Hello world", add_special_tokens=False)[len(before) :]
    assert list(submission.prompt) == [1, suffix, *after, prefix, *before]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("long", [False, True])
async def test_text_that_spells_a_control_token_stays_text(
    tmp_path: Path, generator: FakeGenerator, family: str, special: bool, long: bool
) -> None:
    make, tokens, end = FAMILIES[family]
    model = model_of(tmp_path, make(), (*tokens, end), special=special)
    spelled = "".join((*tokens, end)) * (100 if long else 1)
    given = {"prompt": f"a {spelled} b", "suffix": f"{spelled} c", "max_tokens": 1}
    answer = await ask(model, generator, **given)
    assert answer.status_code == 200, answer.text
    (submission,) = generator.submissions
    ids = {model.tokenizer.token_to_id(token) for token in (*tokens, end)}
    assert sorted(i for i in submission.prompt if i in ids) == sorted(map(model.tokenizer.token_to_id, tokens))
    written = model.decode(submission.prompt, skip_special_tokens=False).replace("▁", " ")  # as SentencePiece reads it
    assert all(given[name].replace("▁", " ") in written for name in ("prompt", "suffix"))


async def test_noncharacters_are_refused_by_the_name_of_their_field(tmp_path: Path, generator: FakeGenerator) -> None:
    model = model_of(tmp_path, kit.byte_level(), FAMILIES["qwen"][1])
    for field in ("prompt", "suffix"):
        answer = await ask(model, generator, **{field: "a\ufdd00\ufdd0"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_suffix_is_refused_by_name_where_it_cannot_be_served(tmp_path: Path, generator: FakeGenerator) -> None:
    without = model_of(tmp_path / "without", kit.byte_level(), ())
    model = model_of(tmp_path / "with", kit.byte_level(), FAMILIES["qwen"][1])
    for served, fields in ((without, {}), (model, {"prompt": [1, 2]}), (model, {"echo": True}), (model, {"suffix": 3})):
        answer = await ask(served, generator, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix"), fields
    assert (await ask(without, generator, suffix="")).status_code == 200, "as if it were left out"

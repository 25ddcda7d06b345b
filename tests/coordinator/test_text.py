"""The text side of a model directory."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from baton.core.errors import ContextLengthExceeded, InvalidRequest, StartupError
from baton.core.request import SamplingParams
from coordinator.text.chat import ChatMessage
from coordinator.text.model import TextModel
from tests.support import tokenizers_kit as kit
from tests.support.model_dirs import model_config, text_dir

USER = [ChatMessage("user", "hi")]


def test_encoding_equals_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    for make in (kit.byte_level, kit.byte_fallback):
        directory = text_dir(tmp_path / make.__name__, make())
        oracle, model = PreTrainedTokenizerFast.from_pretrained(directory), TextModel.load(directory)
        for text in ("Hello world", " x", "", "a</s>b", "<|im_start|>user\n", "中文 😀\n\n"):
            assert model.encode(text) == oracle(text)["input_ids"]
            assert model.encode(text, add_special_tokens=False) == oracle(text, add_special_tokens=False)["input_ids"]
        model.close()


def test_bos_is_never_doubled(tmp_path: Path) -> None:
    model = TextModel.load(text_dir(tmp_path, kit.byte_fallback()))
    assert model.bos_token_id == 1
    assert model.encode("Hello")[0] == 1 and model.encode("Hello").count(1) == 1
    assert model.encode("<s>Hello").count(1) == 1
    assert model.encode("<s>Hello", add_special_tokens=False).count(1) == 1
    starts = TextModel.load(text_dir(tmp_path / "b", kit.byte_fallback(), template="{{ bos_token }}hi"))
    assert starts.encode_chat(USER).count(1) == 1


def test_eos_is_the_union(tmp_path: Path) -> None:
    directory = text_dir(tmp_path, config={"eos_token_id": [1, 7]}, generation={"eos_token_id": [3, 7]})
    assert set(TextModel.load(directory).eos_token_ids) == {1, 3, 7}
    directory = text_dir(tmp_path / "b", config={"eos_token_id": None}, tokenizer_config={"eos_token": "<|im_end|>"})
    assert TextModel.load(directory).eos_token_ids == (3,)
    directory = text_dir(tmp_path / "c", config={"eos_token_id": 9}, generation={"eos_token_id": 8})
    assert set(TextModel.load(directory).eos_token_ids) == {9, 8, 1}


def test_sampling_defaults_come_from_generation_config(tmp_path: Path) -> None:
    assert TextModel.load(text_dir(tmp_path)).defaults == SamplingParams()
    given = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "do_sample": False}
    given |= {"min_p": 0.02, "typical_p": 0.9}
    model = TextModel.load(text_dir(tmp_path / "b", generation=given))
    assert model.defaults == SamplingParams(0.6, 0.9, 20, min_p=0.02, repetition_penalty=1.05)
    assert model.ignored_defaults == ("typical_p",)


def test_the_context_is_the_models_unless_cut(tmp_path: Path) -> None:
    directory = text_dir(tmp_path)
    assert TextModel.load(directory).max_model_len == 128
    assert TextModel.load(directory, max_model_len=64).max_model_len == 64
    with pytest.raises(StartupError, match="128"):
        TextModel.load(directory, max_model_len=129)


def test_chat_templates_are_found_where_they_may_be(tmp_path: Path) -> None:
    assert not TextModel.load(text_dir(tmp_path / "none", template=None)).has_chat
    with pytest.raises(InvalidRequest, match="no chat template"):
        TextModel.load(text_dir(tmp_path / "none", template=None)).encode_chat(USER)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for name, value, text in (("one", "C", "C"), ("named", named, "D")):
        directory = text_dir(tmp_path / name, template=None, tokenizer_config={"chat_template": value})
        model = TextModel.load(directory)
        assert model.decode(model.encode_chat(USER)) == text
    directory = text_dir(tmp_path / "both", template="F", tokenizer_config={"chat_template": "C"})
    assert TextModel.load(directory).decode(TextModel.load(directory).encode_chat(USER)) == "F"


def damage(directory: Path, name: str, text: str | None) -> Path:
    path = directory / name
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    return directory


DAMAGE: list[tuple[str, str | None, str]] = [
    ("tokenizer.json", None, "tokenizer.json"),
    ("tokenizer.json", "", "tokenizer.json"),
    ("tokenizer.json", "{}", "tokenizer.json"),
    ("tokenizer.json", '{"model": {"type": "BPE", "vocab": 3}}', "tokenizer.json"),
    ("config.json", None, "config.json"),
    ("config.json", "[]", "config.json"),
    ("config.json", json.dumps(model_config(vocab_size=100)), "vocab_size"),
    ("generation_config.json", "{", "generation_config.json"),
    ("generation_config.json", '{"eos_token_id": 512}', "eos_token_id"),
    ("generation_config.json", '{"eos_token_id": "1"}', "eos_token_id"),
    ("generation_config.json", '{"temperature": NaN}', "temperature"),
    ("generation_config.json", '{"temperature": -1}', "temperature"),
    ("generation_config.json", '{"top_p": 0}', "top_p"),
    ("generation_config.json", '{"top_k": true}', "top_k"),
    ("generation_config.json", '{"top_k": 2.5}', "top_k"),
    ("tokenizer_config.json", "[1]", "tokenizer_config.json"),
    ("tokenizer_config.json", '{"bos_token": 7}', "bos_token"),
    ("chat_template.jinja", "{% if %}", "chat template"),
]


@pytest.mark.parametrize(("name", "text", "named"), DAMAGE)
def test_damage_ends_in_one_line_that_names_it(tmp_path: Path, name: str, text: str | None, named: str) -> None:
    with pytest.raises(StartupError) as caught:
        TextModel.load(damage(text_dir(tmp_path), name, text))
    assert named in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(text_model: TextModel) -> None:
    for text in ("a " * 5_000_000, "é" * 5_000_000):
        start = time.process_time()
        with pytest.raises(ContextLengthExceeded) as caught:
            await text_model.encode_soon(text)
        assert time.process_time() - start < 0.05
        assert "128" in caught.value.message and caught.value.param == "prompt"


PATHOLOGICAL = ("a", " ", "\n", "1", "a1", " a", "<|", "\u0301", "é", "'s", "\U0001f600", "aA", "_", "\t \n")


@pytest.mark.parametrize("piece", PATHOLOGICAL, ids=ascii)
@pytest.mark.parametrize("make", [kit.byte_level, kit.byte_fallback])
def test_no_text_takes_the_square_of_its_length(make: Callable[[], Any], piece: str) -> None:
    """The best of several times on the processor: four times the text takes 5 to 8 times as long, a square 16 times."""
    tokenizer = make()

    def cost(size: int) -> float:
        text, best = piece * (size // len(piece.encode())), math.inf
        for _ in range(3):
            start = time.process_time()
            tokenizer.encode(text, add_special_tokens=False)
            best = min(best, time.process_time() - start)
        return best

    assert any(cost(1 << 17) <= 11 * cost(1 << 15) for _ in range(3))


async def count_turns(turns: list[float]) -> None:
    while True:
        turns.append(time.monotonic())
        await asyncio.sleep(0.002)


async def test_long_texts_are_encoded_off_the_event_loop(tmp_path: Path) -> None:
    model = TextModel.load(text_dir(tmp_path, config={"max_position_embeddings": 1 << 20}))
    for text in ("Hello world, " * 40_000, "x" * 400_000):
        turns: list[float] = []
        counting = asyncio.create_task(count_turns(turns))
        await asyncio.sleep(0)
        ids = await model.encode_soon(text)
        assert len(turns) >= 5  # other tasks ran meanwhile
        assert await model.decode_soon(ids) == text
        counting.cancel()
    model.close()


def test_the_bound_on_bytes_per_token_holds(tmp_path: Path) -> None:
    model = TextModel.load(text_dir(tmp_path))
    assert model.max_token_bytes is not None
    for text in kit.CORPUS:
        assert len(text.encode()) <= model.max_token_bytes * len(model.encode(text))
    assert TextModel.load(text_dir(tmp_path / "b", kit.metaspace())).max_token_bytes is None


def test_a_tokenizer_that_truncates_or_pads_is_set_right(tmp_path: Path) -> None:
    tokenizer: Any = kit.renamed(kit.byte_level())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    model = TextModel.load(text_dir(tmp_path, tokenizer))
    assert model.decode(model.encode("Hello world, this is long")) == "Hello world, this is long"
    assert len(model.encode("a")) == 1
    ids = model.encode_chat([ChatMessage("user", "Hello world, this is long")])
    assert model.decode(ids) == "user\nHello world, this is long\nassistant\n"

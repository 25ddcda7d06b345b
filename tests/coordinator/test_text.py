"""What the coordinator reads from a model directory: tokenizer, chat template, generation defaults."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from baton.core.errors import ContextLengthExceeded, InvalidRequest, StartupError, Unavailable
from baton.core.request import SamplingParams
from coordinator.__main__ import HUGE_PAGES
from coordinator.text import model as model_module
from coordinator.text.chat import ChatEncoder, ChatMessage, Rendering
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


async def test_bos_is_never_doubled(tmp_path: Path) -> None:
    model = TextModel.load(text_dir(tmp_path, kit.byte_fallback()))
    assert model.bos_token_id == 1
    assert model.encode("Hello")[0] == 1 and model.encode("Hello").count(1) == 1
    assert model.encode("<s>Hello").count(1) == 1
    assert model.encode("<s>Hello", add_special_tokens=False).count(1) == 1
    starts = TextModel.load(text_dir(tmp_path / "b", kit.byte_fallback(), template="{{ bos_token }}hi"))
    assert (await starts.encode_chat_async(USER)).count(1) == 1


def test_eos_is_the_union_of_all_configured_tokens(tmp_path: Path) -> None:
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


def test_context_length_is_the_models_unless_reduced(tmp_path: Path) -> None:
    directory = text_dir(tmp_path)
    assert TextModel.load(directory).max_model_len == 128
    assert TextModel.load(directory, max_model_len=64).max_model_len == 64
    with pytest.raises(StartupError, match="128"):
        TextModel.load(directory, max_model_len=129)


async def test_chat_template_is_found_in_every_supported_file(tmp_path: Path) -> None:
    assert not TextModel.load(text_dir(tmp_path / "none", template=None)).has_chat
    with pytest.raises(InvalidRequest, match="no chat template"):
        await TextModel.load(text_dir(tmp_path / "none", template=None)).encode_chat_async(USER)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for name, value, text in (("one", "C", "C"), ("named", named, "D")):
        directory = text_dir(tmp_path / name, template=None, tokenizer_config={"chat_template": value})
        model = TextModel.load(directory)
        assert model.decode(await model.encode_chat_async(USER)) == text
    directory = text_dir(tmp_path / "both", template="F", tokenizer_config={"chat_template": "C"})
    assert TextModel.load(directory).decode(await TextModel.load(directory).encode_chat_async(USER)) == "F"


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
def test_damaged_model_file_is_reported_in_one_line_with_the_cause(
    tmp_path: Path, name: str, text: str | None, named: str
) -> None:
    with pytest.raises(StartupError) as caught:
        TextModel.load(damage(text_dir(tmp_path), name, text))
    assert named in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "modules.json"])
def test_a_pipe_in_a_model_directory_is_named_and_not_waited_for(tmp_path: Path, name: str) -> None:
    directory = text_dir(tmp_path)
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    with pytest.raises(StartupError, match=rf"cannot read .*{name}: not a regular file"):
        TextModel.load(directory)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(text_model: TextModel) -> None:
    for text in ("a " * 5_000_000, "é" * 5_000_000):
        start = time.process_time()
        with pytest.raises(ContextLengthExceeded) as caught:
            await text_model.encode_async(text)
        assert time.process_time() - start < 0.05
        assert "128" in caught.value.message and caught.value.param == "prompt"


PATHOLOGICAL = ("a", " ", "\n", "1", "a1", " a", "<|", "\u0301", "é", "'s", "\U0001f600", "aA", "_", "\t \n")


@pytest.mark.parametrize("piece", PATHOLOGICAL, ids=ascii)
@pytest.mark.parametrize("make", [kit.byte_level, kit.byte_fallback])
def test_tokenization_time_is_not_quadratic_in_the_text_length(make: Callable[[], Any], piece: str) -> None:
    """Best of several CPU times: four times the text takes 5 to 8 times as long; quadratic time would be 16 times."""
    tokenizer = make()

    def cost(size: int) -> float:
        text, best = piece * (size // len(piece.encode())), math.inf
        for _ in range(3):
            start = time.process_time()
            tokenizer.encode(text, add_special_tokens=False)
            best = min(best, time.process_time() - start)
        return best

    assert any(cost(1 << 17) <= 11 * cost(1 << 15) for _ in range(3))


TWICE = """
import json, time
from tests.coordinator.test_text import PATHOLOGICAL, kit
for make in (kit.byte_level, kit.byte_fallback):
    tokenizer = make()
    def cost(text):
        start = time.process_time()
        tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return time.process_time() - start
    for piece in PATHOLOGICAL:
        text = piece * ((1 << 20) // len(piece.encode()))
        tries = []
        while not tries or (min(tries) > 2.5 and len(tries) < 3):
            tries.append(min(cost(2 * text) for _ in range(2)) / min(cost(text) for _ in range(2)))
        print(json.dumps([make.__name__, piece, tries]))
"""


@pytest.mark.long
def test_tokenizing_two_megabytes_takes_little_more_than_twice_as_long_as_one() -> None:
    """Encoded as in the coordinator: with huge pages, by the batch call."""
    program = [sys.executable, "-c", TWICE]
    environment = {**os.environ, "GLIBC_TUNABLES": HUGE_PAGES}
    shown = subprocess.run(program, env=environment, capture_output=True, text=True, check=True, timeout=600).stdout
    found = [json.loads(line) for line in shown.splitlines()]
    assert len(found) == 2 * len(PATHOLOGICAL)
    assert not [row for row in found if min(row[2]) > 2.5], found


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
        ids = await model.encode_async(text)
        assert len(turns) >= 5  # other tasks ran meanwhile
        assert await model.decode_async(ids) == text
        counting.cancel()
    model.close()


def test_the_bound_on_bytes_per_token_holds(tmp_path: Path) -> None:
    model = TextModel.load(text_dir(tmp_path))
    assert model.max_token_bytes is not None
    for text in kit.CORPUS:
        assert len(text.encode()) <= model.max_token_bytes * len(model.encode(text))
    assert TextModel.load(text_dir(tmp_path / "b", kit.metaspace())).max_token_bytes is None


async def test_truncation_and_padding_of_a_tokenizer_are_disabled(tmp_path: Path) -> None:
    tokenizer: Any = kit.renamed(kit.byte_level())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    model = TextModel.load(text_dir(tmp_path, tokenizer))
    assert model.decode(model.encode("Hello world, this is long")) == "Hello world, this is long"
    assert len(model.encode("a")) == 1
    ids = await model.encode_chat_async([ChatMessage("user", "Hello world, this is long")])
    assert model.decode(ids) == "user\nHello world, this is long\nassistant\n"


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": ["a" * 5_000]}}}
TOO_MUCH: dict[str, tuple[list[ChatMessage], Rendering]] = {
    "messages": ([ChatMessage("assistant", "", tool_calls=(CALL,))], Rendering()),
    "tools": (USER, Rendering(tools=[{"type": "function", "function": {"name": "f", "description": "a" * 5_000}}])),
    "chat_template_kwargs": (USER, Rendering(variables={"x": {"a" * 5_000: 1}})),
}


@pytest.mark.parametrize("param", TOO_MUCH)
async def test_all_template_input_is_measured_before_rendering(
    param: str, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(*_: object, **__: object) -> str:
        raise AssertionError("rendered")

    monkeypatch.setattr(ChatEncoder, "render", render)
    messages, how = TOO_MUCH[param]
    with pytest.raises(ContextLengthExceeded) as caught:
        await text_model.encode_chat_async(messages, how)
    assert "128" in caught.value.message and caught.value.param == param


async def test_messages_and_tools_together_must_fit_the_context(text_model: TextModel) -> None:
    assert text_model.max_token_bytes is not None
    half = "a " * (text_model.max_token_bytes * 128 // 4)
    with pytest.raises(ContextLengthExceeded) as caught:
        await text_model.encode_chat_async([ChatMessage("user", half)], Rendering(tools=[{"type": half + "a"}]))
    assert caught.value.param == "tools"


async def test_event_loop_runs_while_values_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "VALUES_AT_ONCE", 10)
    turns: list[float] = []
    counting = asyncio.create_task(ticking(turns))
    assert await model_module._text_bytes([{"type": "é"}] * 50) == 100
    assert len(turns) >= 15
    counting.cancel()


async def ticking(turns: list[float]) -> None:
    while True:
        turns.append(0.0)
        await asyncio.sleep(0)


class BlockedStep:
    """Blocks a step of every chat until `go` is set; records the last letter of each text."""

    def __init__(self, step: str, patch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun: list[str] = []
        self._lock = threading.Lock()
        real = getattr(ChatEncoder, step)

        def held(encoder: ChatEncoder, what: Any, *more: Any, **named: Any) -> Any:
            text: str = what if isinstance(what, str) else what[0].content
            with self._lock:
                self.begun.append(text[-1])
            assert self.go.wait(30)
            return real(encoder, what, *more, **named)

        patch.setattr(ChatEncoder, step, held)

    async def until_begun(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.begun) < count:
                await asyncio.sleep(0.001)


LONG = 70_000


def wide(path: Path) -> TextModel:
    return TextModel.load(
        text_dir(path, template="{{ messages[0].content }}", config={"max_position_embeddings": 1 << 20})
    )


def starts(model: TextModel, text: str) -> asyncio.Task[list[int]]:
    return asyncio.create_task(model.encode_chat_async([ChatMessage("user", text)]))


async def turns_of_loop() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_empty_messages_count_towards_the_size_of_a_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation of many empty messages is a long one."""
    model, sizes = wide(tmp_path), list[int]()
    waiting = model._waiting
    monkeypatch.setattr(model, "_waiting", lambda size: sizes.append(size) or waiting(size))
    await model.encode_chat_async([ChatMessage("user", "x")] + [ChatMessage("assistant", "")] * 3000)
    assert sizes[0] > model_module.SMALL_BYTES
    await model.encode_chat_async([ChatMessage("user", "x")])
    assert sizes[1] < 100


async def test_total_size_of_chats_waiting_to_be_rendered_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wide(tmp_path)
    monkeypatch.setattr(model_module, "MAX_WAITING_BYTES", 2 * LONG)
    held = BlockedStep("render", monkeypatch)
    waiting = [starts(model, "x" * LONG) for _ in range(2)]
    await turns_of_loop()
    tools = [{"description": "x" * LONG}]
    for refused in (
        starts(model, "x" * LONG),
        asyncio.create_task(model.encode_chat_async(USER, Rendering(tools=tools))),
        asyncio.create_task(model.encode_chat_async(USER, Rendering(variables={"x": tools}))),
        asyncio.create_task(model.encode_chat_async([ChatMessage("assistant", "", tool_calls=tuple(tools))])),
        asyncio.create_task(model.encode_async("x" * LONG)),
    ):
        with pytest.raises(Unavailable) as caught:
            await refused
        assert (caught.value.code, caught.value.retry_after_s) == ("overloaded", 1)
    small = starts(model, "x" * model_module.SMALL_BYTES)
    await turns_of_loop()
    assert not small.done()
    waiting[1].cancel()
    waiting[1] = starts(model, "x" * 9)
    held.go.set()
    for ids in await asyncio.gather(*waiting, small):
        assert ids
    assert model._waiting_bytes == 0
    assert await starts(model, "x" * (5 * LONG)), "one alone may be longer"
    model.close()


async def test_a_short_chat_is_rendered_before_long_ones_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wide(tmp_path)
    held = BlockedStep("render", monkeypatch)
    long = [starts(model, "x" * LONG + letter) for letter in "abcd"]
    await held.until_begun(1)
    short = starts(model, "s")
    await turns_of_loop()
    held.go.set()
    await asyncio.gather(short, *long)
    assert held.begun == ["a", "s", "b", "c", "d"]
    model.close()


async def test_short_chat_is_encoded_concurrently_with_long_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wide(tmp_path)
    held = BlockedStep("encode_rendered", monkeypatch)
    long = [starts(model, "x" * LONG + letter) for letter in "abcd"]
    await held.until_begun(model_module.LONG_AT_ONCE)
    short = starts(model, "s")
    await held.until_begun(model_module.LONG_AT_ONCE + 1)
    assert held.begun[-1] == "s"
    held.go.set()
    await asyncio.gather(short, *long)
    model.close()

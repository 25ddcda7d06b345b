"""Plain values to a `Submission`, as gRPC uses it: the same limits and names as over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from baton.core.errors import ContextLengthExceeded, InvalidRequest
from coordinator.text.chat import ChatMessage
from coordinator.text.model import TextModel
from coordinator.translate import MAX_MESSAGES, Options, Translator
from tests.support import tokenizers_kit as kit
from tests.support.model_dirs import text_dir

HI = [ChatMessage("user", "hi")]


@pytest.fixture
def translator(text_model: TextModel) -> Translator:
    return Translator(text_model, deadline_s=60.0)


async def test_defaults(translator: Translator) -> None:
    text = await translator.from_text("r", "Hello", Options())
    assert list(text.prompt) == kit.byte_level().encode("Hello").ids
    assert (text.request_id, text.max_tokens, text.deadline_s, text.eos_token_ids) == ("r", 16, 60.0, (1,))
    assert (text.sampling.temperature, text.sampling.top_p, text.sampling.top_k) == (1.0, 1.0, 0)
    chat = await translator.from_messages("r", HI, Options())
    assert len(chat.prompt) + chat.max_tokens == 128
    seeds = {(await translator.from_token_ids("r", [1], Options())).sampling.seed for _ in range(20)}
    assert len(seeds) == 20 and all(0 <= seed < 1 << 64 for seed in seeds)


async def test_model_defaults_apply_to_options_that_the_request_omits(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = text_dir(tmp_path_factory.mktemp("m"), generation={"temperature": 0.6, "top_k": 20, "top_p": 0.9})
    translator = Translator(TextModel.load(directory))
    sampling = (await translator.from_token_ids("r", [1], Options())).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.9)
    asked = Options(temperature=0.0, top_k=-1, top_p=1.0, seed=-1)
    sampling = (await translator.from_token_ids("r", [1], asked)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.0, 0, 1.0, 2**64 - 1)


async def test_requested_options_are_kept(translator: Translator) -> None:
    asked = Options(max_tokens=7, temperature=0.5, top_p=0.25, top_k=3, seed=9, stop=("a", "b"), ignore_eos=True)
    got = await translator.from_token_ids("r", [5, 6], asked, deadline_s=3.0)
    assert (got.prompt, got.max_tokens, got.stop, got.eos_token_ids, got.deadline_s) == ((5, 6), 7, ("a", "b"), (), 3.0)
    sampling = got.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 3, 9)
    assert (await translator.from_token_ids("r", [5], Options(), deadline_s=1e9)).deadline_s == 60.0
    assert (await translator.from_token_ids("r", [5], Options(top_k=10_000))).sampling.top_k == 0


async def test_top_p_0_allows_only_the_most_likely_token(translator: Translator) -> None:
    for top_p in (0.0, -0.0, 0):
        sampling = (await translator.from_token_ids("r", [5], Options(top_p=top_p, top_k=7))).sampling
        assert (sampling.top_p, sampling.top_k, sampling.temperature) == (1.0, 1, 1.0)


async def test_context_length_is_enforced_at_the_boundary(translator: Translator) -> None:
    assert (await translator.from_token_ids("r", [5] * 127, Options())).max_tokens == 1
    assert (await translator.from_token_ids("r", [5] * 120, Options(max_tokens=8))).max_tokens == 8
    for ids, options, param in (
        ([5] * 128, Options(), "prompt"),
        ([5] * 120, Options(max_tokens=9), "max_tokens"),
        ([5] * 120, Options(max_tokens=9, max_tokens_param="max_completion_tokens"), "max_completion_tokens"),
    ):
        with pytest.raises(ContextLengthExceeded) as caught:
            await translator.from_token_ids("r", ids, options)
        assert caught.value.param == param
        assert "128" in caught.value.message and str(len(ids)) in caught.value.message


async def test_omitted_max_tokens_is_what_the_pools_hold_beyond_the_prompt(text_model: TextModel) -> None:
    translator = Translator(text_model, pools_hold=lambda prompt_tokens: 40 if prompt_tokens < 40 else 90)
    assert translator.max_model_len() == 40
    chat = await translator.from_messages("r", HI, Options())
    assert len(chat.prompt) + chat.max_tokens == 40
    lengths = {30: 10, 24: 16, 39: 1, 80: 10, 100: 1}  # too long for every worker: refused at admission
    for prompt, expected in lengths.items():
        assert (await translator.from_token_ids("r", [5] * prompt, Options())).max_tokens == expected
    assert (await translator.from_token_ids("r", [5] * 30, Options(max_tokens=60))).max_tokens == 60, "given: kept"
    assert Translator(text_model, pools_hold=lambda prompt_tokens: 5000).max_model_len() == 128


BAD: list[tuple[Options, str]] = [
    (Options(max_tokens=0), "max_tokens"),
    (Options(max_tokens=2**31), "max_tokens"),
    (Options(temperature=float("nan")), "temperature"),
    (Options(temperature=float("inf")), "temperature"),
    (Options(temperature=-0.01), "temperature"),
    (Options(temperature=2.01), "temperature"),
    (Options(top_p=-0.01), "top_p"),
    (Options(top_p=float("nan")), "top_p"),
    (Options(top_k=-2), "top_k"),
    (Options(seed=2**63), "seed"),
    (Options(stop=("",)), "stop"),
    (Options(stop=("a",) * 65), "stop"),
    (Options(stop=("a" * 250,) * 5), "stop"),
    (Options(stop=("a" * 257,)), "stop"),
    (Options(stop=("a\0",)), "stop"),
]


@pytest.mark.parametrize(("options", "param"), BAD)
async def test_out_of_range_options_are_refused_by_name(translator: Translator, options: Options, param: str) -> None:
    for attempt in (
        translator.from_text("r", "a", options),
        translator.from_token_ids("r", [1], options),
        translator.from_messages("r", HI, options),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await attempt
        assert caught.value.param == param


async def test_invalid_prompts_and_messages_are_refused_by_name(translator: Translator) -> None:
    for ids in ([], [-1], [512], [2**70]):
        with pytest.raises(InvalidRequest) as caught:
            await translator.from_token_ids("r", ids, Options())
        assert caught.value.param == "prompt" and len(caught.value.message) < 100
    for text in ("", "a\0"):
        with pytest.raises(InvalidRequest) as caught:
            await translator.from_text("r", text, Options())
        assert caught.value.param == "prompt"
    bad = {
        "messages": [[], HI * (MAX_MESSAGES + 1)],
        "messages[1].role": [[*HI, ChatMessage("root", "x")]],
        "messages[0].content": [[ChatMessage("user", c)] for c in ("\ufdd1", "\0")],
    }
    for param, conversations in bad.items():
        for messages in conversations:
            with pytest.raises(InvalidRequest) as caught:
                await translator.from_messages("r", messages, Options())
            assert caught.value.param == param


async def test_chat_is_refused_if_the_model_has_no_template(tmp_path_factory: pytest.TempPathFactory) -> None:
    translator = Translator(TextModel.load(text_dir(tmp_path_factory.mktemp("m"), template=None)))
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        await translator.from_messages("r", HI, Options())
    assert caught.value.param == "messages"


class LengthOnlyDict(dict[Any, Any]):
    """A dict that has a length, and whose entries must not be read."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("walked")

    __getitem__ = keys = values = items = __iter__  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("name", "most"),
    [("logit_bias", 300), ("stop_token_ids", 64), ("allowed_token_ids", 512), ("stop", 64), ("bad_words", 64)],
)
async def test_entries_are_counted_before_they_are_read(translator: Translator, name: str, most: int) -> None:
    many: Any = LengthOnlyDict(most + 1)
    with pytest.raises(InvalidRequest, match=f"at most {most} entries") as refused:
        await translator.from_token_ids("r", [5], Options(**{name: many}))
    assert refused.value.param == name


async def test_prompt_ids_are_counted_before_they_are_read(translator: Translator) -> None:
    many: Any = LengthOnlyDict(128)
    with pytest.raises(ContextLengthExceeded, match="the prompt has 128"):
        await translator.from_token_ids("r", many, Options())

"""Several prompts in one completion: each is a generation of its own, their choices are numbered prompt by prompt."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from baton.core.errors import InvalidRequest, Unavailable
from baton.core.request import TokenLogprob
from coordinator import translate
from coordinator.api_keys import ApiKeys, digest_of
from coordinator.http import app as http_app
from coordinator.http.app import HttpSettings, create_app
from coordinator.policy.quotas import Client, KeyLimits
from coordinator.submission import Delta, Sink, Submission, Timeline, Usage
from coordinator.text.model import TextModel
from coordinator.translate import Options
from tests.support.fake_generator import FakeGenerator
from tests.support.requests_kit import COMPLETIONS


class EchoGenerator(FakeGenerator):
    """Outputs, for each choice, the length of its prompt and its number; scores the prompt with its length."""

    def __init__(self, refuse: int = -1) -> None:
        super().__init__()
        self.refuse = refuse

    async def generate(self, submission: Submission, sink: Sink | None = None) -> AsyncGenerator[Delta, None]:
        self.submissions.append(submission)
        if len(self.submissions) - 1 == self.refuse:
            raise Unavailable("full", retry_after_s=1)
        count, wanted = len(submission.prompt), submission.sampling
        scored = tuple(TokenLogprob(token, -float(count), 1) for token in submission.prompt[1:])
        for choice in range(submission.n):
            yield Delta(
                f"{count}/{choice}",
                (choice,),
                logprobs=() if wanted.logprobs is None else (TokenLogprob(choice, -0.5, 1),),
                prompt_logprobs=scored if choice == 0 and wanted.prompt_logprobs is not None else None,
                choice=choice,
            )
        for choice in range(submission.n):
            yield Delta("", (), "stop", usage=Usage(count, 1, 1), timeline=Timeline(), choice=choice)
        self.finished.append(submission.request_id)


@pytest.fixture
def generator() -> EchoGenerator:
    return EchoGenerator()


@pytest.fixture
def app(generator: EchoGenerator, text_model: TextModel) -> Starlette:
    return create_app(generator, text_model, HttpSettings("tiny"))


PROMPTS: list[Any] = [[[1], [1, 2], [1, 2, 3]], ["a", "Hello", "a"]]


def lengths(generator: EchoGenerator) -> list[int]:
    return [len(submission.prompt) for submission in generator.submissions]


@pytest.mark.parametrize("prompts", PROMPTS, ids=["ids", "texts"])
@pytest.mark.parametrize("n", [1, 2])
async def test_choices_are_numbered_prompt_by_prompt(
    client: httpx.AsyncClient, generator: EchoGenerator, prompts: list[Any], n: int
) -> None:
    named = {"x-request-id": "mine"}
    answer = (await client.post(COMPLETIONS, json={"prompt": prompts, "n": n}, headers=named)).json()
    counts = lengths(generator)
    expected = [f"{count}/{choice}" for count in counts for choice in range(n)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(3 * n))
    assert answer["id"] == "cmpl-mine"
    ids = [submission.request_id for submission in generator.submissions]
    assert [re.sub("-[0-9a-f]{8}", "", name) for name in ids] == ["mine-0", "mine-1", "mine-2"]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(counts) and usage["completion_tokens"] == 3 * n
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3


async def test_streamed_choices_are_numbered_prompt_by_prompt(
    client: httpx.AsyncClient, generator: EchoGenerator
) -> None:
    body = {"prompt": PROMPTS[0], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    text = (await client.post(COMPLETIONS, json=body)).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    text_of: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        text_of[choice["index"]] = text_of.get(choice["index"], "") + choice["text"]
    assert text_of == {0: "1/0", 1: "1/1", 2: "2/0", 3: "2/1", 4: "3/0", 5: "3/1"}
    ended = [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(ended) == list(range(6)) and text.endswith("data: [DONE]\n\n")
    assert events[-1]["usage"]["prompt_tokens"] == 6


async def test_echo_and_log_probabilities_belong_to_each_prompt(
    client: httpx.AsyncClient, generator: EchoGenerator
) -> None:
    body = {"prompt": ["Hello", "a"], "n": 2, "echo": True, "logprobs": 0}
    choices = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    counts = lengths(generator)
    assert [choice["text"] for choice in choices] == [
        f"{prompt}{count}/{choice}" for prompt, count in zip(("Hello", "a"), counts, strict=True) for choice in range(2)
    ]
    for choice in choices:
        count = counts[choice["index"] // 2]
        assert choice["logprobs"]["token_logprobs"] == [None, *[-float(count)] * (count - 1), -0.5]
    whole = (await client.post(COMPLETIONS, json={"prompt": [[1, 2], [1, 2, 3]], "prompt_logprobs": 0})).json()
    assert [len(choice["prompt_logprobs"]) for choice in whole["choices"]] == [2, 3]
    assert whole["choices"][1]["prompt_logprobs"][1]["2"]["logprob"] == -3.0


async def test_shared_options_are_prepared_once_and_the_event_loop_runs_between_prompts(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 prompts with 64 bad words, 3.5 KB in all, blocked the event loop for 2.9 s."""
    words: list[str] = []
    bad_word = TextModel.bad_word
    monkeypatch.setattr(TextModel, "bad_word", lambda text, word: words.append(word) or bad_word(text, word))
    turns: list[int] = []
    encode = TextModel.encode
    monkeypatch.setattr(
        TextModel,
        "encode",
        lambda text, given, **more: turns.append(other_turns) or encode(text, given, **more),
    )
    other_turns, ended = 0, False

    async def other() -> None:
        nonlocal other_turns
        while not ended:
            other_turns += 1
            await asyncio.sleep(0)

    generator = EchoGenerator()
    app = create_app(generator, text_model, HttpSettings("tiny"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        beside = asyncio.create_task(other())
        body = {"prompt": ["a"] * 32, "bad_words": ["x", "y"], "max_tokens": 1}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        ended = True
        await beside
    assert words == ["x", "y"] and len(generator.submissions) == 32
    assert len({submission.sampling.seed for submission in generator.submissions}) == 32
    of_prompts = turns[-32:]
    assert len(set(of_prompts)) == 32


async def test_total_size_of_echoed_prompts_is_bounded(client: httpx.AsyncClient, generator: EchoGenerator) -> None:
    """A prompt of 1 MB made an answer of 128 MB."""
    body = {"prompt": ["abc " * 5, "de"], "n": 3, "echo": True, "max_tokens": 1}
    assert (await client.post(COMPLETIONS, json=body)).status_code == 200
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_app, "MAX_ECHO_CHARS", 22 * 3 - 1)
        refused = await client.post(COMPLETIONS, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")
    assert len(generator.submissions) == 2


async def test_one_refused_prompt_fails_the_whole_request(text_model: TextModel) -> None:
    generator = EchoGenerator(refuse=1)
    transport = httpx.ASGITransport(create_app(generator, text_model, HttpSettings("tiny")))
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
        answer = await client.post(COMPLETIONS, json={"prompt": PROMPTS[0]})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"


def test_log_probabilities_of_all_prompts_together_are_bounded() -> None:
    """Scores that one prompt may request can be too many for 64 prompts."""
    asked = Options(n=2, logprobs=20)
    translate._check_scores(asked, 10, 400)
    with pytest.raises(InvalidRequest, match="would have 1075200 log-probabilities") as refused:
        translate._check_scores(replace(asked, prompts=64), 10, 400)
    assert refused.value.param == "logprobs"
    with pytest.raises(InvalidRequest, match="of the prompt"):
        translate._check_scores(Options(prompt_logprobs=20, prompts=128), 400, 1)
    translate._check_scores(Options(prompt_logprobs=20), 400, 1)


@pytest.mark.parametrize("refuse", [-1, 0, 5])
async def test_a_list_of_prompts_is_admitted_as_one_request(
    generator: EchoGenerator, text_model: TextModel, refuse: int
) -> None:
    """More prompts than a key may run at once need the key to have nothing else running, as more choices do."""
    who = Client("k", "t", limits=KeyLimits(requests_at_once=8, requests_per_minute=2))
    generator.refuse = refuse
    app = create_app(generator, text_model, HttpSettings("tiny", api_keys=ApiKeys({digest_of("sk-k"): who})))
    body, headers = {"prompt": ["a"] * 9}, {"authorization": "Bearer sk-k"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://baton", headers=headers
    ) as client:
        with generator.admitted(who):
            assert (await client.post(COMPLETIONS, json=body)).status_code == 429
            assert not generator.submissions, "none of them was started"
        assert (await client.post(COMPLETIONS, json=body)).status_code == (200 if refuse < 0 else 503)
    account = generator.quotas._accounts["k"]
    assert account.running == 0 and account.requests is not None and account.requests.level < 1
    assert all(submission.admitted for submission in generator.submissions)

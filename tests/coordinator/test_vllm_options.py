"""Options that vLLM has besides OpenAI's: how messages become a prompt, and what the text contains."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from baton.core.events import SpeculationCounters
from baton.core.request import TokenLogprob
from coordinator.http.app import HttpSettings, create_app
from coordinator.http.generation import EchoOnly
from coordinator.submission import Delta, Submission, Timeline, Usage
from coordinator.text.chat import ChatMessage, Rendering
from coordinator.text.model import TextModel
from coordinator.text.stream import TextStream
from tests.support.fake_generator import FakeGenerator
from tests.support.model_dirs import CHATML, shared_text_model
from tests.support.requests_kit import CHAT, COMPLETIONS, GOOD

THINKS = CHATML + "{% if not enable_thinking | default(true) %}NO{{ note }}{% endif %}"


async def prompt_of(client: httpx.AsyncClient, generator: FakeGenerator, path: str = CHAT, **fields: Any) -> list[int]:
    answer = await client.post(path, json=GOOD[path] | fields)
    assert answer.status_code == 200, answer.text
    return list(generator.submissions[-1].prompt)


async def test_prompts_with_and_without_a_generation_prompt(
    client: httpx.AsyncClient, generator: FakeGenerator, text_model: TextModel
) -> None:
    def shown(ids: list[int]) -> str:
        return text_model.decode(ids, skip_special_tokens=False)

    usual = await prompt_of(client, generator)
    assert shown(usual).endswith("<|im_start|>assistant\n")
    closed = await prompt_of(client, generator, add_generation_prompt=False)
    assert shown(closed).endswith("<|im_end|>\n") and usual[: len(closed)] == closed
    talk = [*GOOD[CHAT]["messages"], {"role": "assistant", "content": "Well <|im_end|>, "}]
    opened = await prompt_of(client, generator, messages=talk, continue_final_message=True)
    assert shown(opened).endswith("<|im_start|>assistant\nWell <|im_end|>, ")
    end = text_model.tokenizer.token_to_id("<|im_end|>")
    assert opened.count(end) == 1, "what the client wrote is no control token"


async def test_chat_template_kwargs_are_variables_of_the_template(generator: FakeGenerator) -> None:
    model = shared_text_model(THINKS)
    app = create_app(generator, model, HttpSettings("tiny", created=1))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        for variables, ends in (({}, False), ({"enable_thinking": True}, False), ({"enable_thinking": False}, True)):
            ids = await prompt_of(client, generator, chat_template_kwargs=variables)
            assert model.decode(ids, skip_special_tokens=False).endswith("NO") is ends
        ids = await prompt_of(client, generator, chat_template_kwargs={"enable_thinking": False, "note": "<|im_end|>"})
        assert ids.count(model.tokenizer.token_to_id("<|im_end|>")) == 1


async def test_final_message_cannot_be_continued_if_the_template_omits_it() -> None:
    model = shared_text_model("{{ messages[0].content }}")
    talk = [ChatMessage("user", "a"), ChatMessage("assistant", "bcd")]
    with pytest.raises(Exception, match="does not render the last message"):
        await model.encode_chat_async(talk, Rendering(continue_final_message=True))


async def test_truncate_prompt_tokens_keeps_the_end_of_the_prompt(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    whole = await prompt_of(client, generator, COMPLETIONS, prompt=list(range(20, 60)))
    assert await prompt_of(client, generator, COMPLETIONS, prompt=whole, truncate_prompt_tokens=5) == whole[-5:]
    assert await prompt_of(client, generator, COMPLETIONS, prompt=whole * 20, truncate_prompt_tokens=7) == whole[-7:]
    assert await prompt_of(client, generator, COMPLETIONS, prompt=whole, truncate_prompt_tokens=99) == whole


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one STOP")])
def test_stop_string_is_included_in_the_text_on_request(text_model: TextModel, include: bool, text: str) -> None:
    ids = text_model.encode("one STOP two", add_special_tokens=False)
    for step in (1, 3, len(ids)):
        stream = TextStream(text_model.vocabulary, ["STOP"], include_stop=include)
        found = "".join(stream.push(ids[i : i + step]).text for i in range(0, len(ids), step))
        assert (found, stream.stopped) == (text, "STOP")


async def test_stop_and_special_token_options_reach_the_pipeline(
    client: httpx.AsyncClient, generator: FakeGenerator, text_model: TextModel
) -> None:
    await client.post(CHAT, json=GOOD[CHAT] | {"include_stop_str_in_output": True, "skip_special_tokens": False})
    asked = generator.submissions[-1]
    assert asked.include_stop and asked.shown_token_ids == text_model.vocabulary.special_ids != frozenset()
    await client.post(CHAT, json=GOOD[CHAT] | {"include_stop_str_in_output": False, "skip_special_tokens": True})
    assert not generator.submissions[-1].include_stop and not generator.submissions[-1].shown_token_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_zero_max_tokens(client: httpx.AsyncClient, generator: FakeGenerator, stream: bool) -> None:
    entry = TokenLogprob(7, -0.5, 1)
    usage = Usage(2, 1, 0, SpeculationCounters())
    generator.script = [Delta("x", (7,), "stop", 7, usage, Timeline(), (entry,), (TokenLogprob(6, -1.5, 2),))]
    fields = {"prompt": [5, 6], "echo": True, "max_tokens": 0, "logprobs": 1, "stream": stream}
    answer = await client.post(COMPLETIONS, json=fields)
    assert answer.status_code == 200, answer.text
    assert generator.submissions[-1].max_tokens == 1
    if not stream:
        body = answer.json()
        (choice,) = body["choices"]
        assert choice["logprobs"]["token_logprobs"] == [None, -1.5] and choice["finish_reason"] == "length"
        assert "x" not in choice["text"] and body["usage"]["completion_tokens"] == 0
    else:
        assert '"finish_reason":"length"' in answer.text and '"text":"x"' not in answer.text
    assert (await client.post(COMPLETIONS, json=fields | {"echo": False})).status_code == 400


async def test_echo_only_closes_its_inner_generator() -> None:
    generator = FakeGenerator(endless=True)
    deltas = EchoOnly(generator).generate(Submission("r", (1,), 1))
    await anext(deltas)
    await deltas.aclose()
    assert generator.finished == ["r"]


async def test_request_id_in_flight_may_be_reused(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    """A gateway reuses the id in a retry, while the first try is still ending."""
    for _ in range(2):
        answer = await client.post(COMPLETIONS, json=GOOD[COMPLETIONS], headers={"x-request-id": "mine"})
        assert (answer.headers["x-request-id"], answer.json()["id"]) == ("mine", "cmpl-mine")
    one, other = (submission.request_id for submission in generator.submissions)
    assert one != other and one.startswith("mine-") and other.startswith("mine-")

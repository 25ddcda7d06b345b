"""Uses clients of Python's package index against a cluster: `python python_clients.py URL MODEL`. Prints `ok NAME` per
check. Runs in an environment that has instructor, openai-agents and litellm. The model is the built-in one, which does
not follow instructions: the schemas restrict what it may say, so that any answer is short and valid."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Literal

os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it is fetched

import instructor
import litellm
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")  # otherwise the model may add properties without end

    name: Literal["Ada", "Grace"]
    age: Literal[36, 85]


def of_instructor(url: str, model: str) -> None:
    official = OpenAI(base_url=url, api_key="unused", max_retries=0)
    for mode in (instructor.Mode.RESPONSES_TOOLS, instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(official, mode=mode)
        messages = [{"role": "user", "content": "Who?"}]
        made = client.create(model=model, messages=messages, response_model=Person, max_retries=0, temperature=0)
        Person.model_validate(made.model_dump())


called: list[str] = []


@function_tool
def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """Returns the weather."""
    called.append(city)
    return f"Sunny in {city}"


async def of_both_agents(url: str, model: str) -> None:
    responses = OpenAIResponsesModel(model, AsyncOpenAI(base_url=url, api_key="unused", max_retries=0))
    # The model would call the tool at each turn: the first call is the agent's answer.
    caller = Agent(
        name="Weather",
        instructions="Be brief.",
        model=responses,
        model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0),
        tools=[get_weather],
        tool_use_behavior="stop_on_first_tool",
    )
    assert (await Runner.run(caller, "Weather?")).final_output == f"Sunny in {called[0]}"
    person = Agent(name="Person", model=responses, model_settings=ModelSettings(temperature=0), output_type=Person)
    assert isinstance((await Runner.run(person, "Who?")).final_output, Person)


def of_agents(url: str, model: str) -> None:
    asyncio.run(of_both_agents(url, model))


def of_litellm(url: str, model: str) -> None:
    part = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "system", "content": [part]}, {"role": "user", "content": "Hello"}]
    texts = []
    for stream in (False, True):
        answer = litellm.completion(
            model=f"openai/{model}",
            api_base=url,
            api_key="unused",
            messages=messages,
            stream=stream,
            temperature=0,
            max_tokens=16,
        )
        pieces = [c.choices[0].delta.content or "" for c in answer] if stream else [answer.choices[0].message.content]
        texts.append("".join(pieces))
    assert texts[0] and texts[0] == texts[1], texts


if __name__ == "__main__":
    for name, check in (("instructor", of_instructor), ("agents", of_agents), ("litellm", of_litellm)):
        check(*sys.argv[1:])
        print("ok", name)

"""Uses clients of Python's package index against a cluster: `python python_clients.py URL MODEL`. Prints `ok NAME` per
check. Runs in an environment that has instructor, openai-agents and litellm. See tests/cluster/test_python_clients.py
for what the scripted model answers."""

from __future__ import annotations

import asyncio
import os
import sys

os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")

import instructor
import litellm
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


ADA = Person(name="Ada", age=36)


def of_instructor(url: str, model: str) -> None:
    official = OpenAI(base_url=url, api_key="unused", max_retries=0)
    for mode in (instructor.Mode.RESPONSES_TOOLS, instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(official, mode=mode)
        selector = "[[json]]" if mode is instructor.Mode.JSON_SCHEMA else "[[person]]"
        messages = [{"role": "user", "content": f"Who? {selector}"}]
        made = client.create(model=model, messages=messages, response_model=Person, max_retries=0)
        assert made == ADA, (mode, made)


@function_tool
def get_weather(city: str) -> str:
    """Returns the weather."""
    return f"Sunny in {city} [[json]]"


def of_agents(url: str, model: str) -> None:
    official = AsyncOpenAI(base_url=url, api_key="unused", max_retries=0)
    agent = Agent(
        name="Weather",
        instructions="Be brief.",
        model=OpenAIResponsesModel(model, official),
        model_settings=ModelSettings(tool_choice="required"),
        tools=[get_weather],
        output_type=Person,
    )
    result = asyncio.run(Runner.run(agent, "Weather? [[weather]]"))
    assert result.final_output == ADA, result.final_output


def of_litellm(url: str, model: str) -> None:
    part = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "system", "content": [part]}, {"role": "user", "content": "[[hello]]"}]
    for stream in (False, True):
        answer = litellm.completion(
            model=f"openai/{model}", api_base=url, api_key="unused", messages=messages, stream=stream
        )
        pieces = [c.choices[0].delta.content or "" for c in answer] if stream else [answer.choices[0].message.content]
        assert "".join(pieces) == "Hello.", pieces


if __name__ == "__main__":
    for name, check in (("instructor", of_instructor), ("agents", of_agents), ("litellm", of_litellm)):
        check(*sys.argv[1:])
        print("ok", name)

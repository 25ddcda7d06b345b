"""Over a hundred published chat templates, read from a PyPI package and not stored in this repository: the sandbox
renders each as transformers does, the format of tool calls is detected, and grammars force tool calls behind the
templates of several families."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from coordinator.text.template import ChatTemplate, Renderer
from coordinator.text.tool_calls import detect_format
from tests.cluster.test_npm_client import TARGET
from tests.support.cluster import cluster

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]
PACKAGE = "xinference==4.1.0"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
FORMS = {
    "llama-3.1-instruct": "llama3",
    "llama-3.3-instruct": "llama3",
    "qwen2.5-instruct": "hermes",
    "qwen3": "hermes",
    "mistral-nemo-instruct": "mistral",
    "mistral-large-instruct": "mistral",
    "gpt-oss": "harmony",
    "Qwen3-Coder": "qwen3_coder",
    "qwen3.5": "qwen3_coder",
    "GLM-4.6": "glm45",
    "GLM-4.7": "glm45",
    "glm-4.5": "glm45",
    "deepseek-r1-0528": "deepseek_v3",
    "deepseek-v3": "deepseek_v31",
    "Deepseek-V3.1": "deepseek_v31",
    "seed-oss": None,
}
FORCED = (
    "llama-3.1-instruct", "qwen3", "mistral-nemo-instruct", "gpt-oss", "Qwen3-Coder", "GLM-4.6", "deepseek-r1-0528",
    "Deepseek-V3.1",
)  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "where"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
ASKED = {"role": "user", "content": "hi"}
TALKS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "plain": ([ASKED], None),
    "system": (
        [{"role": "system", "content": "Be brief."}, ASKED, {"role": "assistant", "content": "yo"}, ASKED],
        None,
    ),
    "tools": ([ASKED], TOOLS),
    "history": (
        [
            ASKED,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": CALL["id"], "name": "get_weather", "content": "sunny"},
        ],
        TOOLS,
    ),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Templates by model name."""
    folder = tmp_path_factory.mktemp("published")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"pip cannot download {PACKAGE}: {done.stderr.strip()[-200:]}")
    found = {}
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        for name in wheel.namelist():
            if name.startswith("xinference/model/llm/models/") and name.endswith(".json"):
                read = json.loads(wheel.read(name))
                for model in read if isinstance(read, list) else [read]:
                    if template := model.get("chat_template"):
                        found[str(model["model_name"])] = template
    return found


def rendered(how: Any) -> str | None:
    """Returns None if the template refuses the conversation."""
    try:
        return str(how())
    except Exception:
        return None


def test_published_templates_are_rendered_as_by_transformers(published: dict[str, str]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    different, texts, renderer = [], 0, Renderer()
    for name, source in published.items():
        for kind, (messages, tools) in TALKS.items():
            options: dict[str, Any] = {"tools": tools, "add_generation_prompt": True}

            def theirs(source=source, messages=messages, options=options) -> str:  # type: ignore[no-untyped-def]
                return str(render_jinja_template([messages], chat_template=source, **options, **TOKENS)[0][0])

            def ours(source=source, messages=messages, options=options) -> str:  # type: ignore[no-untyped-def]
                return ChatTemplate(source, TOKENS, renderer).render(messages, **options)

            expected = rendered(theirs)
            texts += expected is not None
            if rendered(ours) != expected:
                different.append((name, kind))
    assert different == [] and texts > 400


def test_the_tool_call_format_of_published_templates_is_detected(published: dict[str, str]) -> None:
    assert {name: detect_format(published[name]) for name in FORMS} == FORMS


@pytest.mark.parametrize("name", FORCED)
async def test_tool_calls_are_forced_with_a_published_template(
    published: dict[str, str], tmp_path: Path, name: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(TARGET, model)
    (model / "chat_template.jinja").write_text(published[name])
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    described = {"description": "The weather.", "parameters": parameters, "strict": True}
    tools: Any = [{"type": "function", "function": {"name": each, **described}} for each in ("weather", "climate")]
    named = {"type": "function", "function": {"name": "climate"}}
    messages: Any = [{"role": "user", "content": "Call one."}]
    with cluster(model, exact=True, served_model_name="builtin") as running:
        async with openai.AsyncOpenAI(api_key="none", base_url=running.url + "/v1", max_retries=0) as client:
            for choice in ("required", named):
                one = {"parallel_tool_calls": False, "max_tokens": 1000}
                asked: Any = {"model": "builtin", "tools": tools, "tool_choice": choice, **one}
                whole = await client.chat.completions.create(messages=messages, temperature=0, **asked)
                (call,) = whole.choices[0].message.tool_calls or []
                assert call.type == "function" and (choice == "required" or call.function.name == "climate")
                jsonschema.validate(json.loads(call.function.arguments), parameters)
                async with client.chat.completions.stream(messages=messages, temperature=0, **asked) as stream:
                    (same,) = (await stream.get_final_completion()).choices[0].message.tool_calls or []
                assert same.function.arguments == call.function.arguments
                answered = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
                history: Any = [*messages, whole.choices[0].message.model_dump(exclude_none=True), answered]
                after = await client.chat.completions.create(
                    model="builtin", messages=history, tools=tools, tool_choice="auto", max_tokens=4
                )
                assert after.usage is not None and whole.usage is not None
                assert after.usage.prompt_tokens > whole.usage.prompt_tokens

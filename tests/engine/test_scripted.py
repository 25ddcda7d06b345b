"""The scripted checkpoints emit exactly their texts, in this engine, also after other scripts and at temperature 1."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from baton.core.request import SamplingParams
from tests.support.engine_driver import Job, run, tiny_runner
from tests.support.scripted import END, make_scripted

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCRIPTS = {
    "call": CALL,
    "calls": f"Let me see.\n{CALL}\n{CALL.replace('Rome', 'Oslo')} both.",
    "think": "<think>\nHmm, 4 < 5.\n</think>\n\nYes: 日本 🎉🎉 aaaaaaaaaaaaaaaaaaaaaaaaaa",
    "tag": "</think>",
    "short": "a",
    "hello": "Hello world, this is it.",
    "longer": "Hello world, this is it. And more.",
    "nothing": "",
}


def test_the_last_selector_of_a_prompt_decides_the_output(tmp_path: Path) -> None:
    runner = tiny_runner(make_scripted(tmp_path / "m", SCRIPTS), kv_memory_bytes=64 << 20)
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    jobs, expected = [], []
    for name, text in SCRIPTS.items():
        for before in ("", "[[hello]] and then " * 7):
            prompt = tokenizer.encode(f"{before}[[{name}]] with some text behind it").ids
            expected.append(text)
            sampling = SamplingParams(temperature=float(bool(before)))
            jobs.append(Job(prompt, 60, sampling=sampling, chunk=50))
    run(runner, jobs)
    for job, text in zip(jobs, expected, strict=True):
        assert tokenizer.decode(job.output, skip_special_tokens=False).split(END)[0] == text


def test_a_script_that_the_votes_do_not_decide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'a' is ambiguous"):
        make_scripted(tmp_path, {"a": "<think>" * 3})

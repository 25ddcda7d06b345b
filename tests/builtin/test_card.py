"""The built-in pair as shipped: complete, small, consistent, as good as its card says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).resolve().parents[2] / "baton" / "builtin"
NAMES = ["target", "draft"]
FILES = {
    "config.json", "generation_config.json", "model.safetensors",
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
}  # fmt: skip


def read_json(name: str, file: str) -> Any:
    return json.loads((FOLDER / name / file).read_text(encoding="utf-8"))


def card_row(start: str) -> dict[str, float]:
    """The two numbers, target's and draft's, of the card's row that begins with `start`."""
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {re.escape(start)} \| ([\d.,]+) \| ([\d.,]+) \|$", card, re.MULTILINE)
    assert found, f"the card has no row {start!r}"
    return dict(zip(NAMES, (float(value.replace(",", "")) for value in found.groups()), strict=True))


def tensors(name: str) -> dict[str, torch.Tensor]:
    with safe_open(FOLDER / name / "model.safetensors", framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def test_files_are_complete_and_small() -> None:
    for name in NAMES:
        assert {path.name for path in (FOLDER / name).iterdir()} == FILES
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= 25 * 10**6


def test_target_and_draft_share_one_tokenizer_and_its_ids() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (FOLDER / "target" / file).read_bytes() == (FOLDER / "draft" / file).read_bytes()
    vocabulary = read_json("target", "tokenizer.json")["model"]["vocab"]
    for name in NAMES:
        config = read_json(name, "config.json")
        assert config["vocab_size"] == len(vocabulary) == 4096
        assert config["max_position_embeddings"] == 4096
        assert config["bos_token_id"] == vocabulary["<|bos|>"]
        assert config["eos_token_id"] == vocabulary["<|end|>"]
        assert config["tie_word_embeddings"]


def test_weights_are_bf16_finite_and_counted_in_the_card() -> None:
    counts = {}
    for name in NAMES:
        weights = tensors(name)
        assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in weights.values())
        counts[name] = sum(tensor.numel() for tensor in weights.values())
    assert counts == card_row("parameters")
    assert 5e6 <= counts["target"] <= 10e6
    assert counts["draft"] < 1e6


@pytest.mark.parametrize(
    "text", ["def f(x):\n\treturn x  # é, 漢字, \U0001f44d\U0001f3fd, \x00\n", "", " ", "\r\n\r\n", "<|bo"]
)
def test_tokenizer_round_trip(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "target")
    ids = tokenizer(text).input_ids
    assert ids[:1] == [tokenizer.bos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "target")
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == ("<|bos|><|system|>s<|end|><|user|>u<|end|><|assistant|>a<|end|><|user|>u<|end|><|assistant|>")
    assert (FOLDER / "target" / "chat_template.jinja").read_text() == read_json("target", "tokenizer_config.json")[
        "chat_template"
    ]


@pytest.mark.parametrize(("name", "measured"), [("target", 1.849), ("draft", 2.317)])
def test_loss_on_unseen_code_equals_the_measured_value(name: str, measured: float) -> None:
    """`excerpt.txt` is in no training text; `measured` is its loss under the shipped weights."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / name)
    model = AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32)
    text = (Path(__file__).parent / "excerpt.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]).item()
    assert loss == pytest.approx(measured, abs=0.01)


def test_target_completes_a_function_with_indented_code() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "target")
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.float32)
    ids = tokenizer("def read_lines(path):", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=48, do_sample=False)
    body = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert body.startswith("\n    ")
    assert re.search(r"\b(return|with|for|if|open|raise|yield)\b", body), body

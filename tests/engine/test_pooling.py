"""Pooled rows against transformers in float32: last hidden states, their mean, the scores of a classification head."""

from __future__ import annotations

import functools
import json
import operator
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.core.request import GenerateRequest, Pooling, SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.outputs import pool_rows
from baton.engine.runner import Runner
from prefill.scheduler import PrefillScheduler
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_driver import GREEDY, random_tokens, tiny_runner

WAYS = {
    "compiled": {"kernels": "auto"},
    "torch": {"kernels": "torch"},
    "exact": {"exact": True, "kernels": "auto"},
    "exact-torch": {"exact": True, "kernels": "torch"},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama"},
    "mistral": {"arch": "mistral"},
    "qwen2": {"arch": "qwen2", "tied": True},
    "qwen3": {"arch": "qwen3"},
    "headless": {"arch": "qwen3", "head": "none"},
}


def pooled(runner: Runner, prompts: Sequence[Sequence[int]], pooling: Pooling, step_tokens: int) -> list[list[float]]:
    """Returns the vectors of prompts that a scheduler batches in chunks of at most `step_tokens` tokens per step."""
    scheduler = PrefillScheduler(runner.layout, runner.num_blocks, step_tokens)
    for number, prompt in enumerate(prompts):
        request = GenerateRequest(f"r{number}", tuple(prompt), 1, GREEDY, pooling=pooling)
        scheduler.submit(request, float(number), hand_over=False)
    vectors: dict[str, list[float]] = {}
    while (plan := scheduler.begin_step(0.0)) is not None:
        for progress in scheduler.finish_step(runner.step(plan), 0.0).progress:
            if progress.pooled:
                vectors[progress.sequence_id.request_id] = array("f", progress.pooled).tolist()
    scheduler.check()
    return [vectors[f"r{number}"] for number in range(len(prompts))]


@functools.cache
def oracle(model_dir: Path) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(model_dir, dtype=torch.float32).eval()


@torch.no_grad()
def hidden_states(model_dir: Path, prompt: Sequence[int]) -> torch.Tensor:
    states: torch.Tensor = oracle(model_dir)(torch.tensor([list(prompt)])).last_hidden_state[0]
    return states


def pairs() -> list[object]:
    """Each model in two ways, and each way with two or three models."""
    often = lambda m, w: (m + w) % 2 == 0  # noqa: E731
    return [
        pytest.param(model, way, marks=() if often(m, w) else pytest.mark.long)
        for m, model in enumerate(MODELS)
        for w, way in enumerate(WAYS)
    ]


@pytest.mark.parametrize(("model", "way"), pairs())
def test_vectors_equal_transformers_in_any_chunking(checkpoint: Callable[..., Path], model: str, way: str) -> None:
    model_dir = checkpoint(**MODELS[model])
    runner = tiny_runner(model_dir, **WAYS[way])
    prompts = [random_tokens(length, seed=length) for length in (1, 5, 61, 130)]
    states = [hidden_states(model_dir, prompt) for prompt in prompts]
    for pooling in ("last", "mean"):
        expected = torch.stack([each[-1] if pooling == "last" else each.mean(0) for each in states])
        expected = torch.nn.functional.normalize(expected)
        for step_tokens in (512, 40):
            received = torch.nn.functional.normalize(torch.tensor(pooled(runner, prompts, pooling, step_tokens)))
            assert torch.allclose(received, expected, rtol=0, atol=1e-5), (pooling, step_tokens)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_exact_vectors_have_the_same_bits_in_any_batch_and_chunking(
    checkpoint: Callable[..., Path], kernels: str
) -> None:
    runner = tiny_runner(checkpoint(arch="llama"), exact=True, kernels=kernels)
    prompts = [random_tokens(length, seed=length) for length in (1, 7, 61, 130)]
    for pooling in ("last", "mean"):
        together = pooled(runner, prompts, pooling, 512)
        for step_tokens in (13, 64):
            assert pooled(runner, prompts, pooling, step_tokens) == together, (pooling, step_tokens)
        assert [pooled(runner, [prompt], pooling, 512)[0] for prompt in prompts] == together, pooling


def test_cosines_have_transformers_order_in_bfloat16(checkpoint: Callable[..., Path]) -> None:
    model_dir = checkpoint(arch="llama")
    runner = tiny_runner(model_dir, dtype="bfloat16")
    prompts = [random_tokens(40, seed=seed) for seed in range(8)]
    for pooling in ("last", "mean"):
        states = [hidden_states(model_dir, prompt) for prompt in prompts]
        right = torch.stack([each[-1] if pooling == "last" else each.mean(0) for each in states])
        ours = torch.tensor(pooled(runner, prompts, pooling, 64))
        cosines = [torch.nn.functional.cosine_similarity(vectors[:1], vectors[1:]) for vectors in (right, ours)]
        for first in range(7):
            for second in range(7):
                if cosines[0][first] - cosines[0][second] > 0.02:  # bf16 has 8 bits
                    assert cosines[1][first] > cosines[1][second], pooling


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("labels", [1, 3])
def test_scores_of_a_classification_head_equal_transformers(
    checkpoint: Callable[..., Path], labels: int, way: str
) -> None:
    from transformers import AutoModelForSequenceClassification

    model_dir = checkpoint(arch="qwen2", tied=True, head="score", num_labels=labels)
    runner = tiny_runner(model_dir, **WAYS[way])
    model = AutoModelForSequenceClassification.from_pretrained(model_dir, dtype=torch.float32).eval()
    prompts = [random_tokens(length, seed=length) for length in (3, 61)]
    with torch.no_grad():
        expected = [model(torch.tensor([prompt])).logits[0].tolist() for prompt in prompts]
    assert len(expected[0]) == labels
    received = pooled(runner, prompts, "last", 40)
    assert torch.allclose(torch.tensor(received), torch.tensor(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_two_tokens_is_the_difference_of_their_logits(tmp_path: Path, tied: bool, way: str) -> None:
    """As vLLM serves the original Qwen3-Reranker: the logit of "yes" less that of "no"."""
    from transformers import AutoModelForCausalLM

    model_dir = make_checkpoint(tmp_path / "m", "qwen3", tied=tied)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    make_reranker(model_dir, ["n", "y"])
    runner = tiny_runner(model_dir, **WAYS[way])
    no, yes = (json.loads((model_dir / "tokenizer.json").read_text())["model"]["vocab"][token] for token in "ny")
    prompts = [random_tokens(length, seed=length) for length in (3, 61)]
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    received = pooled(runner, prompts, "last", 40)
    assert [len(each) for each in received] == [1, 1]
    for each, expected in zip(received, logits, strict=True):
        assert each[0] == pytest.approx(float(expected[yes] - expected[no]), abs=1e-4)


def make_reranker(model_dir: Path, tokens: list[str]) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    config["architectures"] = [config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")]
    config |= {"classifier_from_token": tokens, "is_original_qwen3_reranker": True}
    (model_dir / "config.json").write_text(json.dumps(config))


def test_a_token_of_the_head_that_the_tokenizer_lacks_is_refused(tmp_path: Path) -> None:
    from baton.core.errors import StartupError

    model_dir = make_checkpoint(tmp_path / "m", "qwen3")
    make_reranker(model_dir, ["n", "yes"])
    with pytest.raises(StartupError, match="classifier_from_token: 'yes' is not a token"):
        tiny_runner(model_dir)


def test_sampled_and_pooled_rows_share_a_step(checkpoint: Callable[..., Path]) -> None:
    """The rows of a step do not change each other's results, and only pooled rows have a vector."""
    runner = tiny_runner(checkpoint(arch="llama"), exact=True)
    prompt = tuple(random_tokens(20))
    rows = [
        Row(SequenceId(str(number)), 0, prompt, (2 * number, 2 * number + 1), GREEDY, num_sampled, pooling=pooling)
        for number, (num_sampled, pooling) in enumerate([(1, ""), (0, "last"), (0, ""), (0, "mean")])
    ]
    outcome = runner.step(StepPlan(1, tuple(rows)))  # type: ignore[arg-type]
    assert [len(tokens) for tokens in outcome.sampled] == [1, 0, 0, 0]
    assert outcome.pooled.keys() == {1, 3}
    for number in (0, 1, 3):
        alone = runner.step(StepPlan(2, (rows[number],)))
        assert alone.sampled[0] == outcome.sampled[number]
        assert alone.pooled.get(0) == outcome.pooled.get(number)


def test_a_head_that_the_config_does_not_declare_is_refused(tmp_path: Path) -> None:
    from baton.core.errors import StartupError

    model_dir = make_checkpoint(tmp_path / "m", "llama", head="score", num_labels=2)
    config = (model_dir / "config.json").read_text()
    (model_dir / "config.json").write_text(config.replace("LlamaForSequenceClassification", "LlamaModel"))
    with pytest.raises(StartupError, match=r"score\.weight does not belong to this model"):
        tiny_runner(model_dir)


def test_sums_have_the_same_bits_however_a_prompt_is_divided() -> None:
    """States of very different sizes, whose plain sum in float64 depends on its order."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(700, 64, generator=generator) * 10.0 ** torch.empty(700, 1).uniform_(
        -12, 3, generator=generator
    )

    def total(length: int) -> list[float]:
        parts = []
        for part in torch.split(states, length):
            rows = (Row(SequenceId("a"), 0, (0,) * len(part), (), GREEDY, pooling="mean"),)
            parts.append(pool_rows(SimpleNamespace(rows=rows), part, None)[0].tolist())  # type: ignore[arg-type]
        return [functools.reduce(operator.add, values) for values in zip(*parts, strict=True)]

    assert total(700) == total(1) == total(33) == total(256)

"""LoRA adapters: the numbers of PEFT, and rows of many adapters in one step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import InvalidRequest, InvariantError
from baton.core.request import SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.adapters import read_adapter
from baton.engine.checkpoint import read_model_config
from baton.engine.kernels.native import choose_kernels
from baton.engine.parallel import TPGroup
from baton.models.adapter_config import WEIGHTS_FILE, tensor_name
from tests.support.adapters import ALL, adapter_files, load_adapter, make_adapter
from tests.support.engine_driver import (
    GREEDY,
    Job,
    all_logits,
    bfloat16_levels,
    float32_levels,
    random_tokens,
    run,
    tiny_runner,
)

KINDS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "by-name": {"target_modules": ["q_proj", "self_attn.v_proj", "up_proj"], "r": 5},
    "by-regex": {"target_modules": r".*\.(k|o|gate|down)_proj", "exclude_modules": r".*\.0\.mlp.*"},
    "rslora": {"use_rslora": True, "r": 16, "lora_alpha": 4},
    "patterns": {"rank_pattern": {"v_proj": 9, r"layers\.1\.mlp.*": 2}, "alpha_pattern": {"q_proj": 3, "up_proj": 16}},
    "layers": {"layers_to_transform": [0, 2]},
}


def from_peft(model_dir: Path, adapter_dir: Path, tokens: list[int], *, hidden: bool = False) -> torch.Tensor:
    """The logits, or the final hidden states."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter_dir).eval()
    with torch.inference_mode():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    values: torch.Tensor = out.hidden_states[-1][0] if hidden else out.logits[0]
    return values


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_peft(checkpoint: Callable[..., Path], tmp_path: Path, kind: str, kernels: str) -> None:
    model_dir = checkpoint("qwen3", intermediate_size=168, num_layers=4) if kind == "patterns" else checkpoint("llama")
    adapter, tokens = make_adapter(tmp_path / "a", model_dir, **KINDS[kind]), random_tokens(70)
    runner = tiny_runner(model_dir, kernels=kernels)
    digest = load_adapter(runner, adapter)
    logits = all_logits(runner, tokens, [33, 1, 7], adapter=digest)
    torch.testing.assert_close(logits, from_peft(model_dir, adapter, tokens), atol=2e-4, rtol=1e-4)
    assert (logits - all_logits(runner, tokens, [70])).abs().max() > 0.1


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_an_embedding_is_that_of_the_adapter(checkpoint: Callable[..., Path], tmp_path: Path, kernels: str) -> None:
    model_dir, tokens = checkpoint("llama"), random_tokens(20)
    adapter = make_adapter(tmp_path / "a", model_dir)
    runner = tiny_runner(model_dir, kernels=kernels)
    digest = load_adapter(runner, adapter)
    states = []
    for name in ("", digest):
        row = Row(SequenceId("x"), 0, tuple(tokens), (0, 1), GREEDY, pooling="last", adapter=name)
        states.append(torch.frombuffer(bytearray(runner.step(StepPlan(1, (row,))).pooled[0]), dtype=torch.float64))
    expected = from_peft(model_dir, adapter, tokens, hidden=True)[-1].double()
    torch.testing.assert_close(states[1].to(expected), expected, atol=2e-4, rtol=1e-4)
    assert (states[0] - states[1]).abs().max() > 0.1


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_scores_of_a_classification_head_are_those_of_the_adapter(
    checkpoint: Callable[..., Path], tmp_path: Path, kernels: str
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    model_dir, tokens = checkpoint("qwen2", head="score", num_labels=3), random_tokens(20)
    adapter = make_adapter(tmp_path / "a", model_dir, task_type=None)
    runner = tiny_runner(model_dir, kernels=kernels)
    row = Row(SequenceId("x"), 0, tuple(tokens), (0, 1), GREEDY, pooling="last", adapter=load_adapter(runner, adapter))
    scores = torch.frombuffer(bytearray(runner.step(StepPlan(1, (row,))).pooled[0]), dtype=torch.float64)
    base = AutoModelForSequenceClassification.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        expected = PeftModel.from_pretrained(base, adapter).eval()(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(scores.to(expected), expected, atol=2e-4, rtol=1e-4)


EXACT = [("auto", "float32"), pytest.param("torch", "float32", marks=pytest.mark.long), ("auto", "bfloat16")]


@pytest.mark.parametrize(("kernels", "dtype"), EXACT)
def test_sixteen_adapters_in_one_batch_equal_sixteen_runs_alone(
    checkpoint: Callable[..., Path], tmp_path: Path, kernels: str, dtype: str
) -> None:
    compiled, name = choose_kernels(kernels, torch.device("cpu"))
    if dtype == "bfloat16" and compiled is None:
        pytest.skip(f"no compiled kernels here: {name}")
    model_dir = checkpoint("llama", intermediate_size=168)
    runner = tiny_runner(model_dir, exact=True, kernels=kernels, dtype=dtype)
    targets = [ALL, ["q_proj", "v_proj"], "all-linear", ["down_proj", "up_proj"]]
    digests = [
        load_adapter(runner, make_adapter(tmp_path / str(n), model_dir, seed=n, r=n + 1, target_modules=targets[n % 4]))
        for n in range(16)
    ]
    prompt = random_tokens(40)
    of_rows = ["", *digests, digests[3], ""]
    together = [Job(prompt, 8, chunk=7 + 5 * n, adapter=digest) for n, digest in enumerate(of_rows)]
    run(runner, together)
    for number, job in enumerate(together):
        alone = Job(prompt, 8, adapter=job.adapter)
        run(runner, [alone], seed=number)
        assert alone.output == job.output
        assert torch.equal(torch.cat(alone.logits), torch.cat(job.logits))
    assert len({tuple(job.output) for job in together}) == 17


LEVELS = [(level, "bfloat16") for level in bfloat16_levels()] + [(level, "float32") for level in float32_levels()]


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_bits_do_not_depend_on_how_many_tokens_of_an_adapter_are_computed_together(
    checkpoint: Callable[..., Path], tmp_path: Path, level: str, dtype: str
) -> None:
    """Token by token, as in decode steps, and in chunks; a rank of 6 has two ranks beside a group of four."""
    model_dir, tokens = checkpoint("llama", intermediate_size=168), random_tokens(150)
    runner = tiny_runner(model_dir, kernels=level, dtype=dtype, threads=2)
    digest = load_adapter(runner, make_adapter(tmp_path / "a", model_dir, r=6))
    one_by_one = all_logits(runner, tokens, [1], adapter=digest)
    for chunks in ([150], [7, 9, 16, 2], [33, 3]):
        assert torch.equal(all_logits(runner, tokens, chunks, adapter=digest), one_by_one)


@pytest.mark.parametrize("level", bfloat16_levels())
def test_an_adapter_in_bfloat16_is_as_close_to_float32_as_torch_kernels(
    checkpoint: Callable[..., Path], tmp_path: Path, level: str
) -> None:
    model_dir, tokens = checkpoint("llama", intermediate_size=168, dtype="bfloat16"), random_tokens(150)
    adapter = make_adapter(tmp_path / "a", model_dir, r=6)

    def logits(kernels: str, dtype: str) -> torch.Tensor:
        runner = tiny_runner(model_dir, kernels=kernels, dtype=dtype)
        return all_logits(runner, tokens, [64], adapter=load_adapter(runner, adapter))

    full = logits("torch", "float32")
    assert (logits(level, "bfloat16") - full).abs().mean() < 1.1 * (logits("torch", "bfloat16") - full).abs().mean()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_beside_it_do_not_change_the_bits_of_a_row_without_one(
    checkpoint: Callable[..., Path], tmp_path: Path, dtype: str
) -> None:
    """Also where gate and up are not multiplied in registers because some row has an adapter."""
    model_dir = checkpoint("llama")
    runner = tiny_runner(model_dir, exact=True, dtype=dtype)
    digest = load_adapter(runner, make_adapter(tmp_path / "a", model_dir))
    beside = Job(random_tokens(50), 8)
    run(runner, [beside, Job(random_tokens(30), 8, adapter=digest)])
    runner.adapters.drop(digest)
    alone = Job(random_tokens(50), 8)
    run(runner, [alone], seed=1)
    assert torch.equal(torch.cat(alone.logits), torch.cat(beside.logits))


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_row_of_an_adapter_that_is_not_loaded_is_a_bug(
    checkpoint: Callable[..., Path], tmp_path: Path, kernels: str
) -> None:
    model_dir = checkpoint("llama")
    runner = tiny_runner(model_dir, kernels=kernels)
    digest = load_adapter(runner, make_adapter(tmp_path / "a", model_dir))
    runner.adapters.drop(digest)
    with pytest.raises(InvariantError, match="which is not loaded"):
        all_logits(runner, random_tokens(5), [5], adapter=digest)


def test_ranks_have_slices_of_b_where_outputs_are_split_and_of_a_where_inputs_are(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model_dir = checkpoint("llama", num_kv_heads=1)
    files = adapter_files(make_adapter(tmp_path / "a", model_dir, rank_pattern={"k_proj": 2}))
    config, like = read_model_config(model_dir), torch.empty(0)
    whole, *halves = (read_adapter(*files, config, 64, group, like)[1] for group in (TPGroup(), *ranks_of(2)))
    for name, shared in (("qkv", (1, 2)), ("gate_up", ())):
        own = getattr(whole, name)
        for rank in halves:
            assert torch.equal(getattr(rank, name).a, own.a)
        for index, part in enumerate(own.parts):
            parts = [getattr(rank, name).parts[index] for rank in halves]
            both = parts[0].weight if index in shared else torch.cat([each.weight for each in parts])
            assert torch.equal(both, part.weight)
            assert parts[0].first == (part.first if index == 0 else part.first - 32 if index in shared else 80)
    for name in ("attention_out", "down"):
        own = getattr(whole, name)
        assert torch.equal(torch.cat([getattr(rank, name).a for rank in halves], 1), own.a)
        assert all(torch.equal(getattr(rank, name).parts[0].weight, own.parts[0].weight) for rank in halves)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite_is_refused_by_name(
    checkpoint: Callable[..., Path], tmp_path: Path, value: float
) -> None:
    model_dir = checkpoint("llama")
    path = make_adapter(tmp_path / "a", model_dir)
    tensors = load_file(path / WEIGHTS_FILE)
    name = tensor_name("model.layers.2.mlp.up_proj", "B")
    tensors[name][3, 1] = value
    save_file(tensors, path / WEIGHTS_FILE)
    with pytest.raises(InvalidRequest, match=f"{WEIGHTS_FILE}: tensor {name} must have finite values"):
        read_adapter(*adapter_files(path), read_model_config(model_dir), 64, TPGroup(), torch.empty(0))


def ranks_of(size: int) -> list[TPGroup]:
    return [TPGroup(rank, size) for rank in range(size)]

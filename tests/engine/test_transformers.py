"""Models that transformers computes, over pages: the tokens that transformers generates by itself."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import StartupError
from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepPlan
from baton.engine import loading, transformers_path
from baton.engine.attention import Reach, Scores
from baton.engine.attention_calls import reach_of
from baton.engine.checkpoint import read_model_config
from baton.engine.kernels.build import processor_levels
from baton.engine.memory import unread_sizes
from baton.models.model_config import GeneralConfig
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_driver import Job, all_logits, random_tokens, run, tiny_runner
from tests.support.marked_device import CPU, MarkedDevice
from tests.support.transformers_models import SERVED, generated, make_transformers_checkpoint

QUICK = (
    "deepseek_v3"  # `make test` has gemma2 and llama4_text beside each other, and gpt_oss in test_transformers_mxfp4
)
PROMPTS = (37, 11, 24)
NEW_TOKENS = 24

LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": [4.0] * 8,
        "short_factor": [1.0] * 8,
        "original_max_position_embeddings": 64,
    },
}
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("recurrent_gemma", {}, "attention is called 1 times in a model of 4 layers"),
    ("mamba", {}, "never calls transformers' attention interface"),
    ("falcon", {}, "never calls transformers' attention interface"),
    ("qwen3_next", {}, r"keeps a state of each sequence beside its KV \(Cache\.get_conv_state\)"),
    ("deepseek_v32", {}, "reads its mask as a tensor, as an indexer"),
    ("diffllama", {}, "attends to other K and V than it stores"),
    ("phi3", LONGROPE, "rope_type longrope .* it is served with --max-model-len 64 or less"),
)
FAULTS = {
    "window": "gemma2",
    "chunk": "llama4_text",
    "softcap": "gemma2",
    "sinks": "gpt_oss",
    "scale": "gemma2",
    "scale of latents": "deepseek_v3",
    "positions in a chunk": "llama4_text",
    "reused KV": "gemma3n_text",
    "slots": "llama4_text",
}
"""Silent faults, each with an architecture in which it shows."""
SEEN_ANYWHERE = ("sinks", "scale", "scale of latents", "slots")
"""Faults that change every position, as softcap does: the others show in long or divided sequences only."""


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_transformers_checkpoint(tmp_path_factory.mktemp("models") / "m", "gemma2")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == QUICK else pytest.mark.long) for kind in SERVED]
)
def test_tokens_equal_those_that_transformers_generates(kind: str, tmp_path: Path) -> None:
    """Prompts in chunks shorter than they are, beside decode steps, in scattered blocks."""
    path = make_transformers_checkpoint(tmp_path / kind, kind)
    prompts = [random_tokens(length, seed) for seed, length in enumerate(PROMPTS)]
    runner = tiny_runner(path, model_impl="transformers", block_size=4)
    jobs = [Job(prompt, NEW_TOKENS, chunk=7) for prompt in prompts]
    run(runner, jobs, seed=1)
    assert [job.output for job in jobs] == generated(path, prompts, NEW_TOKENS)
    assert runner.facts.model_impl == "transformers"


@pytest.mark.parametrize(("kind", "changes", "reason"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_pages_of_kv_cannot_serve_is_refused_by_name(
    kind: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = make_transformers_checkpoint(tmp_path / kind, kind, **changes)
    with pytest.raises(StartupError, match=f"{kind}: not served: .*{reason}"):
        tiny_runner(path)


def test_stored_causal_masks_are_ignored(tmp_path: Path) -> None:
    """As Pythia's published files have them."""
    path = make_transformers_checkpoint(tmp_path / "m", "gpt_neox", num_hidden_layers=2)
    tensors = load_file(path / "model.safetensors")
    for layer in range(2):
        attention = f"gpt_neox.layers.{layer}.attention"
        tensors[f"{attention}.bias"] = torch.ones(1, 1, 512, 512).tril().bool()
        tensors[f"{attention}.masked_bias"] = torch.tensor(-1e9)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    prompt = random_tokens(20)
    job = Job(prompt, 8, chunk=7)
    run(tiny_runner(path, block_size=4), [job])
    assert [job.output] == generated(path, [prompt], 8)


def test_scaling_added_beside_rope_parameters_keeps_their_theta(tmp_path: Path) -> None:
    """transformers itself would take its default of 10,000."""
    from baton.engine import transformers_model

    added = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    directory = make_checkpoint(tmp_path, "qwen3", num_layers=1)
    fields = json.loads((directory / "config.json").read_text())
    fields |= {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_scaling": added}
    (directory / "config.json").write_text(json.dumps(fields))
    assert isinstance(read_model_config(directory), GeneralConfig)
    assert transformers_model._read_config(directory, 64).rope_parameters == added | {"rope_theta": 1e6}


def test_longrope_is_served_up_to_the_length_of_one_set_of_frequencies(tmp_path: Path) -> None:
    path = make_transformers_checkpoint(tmp_path / "phi3", "phi3", **LONGROPE)
    prompt = random_tokens(30)
    runner = tiny_runner(path, max_model_len=64, block_size=4)
    job = Job(prompt, 24, chunk=7)
    run(runner, [job])
    assert [job.output] == generated(path, [prompt], 24)


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        *(pytest.param(f, "float32", marks=pytest.mark.long if f in SEEN_ANYWHERE else ()) for f in FAULTS),
        *(pytest.param(f, "bfloat16", marks=() if f == "window" else pytest.mark.long) for f in FAULTS),
    ],
)
def test_self_check_finds_a_planted_fault(
    fault: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = FAULTS[fault]
    path = make_transformers_checkpoint(tmp_path / kind, kind, getattr(torch, dtype))
    plant(fault, monkeypatch)
    with pytest.raises(StartupError, match="self-check failed: a sequence computed"):
        tiny_runner(path, dtype=dtype)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == QUICK else pytest.mark.long) for kind in SERVED]
)
def test_bfloat16_is_checked_in_float32_and_computes_the_same_bits_afterwards(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_transformers_checkpoint(tmp_path / kind, kind, torch.bfloat16)
    checked = tiny_runner(path, dtype="bfloat16")
    assert {t.dtype for pair in checked.kv.storage for t in pair} == {torch.bfloat16}
    if kind == "deepseek_v3":
        assert checked.layout.bytes_per_token == 4 * (20 + 8) * 2  # layers, latent and rotated key, bytes
    assert not [record for record in caplog.records if record.name.startswith("baton")]
    monkeypatch.setattr(loading, "check_in_float32", lambda *_: None)
    tokens = random_tokens(24)
    logits = [all_logits(runner, tokens, [24]) for runner in (checked, tiny_runner(path, dtype="bfloat16"))]
    assert torch.equal(*logits)


def plant(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.engine import attention_calls, transformers_model

    lost = {"softcap": "softcap", "sinks": "sinks", "scale": "scale", "scale of latents": "scale"}
    if fault in lost:
        monkeypatch.setattr(transformers_model, "Scores", lambda *given: replace(Scores(*given), **{lost[fault]: None}))
    elif fault in ("window", "chunk"):
        monkeypatch.setattr(attention_calls, "reach_of", lambda *_: Reach())
        monkeypatch.setattr(transformers_model, "_mask", lambda *_, **__: None)
    elif fault == "positions in a chunk":
        monkeypatch.setattr(transformers_model.PagedCache, "get_seq_length", lambda *_: 0)
    elif fault == "reused KV":
        last = lambda recorder, *_: (len(recorder._stored) - 1, False)  # noqa: E731
        monkeypatch.setattr(attention_calls.Recorder, "_source", last)
    elif fault == "slots":
        update = transformers_model._Step.update
        swapped = lambda step, keys, values, layer: update(step, values, keys, layer)  # noqa: E731
        monkeypatch.setattr(transformers_model._Step, "update", swapped)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """transformers itself would compute with random weights of the router."""
    path = make_transformers_checkpoint(tmp_path / "m", "qwen3_moe")
    tensors = load_file(path / "model.safetensors")
    router = next(name for name in tensors if name.endswith("mlp.gate.weight"))
    del tensors[router]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=rf"m: not served: tensor {re.escape(router)}: missing keys"):
        tiny_runner(path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"exact": True, "kernels": "torch"},
            "--exact without compiled kernels: torch's own sums are not row-invariant",
        ),
        ({"quantize": "int8"}, "--quantize int8: use none"),
        ({"model_impl": "baton"}, "architectures 'Gemma2ForCausalLM' is not supported"),
    ],
)
def test_options_that_the_path_does_not_serve_are_refused(options: dict[str, Any], reason: str, gemma2: Path) -> None:
    with pytest.raises(StartupError, match=re.escape(reason)):
        tiny_runner(gemma2, **options)


@pytest.mark.skipif(not processor_levels(), reason="no compiled kernels on this machine")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
@pytest.mark.parametrize(
    "kind", ["mixtral", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("gemma3_text", "glm4", "qwen3_moe"))]
)
def test_in_exact_mode_a_row_has_the_same_bits_in_any_chunks(kind: str, dtype: str, tmp_path: Path) -> None:
    """Mixtral's router multiplies a parameter, not a linear layer."""
    path = make_transformers_checkpoint(tmp_path / kind, kind, getattr(torch, dtype))
    runner, tokens = tiny_runner(path, dtype=dtype, exact=True, threads=2), random_tokens(90)
    expected = all_logits(runner, tokens, [90])
    for chunks in ([1] * 90, [7, 33, 1, 2, 47]):
        assert torch.equal(all_logits(runner, tokens, chunks), expected)


@pytest.mark.skipif(not processor_levels(), reason="no compiled kernels on this machine")
@pytest.mark.parametrize(
    ("kind", "product"),
    [("gemma2", "matmul"), pytest.param("gpt_oss", "matmul", marks=pytest.mark.long), ("deepseek_v3", "einsum")],
)
def test_exact_mode_refuses_products_that_torch_computes(kind: str, product: str, tmp_path: Path) -> None:
    """Attention with a softcap, with sinks, and to latents."""
    path = make_transformers_checkpoint(tmp_path / kind, kind)
    with pytest.raises(StartupError, match=rf"--exact: torch computes a product \({product}\)"):
        tiny_runner(path, exact=True)


@pytest.mark.skipif(not processor_levels(), reason="no compiled kernels on this machine")
@pytest.mark.parametrize(("has_kernel", "product"), [(True, "_grouped_mm"), (False, "grouped_mm_fallback")])
def test_exact_mode_refuses_experts_that_torch_computes(
    has_kernel: bool, product: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.transformers_kernels.pack_experts", lambda *_: None)
    monkeypatch.setattr("transformers.integrations.moe._can_use_grouped_mm", lambda *_: has_kernel)
    path = make_transformers_checkpoint(tmp_path / "m", "mixtral")
    with pytest.raises(StartupError, match=rf"--exact: torch computes a product \({product}\)"):
        tiny_runner(path, exact=True)


def test_a_missing_extra_is_named(gemma2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_path, "find_spec", lambda _: None)
    with pytest.raises(StartupError, match=r"pip install 'baton-serve\[transformers\]'"):
        tiny_runner(gemma2)


@pytest.mark.parametrize("kind", ["gemma3n_text", pytest.param("gemma2", marks=pytest.mark.long)])
def test_sizes_are_known_before_weights_are_read(kind: str, tmp_path: Path) -> None:
    """With storages that are read twice, and without."""
    path = make_transformers_checkpoint(tmp_path / kind, kind)
    runner = tiny_runner(path)
    sizes = unread_sizes(path, read_model_config(path), 16, "float32")
    assert sizes == (runner.layout, runner.parameter_bytes)


def test_two_models_of_this_path_keep_their_states_apart(gemma2: Path, tmp_path: Path) -> None:
    """As a target and its draft do, which run in turns on one thread."""
    other = make_transformers_checkpoint(tmp_path / "n", "llama4_text")
    paths, prompt = (gemma2, other), random_tokens(20)
    runners = [tiny_runner(path, block_size=4) for path in paths]
    jobs = [Job(prompt, 12, chunk=7) for _ in paths]
    for runner, job in zip(runners, jobs, strict=True):
        run(runner, [job])
    again = Job(prompt, 12, chunk=5)
    run(runners[0], [again], seed=3)
    assert [job.output for job in jobs] == [generated(path, [prompt], 12)[0] for path in paths]
    assert again.output == jobs[0].output


@pytest.mark.parametrize(
    ("mask", "reach"),
    [
        (lambda b, h, q, k: k <= q, Reach()),
        (lambda b, h, q, k: (k <= q) & (k > q - 9), Reach(window=9)),
        (lambda b, h, q, k: (k <= q) & (k // 6 == q // 6), Reach(chunk=6)),
        (lambda b, h, q, k: (k <= q) & (k > q - 900), Reach()),
    ],
)
def test_reach_of_a_mask(mask: Any, reach: Reach) -> None:
    assert reach_of(mask, 300) == reach


def test_a_mask_is_evaluated_on_the_device_of_its_own_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    with MarkedDevice(monkeypatch):
        padding = torch.zeros(1, dtype=torch.int64, device=CPU)
        chunks = lambda b, h, q, k: ((k - padding[b]) // 50 == (q - padding[b]) // 50) & (k <= q)  # noqa: E731
        assert reach_of(chunks, 300, CPU) == Reach(chunk=50)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: q >= 0,
        lambda b, h, q, k: (k <= q) & (k > q - 9) | (k < 4),
        lambda b, h, q, k: (k <= q) & (k % 2 == q % 2),
    ],
    ids=["both ways", "window beside the first positions", "every other"],
)
def test_other_masks_are_refused(mask: Any) -> None:
    with pytest.raises(StartupError, match="neither causal, nor sliding, nor chunked"):
        reach_of(mask, 300)


@pytest.mark.parametrize("kind", ["gemma2", "llama4_text", "opt"])
def test_final_hidden_states_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModel

    path = make_transformers_checkpoint(tmp_path / kind, kind)
    runner = tiny_runner(path, block_size=4)
    tokens = tuple(random_tokens(20))
    count = runner.layout.blocks_for(len(tokens))
    blocks = tuple(7 * index % count for index in range(count))
    rows = [Row(SequenceId("a"), 0, tokens, blocks, SamplingParams(), pooling="last")]
    pooled = runner.step(StepPlan(0, tuple(rows))).pooled[0]
    with torch.no_grad():
        expected = AutoModel.from_pretrained(path)(torch.tensor([tokens])).last_hidden_state[0, -1]
    torch.testing.assert_close(torch.tensor(pooled, dtype=torch.float64), expected.double(), atol=1e-4, rtol=1e-4)

"""Modules of attention of a model of transformers by one call of the compiled kernels: the same bits as their parts,
and which modules stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import StartupError
from baton.engine import transformers_attention, transformers_kernels
from baton.engine.kernels.native import choose_kernels
from baton.engine.runner import Runner
from baton.engine.transformers_attention import KernelAttention
from tests.support.engine_driver import (
    Job,
    all_logits,
    bfloat16_levels,
    float32_levels,
    random_tokens,
    run,
    tiny_runner,
)
from tests.support.transformers_models import make_transformers_checkpoint

KERNELS, _ = choose_kernels("auto", torch.device("cpu"))
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no compiled kernels on this machine")

OFTEN = {"qwen2": "float32", "qwen3": "bfloat16", "mixtral": "bfloat16"}
"""The dtype in which `make test` has a model: one with biases, one with norms of heads, one with a window."""
LEVELS = [("float32", level) for level in float32_levels()] + [("bfloat16", level) for level in bfloat16_levels()]


def attentions(runner: Runner) -> list[KernelAttention]:
    made: list[KernelAttention] = runner.adapters._model.by_kernels.attentions
    return made


@pytest.mark.parametrize(
    ("kind", "dtype", "level"),
    [
        pytest.param(kind, dtype, level, marks=() if OFTEN.get(kind) == dtype else pytest.mark.long)
        for kind in ("llama", "qwen3", "qwen2", "mixtral")
        for dtype, level in LEVELS
    ],
)
def test_in_exact_mode_attention_at_once_has_the_bits_of_its_parts(
    kind: str, dtype: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With norms of heads, biases, a window; in chunks and one by one."""
    path, tokens = make_transformers_checkpoint(tmp_path / kind, kind, getattr(torch, dtype)), random_tokens(90)
    options: dict[str, Any] = {"dtype": dtype, "exact": True, "kernels": level, "model_impl": "transformers"}
    runner = tiny_runner(path, **options)
    before = [each.calls for each in attentions(runner)]
    logits = all_logits(runner, tokens, [40, 1, 9])
    assert [each.calls - computed for each, computed in zip(attentions(runner), before, strict=True)] == [4] * 4
    monkeypatch.setattr(transformers_kernels, "use_attention", lambda *_: [])
    apart = tiny_runner(path, **options)
    assert torch.equal(all_logits(apart, tokens, [90]), logits)
    assert attentions(apart) == []


@pytest.mark.parametrize(
    ("kind", "kv_dtype"),
    [("gemma3_text", "fp8"), ("llama", "auto")]
    + [pytest.param(*case, marks=pytest.mark.long) for case in (("gemma3_text", "auto"), ("llama", "fp8"))],
)
def test_sequences_of_a_batch_have_the_tokens_of_its_parts(
    kind: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two groups of KV, and with KV in fewer bits."""
    path = make_transformers_checkpoint(tmp_path / kind, kind, torch.bfloat16)
    options: dict[str, Any] = {"dtype": "bfloat16", "kv_dtype": kv_dtype, "model_impl": "transformers"}
    outputs = []
    for at_once in (True, False):
        if not at_once:
            monkeypatch.setattr(transformers_kernels, "use_attention", lambda *_: [])
        runner = tiny_runner(path, block_size=4, **options)
        jobs = [Job(random_tokens(length, length), 12, chunk=7) for length in (37, 11, 24)]
        run(runner, jobs, seed=1)
        assert sum(each.calls for each in attentions(runner)) > 0 or not at_once
        outputs.append([job.tokens for job in jobs])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("kind", "number", "computed"),
    [
        ("smollm3", 3, 3),  # one of four layers rotates nothing
        ("olmo2", 0, 0),  # norms of all heads together
        ("cohere", 0, 0),  # neighbours rotate
        ("phi3", 0, 0),  # one layer of queries, keys and values
        ("gemma2", 4, 0),  # softcap, which a step shows
        pytest.param("gpt_oss", 0, 0, marks=pytest.mark.long),  # sinks
        pytest.param("exaone4", 2, 2, marks=pytest.mark.long),  # layers without a window rotate nothing
    ],
)
def test_what_is_not_attention_of_this_kind_stays(kind: str, number: int, computed: int, tmp_path: Path) -> None:
    runner = tiny_runner(make_transformers_checkpoint(tmp_path / kind, kind))
    made = attentions(runner)
    before = [each.calls for each in made]
    all_logits(runner, random_tokens(9), [9])
    assert len(made) == number
    assert sum(each.calls - was for each, was in zip(made, before, strict=True)) == computed


def test_a_scale_of_late_positions_is_seen(tmp_path: Path) -> None:
    """It is 1 at first: an attention that ignores it must not pass for the same."""
    path = make_transformers_checkpoint(tmp_path / "m", "ministral3")
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"] |= {"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}
    (path / "config.json").write_text(json.dumps(config))
    assert attentions(tiny_runner(path)) == []
    assert len(attentions(tiny_runner(path, max_model_len=64))) == 4


def test_other_options_are_left_to_the_module(tmp_path: Path) -> None:
    (attention, *_) = attentions(tiny_runner(make_transformers_checkpoint(tmp_path / "m", "mixtral")))
    given, calls = list[Any](), attention.calls
    attention._forward = lambda *arguments, **options: given.append((arguments, options))
    x, rotary = torch.randn(1, 3, 64), (torch.randn(1, 3, 16), torch.randn(1, 3, 16))

    class Cache:
        class target:
            take = staticmethod(lambda *_: pytest.fail("a step was asked"))

    plain = {"hidden_states": x, "position_embeddings": rotary, "past_key_values": Cache}
    for other in (
        {"another": 1},
        {"past_key_values": None},
        {"hidden_states": x.bfloat16()},
        {"hidden_states": x.repeat(2, 1, 1)},
        {"position_embeddings": (rotary[0], rotary[1].bfloat16())},
        {"position_embeddings": (rotary[0][..., :8], rotary[1][..., :8])},
    ):
        attention(**{**plain, **other})
    attention(x, **plain)
    attention.plain = True
    attention(**plain)
    assert (len(given), attention.calls) == (8, calls)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_self_check_finds_a_kernel_that_is_wrong(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaled by 1.3, as if a factor were lost."""
    path = make_transformers_checkpoint(tmp_path / "m", "llama", getattr(torch, dtype))
    compute = KernelAttention.__call__

    def wrong(self: KernelAttention, *arguments: Any, **options: Any) -> Any:
        calls = self.calls
        result, weights = compute(self, *arguments, **options)
        return result * (1.3 if self.calls > calls else 1.0), weights

    monkeypatch.setattr(transformers_attention, "_same_bits", lambda *_: True)
    monkeypatch.setattr(KernelAttention, "__call__", wrong)
    with pytest.raises(StartupError, match="self-check failed: a sequence computed"):
        tiny_runner(path, dtype=dtype, model_impl="transformers")

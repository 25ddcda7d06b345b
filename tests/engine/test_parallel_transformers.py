"""Tensor parallelism of models that transformers computes: what each rank holds, and the tokens of transformers
itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import StartupError
from baton.core.kv_layout import LayerKV
from baton.engine import transformers_parallel
from baton.engine.checkpoint import read_model_config
from baton.engine.kernels.build import level_of
from baton.engine.loading import load_runner
from baton.engine.memory import unread_sizes
from baton.engine.options import EngineOptions
from baton.engine.parallel import TPGroup
from baton.engine.transformers_parallel import PROVEN, Cut, divide
from baton.runtime.model_source import builtin_directory
from launch import served_models
from tests.support import forks
from tests.support.engine_driver import Job, random_tokens, run
from tests.support.rank_pool import RankPool
from tests.support.transformers_models import generated, make_mxfp4_checkpoint, make_transformers_checkpoint

PROMPTS, NEW_TOKENS = (37, 11, 24), 12
QUICK = ("deepseek_v3", "olmo2")  # latents and experts; KV whole on every rank
EXPERTS = (
    "afmoe", "aria_text", "axk1", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe",
    "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "kolibri1", "laguna", "mellum", "mimo_v2_flash", "minimax_m2",
    "minimax_m3_vl_text", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "solar_open",
)  # fmt: skip
"""Those of PROVEN that have experts."""
PART = {"afmoe": 0.77, "youtu": 0.661}
"""Of the whole model, at most, on one of two ranks, if it is more than 0.66: tiny models have large norms, routers and
latents (Youtu's projections to them are whole), and the plan of AFMoE divides only experts."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [pytest.param(kind, 2, marks=() if kind in QUICK else pytest.mark.long) for kind in PROVEN]
    + [pytest.param(kind, 4, marks=pytest.mark.long) for kind in ("gemma2", "qwen3_moe")],  # with 2 KV heads
)
def test_tokens_on_several_ranks_equal_those_that_transformers_generates(
    kind: str, ranks: int, pool: RankPool, tmp_path: Path
) -> None:
    check_tokens(kind, ranks, pool, tmp_path)


def test_a_kv_head_is_there_on_both_ranks(pool: RankPool, tmp_path: Path) -> None:
    path = make_transformers_checkpoint(tmp_path / "m", "gpt_oss", num_key_value_heads=1)  # its plan has a supplement
    check_tokens_of(path, 2, pool, 0.66)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [pytest.param(kind, 2, marks=() if kind == "qwen3_moe" else pytest.mark.long) for kind in EXPERTS]
    + [pytest.param("qwen3_moe", 4, marks=pytest.mark.long)],
)
def test_tokens_with_whole_experts_on_each_rank_equal_those_that_transformers_generates(
    kind: str, ranks: int, pool: RankPool, tmp_path: Path
) -> None:
    check_tokens(kind, ranks, pool, tmp_path, expert_parallel=True)


@pytest.mark.long
@pytest.mark.skipif(level_of("auto") is None, reason="no compiled kernels on this machine")
def test_two_ranks_pass_the_self_test_of_exact_mode(pool: RankPool, tmp_path: Path) -> None:
    check_tokens("mixtral", 2, pool, tmp_path, exact=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("inner", "part", "options"),
    [
        (96, 0.83, {}),  # in float32, in part
        (128, 0.66, {}),
        (96, 0.66, {"expert_parallel": True}),
        (128, 0.66, {"kernels": "torch"}),
    ],
    ids=["blocks that are cut", "whole blocks", "whole experts", "dequantised"],
)
def test_tokens_of_experts_in_mxfp4_on_two_ranks_equal_those_that_transformers_generates(
    inner: int, part: float, options: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    path = make_mxfp4_checkpoint(tmp_path / "m", intermediate_size=inner)
    check_tokens_of(path, 2, pool, part, **options)


def check_tokens(kind: str, ranks: int, pool: RankPool, tmp_path: Path, **options: bool) -> None:
    path = make_transformers_checkpoint(tmp_path / kind, kind)
    check_tokens_of(path, ranks, pool, PART.get(kind, 0.66), **options)


def check_tokens_of(path: Path, ranks: int, pool: RankPool, part: float, **options: Any) -> None:
    """`part`: of the whole model, at most, on one rank."""
    prompts = [random_tokens(length, seed) for seed, length in enumerate(PROMPTS)]
    jobs = [Job(prompt, NEW_TOKENS, chunk=7) for prompt in prompts]
    level = level_of(options.get("kernels", "auto"))
    _, whole = unread_sizes(path, read_model_config(path, "transformers"), 4, "float32", level=level)
    with pool.load(path, ranks, model_impl="transformers", block_size=4, **options) as runner:
        run(runner, jobs, seed=1)
        layer, local = runner.layout.layers[0], runner.facts[0].local_layout.layers[0]
        assert local.num_kv_heads == max(layer.num_kv_heads // ranks, 1)
        assert max(facts.parameter_bytes for facts in runner.facts) <= whole * part
    assert [job.output for job in jobs] == generated(path, prompts, NEW_TOKENS)


def test_experts_are_whole_on_one_rank_and_absent_from_the_others() -> None:
    model = without_weights("qwen3_moe")
    name = "model.layers.0.mlp.experts"
    whole, number = model.get_parameter(f"{name}.down_proj").shape, model.get_submodule(name).num_experts
    cuts = divide(model, TPGroup(1, 2), expert_parallel=True)
    experts = model.get_submodule(name)
    assert experts.down_proj.shape == (number // 2, *whole[1:]) and experts.num_experts == number // 2
    assert cuts[f"{name}.down_proj"].local(number, TPGroup(1, 2), name)[0] == [slice(number // 2, number)]
    with pytest.raises(StartupError, match="--expert-parallel: model_type gemma2 has no experts"):
        divide(without_weights("gemma2"), TPGroup(0, 2), expert_parallel=True)
    with pytest.raises(StartupError, match="--expert-parallel: the architecture of target has no experts"):
        load_runner(EngineOptions(model_dir=builtin_directory("target"), device="cpu", expert_parallel=True))


def test_the_list_that_users_see_names_the_same_architectures() -> None:
    rows = json.loads(served_models.FILE.read_text())
    assert sorted(row["type"] for row in rows if row.get("ranks") == 2) == sorted(PROVEN)


@pytest.mark.parametrize(
    ("cut", "size", "group", "slices", "length"),
    [
        (Cut(-2), 12, TPGroup(1, 3), [slice(4, 8)], 4),
        (Cut(-2, pieces=2), 12, TPGroup(1, 2), [slice(3, 6), slice(9, 12)], 6),  # gate and up
        (Cut(-1, units=6), 12, TPGroup(1, 3), [slice(4, 8)], 4),  # pairs
        (Cut(-2, units=2, kind="kv"), 32, TPGroup(2, 4), [slice(16, 32)], 16),
        (Cut(-2, kind="vocabulary"), 7, TPGroup(1, 2), [slice(4, 7)], 4),
        (Cut(-1, kind="first"), 7, TPGroup(1, 2), [slice(0, 7)], 7),
    ],
)
def test_part_of_a_dimension(cut: Cut, size: int, group: TPGroup, slices: list[slice], length: int) -> None:
    assert cut.local(size, group, "x") == (slices, length)


@pytest.mark.parametrize(
    ("kind", "changes", "plan", "reason"),
    [
        ("gpt2", {}, {}, "transformers has no tensor-parallel plan for model_type gpt2"),
        ("diffllama", {}, {}, "tensor parallelism of model_type diffllama is not tested"),
        ("gemma2", {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}, {}, "of 3 cannot be"),
        ("gemma2", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}, {}, "3 KV heads cannot be"),
        ("gemma2", {"intermediate_size": 95}, {}, "layers.0.mlp.gate_proj.weight: its dimension of 95 cannot be"),
        ("gemma2", {}, {"model.layers.*.mlp.up_proj": "new"}, "mlp.up_proj.weight: its tensor-parallel style 'new' is"),
        ("gemma2", {}, {"model.norm": "colwise"}, "model.norm: a Gemma2RMSNorm cannot be divided colwise"),
        ("gemma2", {}, {"model.layers.*.mlp": "all_reduce"}, "model.layers.0.mlp: its plan sums"),
        (
            "gemma2",
            {},
            {"model.layers.*.self_attn.k_proj": "colwise_gather_output"},
            "self_attn.q_proj: its plan divides only one of queries and keys",
        ),
        ("gemma2", {}, {"lm_head": "replicated_with_grad_allreduce"}, "lm_head: .*"),
    ],
)
def test_plans_that_cannot_be_applied_are_refused_by_name(
    kind: str, changes: dict[str, Any], plan: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(transformers_parallel._SUPPLEMENTS, kind, plan)
    if plan.get("model.layers.*.mlp"):
        plan |= dict.fromkeys((f"model.layers.*.mlp.{name}_proj" for name in ("gate", "up", "down")), "mla_kv_a_proj")
    with pytest.raises(StartupError, match=reason):
        divide(without_weights(kind, **changes), TPGroup(0, 2))


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("gemma2", LayerKV(2, 16, "float32", window=8)),
        ("olmo2", LayerKV(1, 32, "float32")),  # normalised over all heads
        ("deepseek_v3", LayerKV(1, 20, "float32", value_dim=8)),
    ],
)
def test_kv_that_ranks_do_not_divide_has_one_head(kind: str, layer: LayerKV, tmp_path: Path) -> None:
    path = make_transformers_checkpoint(tmp_path / "m", kind)
    layout, _ = unread_sizes(path, read_model_config(path), 16, "float32")
    assert layout.layers[0] == layer


def test_loading_a_part_takes_no_more_than_the_part_and_its_largest_tensor(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 6}
    paths = [
        make_transformers_checkpoint(tmp_path / name, "mixtral", **sizes) for name, sizes in (("n", {}), ("m", sizes))
    ]
    done = forks.run([sys.executable, "-m", "tests.support.load_part", *map(str, paths)], timeout=200)
    assert done.returncode == 0, done.stderr
    peak, part, largest = json.loads(done.stdout)
    assert part > 30 << 20
    assert peak < part + 2 * largest, (peak, part, largest)


def without_weights(kind: str, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    from tests.support.transformers_models import tiny_config

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(kind, **changes), attn_implementation="eager")

"""Models that transformers computes, through a running cluster: transformers' tokens, and each tier does only its own
work."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client
from tests.support.cluster import cluster
from tests.support.oracle import greedy
from tests.support.transformers_models import SERVED, make_mxfp4_checkpoint, make_transformers_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

CHUNK, COUNT = 16, 64
LENGTHS = (3, 16, 17, 50, 97, 130)
CACHED = 128  # tokens of the last prompt that are in whole blocks
SENT_TOKENS = sum(LENGTHS) + LENGTHS[-1] - CACHED
LATENT, ROPE, LAYERS = 20, 8, 4  # of the tiny checkpoints
DIVIDED = (
    "cohere2", "deepseek_v3", "gemma2", "gemma3n_text", "glm4_moe", "gpt_neox", "gpt_oss", "llama4_text", "olmo2",
    "phi3", "qwen3_moe", "starcoder2",
)  # fmt: skip
QUICK_DIVIDED = (("deepseek_v3", (1, 2)),)


def prompts() -> list[list[int]]:
    return [[(7 * n + 13 * i * i + i) % 256 for i in range(n)] for n in LENGTHS]


@pytest.mark.long  # below is one of two ranks
@pytest.mark.parametrize("kind", SERVED)
async def test_greedy_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    model = make_transformers_checkpoint(tmp_path / "m", kind)
    worked = await same_tokens(model, tmp_path, model_impl="transformers")
    decode, prefill = worked["decode-0"], worked["prefill-0"]
    assert {decode["model_impl"], prefill["model_impl"]} == {"transformers"}
    assert decode["prompt_tokens_computed"] == 0
    assert prefill["prompt_tokens_computed"] == SENT_TOKENS
    assert decode["kv_bytes_received"] == prefill["kv_bytes_sent"] > 0
    if kind == "deepseek_v3":  # MLA: what is sent of a token are its latents
        assert prefill["kv_bytes_sent"] == SENT_TOKENS * LAYERS * (LATENT + ROPE) * 4


@pytest.mark.parametrize(
    ("kind", "prefill_tp", "decode_tp"),
    [
        pytest.param(kind, *sizes, marks=() if (kind, sizes) in QUICK_DIVIDED else pytest.mark.long)
        for kind in DIVIDED
        for sizes in ((2, 1), (1, 2))
    ],
)
async def test_tokens_over_workers_of_other_sizes_equal_transformers(
    kind: str, prefill_tp: int, decode_tp: int, tmp_path: Path
) -> None:
    """Of two ranks the leader drafts, with a model on the other path."""
    model = make_transformers_checkpoint(tmp_path / "m", kind)
    flags: dict[str, object] = {"prefill_tp": prefill_tp, "decode_tp": decode_tp}
    if decode_tp > 1:
        flags |= {"draft": make_checkpoint(tmp_path / "draft", "llama"), "draft_tokens": 2}
    worked = await same_tokens(model, tmp_path, model_impl="transformers", **flags)
    decode, prefill = worked["decode-0"], worked["prefill-0"]
    assert {decode["model_impl"], prefill["model_impl"]} == {"transformers"}
    assert [len(worker["pids"]) for worker in (prefill, decode)] == [prefill_tp, decode_tp]
    assert decode["prompt_tokens_computed"] == 0
    assert prefill["prompt_tokens_computed"] == SENT_TOKENS
    assert decode["kv_bytes_received"] == prefill["kv_bytes_sent"] > 0
    if decode_tp > 1:
        assert decode["speculation"]["drafted_tokens"] > 0
    if kind == "deepseek_v3":  # each rank has all latents
        assert prefill["kv_bytes_sent"] == SENT_TOKENS * LAYERS * (LATENT + ROPE) * 4 * decode_tp


@pytest.mark.long
async def test_tokens_over_workers_that_divide_experts_among_ranks_equal_transformers(tmp_path: Path) -> None:
    model = make_transformers_checkpoint(tmp_path / "m", "qwen3_moe")
    worked = await same_tokens(model, tmp_path, model_impl="transformers", decode_tp=2, expert_parallel=True)
    assert len(worked["decode-0"]["pids"]) == 2 and worked["decode-0"]["prompt_tokens_computed"] == 0


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"decode_tp": 2}, {"decode_tp": 2, "expert_parallel": True}], ids=str)
async def test_tokens_of_experts_in_mxfp4_equal_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    worked = await same_tokens(make_mxfp4_checkpoint(tmp_path / "m"), tmp_path, **options)
    assert worked["decode-0"]["prompt_tokens_computed"] == 0


@pytest.mark.long  # above, a draft model on the other path
@pytest.mark.parametrize(("target", "draft"), [("gemma2", "llama"), ("llama", "gemma2")])
async def test_either_model_of_a_speculating_pair_may_be_on_either_path(
    target: str, draft: str, tmp_path: Path
) -> None:
    def made(kind: str) -> Path:
        path = tmp_path / kind
        return make_checkpoint(path, "llama") if kind == "llama" else make_transformers_checkpoint(path, kind)

    model = made(target)
    worked = await same_tokens(model, tmp_path, draft=str(made(draft)), draft_tokens=2)
    counts = worked["decode-0"]["speculation"]
    assert counts["drafted_tokens"] > 0
    assert worked["decode-0"]["model_impl"] == ("baton" if target == "llama" else "transformers")


async def same_tokens(model: Path, where: Path, **flags: Any) -> dict[str, dict[str, Any]]:
    """Returns the rows of /workers after prompts whose tokens equal transformers'."""
    options = {"served_model_name": "m", "dtype": "float32", "step_tokens": CHUNK, **flags}
    with cluster(model, run_dir=where / "run", **options) as running:
        async with Client(running) as client:
            answers = await asyncio.gather(*(client.complete(p, COUNT) for p in prompts()))
            again = await client.complete(prompts()[-1], COUNT)
            await client.idle(running)
        workers = running.workers()
    for prompt, answer in zip(prompts(), answers, strict=True):
        tokens = tuple(answer["choices"][0]["token_ids"])
        expected = greedy(model, prompt, COUNT, likely=tokens)
        assert len(tokens) == COUNT
        assert tokens[: expected.decided] == expected.tokens[: expected.decided]
        assert expected.decided > 8
    assert again["choices"][0]["token_ids"] == answers[-1]["choices"][0]["token_ids"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == CACHED
    return workers

"""Exact mode: the bits of a row's logits do not depend on the other rows of its step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.core.errors import StartupError
from baton.core.request import SamplingParams, SequenceId, TokenBias
from baton.core.step import History, Row, StepOutcome, StepPlan
from baton.engine.kernels.native import choose_kernels
from baton.engine.runner import Runner
from baton.engine.selftest import prove_row_invariance
from tests.support.engine_driver import GREEDY, Job, all_logits, random_tokens, run, tiny_runner

SEEDED = SamplingParams(temperature=0.8, seed=1234)
FULL = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    min_p=0.01,
    seed=77,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.2,
    logit_bias=(TokenBias(11, 2.0), TokenBias(40, -3.0)),
    min_tokens=6,
    bad_words=((11, 11), (5,)),
)
ARCHS = {
    "llama": {"arch": "llama"},
    "mistral": {"arch": "mistral"},
    "qwen2": {"arch": "qwen2", "intermediate_size": 176},
    "qwen3": {"arch": "qwen3", "head_dim": 24, "num_heads": 6, "num_kv_heads": 3, "vocab_size": 333},
}


QUICK = [
    *((arch, "auto", "float32", "auto") for arch in ("llama", "mistral", "qwen3")),
    ("qwen3", "torch", "float32", "auto"),
    ("qwen3", "auto", "bfloat16", "auto"),
    ("mistral", "auto", "bfloat16", "fp8"),
]
MORE = [
    ("qwen2", "auto", "float32", "auto"),
    ("mistral", "torch", "float32", "auto"),
    ("llama", "auto", "bfloat16", "auto"),
    ("qwen3", "torch", "float32", "fp8"),
]
KINDS = [*QUICK, *(pytest.param(kind, marks=pytest.mark.long) for kind in MORE)]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def exact(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Runner:
    arch, kernels, dtype, kv_dtype = request.param
    if dtype == "bfloat16":
        compiled, name = choose_kernels(kernels, torch.device("cpu"))
        if compiled is None:
            pytest.skip(f"no compiled kernels here: {name}")
    return tiny_runner(checkpoint(**ARCHS[arch]), exact=True, kernels=kernels, dtype=dtype, kv_dtype=kv_dtype)


@pytest.mark.parametrize("chunk", [7, *(pytest.param(c, marks=pytest.mark.long) for c in (16, 64)), 512])
def test_chunks_do_not_change_bits(exact: Runner, chunk: int) -> None:
    tokens = random_tokens(530)
    assert torch.equal(all_logits(exact, tokens, [chunk], seed=1), all_logits(exact, tokens, [530], seed=2))


def test_kv_made_by_decode_equals_kv_made_by_prefill(exact: Runner) -> None:
    tokens = random_tokens(140)
    by_decode = all_logits(exact, tokens, [1])
    assert torch.equal(by_decode, all_logits(exact, tokens, [140], seed=1))
    assert torch.equal(by_decode, all_logits(exact, tokens, [90, 1, 1, 1], seed=2))


@pytest.mark.parametrize(
    "sampling",
    [FULL, *(pytest.param(s, marks=pytest.mark.long) for s in (GREEDY, SEEDED))],
    ids=["full", "greedy", "seeded"],
)
def test_batch_mates_do_not_change_bits_or_tokens(exact: Runner, sampling: SamplingParams) -> None:
    lengths = {5: 100, 33: 7, 100: 16, 130: 64, 17: 1, 64: 33, 1: 512, 90: 40, 48: 16}
    together = [Job(random_tokens(n, seed=n), 12, sampling, chunk) for n, chunk in lengths.items()]
    run(exact, together)
    for job in together[::3]:
        for chunk in (16, 512):
            alone = Job(job.prompt, 12, sampling, chunk)
            run(exact, [alone], seed=chunk)
            assert alone.output == job.output
            assert torch.equal(torch.cat(alone.logits), torch.cat(job.logits))


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, FULL], ids=["greedy", "seeded", "full"])
def test_verified_tokens_equal_tokens_sampled_one_by_one(exact: Runner, sampling: SamplingParams, k: int) -> None:
    """Position j of a verification row is processed as if the draft tokens before it had been output; a wrong draft
    token changes nothing before it and does not enter the row's history."""
    prompt = random_tokens(30)
    job = Job(prompt, 16, sampling, end_token_ids=(3, 9))
    run(exact, [job])
    at, wrong = 3, (job.output[-1] + 1) % 300
    for drafts in (job.output[at : at + k], [wrong, *job.output[at + 1 : at + k]]):
        start = len(prompt) + at - 1
        history = History(tuple(prompt), tuple(job.output[:at]), job.end_token_ids)
        tokens = (job.output[at - 1], *drafts)
        row = Row(SequenceId("0"), start, tokens, job.blocks, sampling, 1 + k, at, history)
        sampled = exact.step(StepPlan(99, (row,))).sampled[0]
        right = 1 if drafts[0] == wrong else 1 + k
        assert list(sampled[:right]) == job.output[at : at + right]


def test_resumed_attempt_yields_the_same_tokens_and_logits(exact: Runner) -> None:
    job = Job(random_tokens(40), 30, SEEDED)
    run(exact, [job])
    resumed = Job(job.tokens[:55], 15, SEEDED, resumed=15)
    run(exact, [resumed], seed=9)
    assert resumed.output == job.output[15:]
    assert torch.equal(torch.cat(resumed.logits), torch.cat(job.logits[15:]))


@pytest.mark.parametrize("sizes", [(576, 1536, 576), (1536, 64, 576)], ids=str)
def test_chunks_do_not_change_bits_at_shapes_where_onednn_sums_one_row_differently(
    checkpoint: Callable[..., Path], sizes: tuple[int, int, int]
) -> None:
    """At 1,536 -> 576, oneDNN sums a product of one row in another order than a product of several (measured on Zen 5):
    tested as the MLP's second half, and as the head."""
    hidden, inner, vocab = sizes
    model = checkpoint(hidden_size=hidden, intermediate_size=inner, head_dim=64, num_layers=1, vocab_size=vocab)
    runner = tiny_runner(model, exact=True, kernels="torch")
    tokens = random_tokens(200)
    assert torch.equal(all_logits(runner, tokens, [100, 1, 7, 1, 1, 64]), all_logits(runner, tokens, [200], seed=1))


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_chunks_do_not_change_bits_with_two_threads(checkpoint: Callable[..., Path], kernels: str) -> None:
    model = checkpoint(hidden_size=256, intermediate_size=640, num_layers=1)
    runner = tiny_runner(model, exact=True, threads=2, kernels=kernels)
    tokens = random_tokens(300)
    assert torch.equal(all_logits(runner, tokens, [255, 1, 7, 40]), all_logits(runner, tokens, [300], seed=1))


@pytest.mark.parametrize("block_size", [8, 64])
def test_the_block_size_does_not_change_bits(block_size: int, checkpoint: Callable[..., Path]) -> None:
    model, tokens = checkpoint(arch="mistral"), random_tokens(200)
    other = tiny_runner(model, exact=True, block_size=block_size)
    assert torch.equal(all_logits(other, tokens, [70]), all_logits(tiny_runner(model, exact=True), tokens, [200]))


@pytest.mark.parametrize("block_size", [24, 128])
def test_block_size_that_does_not_divide_64_is_refused(block_size: int, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(StartupError, match=f"block-size must divide 64, not {block_size}"):
        tiny_runner(checkpoint("llama"), exact=True, block_size=block_size)


def test_self_test_refuses_the_fast_path(checkpoint: Callable[..., Path]) -> None:
    runner = tiny_runner(checkpoint("llama"), kernels="torch")
    with pytest.raises(StartupError, match=r"self-test failed: .* of layer 1 differ .* not row-invariant"):
        prove_row_invariance(runner.step_logits, runner.kv, 320, runner.max_model_len, 8192)


def test_self_test_detects_one_changed_bit_in_the_logits(exact: Runner) -> None:
    def disturbed(plan: StepPlan) -> list[torch.Tensor]:
        logits = exact.step_logits(plan)
        if len(plan.rows) > 1:
            logits[-1][-1, 7] = torch.nextafter(logits[-1][-1, 7], torch.tensor(torch.inf))
        return logits

    with pytest.raises(StartupError, match="logits differ between batched and single computation at 1 of 3 positions"):
        prove_row_invariance(disturbed, exact.kv, 320, exact.max_model_len, 8192)


def test_self_test_fits_a_small_pool_and_step(checkpoint: Callable[..., Path]) -> None:
    runner = tiny_runner(checkpoint("llama"), exact=True, kv_memory_bytes=30 * 16 * 768, max_num_tokens=64)
    assert isinstance(runner.step(StepPlan(1, ())), StepOutcome)


def test_exact_mode_defaults_to_float32(checkpoint: Callable[..., Path]) -> None:
    assert tiny_runner(checkpoint("llama"), exact=True, dtype="auto").dtype_name == "float32"


def test_exact_mode_in_bfloat16_needs_compiled_kernels(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(StartupError, match="exact mode in bfloat16 needs compiled kernels, not torch: set dtype"):
        tiny_runner(checkpoint("llama"), exact=True, dtype="bfloat16", kernels="torch")

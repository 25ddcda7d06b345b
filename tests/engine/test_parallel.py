"""Tensor parallelism in real processes: the numbers of one rank, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import InvariantError, StartupError
from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Draw, Row, StepPlan
from baton.engine.draft_tokens_device import DeviceDraftTokens
from baton.engine.kernels.native import choose_kernels
from baton.engine.weights import EMBEDDING, expected_tensors
from decode.speculation.drafts import ModelDrafts
from decode.speculation.policy import Speculation
from tests.engine.test_launches import requests, same
from tests.support.decode_drive import decode_all
from tests.support.device_choice import decide
from tests.support.engine_driver import Job, all_logits, random_tokens, run, tiny_runner
from tests.support.rank_pool import RankPool
from tests.support.sampler_cases import sample

WIDE = {"num_heads": 8, "head_dim": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama"},
    "llama2": {"arch": "llama2", "num_kv_heads": 4, "old_config": True, "tied": True, "vocab_size": 333},
    "llama-bias": {"arch": "llama", "bias": True, "shards": 3},
    "mistral": {"arch": "mistral", **WIDE, "num_kv_heads": 8},
    "qwen2": {"arch": "qwen2", "tied": True},
    "qwen3": {"arch": "qwen3", "head_dim": 32, "num_kv_heads": 4},
    "one-kv-head": {"arch": "qwen2", "num_kv_heads": 1},
}
AT_TWO = [pytest.param(name, 2, marks=pytest.mark.long if name == "qwen2" else ()) for name in VARIANTS]
AT_FOUR = [pytest.param(name, 4, marks=() if name == "llama" else pytest.mark.long) for name in VARIANTS]
TIE = 1e-4


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


@pytest.mark.parametrize(("variant", "tp"), AT_TWO + AT_FOUR)
def test_logits_and_greedy_tokens_equal_those_of_one_rank(
    checkpoint: Callable[..., Path], pool: RankPool, variant: str, tp: int
) -> None:
    model_dir = checkpoint(**VARIANTS[variant])
    alone = tiny_runner(model_dir)
    tokens = random_tokens(120)
    expected = all_logits(alone, tokens, [120])
    jobs = [Job(random_tokens(n, seed=n), max_tokens=12, chunk=9 + 6 * i) for i, n in enumerate([1, 17, 40, 90])]
    with pool.load(model_dir, tp) as runner:
        for chunks in ([120], [7, 1, 40, 3, 16, 9]):
            assert torch.allclose(all_logits(runner, tokens, chunks), expected, rtol=0, atol=1e-4)
        run(runner, jobs)
    stops = 0
    for job in jobs:
        logits = all_logits(alone, job.tokens[:-1], [64])[len(job.prompt) - 1 :]
        best = logits.topk(2).values
        near_tie = (best[:, 0] - best[:, 1] < TIE).nonzero().flatten().tolist()
        until = near_tie[0] if near_tie else 12
        stops += bool(near_tie)
        assert job.output[:until] == logits.argmax(-1).tolist()[:until]
    assert stops <= 1


@pytest.mark.parametrize(
    ("variant", "tp", "shared"),
    [
        ("llama", 2, set()),
        ("llama-bias", 2, {"self_attn.o_proj.bias"}),
        ("qwen3", 4, {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}),
        ("llama", 4, {"self_attn.k_proj.weight", "self_attn.v_proj.weight", "kv heads"}),
        ("llama2", 2, {"model.embed_tokens.weight"}),  # 333 ids: one row of padding
    ],
)
def test_each_rank_holds_its_shard_and_only_the_listed_replicated_tensors(
    checkpoint: Callable[..., Path], pool: RankPool, variant: str, tp: int, shared: set[str]
) -> None:
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight"}
    model_dir = checkpoint(**VARIANTS[variant])
    alone = tiny_runner(model_dir)
    rest = sum(
        4 * (2 * shape[1] if name == EMBEDDING else math.prod(shape))  # of embedding and head the rows of padding
        for name, shape in expected_tensors(alone.model_config).items()
        if (name.partition("model.layers.")[2].partition(".")[2] or name) in norms | shared
    )
    assert rest < alone.parameter_bytes / 4
    with pool.load(model_dir, tp) as runner:
        assert len({facts.num_blocks for facts in runner.facts}) == 1
        for facts in runner.facts:
            assert facts.parameter_bytes <= alone.parameter_bytes // tp + rest
            copies = 2 if "kv heads" in shared else 1
            assert facts.local_layout.bytes_per_token * tp == alone.layout.bytes_per_token * copies
            heads = facts.local_layout.layers[0].num_kv_heads
            assert {shape[2] for shape in facts.kv_shapes} == {heads}
        assert runner.facts[0].layout.layers[0].num_kv_heads == VARIANTS[variant].get("num_kv_heads", 2)


def test_kv_memory_counts_for_the_whole_worker_and_the_smallest_rank_limits_it(
    checkpoint: Callable[..., Path], pool: RankPool
) -> None:
    model_dir = checkpoint("llama")
    alone = tiny_runner(model_dir, kv_memory_bytes=1 << 20)
    with pool.load(model_dir, 2, kv_memory_bytes=1 << 20) as runner:
        assert [facts.num_blocks for facts in runner.facts] == [alone.num_blocks] * 2
        assert runner.layout == alone.layout
    with pool.load(model_dir, 2, kv_memory_bytes=[1 << 20, 1 << 19]) as runner:
        assert [facts.num_blocks for facts in runner.facts] == [alone.num_blocks // 2] * 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 3, "num_kv_heads": 3}, "num_attention_heads 3 cannot be divided over 2 tensor-parallel ranks"),
        ({"num_heads": 6, "num_kv_heads": 3}, "3 KV heads cannot be divided over 2 tensor-parallel ranks"),
        ({"intermediate_size": 161}, "intermediate_size 161 cannot be divided over 2 tensor-parallel ranks"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_numbers(
    checkpoint: Callable[..., Path], pool: RankPool, sizes: dict[str, int], message: str
) -> None:
    assert [str(found) for found in pool.start(checkpoint("llama", **sizes), 2)] == [message] * 2


def test_ranks_with_different_checkpoints_are_refused(checkpoint: Callable[..., Path], pool: RankPool) -> None:
    found = pool.start([checkpoint("llama"), checkpoint("llama", seed=1)], 2)  # type: ignore[arg-type]
    first, second = map(str, found)
    assert first == second and first.startswith("model_digest: ")
    assert first.endswith(" at rank 1; config.json is equal, the weights are not")


@pytest.mark.parametrize(
    ("differing", "message"),
    [
        ({"quantize": ["none", "int8"]}, "quantize: 'none' at rank 0 and 'int8' at rank 1"),
        ({"dtype": ["float32", "bfloat16"]}, "dtype: 'float32' at rank 0 and 'bfloat16' at rank 1;"),
        ({"exact": [True, False]}, "exact: True at rank 0 and False at rank 1"),
        ({"block_size": [16, 32]}, "block_size: 16 at rank 0 and 32 at rank 1;"),
        ({"max_model_len": [None, 32]}, "max_model_len: 4096 at rank 0 and 32 at rank 1"),
        ({"max_num_tokens": [1536, 1024]}, "max_num_tokens: 1536 at rank 0 and 1024 at rank 1; it follows from"),
        ({"edge_kind": ["auto", "ipc"]}, "edge_kind: 'gloo' at rank 0 and 'ipc' at rank 1;"),
        ({"version": ["0.1.0", "0.2.0"]}, "code_version: '0.1.0' at rank 0 and '0.2.0' at rank 1"),
        ({"exact": True, "kernels": ["torch", "auto"]}, "kernels: 'torch' at rank 0 and "),
        ({"dtype": "bfloat16", "kernels": ["auto", "torch"]}, "kernels: 'compiled' at rank 0 and 'torch' at rank 1;"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_ranks_with_different_options_are_refused(
    checkpoint: Callable[..., Path], pool: RankPool, differing: dict[str, Any], message: str
) -> None:
    device = torch.device("cpu")
    if ("int8" in str(differing) or "kernels" in differing) and choose_kernels("auto", device)[0] is None:
        pytest.skip("there are no compiled kernels here")
    first, second = pool.start(checkpoint("llama"), 2, **differing)
    assert isinstance(first, StartupError) and isinstance(second, StartupError)
    assert str(first).startswith(message) and str(first) == str(second)


def test_ranks_may_differ_in_kernels_and_rank_local_options(checkpoint: Callable[..., Path], pool: RankPool) -> None:
    """A rank that names the model's own length limit also agrees with one that leaves the limit open."""
    own = {
        "kernels": ["torch", "auto"],
        "threads": [1, 2],
        "max_model_len": [4096, None],
        "staging_bytes": [0, 1 << 20],
    }
    with pool.load(checkpoint("llama"), 2, **own) as runner:
        row = Row(SequenceId("a"), 0, tuple(random_tokens(9)), (0,), SEEDED, num_sampled=1)
        assert len(runner.step(StepPlan(1, (row,))).sampled[0]) == 1


SEEDED = SamplingParams(temperature=0.8, seed=1234)


@pytest.mark.parametrize(
    ("variant", "tp"),
    [("llama", 2), *[pytest.param(name, 4, marks=pytest.mark.long) for name in ("llama", "llama-bias", "qwen3")]],
)
def test_exact_mode_has_the_same_bits_in_any_batch_and_chunk(
    checkpoint: Callable[..., Path], pool: RankPool, variant: str, tp: int
) -> None:
    tokens = random_tokens(200)
    with pool.load(checkpoint(**VARIANTS[variant]), tp, exact=True) as runner:
        whole = all_logits(runner, tokens, [200], seed=1)
        for chunk in (7, 16, 64):
            assert torch.equal(all_logits(runner, tokens, [chunk], seed=2), whole)
        assert torch.equal(all_logits(runner, tokens, [180, *[1] * 20], seed=3), whole)
        lengths = {5: 100, 33: 7, 70: 16, 9: 1, 1: 512, 48: 64}
        together = [Job(random_tokens(n, seed=n), 12, SEEDED, chunk) for n, chunk in lengths.items()]
        run(runner, together)
        for job in together[::3]:
            alone = Job(job.prompt, 12, SEEDED, 16)
            run(runner, [alone], seed=5)
            assert alone.output == job.output
            assert torch.equal(torch.cat(alone.logits), torch.cat(job.logits))


def test_only_the_leader_samples(checkpoint: Callable[..., Path], pool: RankPool) -> None:
    with pool.load(checkpoint("llama"), 2) as runner:
        row = Row(SequenceId("a"), 0, tuple(random_tokens(9)), (0,), SEEDED, num_sampled=2, output_index=3)
        logits = runner.step_logits(StepPlan(1, (row,)))[0]
        outcome = runner.step(StepPlan(2, (row, row.__class__(SequenceId("b"), 0, (1, 2), (4,), SEEDED))))
        assert logits.shape == (2, 320)
        assert outcome.sampled == (tuple(sample(logits, [Draw(SEEDED, 0, index) for index in (3, 4)])), ())
        assert runner.step(StepPlan(3, ())).sampled == ()
        assert len(runner.facts[0].pids) == 2
        assert runner.facts[0].pids == tuple(process.pid for process in pool.processes[:2])


AS_ON_A_GPU = pytest.param("torch", True, id="as on a GPU")


@pytest.mark.parametrize(
    ("kernels", "on_device"), [("auto", False), pytest.param("torch", False, marks=pytest.mark.long), AS_ON_A_GPU]
)
def test_followers_receive_sampled_tokens_that_their_plans_lack(
    checkpoint: Callable[..., Path], pool: RankPool, kernels: str, on_device: bool
) -> None:
    """A follower that was fed another token than its leader would compute different KV."""
    some = requests("warm", 6, vocab_size=320, length=12)
    with pool.load(checkpoint("llama"), 2, exact=True, kernels=kernels, on_device=on_device) as ranks:
        expected = decode_all(ranks, some, batch=3)  # type: ignore[arg-type]
        found = decode_all(ranks, some, batch=3, launcher=ranks)  # type: ignore[arg-type]
    assert same(found, expected) and found.steps_ahead > found.steps / 2


@pytest.mark.parametrize(("kernels", "on_device"), [pytest.param("torch", False, marks=pytest.mark.long), AS_ON_A_GPU])
def test_followers_receive_draft_tokens_that_their_plans_lack(
    checkpoint: Callable[..., Path], pool: RankPool, kernels: str, on_device: bool
) -> None:
    """The leader's draft model makes them, as on a GPU: plans never contain them."""
    some, model_dir = requests("looking back", 12, vocab_size=320, length=16), checkpoint("llama")
    draft = tiny_runner(model_dir, kernels="torch")
    draft._propose = DeviceDraftTokens(draft._compute, draft._limits, torch.device("cpu"), decide, draft._tables)
    drafts = ModelDrafts(draft.layout, draft.num_blocks, draft.max_model_len)
    with pool.load(model_dir, 2, exact=True, kernels=kernels, on_device=on_device) as ranks:
        expected = decode_all(ranks, some, batch=3)  # type: ignore[arg-type]
        ranks.launches_ahead = True
        guessing = Speculation(drafts, fixed_length=3)
        found = decode_all(ranks, some, batch=3, speculation=guessing, draft=draft)  # type: ignore[arg-type]
    assert same(found, expected) and found.counters.accepted_tokens > 20


def test_invalid_plan_raises_at_the_leader_and_ends_no_rank(checkpoint: Callable[..., Path], pool: RankPool) -> None:
    with pool.load(checkpoint("llama"), 2) as runner:
        with pytest.raises(InvariantError, match="token id outside"):
            runner.step(StepPlan(1, (Row(SequenceId("a"), 0, (999,), (0,), SEEDED, 1),)))
        assert len(runner.step(StepPlan(2, (Row(SequenceId("a"), 0, (9,), (0,), SEEDED, 1),))).sampled[0]) == 1


def test_ranks_of_a_test_that_fails_serve_the_next_one(checkpoint: Callable[..., Path], pool: RankPool) -> None:
    model_dir = checkpoint("llama")
    with pytest.raises(AssertionError), pool.load(model_dir, 2):
        raise AssertionError
    with pool.load(model_dir, 2) as runner:
        assert runner.step(StepPlan(1, ())).sampled == ()


def test_bfloat16_is_as_close_to_float32_as_on_one_rank(checkpoint: Callable[..., Path], pool: RankPool) -> None:
    model_dir = checkpoint("llama", dtype="bfloat16")
    tokens = random_tokens(120)
    full = all_logits(tiny_runner(model_dir), tokens, [120])
    with pool.load(model_dir, 2, dtype="bfloat16") as runner:
        half = all_logits(runner, tokens, [50, 1, 1, 7])
        assert torch.equal(half, all_logits(runner, tokens, [50, 1, 1, 7], seed=3))
    assert (half - full).abs().max() < 0.6
    assert (half - full).abs().mean() < 0.06

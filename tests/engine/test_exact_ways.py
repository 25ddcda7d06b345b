"""Exact mode, end to end on engines and schedulers: 200 requests computed in every supported way yield the tokens that
each request yields alone. `make test` runs a few of them, `make test-long` all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.request import GenerateRequest
from baton.engine.kernels.native import choose_kernels
from baton.runtime.model_source import builtin_directory
from tests.support.checkpoints import EOS_ID
from tests.support.engine_driver import tiny_runner
from tests.support.exact_jobs import random_text, requests, source_text
from tests.support.pair_drive import ALONE, WAYS, Answers, Pair, Way

FEW, ALL = 20, 200
BLOCK_SIZE = 4
KV_BYTES = 48 << 20
TINY: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama"},
    "mistral": {"arch": "mistral"},
    "qwen3": {"arch": "qwen3", "head_dim": 24, "num_heads": 6, "num_kv_heads": 3, "vocab_size": 333},
}
QUICK = {
    "builtin-bf16": ("batch of 32", "model, k = adaptive", "model, chunks of 16, cached, preempted"),
    "llama": (
        *("chunks of 16", "prefix cache", "preempted", "ngram, k = 8"),
        *("always right", "always wrong"),
    ),
    "mistral": ("model, chunks of 16, cached, preempted",),
}


@dataclass
class Setup:
    """Engines, requests, and the result of each request computed alone."""

    pair: Pair
    requests: list[GenerateRequest]
    alone: Answers


Make = Callable[[str, int], Setup]


@pytest.fixture(scope="module")
def setups(checkpoint: Callable[..., Path]) -> Make:
    @cache
    def make(model: str, count: int) -> Setup:
        dtype = "bfloat16" if model.endswith("bf16") else "float32"
        if dtype == "bfloat16" and choose_kernels("auto", torch.device("cpu"))[0] is None:
            pytest.skip("no compiled kernels here")
        if model.startswith("builtin"):
            target, draft, eos = builtin_directory("target"), builtin_directory("draft"), (1,)
        else:  # the draft has other random weights: it is accepted by chance only
            target, draft = checkpoint(**TINY[model]), checkpoint(**TINY[model], num_layers=1, seed=1)
            eos = (EOS_ID,)
        options = {"block_size": BLOCK_SIZE, "kv_memory_bytes": KV_BYTES, "dtype": dtype}
        runners = [tiny_runner(target, exact=True, **options) for _ in range(2)]
        pair = Pair(*runners, tiny_runner(draft, **options))
        vocab_size = pair.decode.model_config.vocab_size
        text = source_text(target, vocab_size) if model.startswith("builtin") else random_text(vocab_size)
        some = requests(count, text, vocab_size, eos)
        return Setup(pair, some, pair.answer(some, ALONE))

    return make


def cases() -> list[object]:
    made: list[object] = []
    for model in ("builtin", "builtin-bf16", *TINY):
        for name in WAYS:
            made.append(pytest.param(model, ALL, name, id=f"{model}-{ALL}-{name}", marks=pytest.mark.long))
            if name in QUICK.get(model, ()):
                made.append(pytest.param(model, FEW, name, id=f"{model}-{FEW}-{name}"))
    return made


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "count", "name"), cases())
def test_every_way_yields_the_tokens_of_each_request_alone(setups: Make, model: str, count: int, name: str) -> None:
    setup, way = setups(model, count), WAYS[name]
    answers = setup.pair.answer(setup.requests, way, setup.alone.tokens)
    assert answers.tokens == setup.alone.tokens
    assert answers.reasons == setup.alone.reasons
    assert_computed_as(way, answers, count, real_draft=model.startswith("builtin") and way.drafts == "model")


def assert_computed_as(way: Way, answers: Answers, count: int, *, real_draft: bool) -> None:
    """Asserts that the requests were computed as `way` specifies."""
    assert answers.widest <= way.batch and (answers.widest > 1 or way.batch == 1)
    if count == ALL and not way.short:
        assert answers.widest == way.batch or (way.chunk < 512 and answers.widest > way.batch / 2)
    assert answers.longest_chunk == way.chunk or way.chunk > 64 > answers.longest_chunk / 4
    assert (answers.preemptions > 0) == way.short
    cached = answers.cached_on_prefill, answers.cached_on_decode
    assert min(cached) > 0 if way.cache else max(cached) == 0
    drafted, accepted = answers.counters.drafted_tokens, answers.counters.accepted_tokens
    assert (drafted > 0) == (way.drafts != "none")
    if way.drafts == "right":
        assert accepted == drafted
    if way.drafts == "wrong":
        assert accepted == 0
    if real_draft:
        assert accepted > sum(map(len, answers.tokens.values())) / 4
        assert accepted > drafted / 4 or way.length > 1  # of many draft tokens the later ones are rarely accepted


def test_blocks_behind_the_window_are_given_back_without_a_difference(setups: Make) -> None:
    setup = setups("mistral", FEW)
    kept = setup.pair.answer(setup.requests, replace(ALONE, give_back=False))
    assert kept.given_back == (0, 0)
    assert (kept.tokens, kept.reasons) == (setup.alone.tokens, setup.alone.reasons)
    assert setup.alone.given_back[1] > 0
    chunks = setup.pair.answer(setup.requests, WAYS["chunks of 16"])
    assert min(chunks.given_back) > 0 and chunks.tokens == kept.tokens


@pytest.mark.parametrize("count", [FEW, pytest.param(ALL, marks=pytest.mark.long)])
@pytest.mark.parametrize("model", [pytest.param("builtin", marks=pytest.mark.long), "llama"])
def test_requests_cover_all_finish_reasons_and_kinds_of_sampling(setups: Make, model: str, count: int) -> None:
    """Both finish reasons occur, half of the requests are greedy, and the other half does not yield greedy tokens."""
    setup = setups(model, count)
    assert {"stop", "length"} <= set(setup.alone.reasons.values())
    kinds = [r.sampling for r in setup.requests]
    assert sum(k.greedy for k in kinds) == count / 2
    assert sum(k.penalises for k in kinds) > count / 3 and sum(bool(k.logit_bias) for k in kinds) == count / 5
    greedy = [replace(r, sampling=replace(r.sampling, temperature=0.0)) for r in setup.requests]
    assert setup.pair.answer(greedy, Way()).tokens != setup.alone.tokens

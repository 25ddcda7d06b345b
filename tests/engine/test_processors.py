"""Bias, masks and penalties against the plain twin, bit for bit, and against transformers where it has the same."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from baton.core.request import SamplingParams, SequenceId, TokenBias
from baton.core.step import Draw, History
from baton.engine.processors import Drafted, SeenTables, process
from baton.engine.sampler import survivors
from tests.support.plain_sampler import plain_process, plain_sample
from tests.support.sampler_cases import sample

VOCAB = 40
IDS = st.integers(0, VOCAB - 1)
TOKENS = st.lists(IDS, max_size=12).map(tuple)
BIASES = st.dictionaries(IDS, st.floats(-100, 100), max_size=4)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    presence_penalty=st.sampled_from([0.0, 1.1, -0.3]),
    logit_bias=BIASES.map(lambda b: tuple(TokenBias(i, b[i]) for i in sorted(b))),
    min_tokens=st.sampled_from([0, 3, 30]),
    bad_words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    allowed_token_ids=st.just(()) | st.sets(st.integers(0, 6), min_size=1).map(lambda ids: tuple(sorted(ids))),
)


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    output = draw(st.lists(st.integers(0, 6), max_size=12).map(tuple))
    history = History(draw(TOKENS), output, draw(st.sampled_from([(), (1,), (1, 5)])))
    drafts = draw(st.lists(IDS, max_size=3).map(tuple))
    return Draw(draw(PARAMS), draw(st.integers(0, 2)), len(output) + len(drafts), history, drafts)


def random_logits(rows: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=100, deadline=None)
@given(batch=st.lists(draws(), min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_process_matches_the_reference_bit_for_bit_and_leaves_its_input_unchanged(batch: list[Draw], seed: int) -> None:
    logits = random_logits(len(batch), seed)
    before = logits.clone()
    expected = [plain_process(row.tolist(), draw) for row, draw in zip(logits, batch, strict=True)]
    assert process(logits, batch).tolist() == expected
    tokens = [plain_sample(row.tolist(), draw) for row, draw in zip(logits, batch, strict=True)]
    assert sample(logits, batch) == tokens
    assert torch.equal(logits, before)


@settings(max_examples=100, deadline=None)
@given(batch=st.lists(draws(), min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_device_draft_tokens_count_like_known_ones(batch: list[Draw], seed: int) -> None:
    """With few different tokens, so that draft tokens repeat one another and the output."""
    few = [
        replace(draw, drafts=tuple(t % 6 for t in draw.drafts), sampling=replace(draw.sampling, bad_words=()))
        for draw in batch
    ]
    draft_tokens = torch.full((len(few), 4), 3)  # entries after a row's draft tokens are ignored
    for row, draw in enumerate(few):
        draft_tokens[row, : len(draw.drafts)] = torch.tensor(draw.drafts, dtype=torch.int64)
    drafted = Drafted(draft_tokens, [len(draw.drafts) for draw in few])
    logits = random_logits(len(few), seed)
    found = process(logits, [replace(draw, drafts=()) for draw in few], drafted=drafted)
    assert found.tolist() == process(logits, few).tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(draws(), st.integers(0, 1)), min_size=1, max_size=8), st.integers(1, 3))
def test_tables_kept_from_step_to_step_never_change_a_result(steps: list[tuple[Draw, int]], limit: int) -> None:
    """Whatever histories are passed for one sequence: longer, shorter, of another prompt."""
    tables, logits = SeenTables(limit), random_logits(1, 1)
    for draw, name in steps:
        kept = Draw(draw.sampling, 0, draw.output_index, draw.history, draw.drafts, SequenceId(str(name)))
        assert process(logits, [kept], tables).tolist() == process(logits, [draw]).tolist()


def test_counts_of_a_growing_sequence_are_updated_incrementally(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, prompt = SeenTables(), tuple(range(30))
    params = SamplingParams(frequency_penalty=1.0)
    made: list[int] = []
    unique = np.unique
    monkeypatch.setattr(np, "unique", lambda *a, **k: made.append(1) or unique(*a, **k))
    for length in range(200):
        history = History(prompt, tuple(i % 9 for i in range(length)))
        draw = Draw(params, 0, length, history, (), SequenceId("r"))
        ids, counts = tables.of(draw, history).after(())
        assert counts.sum() == length and len(ids) == 30
    assert len(made) == 1


def test_draft_tokens_count_as_output() -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, bad_words=((3, 4, 5),), min_tokens=4)
    logits = random_logits(1, 2)
    for cut in range(4):
        output = (7, 3, 4)
        draw = Draw(params, 0, 3, History((1, 2), output[:cut], (9,)), output[cut:])
        assert torch.equal(
            process(logits, [draw]), process(logits, [Draw(params, 0, 3, History((1, 2), output, (9,)))])
        )


def test_batch_mates_do_not_change_a_row() -> None:
    logits = random_logits(20, 3)
    batch = [
        Draw(
            SamplingParams(presence_penalty=i / 10, allowed_token_ids=(1, 2, i) * (i % 2)), 0, 2, History((i,), (1, i))
        )
        for i in range(20)
    ]
    together = process(logits, batch)
    for i, draw in enumerate(batch):
        assert torch.equal(together[i : i + 1], process(logits[i : i + 1], [draw]))


def test_only_allowed_tokens_apply_when_all_masks_together_would_leave_no_token() -> None:
    logits = random_logits(1, 4)
    history = History((0,), (5,), (5, 6))
    params = SamplingParams(allowed_token_ids=(5, 6), min_tokens=9, temperature=0.0)
    assert sample(logits, [Draw(params, 0, 1, history)]) == [5 if logits[0, 5] > logits[0, 6] else 6]
    everything = SamplingParams(min_tokens=9, temperature=0.0)
    all_ids = History((0,), (), tuple(range(VOCAB)))
    assert sample(logits, [Draw(everything, 0, 0, all_ids)]) == [int(logits[0].argmax())]


def test_last_token_of_a_bad_word_is_masked_and_its_beginning_is_not() -> None:
    params = SamplingParams(bad_words=((3, 4), (8,)))
    logits = random_logits(1, 5)

    def masked(*output: int) -> list[int]:
        found = process(logits, [Draw(params, 0, len(output), History((3,), output))])
        return torch.isneginf(found[0]).nonzero().flatten().tolist()

    assert masked() == [8]  # the prompt ends with 3, but bad words are matched in the output only
    assert masked(3) == [4, 8]
    assert masked(4, 3, 4) == [8]


# transformers, on the same numbers.


def by_hf(make: Callable[[], Any], ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = make()(torch.tensor([ids]), logits.clone())
    return result


def by_baton(
    params: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...], logits: torch.Tensor
) -> torch.Tensor:
    return process(logits, [Draw(params, 0, len(output), History(prompt, output, (2, 9)))])


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_matches_transformers(penalty: float) -> None:
    logits = random_logits(1, 6)
    expected = by_hf(lambda: hf.RepetitionPenaltyLogitsProcessor(penalty), [1, 5, 5, 30], logits)
    assert torch.equal(by_baton(SamplingParams(repetition_penalty=penalty), (1, 5), (5, 30), logits), expected)


def test_min_tokens_matches_transformers() -> None:
    logits = random_logits(1, 7)
    for length in range(4):
        output = (3,) * length
        make = lambda: hf.MinNewTokensLengthLogitsProcessor(2, 2, torch.tensor([2, 9]))  # noqa: E731
        expected = by_hf(make, [1, 5, *output], logits)
        assert torch.equal(by_baton(SamplingParams(min_tokens=2), (1, 5), output, logits), expected)


def test_bad_words_match_transformers() -> None:
    logits, words = random_logits(1, 8), [[4], [3, 7], [3, 3, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    for output in ((), (3,), (3, 3), (7, 3)):
        expected = by_hf(lambda: hf.NoBadWordsLogitsProcessor(words, eos_token_id=None), [10, *output], logits)
        params = SamplingParams(bad_words=tuple(map(tuple, words)))
        assert torch.equal(by_baton(params, (10,), output, logits), expected)


def test_logit_bias_matches_transformers() -> None:
    logits, biases = random_logits(1, 9), {3: 5.0, 11: -100.0}
    expected = by_hf(lambda: hf.SequenceBiasLogitsProcessor({(i,): b for i, b in biases.items()}), [1], logits)
    params = SamplingParams(logit_bias=tuple(TokenBias(i, b) for i, b in biases.items()))
    assert torch.equal(by_baton(params, (1,), (), logits), expected)


WARPERS: dict[str, tuple[dict[str, Any], list[Callable[[], Any]]]] = {
    "top_k": ({"top_k": 7}, [lambda: hf.TopKLogitsWarper(7)]),
    "top_p": ({"top_p": 0.8}, [lambda: hf.TopPLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.05}, [lambda: hf.MinPLogitsWarper(0.05)]),
    "all": (
        {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
        [lambda: hf.TopKLogitsWarper(20), lambda: hf.TopPLogitsWarper(0.9), lambda: hf.MinPLogitsWarper(0.1)],
    ),
}


@pytest.mark.parametrize("name", WARPERS)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_survivors_match_transformers(name: str, temperature: float) -> None:
    asked, warpers = WARPERS[name]
    for seed in range(20):
        logits = random_logits(1, seed, 500)
        scores = hf.TemperatureLogitsWarper(temperature)(torch.tensor([[1]]), logits.clone())
        for make in warpers:
            scores = make()(torch.tensor([[1]]), scores)
        expected = torch.isfinite(scores[0]).nonzero().flatten().tolist()
        assert survivors(logits[0].numpy(), SamplingParams(temperature=temperature, **asked)).tolist() == expected


def test_mask_of_allowed_tokens_is_built_once_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each of its steps: for 150,000 ids that would delay every other row of the step."""
    made = 0
    ones = torch.ones

    def counted(*size: Any, **more: Any) -> Tensor:
        nonlocal made
        made += 1
        return ones(*size, **more)

    monkeypatch.setattr(torch, "ones", counted)
    params, other = (SamplingParams(allowed_token_ids=ids) for ids in ((1, 5), (2,)))
    tables, logits = SeenTables(), torch.randn(3, 8)
    for step in range(5):
        found = process(logits, [Draw(params, 0, step), Draw(SamplingParams(), 0, step), Draw(other, 0, step)], tables)
        kept = [torch.isfinite(row).nonzero().flatten().tolist() for row in found]
        assert kept == [[1, 5], list(range(8)), [2]] and torch.equal(found[1], logits[1])
        assert torch.equal(found[0][[1, 5]], logits[0][[1, 5]])
    assert made == 2


def test_masks_of_large_lists_are_cached_until_their_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 lists of 30,000 ids: a limit on the number of cached ids would rebuild each mask in each step."""
    ids, made = tuple(range(30_000)), 0
    ones = torch.ones

    def counted(*size: Any, **more: Any) -> Tensor:
        nonlocal made
        made += 1
        return ones(*size, **more)

    monkeypatch.setattr(torch, "ones", counted)
    tables, all_params = SeenTables(), [SamplingParams(seed=seed, allowed_token_ids=ids) for seed in range(64)]
    for _ in range(3):
        for params in all_params:
            tables.outside_allowed(params, len(ids), torch.device("cpu"))
    assert made == 64 == len(tables._masks)
    del params, all_params
    gc.collect()
    assert not tables._masks


@pytest.mark.parametrize("allowed", [3, 500, 1000], ids="{} of 1000".format)
@pytest.mark.parametrize("in_place", [False, True])
def test_lists_of_any_length_mask_all_other_tokens(allowed: int, in_place: bool) -> None:
    ids = tuple(sorted(random.Random(allowed).sample(range(1000), allowed)))
    logits = torch.randn(3, 1000)
    expected = logits.clone()
    expected[1, [token for token in range(1000) if token not in set(ids)]] = -torch.inf
    draws = [Draw(SamplingParams(allowed_token_ids=ids) if row == 1 else SamplingParams(), 0, 0) for row in range(3)]
    before = logits.clone()
    assert torch.equal(process(logits, draws, in_place=in_place), expected)
    assert torch.equal(logits, expected if in_place else before)

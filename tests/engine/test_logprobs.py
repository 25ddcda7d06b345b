"""Log-probabilities: those of the model, whatever the sampler does, and the same in any batch and chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.core.request import SamplingParams, SequenceId, TokenBias, TokenLogprob
from baton.core.step import Row, StepPlan
from baton.engine.outputs import reported, reports, token_logprob
from baton.engine.runner import Runner
from tests.support.engine_driver import all_logits, block_ids, random_tokens, tiny_runner


def test_logprobs_equal_log_softmax() -> None:
    logits = torch.randn(2000, generator=torch.Generator().manual_seed(1)) * 4
    expected = torch.log_softmax(logits.double(), dim=0).float()
    found = token_logprob(logits.numpy(), 77, 20)
    values, ids = torch.topk(expected, 20)
    assert (found.token_id, found.logprob) == (77, pytest.approx(expected[77].item(), abs=1e-6))
    assert found.top_ids == tuple(ids.tolist())
    assert np.allclose(found.top_logprobs, values.numpy(), atol=1e-6)
    assert found.rank == int((expected > expected[77]).sum()) + 1


def test_equal_logits_have_the_same_rank_and_are_listed_by_id() -> None:
    logits = np.zeros(50, dtype=np.float32)
    logits[40] = 1.0
    found = token_logprob(logits, 9, 3)
    assert (found.rank, found.top_ids) == (2, (40, 0, 1))
    assert token_logprob(logits, 9, 0).top_ids == ()
    assert len(token_logprob(logits, 9, 99).top_ids) == 50


@pytest.mark.parametrize("vocab", [3, 50, 4096])
def test_device_reports_equal_the_plain_ones_bit_for_bit(vocab: int) -> None:
    """Also among equal logits, zeros of both signs and masked tokens, and for more rows than are computed at once."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn((150, vocab), generator=generator) * 4
    logits[1] = logits[1].bfloat16().float()
    logits[2] = 0.0
    logits[2, 1] = -0.0
    logits[3, ::2] = -torch.inf
    logits[4] *= 1e4
    tokens = torch.randint(vocab, (150,), generator=generator)
    tokens[3] = 1
    for top in (0, 1, 20, 5000):
        lines = reports(logits, tokens, top)
        assert lines.dtype == torch.int32 and lines.shape == (150, 2 + 2 * min(top, vocab))
        for line, row, token in zip(lines.numpy(), logits.numpy(), tokens.tolist(), strict=True):
            assert reported(line, token, top) == token_logprob(row, token, top)
            assert reported(line, token, 1) == token_logprob(row, token, min(top, 1))


@pytest.fixture(scope="module")
def exact(checkpoint: Callable[..., Path]) -> Runner:
    return tiny_runner(checkpoint(arch="llama"), exact=True)


def test_sampled_tokens_have_raw_log_probabilities(exact: Runner) -> None:
    tokens = random_tokens(20)
    params = SamplingParams(temperature=0.7, seed=3, logprobs=5, logit_bias=(TokenBias(8, 90.0),))
    silent = SamplingParams(temperature=0.0)
    blocks = tuple(b for b, _ in zip(block_ids(exact), range(4), strict=False))
    asked = Row(SequenceId("a"), 0, tuple(tokens), blocks[:2], params, num_sampled=2)
    mate = Row(SequenceId("b"), 0, (1, 2), blocks[2:], silent, num_sampled=1)
    outcome = exact.step(StepPlan(1, (mate, asked)))
    logits = all_logits(exact, tokens, [20])
    assert outcome.sampled[1] == (8, 8) and outcome.logprobs[0] == ()
    assert outcome.logprobs[1] == tuple(token_logprob(row.numpy(), 8, 5) for row in logits[-2:])


@pytest.mark.parametrize("chunk", [7, 50, 200])
def test_prompt_logprobs_are_the_same_in_any_chunks(exact: Runner, chunk: int) -> None:
    tokens = tuple(random_tokens(50))
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    blocks = tuple(b for b, _ in zip(block_ids(exact, chunk), range(4), strict=False))
    scored: list[TokenLogprob] = []
    for start in range(0, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        known = tokens[start + 1 : end + 1]
        row = Row(SequenceId("a"), start, tokens[start:end], blocks, params, int(end == 50), scored=known)
        mate = Row(SequenceId("b"), 0, (1, 2, 3), (exact.num_blocks - 1,), SamplingParams(), num_sampled=1)
        scored += exact.step(StepPlan(1, (mate, row))).scored_of(1)
    logits = all_logits(exact, tokens, [50])
    assert scored == [token_logprob(logits[i].numpy(), tokens[i + 1], 2) for i in range(49)]

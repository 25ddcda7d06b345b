"""A value out of range is refused with the field's name, at every hop, before it reaches a tensor."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.request import SamplingParams, TokenBias
from baton.core.sampling_limits import check_sampling

VOCAB = 100
BAD: list[tuple[str, Any]] = [
    *[("temperature", v) for v in (-0.01, 2.01, math.nan, math.inf)],
    *[("top_p", v) for v in (0.0, 1.01, math.nan)],
    *[("top_k", v) for v in (-1, 1 << 31)],
    *[("seed", v) for v in (-1, 1 << 64)],
    *[("min_p", v) for v in (-0.1, 1.1, math.nan)],
    *[("repetition_penalty", v) for v in (0.0, -1.0, 101.0, math.nan)],
    *[(name, v) for name in ("frequency_penalty", "presence_penalty") for v in (-2.1, 2.1, math.nan)],
    *[("min_tokens", v) for v in (-1, 9)],
    *[(name, v) for name in ("stop_token_ids", "allowed_token_ids") for v in ((-1,), (VOCAB,), (1, 1 << 40))],
    ("stop_token_ids", tuple(range(65))),
    *[("bad_words", v) for v in (((),), ((1, VOCAB),), ((-1,),), ((1,) * 65,), ((1,),) * 129)],
    *[("logit_bias", (TokenBias(*v),)) for v in ((-1, 0.0), (VOCAB, 0.0), (1, 100.1), (1, math.nan))],
    ("logit_bias", tuple(TokenBias(i % VOCAB, 0.0) for i in range(301))),
    *[(name, v) for name in ("logprobs", "prompt_logprobs") for v in (-1, 21)],
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{n}-{i}" for i, (n, _) in enumerate(BAD)])
def test_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(SamplingParams(**{name: value}), 8, VOCAB)
    assert caught.value.param == name and len(caught.value.message) < 200


def test_both_limits_of_every_range_are_accepted() -> None:
    check_sampling(SamplingParams(), 1, VOCAB)
    ids = tuple(range(64))
    for low in (True, False):
        check_sampling(
            SamplingParams(
                temperature=0.0 if low else 2.0,
                top_p=1e-9 if low else 1.0,
                min_p=0.0 if low else 1.0,
                repetition_penalty=0.01 if low else 100.0,
                frequency_penalty=-2.0 if low else 2.0,
                presence_penalty=-2.0 if low else 2.0,
                min_tokens=0 if low else 8,
                stop_token_ids=() if low else ids,
                allowed_token_ids=(VOCAB - 1,),
                bad_words=((0,), ids),
                logit_bias=(TokenBias(0, -100.0), TokenBias(99, 100.0)),
                logprobs=0 if low else 20,
                prompt_logprobs=None if low else 20,
            ),
            8,
            VOCAB,
        )


def test_bad_words_that_leave_no_allowed_token_are_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(SamplingParams(allowed_token_ids=(4, 5), bad_words=((4,), (5,), (6, 7))), 8, VOCAB)
    assert caught.value.param == "bad_words"

"""Embeddings and scores as submissions to the pipeline, one per text, and their results: the same for HTTP and gRPC.

Two texts are compared by a classification head, which reads one after the other as one prompt, or else by the cosine of
their embeddings.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import mul

from baton.core.errors import InvalidRequest
from coordinator.submission import Submission
from coordinator.text.pooling import PoolingModel, probabilities, sigmoid, vector_of
from coordinator.translate import PoolOptions, Text, Translator

MAX_INPUTS = 2_048
"""Texts of one request, as OpenAI has it."""


async def to_embed(
    translator: Translator,
    request_id: str,
    texts: Sequence[Text],
    options: PoolOptions,
    dimensions: int | None,
    *,
    param: str,
) -> list[Submission]:
    """Returns the submissions of texts, which the field `param` of the request contains, to be embedded.

    Raises:
        BatonError: the model does not embed, or a text or an option is invalid; names the field.
    """
    model = translator.text.pooling
    model.check_embeds()
    model.check_dimensions(dimensions)
    return await _submissions(translator, request_id, [(text, param) for text in texts], options)


async def to_classify(
    translator: Translator, request_id: str, texts: Sequence[Text], options: PoolOptions, *, param: str
) -> list[Submission]:
    """Returns the submissions of texts, which the field `param` of the request contains, to be classified.

    Raises:
        BatonError: the model has no classification head, or a text or an option is invalid; names the field.
    """
    translator.text.pooling.check_classifies()
    return await _submissions(translator, request_id, [(text, param) for text in texts], options)


@dataclass(frozen=True, slots=True)
class Classification:
    """The most likely label of a text, and the probabilities of all labels, or their scores."""

    label: str
    probs: list[float]


def classify(model: PoolingModel, pooled: bytes, *, activation: bool = True) -> Classification:
    """Returns what a model's classification head says of a text."""
    scores = vector_of(pooled)
    probs = probabilities(scores) if activation else list(scores)
    return Classification(model.labels[max(range(len(scores)), key=scores.__getitem__)], probs)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Which answers to compare: `pairs` has the indexes of two embeddings, or is empty if each answer is the score of a
    classification head."""

    model: PoolingModel
    pairs: tuple[tuple[int, int], ...] = ()

    def scores(self, answers: Sequence[bytes], *, activation: bool = True) -> list[float]:
        """Returns one score per pair. Those of a head are between 0 and 1, or raw without `activation`."""
        if self.pairs:
            units = [vector_of(answer, normalize=True) for answer in answers]
            return [math.fsum(map(mul, units[first], units[second])) for first, second in self.pairs]
        raw = [vector_of(answer)[0] for answer in answers]
        return [sigmoid(score) for score in raw] if activation else raw


async def to_compare(
    translator: Translator,
    request_id: str,
    firsts: Sequence[str],
    seconds: Sequence[str],
    options: PoolOptions,
    *,
    params: tuple[str, str],
) -> tuple[list[Submission], Pairs]:
    """Returns the submissions to compare each of `seconds` with the text of `firsts` at its place, or with the only
    one. `params` are the fields of the request that contain them.

    Raises:
        BatonError: the model cannot compare texts, or a text or an option is invalid; names the field.
    """
    model = translator.text.pooling
    model.check_scores()
    if not seconds:
        raise InvalidRequest(f"{params[1]} is empty", param=params[1])
    if len(firsts) not in (1, len(seconds)):
        message = f"{len(firsts)} texts cannot be compared with {len(seconds)}: only 1 with N, or N with N"
        raise InvalidRequest(message, param=params[0])
    if model.labels:
        given = zip(repeat(firsts[0]) if len(firsts) == 1 else firsts, seconds, strict=False)
        texts: list[tuple[Text, str]] = [(first + second, params[1]) for first, second in given]
        return await _submissions(translator, request_id, texts, options), Pairs(model)
    texts = [*((first, params[0]) for first in firsts), *((second, params[1]) for second in seconds)]
    number = len(firsts)
    pairs = tuple((index if number > 1 else 0, number + index) for index in range(len(seconds)))
    return await _submissions(translator, request_id, texts, options), Pairs(model, pairs)


async def _submissions(
    translator: Translator, request_id: str, texts: Sequence[tuple[Text, str]], options: PoolOptions
) -> list[Submission]:
    submissions: list[Submission] = []
    for number, (text, param) in enumerate(texts):
        name = request_id if len(texts) == 1 else f"{request_id}-{number}"
        submission = await translator.to_pool(name, text, options, param=param)
        submissions.append(submission)
        await asyncio.sleep(0)  # up to 2,048 short texts are encoded on the event loop
    return submissions

"""Requests whose answers must not depend on how they are computed: every kind of sampling, prompts with shared
prefixes, answers that end early."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from baton.core.request import GenerateRequest, SamplingParams, TokenBias

FAMILY = 5  # consecutive requests with the same prefix

# Lengths in tokens of prompt prefixes, of the rest of the prompt, and of the output.
_HEADS = (0, 16, 40, 100)
_TAILS = (3, 40)
_MOST_OUTPUT = (8, 40)


def samplings(vocab_size: int, common: Sequence[int]) -> tuple[SamplingParams, ...]:
    """Half greedy, half at T = 0.8. `common` are tokens that are likely to occur in answers: they are biased, banned,
    or end the answer."""
    biases = tuple(TokenBias(token, 1.5 - index) for index, token in enumerate(sorted(common[:4])))
    stops, bad = tuple(common[4:12]), ((common[0],), (common[1], common[2]))
    half = tuple(range(0, vocab_size, 2))
    return (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4),
        SamplingParams(temperature=0.8, presence_penalty=0.5, repetition_penalty=1.1, top_p=0.95, top_k=40),
        SamplingParams(temperature=0.0, logit_bias=biases, stop_token_ids=stops),
        SamplingParams(temperature=0.8, logit_bias=biases, min_p=0.02),
        SamplingParams(temperature=0.0, min_tokens=5, stop_token_ids=stops, bad_words=bad),
        SamplingParams(temperature=0.8, min_tokens=3, stop_token_ids=stops, frequency_penalty=0.3),
        SamplingParams(temperature=0.0, allowed_token_ids=half, presence_penalty=0.2),
        SamplingParams(temperature=0.8, bad_words=bad, allowed_token_ids=half, top_p=0.9),
    )


def requests(count: int, text: Sequence[int], vocab_size: int, eos: tuple[int, ...]) -> list[GenerateRequest]:
    """Returns `count` requests with prompts cut out of `text` (token ids), the same for the same arguments."""
    generator = random.Random(11)
    common = sorted(set(text), key=lambda token: (-text.count(token), token))
    kinds = samplings(vocab_size, [token for token in common if token not in eos])
    made, head = [], ()
    for index in range(count):
        if index % FAMILY == 0:
            head = _piece(generator, text, _HEADS[index // FAMILY % len(_HEADS)])
        tail = _piece(generator, text, generator.randint(*_TAILS))
        sampling = kinds[index % len(kinds)]
        seeded = replace(sampling, seed=index * 0x1_0000_0001)
        most = generator.randint(*_MOST_OUTPUT)
        made.append(GenerateRequest(f"r{index}", head + tail, most, seeded, eos_token_ids=eos if index % 3 else ()))
    return made


def source_text(model_dir: Path, vocab_size: int, length: int = 6000) -> list[int]:
    """Token ids of Python source, the same on every run of one interpreter."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    text: list[int] = []
    for name in ("argparse", "json/decoder", "textwrap", "csv", "queue", "heapq"):
        source = (Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text(encoding="utf-8")
        text += [token for token in tokenizer.encode(source[2000:12000]).ids if token < vocab_size]
    return text[:length]


def random_text(vocab_size: int, length: int = 3000) -> list[int]:
    """Returns tokens that often repeat earlier pieces, so that prompt lookup finds matches."""
    generator = random.Random(3)
    text = generator.choices(range(vocab_size), k=200)
    while len(text) < length:
        start = generator.randrange(len(text) - 40)
        text += text[start : start + generator.randint(5, 40)] + generator.choices(range(vocab_size), k=4)
    return text[:length]


def _piece(generator: random.Random, text: Sequence[int], length: int) -> tuple[int, ...]:
    start = generator.randrange(len(text) - length)
    return tuple(text[start : start + length])

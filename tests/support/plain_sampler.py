"""The sampler exactly as defined (docs/numerics.md): one row at a time, with plain loops. Tests compare with it."""

from __future__ import annotations

import math

import numpy as np

from baton.core.request import SamplingParams
from baton.core.step import Draw


def plain_process(logits: list[float], draw: Draw) -> list[float]:
    """Takes and returns float32 values as Python numbers."""
    params, history, f = draw.sampling, draw.history, np.float32
    out = [f(value) for value in logits]
    for token, bias in params.logit_bias:
        out[token] = out[token] + f(bias)
    output = [] if history is None else [*history.output, *draw.drafts]
    banned = set()
    if history is not None and draw.output_index < params.min_tokens:
        banned |= set(history.end_token_ids)
    for word in params.bad_words if history is not None else ():
        start = [*word[:-1]]
        if len(start) <= len(output) and output[len(output) - len(start) :] == start:
            banned.add(word[-1])
    allowed = set(params.allowed_token_ids) or set(range(len(out)))
    if allowed <= banned:
        banned = set()
    for token in range(len(out)):
        if token not in allowed or token in banned:
            out[token] = f(-math.inf)
    for token in range(len(out)) if history is not None else ():
        if token in history.prompt or token in output:
            r = f(params.repetition_penalty)
            out[token] = out[token] / r if out[token] > 0 else out[token] * r
        count = output.count(token)
        out[token] = out[token] - f(params.frequency_penalty) * f(count)
        out[token] = out[token] - f(params.presence_penalty) * f(count > 0)
    return [float(value) for value in out]


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & 0xFFFFFFFF, (a >> 32) ^ counter[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def plain_survivors(logits: list[float], params: SamplingParams) -> list[int]:
    """Follows the definition, with a full sort and a loop."""
    ranked = sorted((t for t in range(len(logits)) if logits[t] > -math.inf), key=lambda token: (-logits[token], token))
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    weights = [math.exp((logits[t] - logits[ranked[0]]) / params.temperature) for t in ranked]
    target, mass, kept = params.top_p * math.fsum(weights), 0.0, []
    for token, weight in zip(ranked, weights, strict=True):
        if (mass < target or params.top_p == 1.0) and weight >= params.min_p:
            kept.append(token)
        mass += weight
    return sorted(kept)


def plain_noise(token: int, draw: Draw) -> float:
    seed = draw.sampling.seed
    counter = [token >> 2, draw.output_index, draw.choice, 0]
    x = plain_philox(counter, [seed & 0xFFFFFFFF, seed >> 32])[token & 3]
    return -math.log(-math.log1p(-(x + 0.5) * 2.0**-32))


def plain_sample(logits: list[float], draw: Draw) -> int:
    params, logits = draw.sampling, plain_process(logits, draw)
    if params.temperature == 0.0:
        return max(range(len(logits)), key=lambda token: (logits[token], -token))
    return max(
        plain_survivors(logits, params),
        key=lambda token: (logits[token] + params.temperature * plain_noise(token, draw), -token),
    )

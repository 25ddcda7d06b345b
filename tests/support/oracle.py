"""Reference output by transformers: greedy tokens of a checkpoint on CPU in float32, and where they are nearly tied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

TIE = 1e-4


@dataclass(frozen=True)
class Greedy:
    """`decided` counts the tokens before the first position at which the two best logits are within TIE."""

    tokens: tuple[int, ...]
    decided: int


@lru_cache(maxsize=8)
def _model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy(path: Path, prompt: Sequence[int], count: int) -> Greedy:
    """Returns `count` greedy tokens after `prompt`, without stopping at EOS."""
    model = _model(path)
    tokens: list[int] = []
    decided = count
    inputs, cache = torch.tensor([list(prompt)]), None
    for index in range(count):
        out = model(inputs, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[0, -1]
        best = torch.topk(logits, 2)
        if float(best.values[0] - best.values[1]) < TIE:
            decided = min(decided, index)
        tokens.append(int(best.indices[0]))
        inputs = torch.tensor([[tokens[-1]]])
    return Greedy(tuple(tokens), decided)

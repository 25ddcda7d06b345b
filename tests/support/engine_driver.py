"""Drives a runner as a small scheduler would: several sequences, chunked prefill, then one token per step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Draw, History, Row, StepPlan
from baton.engine.kernels.build import processor_levels
from baton.engine.loading import load_runner
from baton.engine.options import EngineOptions
from baton.engine.processors import SeenTables
from baton.engine.runner import Runner
from tests.support.sampler_cases import sample

GREEDY = SamplingParams(temperature=0.0)


def float32_levels() -> list[str]:
    """Levels of this processor whose code for float32 differs: the lowest, AVX-512, and one that multiplies bf16."""
    levels = processor_levels()
    return sorted({levels[0], *levels[1:2], levels[-1]}) if levels else []


def bfloat16_levels() -> list[str]:
    """Levels of this processor whose code for bf16 differs: all."""
    return list(processor_levels())


def tiny_runner(model_dir: Path, **options: Any) -> Runner:
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_memory_bytes": 8 << 20}
    return load_runner(EngineOptions(model_dir=model_dir, **{**defaults, **options}))


def kv_bytes(runner: Runner) -> int:
    """Bytes of this rank's KV pool, including its block of zeros."""
    return sum(tensor.nbytes for pair in runner.kv.storage for tensor in pair)


def random_tokens(count: int, seed: int = 0, vocab_size: int = 320) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=count)


def block_ids(runner: Runner, seed: int = 0) -> Iterator[int]:
    """All blocks of the pool in random order: results must not depend on which blocks a sequence has."""
    blocks = list(range(runner.num_blocks))
    random.Random(seed).shuffle(blocks)
    return iter(blocks)


@dataclass
class Job:
    """One sequence. `tokens` is the prompt followed by the generated tokens; `logits` are those that each generated
    token was sampled from. The last `resumed` tokens of the prompt are output of an earlier attempt."""

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    chunk: int = 1 << 30
    blocks: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    computed: int = 0
    resumed: int = 0
    end_token_ids: tuple[int, ...] = ()
    adapter: str = ""

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def done(self) -> bool:
        return len(self.output) >= self.max_tokens

    def next_row(self, name: str) -> Row:
        count = min(self.chunk, len(self.tokens) - self.computed)
        last = self.computed + count == len(self.tokens)
        boundary = len(self.prompt) - self.resumed
        history = History(tuple(self.tokens[:boundary]), tuple(self.tokens[boundary:]), self.end_token_ids)
        return Row(
            SequenceId(name),
            self.computed,
            tuple(self.tokens[self.computed : self.computed + count]),
            self.blocks,
            self.sampling,
            num_sampled=int(last),
            output_index=self.resumed + len(self.output),
            history=history if last else None,
            adapter=self.adapter,
        )


def run(runner: Runner, jobs: Sequence[Job], seed: int = 0) -> None:
    """Runs all jobs to completion in one continuous batch."""
    free = block_ids(runner, seed)
    for job in jobs:
        job.tokens = list(job.prompt)
        job.blocks = tuple(next(free) for _ in range(runner.layout.blocks_for(len(job.prompt) + job.max_tokens)))
    step_id, tables = 0, SeenTables()
    while active := [job for job in jobs if not job.done]:
        rows = tuple(job.next_row(str(index)) for index, job in enumerate(active))
        results = runner.step_logits(StepPlan(step_id, rows))
        for job, row, logits in zip(active, rows, results, strict=True):
            job.computed = row.end
            if row.num_sampled:
                job.logits.append(logits[0])
                draw = Draw(job.sampling, 0, row.output_index, row.history, (), row.sequence_id)
                job.tokens += sample(logits, [draw], tables)
        step_id += 1


def all_logits(
    runner: Runner, tokens: Sequence[int], chunks: Sequence[int], seed: int = 0, adapter: str = ""
) -> Tensor:
    """Logits [len(tokens), vocab] of a sequence computed alone in chunks of the given lengths (cycled)."""
    free = block_ids(runner, seed)
    blocks = tuple(next(free) for _ in range(runner.layout.blocks_for(len(tokens))))
    parts: list[Tensor] = []
    start = 0
    while start < len(tokens):
        count = min(chunks[len(parts) % len(chunks)], len(tokens) - start)
        part = tuple(tokens[start : start + count])
        row = Row(SequenceId("x"), start, part, blocks, GREEDY, num_sampled=count, adapter=adapter)
        parts += runner.step_logits(StepPlan(len(parts), (row,)))
        start += count
    return torch.cat(parts)

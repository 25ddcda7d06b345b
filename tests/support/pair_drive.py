"""Both tiers on real engines, in one process and without links: the prefill scheduler computes prompts in chunks on one
engine, their KV is copied to the blocks that the decode scheduler reserved on another engine, which then generates.

A `Way` is a configuration: drafter and draft length, batch size, chunk size, prefix cache on or off, and the size of
the pool. In exact mode answers do not depend on it. Time is virtual: a step takes STEP_S.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.errors import Unavailable
from baton.core.events import SpeculationCounters
from baton.core.request import GenerateRequest
from baton.core.sequence import Sequence as Running
from baton.core.step import DraftRow, StepOutcome, StepPlan
from baton.core.window import Window
from baton.engine.runner import Runner
from decode.scheduler import DecodeScheduler
from decode.speculation.drafts import Drafts
from decode.speculation.engine import SpeculativeEngine
from decode.speculation.policy import Speculation
from decode.speculation.step_cost import StepModel
from prefill.scheduler import PrefillScheduler
from tests.support.decode_drive import make_drafts

STEP_S = 0.02
DRAFT_S = 1e-4  # so cheap that drafting pays even for answers of a few tokens
_MOST_STEPS = 200_000


@dataclass(frozen=True, slots=True)
class Way:
    """`drafts` is none, ngram, model, right or wrong (the latter two from known answers); `length` is the draft length,
    0 for an adaptive one. `batch` requests generate concurrently, prompts are computed in chunks of `chunk`. `short`:
    decode has a third of the KV blocks that the batch needs, so sequences are preempted and recomputed. `give_back`
    false: blocks behind the window are kept and handed over."""

    drafts: str = "none"
    length: int = 0
    batch: int = 32
    chunk: int = 4096
    cache: bool = False
    short: bool = False
    give_back: bool = True


ALONE = Way(batch=1)
"""The reference for every other way: one request at a time, the prompt in one row, no draft tokens, no cache."""

WAYS = {
    "batch of 32": Way(),
    "chunks of 16": Way(batch=8, chunk=16),
    "chunks of 64": Way(chunk=64),
    "chunks of 512": Way(chunk=512),
    "prefix cache": Way(batch=4, cache=True),
    "preempted": Way(batch=8, short=True),
    "preempted, cached": Way(batch=8, cache=True, short=True),
    **{
        f"{drafts}, k = {length or 'adaptive'}": Way(drafts, length)
        for drafts in ("ngram", "model")
        for length in (0, 1, 4, 8)
    },
    "ngram alone": Way("ngram", 4, batch=1),
    "model alone": Way("model", 4, batch=1),
    "always right": Way("right", 8),
    "always wrong": Way("wrong", 4),
    "ngram, preempted": Way("ngram", 4, batch=8, short=True),
    "model, preempted": Way("model", 4, batch=8, short=True),
    "model, chunks of 16, cached, preempted": Way("model", 0, batch=6, chunk=16, cache=True, short=True),
}


@dataclass
class Answers:
    """Tokens by request, why each ended, and evidence that the way took effect: the widest decode step and longest
    prefill row, tokens reused from caches, preemptions, blocks given back by prefill and by decode, draft tokens."""

    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    widest: int = 0
    longest_chunk: int = 0
    cached_on_prefill: int = 0
    cached_on_decode: int = 0
    preemptions: int = 0
    given_back: tuple[int, int] = (0, 0)
    steps: int = 0
    counters: SpeculationCounters = field(default_factory=SpeculationCounters)


class FixedCosts(StepModel):
    """Fixed step costs, independent of the real times: about 10 ms for a step, and `draft_s` for a draft's step."""

    def __init__(self, draft_s: float = 1e-3, step_tokens: int = 512) -> None:
        super().__init__(((1, 1e-2), (64, 1.5e-2)), ((1, draft_s), (64, 2 * draft_s)), step_tokens=step_tokens)

    def observe(self, plan: StepPlan, outcome: StepOutcome, wall_s: float) -> None:
        pass


class KnownDrafts:
    """Draft tokens from known answers: always the right tokens, or always wrong ones."""

    def __init__(self, answers: dict[str, tuple[int, ...]], vocab_size: int, *, right: bool) -> None:
        self._answers, self._vocab_size, self._right = answers, vocab_size, right

    def open(self, sequence: Running) -> None:
        pass

    def close(self, sequence: Running) -> None:
        pass

    def behind(self, sequence: Running) -> int:
        return 0

    def room(self, sequence: Running, count: int) -> int:
        return max(0, min(count, len(self._answers[sequence.id.request_id]) - len(sequence.output)))

    def propose(self, sequence: Running, row: int, count: int) -> tuple[int, ...]:
        done = len(sequence.output)
        known = self._answers[sequence.id.request_id][done : done + count]
        return known if self._right else tuple((token + 1) % self._vocab_size for token in known)

    def on_verified(self, sequence: Running, drafted: int, accepted: int) -> None:
        pass

    def fill(self, sequence: Running, tokens: int) -> DraftRow | None:
        return None

    def check_idle(self) -> None:
        pass

    def check(self, sequences: object) -> None:
        pass


class Pair:
    """An engine for prefill and one for decode, with the same checkpoint and block size, and a draft model for decode.
    They keep no state between two calls of `answer`."""

    def __init__(self, prefill: Runner, decode: Runner, draft: Runner) -> None:
        assert prefill.facts == decode.facts
        self.prefill, self.decode, self.draft = prefill, decode, draft

    def answer(
        self, requests: Sequence[GenerateRequest], way: Way, known: dict[str, tuple[int, ...]] | None = None
    ) -> Answers:
        """Generates all requests, and checks the invariants of both schedulers at the end. `known` answers are required
        for drafts that are right or wrong."""
        drive = _Drive(self, requests, way, known or {})
        return drive.run()


class _Drive:
    """Complete state: both schedulers, requests not yet submitted, and the first tokens of those parked on prefill."""

    def __init__(
        self, pair: Pair, requests: Sequence[GenerateRequest], way: Way, known: dict[str, tuple[int, ...]]
    ) -> None:
        self.pair, self.way = pair, way
        layout, digest = pair.decode.layout, pair.decode.facts.model_digest
        blocks, window = pair.decode.num_blocks, Window.of(layout)
        step_tokens = 16 if way.short and window.size else 512  # so that recomputing needs few blocks
        if way.short:
            longest = max(r.max_kv_tokens for r in requests)
            held = sorted((window.max_blocks(r.max_kv_tokens, 1) for r in requests), reverse=True)
            blocks = max(sum(held[: way.batch]) // 3, window.max_blocks(longest, step_tokens) + 1)
        options: dict[str, Any] = {
            "model_digest": digest,
            "prefix_cache": way.cache,
            "give_back": way.give_back,
        }
        self.prefill = PrefillScheduler(layout, pair.prefill.num_blocks, way.chunk, **options)
        speculation = Speculation(self._drafts(known), FixedCosts(DRAFT_S, step_tokens), fixed_length=way.length)
        self.decode = DecodeScheduler(layout, blocks, way.batch, speculation, **options)
        self.engine = SpeculativeEngine(pair.decode, pair.draft)
        self.waiting = deque(requests)
        self.parked: deque[tuple[GenerateRequest, int]] = deque()
        self.requests = {r.sequence_id: r for r in requests}
        self.answers = Answers()
        self.output: dict[str, list[int]] = {r.request_id: [] for r in requests}
        self.now = 0.0
        self.admitted = 1 if way.batch == 1 else 2 * way.batch

    def _drafts(self, known: dict[str, tuple[int, ...]]) -> Drafts | None:
        if self.way.drafts in ("right", "wrong"):
            return KnownDrafts(known, self.pair.decode.model_config.vocab_size, right=self.way.drafts == "right")
        return make_drafts(self.way.drafts, self.pair.draft)

    def run(self) -> Answers:
        answers = self.answers
        while self.waiting or self.prefill.num_sequences or self.decode.num_sequences:
            assert answers.steps < _MOST_STEPS, f"no end: {self.prefill!r}, {self.decode!r}"
            answers.steps += 1
            self.now += STEP_S
            while self.waiting and self.prefill.num_sequences + self.decode.num_sequences < self.admitted:
                self.prefill.submit(self.waiting.popleft(), self.now, hand_over=True)
            self._prefill_step()
            while self.parked and self._hand_over(*self.parked[0]):
                self.parked.popleft()
            self._decode_step()
        for scheduler in (self.prefill, self.decode):
            scheduler.check()
            assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
        answers.tokens = {name: tuple(output) for name, output in self.output.items()}
        answers.cached_on_prefill = self.prefill.prompt_tokens_cached
        answers.cached_on_decode = self.decode.bytes_reused // self.decode.layout.bytes_per_token
        answers.given_back = self.prefill.cache.blocks_given_back, self.decode.cache.blocks_given_back
        answers.preemptions, answers.counters = self.decode.preemptions, self.decode.speculation.counters
        return answers

    def _prefill_step(self) -> None:
        plan = self.prefill.begin_step(self.now)
        if plan is None:
            return
        self.answers.longest_chunk = max(self.answers.longest_chunk, *(len(row.tokens) for row in plan.rows))
        result = self.prefill.finish_step(self.pair.prefill.step(plan), self.now)
        ended = {end.sequence for end in result.ended}
        for end in result.ended:
            self.answers.reasons[end.sequence.request_id] = end.reason
        for progress in result.progress:
            if progress.first_token is not None:
                self.output[progress.sequence_id.request_id].append(progress.first_token)
                if progress.sequence_id in ended:
                    self.prefill.release_send(progress.sequence_id)
                else:
                    self.parked.append((self.requests[progress.sequence_id], progress.first_token))

    def _hand_over(self, request: GenerateRequest, first_token: int) -> bool:
        """Copies the KV that decode has not cached, block by block; returns False if decode has no free blocks."""
        sequence, size = request.sequence_id, self.decode.layout.block_size
        try:
            there = self.decode.reserve(request, self.now).block_ids
        except Unavailable as error:
            assert error.code == "no_free_blocks"
            return False
        cached = self.decode.sequences[sequence].prefix_tokens // size
        here = self.prefill.block_ids(sequence)
        assert len(here) == len(there)
        for mine, theirs in zip(self.pair.prefill.kv.layers, self.pair.decode.kv.layers, strict=True):
            for source, target in zip(mine, theirs, strict=True):
                target[list(there[cached:])] = source[list(here[cached:])]
        self.prefill.release_send(sequence)
        ended = self.decode.received(sequence, first_token, self.now)
        assert ended is None, "prefill ends what its first token ends"
        return True

    def _decode_step(self) -> None:
        plan = self.decode.begin_step(self.now)
        if plan is None:
            return
        self.answers.widest = max(self.answers.widest, len(plan.rows))
        result = self.decode.finish_step(self.engine.step(plan), self.now)
        for event in result.tokens:
            output = self.output[event.sequence.request_id]
            assert output[event.first_index :] == list(event.tokens[: len(output) - event.first_index])
            output[event.first_index :] = event.tokens
        for end in result.ended:
            self.answers.reasons[end.sequence.request_id] = end.reason

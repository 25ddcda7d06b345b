"""One decode worker whose pool is too small for its streams, in virtual time: the scheduler alone, without hand-overs.

A cost curve determines the duration of steps and of recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.errors import InvariantError
from baton.core.kv_layout import KVLayout
from baton.core.request import GenerateRequest, SamplingParams
from decode.scheduler import DecodeScheduler
from decode.speculation.policy import Speculation
from decode.speculation.step_cost import StepModel
from sim.cluster import LAYERS
from tests.support.constant_model import ConstantModel

BLOCK = 16
COSTS = ((1, 0.010), (8, 0.012), (64, 0.030), (512, 0.200))
"""Seconds of a step by its tokens: approximately the built-in pair on one slow core."""
FAST = ((1, 0.0010), (4, 0.0014), (8, 0.0033), (16, 0.0060), (32, 0.0107), (64, 0.018), (512, 0.110))
"""Seconds of a step by its tokens: the built-in pair with compiled kernels on one core of a processor with AVX2."""


@dataclass(frozen=True, slots=True)
class Stream:
    prompt: int = 64
    output: int = 256
    priority: int = 0

    @property
    def blocks(self) -> int:
        return -(-(self.prompt + self.output) // BLOCK)


@dataclass
class Progress:
    """The result of a drive: the longest time without a token of each stream, tokens by stream, when each ended, how
    many tokens were recomputed and the share of time that it took, steps in which a running sequence had no row."""

    silence_s: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    ended_at: dict[str, float] = field(default_factory=dict)
    recomputed: int = 0
    recompute_share: float = 0.0
    throttled_steps: int = 0
    preemptions: int = 0

    @property
    def longest_silence_s(self) -> float:
        return max(self.silence_s.values())

    @property
    def end_s(self) -> float:
        return max(self.ended_at.values())


def half_pool(streams: Sequence[Stream]) -> int:
    return sum(stream.blocks for stream in streams) // 2


def drive(streams: Sequence[Stream], num_blocks: int, *, costs: Sequence[tuple[int, float]] = COSTS) -> Progress:
    """Runs all streams concurrently, with computed prompts, until the last has ended. Every block must be free then."""
    speculation = Speculation(model=StepModel(costs, budget_s=0.05))
    worker = DecodeScheduler(KVLayout(BLOCK, LAYERS), num_blocks, 64, speculation, prefix_cache=False)
    engine = ConstantModel()
    result, last_token_at = Progress(), dict[str, float]()
    for index, stream in enumerate(streams):
        prompt, greedy = tuple(range(1000, 1000 + stream.prompt)), SamplingParams(temperature=0.0)
        request = GenerateRequest(f"s{index}", prompt, stream.output, greedy, priority=stream.priority)
        worker.reserve(request, 0.0)
        worker.received(request.sequence_id, 5, 0.0)
        last_token_at[request.request_id] = result.silence_s[request.request_id] = 0.0
    now, steps, step_s = 0.0, 0, speculation.model.long.seconds
    while worker.num_sequences:
        plan = worker.begin_step(now)
        if plan is None:
            raise InvariantError(f"no sequence continues: {worker!r}")
        again = plan.num_tokens - sum(row.num_sampled for row in plan.rows)
        took_s = step_s(plan.num_tokens)
        result.recomputed += again
        result.recompute_share += took_s - step_s(plan.num_tokens - again)
        result.throttled_steps += len(plan.rows) < worker.num_running
        now += took_s
        events = worker.finish_step(engine.step(plan), now)
        for event in events.tokens:
            name = event.sequence.request_id
            result.silence_s[name] = max(result.silence_s[name], now - last_token_at[name])
            last_token_at[name] = now
            result.tokens[name] = event.first_index + len(event.tokens)
        for ended in events.ended:
            result.ended_at[ended.sequence.request_id] = now
        steps += 1
        if steps % 8 == 0:
            worker.check()
    worker.check()
    result.recompute_share /= now
    result.preemptions = worker.preemptions
    return result

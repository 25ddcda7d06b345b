"""Where a prompt is computed: by a prefill worker, which hands its KV over, or by the decode worker. Pure.

Both choices have a price in seconds of waiting, from what workers measure and report (`PromptCost`): what the request
itself waits until its second token can be computed, and what others wait because of it.

    apart      backlog and prompt at the prefill worker's rate, then the part of the hand-over that the computation does
               not hide; each request in the queue waits for the prompt's share of the prefill workers
    on decode  backlog and prompt at the decode worker's rate, and one step of its streams per chunk; each stream there
               waits for the prompt, and as many as arrive at the rate of now wait for half of it on average, which
               counts `stream_weight` times for each per cent of their time that they wait

A prompt goes where the sum is lower. So an idle decode worker, a cached prefix or a short prompt saves the hand-over,
and a decode worker with streams does not compute what a prefill worker can soon. How long one step of the streams may
become is no matter of this choice: the decode worker limits the prompt tokens of each step (`--step-budget-ms`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from baton.core.events import PromptCost
from baton.core.line_fit import LineFit

Split = Literal["always", "auto", "never"]
"""`always` apart, `never` apart, or `auto`: each request by its price."""
STREAM_WEIGHT = 1.0
"""What a second that a stream waits counts for each per cent of the stream's time, in seconds that a request waits for
its first token, unless configured. With less, streams of `auto` are slower than those of `always` (decision 0034)."""
RATE_S = 10.0
"""With 5 s to 30 s the decisions are as good (decision 0034)."""
_DECAY = 0.95
_FEWEST = 4.0


@dataclass(frozen=True, slots=True)
class PromptAt:
    """A prompt at one worker: the tokens that it has to compute there, those that it computes first, and its cost."""

    worker: str
    tokens: int
    backlog: int
    cost: PromptCost

    @property
    def compute_s(self) -> float:
        """Seconds until the prompt is computed, if nothing else arrives."""
        tokens = self.backlog + self.tokens
        return tokens * self.cost.token_s + -(-tokens // max(self.cost.step_tokens, 1)) * self.cost.step_s

    @property
    def own_s(self) -> float:
        """Seconds that others wait for the prompt."""
        return self.tokens * self.cost.token_s


@dataclass(frozen=True, slots=True)
class Decision:
    """`apart_s` and `on_decode_s` are the two prices, of which `apart_others_s` and `decode_others_s` are for others,
    streams by their weight; `hand_over_s` is part of the first. All are 0 if there was no choice."""

    on_decode: bool
    reason: str
    apart_s: float = 0.0
    on_decode_s: float = 0.0
    hand_over_s: float = 0.0
    apart_others_s: float = 0.0
    decode_others_s: float = 0.0

    def as_json(self) -> dict[str, object]:
        """Returns the decision with its prices in milliseconds."""
        names = ("apart", "on_decode", "hand_over", "apart_others", "decode_others")
        prices = {f"{name}_ms": round(getattr(self, f"{name}_s") * 1e3, 3) for name in names}
        return {"prompt_on": "decode" if self.on_decode else "prefill", "reason": self.reason, **prices}


def decide(
    apart: PromptAt,
    on_decode: PromptAt,
    hand_over_s: float,
    queued: int,
    prefill_workers: int,
    streams: int,
    stream_s: float,
    stream_weight: float = STREAM_WEIGHT,
    streams_per_s: float = 0.0,
) -> Decision:
    """Returns where a prompt is computed. `queued` requests wait in the queue for `prefill_workers`, and `streams` are
    generated at the decode worker, each for `stream_s` from its first token to its last if it does not wait;
    `streams_per_s` more arrive there."""
    apart_others_s = queued * apart.own_s / max(prefill_workers, 1)
    waits_s = on_decode.own_s
    more = streams_per_s * waits_s  # on average they arrive when half of the prompt is computed
    felt_s = streams * _felt_s(waits_s, stream_s) + more * _felt_s(waits_s / 2, stream_s)
    decode_others_s = stream_weight * felt_s
    apart_s = apart.compute_s + hand_over_s + apart_others_s
    on_decode_s = on_decode.compute_s + decode_others_s
    there = on_decode_s < apart_s
    reason = (
        f"{'on decode' if there else 'apart'}: {on_decode.worker} {_seconds(on_decode_s)}"
        f" ({on_decode.tokens} tokens after {on_decode.backlog} at {_rate(on_decode.cost)},"
        f" {streams} streams and {more:.1f} to come wait, which counts {_seconds(decode_others_s)});"
        f" {apart.worker} {_seconds(apart_s)} ({apart.tokens} tokens after {apart.backlog} at {_rate(apart.cost)},"
        f" hand-over {_seconds(hand_over_s)}, {queued} queued wait {_seconds(apart_others_s)})"
    )
    return Decision(there, reason, apart_s, on_decode_s, hand_over_s, apart_others_s, decode_others_s)


def _felt_s(waits_s: float, stream_s: float) -> float:
    """Returns what it counts that a stream of `stream_s` waits: each second of it as many as per cent of its time."""
    return 100 * waits_s / (waits_s + stream_s) * waits_s if waits_s else 0.0


class StreamRate:
    """How many streams begin per second: an average over RATE_S, in which older ones count less."""

    def __init__(self) -> None:
        self.per_s = self._at = 0.0

    def observe(self, streams: int, now: float) -> None:
        self.per_s = self.per_s * math.exp((self._at - now) / RATE_S) + streams / RATE_S
        self._at = now


class HandOverCost:
    """How long hand-overs last after the prompt is computed, by the tokens of the last chunk."""

    def __init__(self) -> None:
        self._fit = LineFit(_DECAY)

    def __repr__(self) -> str:
        return f"<HandOverCost {self.seconds(0) * 1e3:.1f} ms, {self.seconds(512) * 1e3:.1f} ms for 512 tokens>"

    def observe(self, tokens: int, seconds: float) -> None:
        self._fit.observe(tokens, seconds)

    def seconds(self, tokens: int) -> float:
        """Returns the seconds expected for a last chunk of `tokens` tokens; 0 before any hand-over."""
        if not self._fit.count:
            return 0.0
        line = self._fit.line() if self._fit.count >= _FEWEST else None
        return self._fit.mean_s() if line is None else line[0] + line[1] * tokens


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _rate(cost: PromptCost) -> str:
    return f"{1 / cost.token_s:.0f} tokens/s" if cost.token_s > 0 else "no measured rate"

"""Streams survive kill -9 of any worker: each continues at its next token, with the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client, body
from tests.support.fault_cluster import FaultCluster, fault_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

LENGTH = 160
WAVES_TO_CATCH = 20
PROMPTS = [[7 + (n * 31 + i) % 200 for i in range(400 + 13 * n)] for n in range(7)]
# Every kind of state that must survive: noise by output index, penalties over the output, stop strings, offsets of
# logprobs, a grammar's automaton.
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    {"logprobs": 2},
    {"stop": ["zzqx"], "temperature": 1.0, "seed": 9, "min_tokens": LENGTH // 2},
    {"n": 2, "temperature": 1.0, "seed": 11},
    {"structured_outputs": {"regex": "([a-f]{3},){38,39}"}, "temperature": 1.0, "seed": 12, "ignore_eos": False},
]


@dataclass
class Stream:
    """What a client received, by choice, and the arrival times."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    finish: dict[int, str] = field(default_factory=dict)
    error: str = ""
    at: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    def answer(self) -> tuple[object, ...]:
        return self.tokens, self.text, self.logprobs, self.finish, self.error, self.usage.get("completion_tokens")

    @property
    def longest_silence_s(self) -> float:
        return max(b - a for a, b in zip(self.at, self.at[1:], strict=False))


async def read(client: Client, number: int, into: Stream) -> Stream:
    options = KINDS[number % len(KINDS)]
    sent = {
        **body(PROMPTS[number % len(PROMPTS)], LENGTH, stream=True),
        "stream_options": {"include_usage": True},
        **options,
    }
    async with client.http.stream("POST", "/v1/completions", json=sent) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            into.error = event.get("error", {}).get("code", into.error)
            into.usage = event.get("usage") or into.usage
            for choice in event.get("choices", []):
                index = choice["index"]
                into.at.append(time.monotonic())
                into.tokens.setdefault(index, []).extend(choice["token_ids"])
                into.text[index] = into.text.get(index, "") + choice["text"]
                into.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
                if choice.get("finish_reason"):
                    into.finish[index] = choice["finish_reason"]
    return into


@asynccontextmanager
async def wave(client: Client, streams: int, first: int = 0) -> AsyncIterator[list[Stream]]:
    """Runs `streams` concurrent streams and waits for their ends."""
    made = [Stream() for _ in range(streams)]
    async with asyncio.TaskGroup() as group:
        for number, stream in enumerate(made):
            group.create_task(read(client, first + number, stream))
        yield made


async def kill_at_work(running: FaultCluster, victim: str, made: list[Stream]) -> int | None:
    """Kills a worker while it works for the wave and returns its incarnation; None if the streams ended before a poll
    showed that: they last some 0.4 s."""
    busy: list[bool] = []

    def over() -> bool:
        busy.append(is_busy(running, victim, made))
        return busy[-1] or all(stream.finish for stream in made)

    await running.until(over, f"{victim} at work, or no stream")
    if not busy[-1]:
        return None
    killed = incarnation(running, victim)
    running.signal(victim)
    return killed


@pytest.mark.parametrize(
    ("draft", "cache", "streams", "waves"),
    [
        ("ngram", False, 7, 1),
        pytest.param("none", True, 12, 2, marks=pytest.mark.long),
        pytest.param("ngram", False, 12, 2, marks=pytest.mark.long),
    ],
)
async def test_streams_are_unchanged_after_kill_9_of_each_worker_in_turn_and_at_random(
    draft: str, cache: bool, streams: int, waves: int, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "m", "llama", max_position_embeddings=1024)
    flags = {
        "exact": True,
        "draft": draft,
        "prefix_cache": cache,
        "step_tokens": 64,
        "kv_memory_gib": 0.02,
        "served_model_name": "m",
    }
    generator, silences, rescheduled = random.Random(3), list[float](), 0
    with fault_cluster(model, **flags) as running:
        victims = ["prefill-0", "decode-0"]
        if waves > 1:
            victims = [*running.workers * waves, *(generator.choice(running.workers) for _ in range(waves))]
        async with Client(running.cluster, timeout_s=120.0) as client:
            async with wave(client, len(KINDS)) as undisturbed:
                pass
            expected = [stream.answer() for stream in undisturbed]
            assert re.fullmatch("([a-f]{3},){38,39}", undisturbed[-1].text[0])
            for victim in victims:
                for _ in range(WAVES_TO_CATCH):
                    async with wave(client, streams) as made:
                        killed = await kill_at_work(running, victim, made)
                    for number, stream in enumerate(made):
                        assert stream.answer() == expected[number % len(KINDS)], (
                            victim,
                            number,
                            running.cluster.logs(),
                        )
                        silences.append(stream.longest_silence_s)
                    if killed is not None:
                        break
                assert killed is not None, f"{victim} was never seen at work"
                # The streams may have ended before the coordinator knows that it is lost.
                await running.until(lambda v=victim, k=killed: incarnation(running, v) != k, f"{victim} again")
                await running.wait_until_idle()
        log = (running.cluster.run_dir / "coordinator.log").read_text()
        rescheduled = log.count(" is rescheduled at index ")
    silences.sort()
    p99 = silences[min(len(silences) - 1, round(len(silences) * 0.99))]
    median = silences[len(silences) // 2]
    print(
        f"{len(silences)} streams, {len(victims)} kills, {rescheduled} rescheduled,"
        f" longest silence of a stream: median {median:.2f} s, p99 {p99:.2f} s, max {silences[-1]:.2f} s"
    )
    assert rescheduled >= len(victims) / 2


def incarnation(running: FaultCluster, worker: str) -> int:
    return int(running.cluster.workers()[worker]["incarnation"])


def is_busy(running: FaultCluster, victim: str, streams: list[Stream]) -> bool:
    """Returns whether a decode worker generates and all streams have begun, or a prefill worker computes; with a prefix
    cache it may have nothing to compute, so it suffices that all streams have begun."""
    known = running.cluster.workers()[victim]
    begun = all(stream.at for stream in streams)
    return bool(known["running"]) and begun if victim.startswith("decode") else bool(known["running"]) or begun

"""`x-baton-split`: where the prompt of an answer was computed and why, on request."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from coordinator.http import generation
from coordinator.policy.split import Decision
from coordinator.submission import Delta
from tests.coordinator.test_recent import TIMES
from tests.support.fake_generator import FakeGenerator, reply

REASON = "on decode: d0 4.0 ms (4 tokens after 0 at 1000 tokens/s, 0 streams and 0.0 to come wait); p0 9.0 ms"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [1, 2, 3]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "model": "tiny"},
    "/v1/responses": {"input": "hi"},
}


def decided(generator: FakeGenerator) -> None:
    first, *others = reply("Hello", " world")
    assert isinstance(first, Delta)
    generator.script = [first._replace(split=REASON), *others]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [*BODIES])
async def test_reason_is_in_the_header_if_asked_for(
    client: httpx.AsyncClient, generator: FakeGenerator, path: str, stream: bool
) -> None:
    decided(generator)
    body = {**BODIES[path], "stream": stream}
    asked = await client.post(path, json=body, headers={"x-baton-split": "1"})
    assert asked.status_code == 200, asked.text
    assert asked.headers["x-baton-split"] == REASON
    assert "x-baton-split" not in (await client.post(path, json=body)).headers


async def test_cluster_that_decides_nothing_says_so(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    answer = await client.post("/v1/completions", json=BODIES["/v1/completions"], headers={"x-baton-split": ""})
    assert answer.headers["x-baton-split"] == "apart: --split always"


async def test_stream_that_began_before_the_decision_has_no_such_header(
    client: httpx.AsyncClient, generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "QUIET_S", 0.02)
    decided(generator)
    generator.script = [0.2, *generator.script]
    body = {**BODIES["/v1/completions"], "stream": True}
    answer = await asyncio.wait_for(client.post("/v1/completions", json=body, headers={"x-baton-split": "1"}), 30)
    assert answer.text.startswith(": keep-alive") and "x-baton-split" not in answer.headers


def test_timeline_has_the_prices() -> None:
    decision = Decision(True, REASON, 0.009, 0.004, 0.002, 0.0, 0.001)
    assert replace(TIMES, split=decision).as_json()["split"] == {
        "prompt_on": "decode",
        "reason": REASON,
        "apart_ms": 9.0,
        "on_decode_ms": 4.0,
        "hand_over_ms": 2.0,
        "apart_others_ms": 0.0,
        "decode_others_ms": 1.0,
    }

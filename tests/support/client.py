"""A small HTTP and gRPC client of a running cluster, for tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import httpx

from baton.v1 import serving_pb2, serving_pb2_grpc, types_pb2
from tests.support.cluster import Cluster


def body(prompt: Sequence[int] | str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    prompt = prompt if isinstance(prompt, str) else list(prompt)
    defaults = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": "m", "prompt": prompt, "max_tokens": max_tokens, **defaults, **fields}


RETRIES = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            },
        }
    ]
}
"""How gRPC clients repeat calls, as documented (docs/api.md)."""


class Client:
    """`complete` returns the whole answer; `events` yields the events of a stream as they arrive."""

    def __init__(self, cluster: Cluster, timeout_s: float = 60.0) -> None:
        limits = httpx.Limits(max_connections=256)
        self.http = httpx.AsyncClient(base_url=cluster.url, timeout=timeout_s, limits=limits)
        self._grpc = cluster.grpc

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.http.aclose()

    async def complete(self, prompt: Sequence[int] | str, max_tokens: int, **fields: Any) -> dict[str, Any]:
        answer = await self.http.post("/v1/completions", json=body(prompt, max_tokens, **fields))
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()
        return whole

    async def tokens(self, prompt: Sequence[int] | str, max_tokens: int, **fields: Any) -> tuple[int, ...]:
        return tuple((await self.complete(prompt, max_tokens, **fields))["choices"][0]["token_ids"])

    async def events(self, prompt: Sequence[int] | str, max_tokens: int, **fields: Any) -> AsyncIterator[Any]:
        """Parsed events; the last is the string "[DONE]"."""
        sent = body(prompt, max_tokens, stream=True, **fields)
        async with self.http.stream("POST", "/v1/completions", json=sent) as answer:
            if answer.status_code != 200:
                raise AssertionError((await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])

    async def streamed(
        self, prompt: Sequence[int] | str, max_tokens: int, **fields: Any
    ) -> tuple[str, tuple[int, ...]]:
        text, ids = "", []
        async for event in self.events(prompt, max_tokens, **fields):
            for choice in [] if event == "[DONE]" else event["choices"]:
                text += choice["text"]
                ids += choice["token_ids"]
        return text, tuple(ids)

    async def grpc_tokens(self, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> tuple[int, ...]:
        params = types_pb2.SamplingParams(**{"temperature": 0, "ignore_eos": True, **sampling})
        request = serving_pb2.GenerateRequest(
            token_ids=types_pb2.TokenIds(ids=prompt), max_tokens=max_tokens, sampling=params
        )
        ids: list[int] = []
        retries = [("grpc.service_config", json.dumps(RETRIES))]
        async with grpc.aio.insecure_channel(self._grpc, options=retries) as channel:
            async for answer in serving_pb2_grpc.ServingStub(channel).Generate(request, timeout=60):
                ids += answer.delta.token_ids
        return tuple(ids)

    async def idle(self, cluster: Cluster, timeout_s: float = 30.0) -> None:
        """Asserts that within `timeout_s` every block is free and no worker has a sequence."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            workers = (await self.http.get("/workers")).json()["workers"]
            alive = [w for w in workers if w["state"] != "lost"]
            busy = [w for w in alive if w["blocks_free"] != w["blocks_total"] or w["sequences"] or w["running"]]
            if not busy:
                return
            assert asyncio.get_running_loop().time() < deadline, f"not idle: {busy}\n{cluster.logs()}"
            await asyncio.sleep(0.1)

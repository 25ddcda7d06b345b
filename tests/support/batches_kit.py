"""A coordinator's front over a fake generator, and a batches process, both on real sockets in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from starlette.types import ASGIApp

from batches.public_api import PublicApi
from batches.routes import BatchRoutes
from batches.runner import BatchRunner
from batches.serving import listen, make_server
from batches.store import BatchStore
from coordinator.http.app import HttpSettings, create_app
from coordinator.http.server import HttpServer
from coordinator.text.model import TextModel
from tests.support.fake_generator import FakeGenerator
from tests.support.front_kit import running

ACCESS_KEY = "key-between-the-two"


@dataclass
class Batches:
    """The parts of both: `app` and `server` are the coordinator's."""

    app: ASGIApp
    server: HttpServer
    store: BatchStore
    runner: BatchRunner
    routes: BatchRoutes
    url: str
    address: str


@asynccontextmanager
async def with_batches(
    directory: Path,
    generator: FakeGenerator,
    text_model: TextModel,
    *,
    max_bytes: int = 1 << 20,
    max_file_bytes: int = 200 << 20,
    **more: Any,
) -> AsyncIterator[Batches]:
    """`more` are fields of HttpSettings. At the end the batches process stops as if it were killed."""
    sock = listen("127.0.0.1", 0)
    address = f"127.0.0.1:{sock.getsockname()[1]}"
    settings = HttpSettings("tiny", batches_address=address, batches_key=ACCESS_KEY, **more)
    app = create_app(generator, text_model, settings)  # type: ignore[arg-type]
    async with running(app) as front:
        url = f"http://127.0.0.1:{front.address[1]}"
        api = PublicApi(url, ACCESS_KEY, 600.0)
        store = BatchStore(str(directory), max_bytes)
        runner = BatchRunner(store, api.ask, strict_fields=settings.strict_fields)
        routes = BatchRoutes(
            store, runner, ACCESS_KEY, max_file_bytes=max_file_bytes, strict_fields=settings.strict_fields
        )
        server = make_server(routes)
        parts = [asyncio.create_task(server.serve([sock])), asyncio.create_task(runner.run())]
        try:
            yield Batches(app, front, store, runner, routes, url, address)
        finally:
            parts[1].cancel()
            server.should_exit = server.force_exit = True
            await asyncio.wait(parts)
            await api.close()
            runner.close()
            await app.state.close()


@asynccontextmanager
async def official_client(url: str, key: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(api_key=key, base_url=f"{url}/v1", max_retries=0) as client:
        yield client

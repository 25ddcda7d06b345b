"""Fixtures shared by the tests of the front."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import httpx2
import openai
import pytest
from starlette.applications import Starlette

from coordinator.http.app import HttpSettings, create_app
from coordinator.text.model import TextModel
from tests.support.fake_generator import FakeGenerator
from tests.support.grpc_kit import Client, served
from tests.support.model_dirs import text_dir


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextModel]:
    directory: Path = text_dir(tmp_path_factory.mktemp("models") / "tiny")
    model = TextModel.load(directory)
    yield model
    model.close()


@pytest.fixture
def generator() -> FakeGenerator:
    return FakeGenerator()


@pytest.fixture
def app(generator: FakeGenerator, text_model: TextModel) -> Starlette:
    return create_app(generator, text_model, HttpSettings("tiny", version="1.2", created=1, max_body_bytes=1 << 20))


@pytest.fixture
async def client(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        yield client


@pytest.fixture
async def official(app: Starlette) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://baton")
    async with openai.AsyncOpenAI(api_key="k", base_url="http://baton/v1", http_client=http, max_retries=0) as client:
        yield client


@pytest.fixture
async def grpc_client(generator: FakeGenerator, text_model: TextModel) -> AsyncIterator[Client]:
    async with served(generator, text_model) as client:
        yield client

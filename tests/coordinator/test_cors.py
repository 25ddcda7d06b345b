"""Browsers: pages of allowed origins may call the API and read what it says in headers, others may not."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from coordinator.http.app import HttpSettings, create_app
from coordinator.text.model import TextModel
from tests.support.fake_generator import FakeGenerator
from tests.support.requests_kit import CHAT, GOOD

PAGE = "https://page.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.fixture
async def browser(text_model: TextModel) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(FakeGenerator(), text_model, HttpSettings("tiny", allowed_origins=(PAGE,)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        yield client


async def test_an_allowed_page_may_ask_and_read(browser: httpx.AsyncClient) -> None:
    asked = await browser.options(CHAT, headers={"origin": PAGE, **PREFLIGHT})
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in asked.headers["access-control-allow-headers"]
    for body, status in ((GOOD[CHAT], 200), ({}, 400)):
        answer = await browser.post(CHAT, json=body, headers={"origin": PAGE})
        assert answer.status_code == status and answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_other_pages_may_not(browser: httpx.AsyncClient) -> None:
    other = {"origin": "https://other.example"}
    assert (await browser.options(CHAT, headers=other | PREFLIGHT)).status_code == 400
    assert "access-control-allow-origin" not in (await browser.post(CHAT, json=GOOD[CHAT], headers=other)).headers


async def test_without_the_option_there_is_none(client: httpx.AsyncClient) -> None:
    answer = await client.post(CHAT, json=GOOD[CHAT], headers={"origin": PAGE})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
    assert (await client.options(CHAT, headers={"origin": PAGE, **PREFLIGHT})).status_code == 405

"""CORS: pages of allowed origins may call the API and read its response headers, others may not."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from baton.core.errors import StartupError
from coordinator.http.app import HttpSettings, create_app
from coordinator.options import parse_origins
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


async def test_an_allowed_origin_may_send_requests_and_read_responses(browser: httpx.AsyncClient) -> None:
    asked = await browser.options(CHAT, headers={"origin": PAGE, **PREFLIGHT})
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in asked.headers["access-control-allow-headers"]
    deletes = {"origin": PAGE, "access-control-request-method": "DELETE"}
    assert (await browser.options("/v1/responses/resp_1", headers=deletes)).status_code == 200
    for body, status in ((GOOD[CHAT], 200), ({}, 400)):
        answer = await browser.post(CHAT, json=body, headers={"origin": PAGE})
        assert answer.status_code == status and answer.headers["access-control-allow-origin"] == PAGE
        exposed = answer.headers["access-control-expose-headers"]
        assert "x-request-id" in exposed and "x-baton-split" in exposed


async def test_other_origins_get_no_cors_headers(browser: httpx.AsyncClient) -> None:
    other = {"origin": "https://other.example"}
    assert (await browser.options(CHAT, headers=other | PREFLIGHT)).status_code == 400
    assert "access-control-allow-origin" not in (await browser.post(CHAT, json=GOOD[CHAT], headers=other)).headers


async def test_without_allowed_origins_no_cors_headers_are_sent(client: httpx.AsyncClient) -> None:
    answer = await client.post(CHAT, json=GOOD[CHAT], headers={"origin": PAGE})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
    assert (await client.options(CHAT, headers={"origin": PAGE, **PREFLIGHT})).status_code == 405


LOCAL = ("127.0.0.1:8100", "[::1]:8100", "[::ffff:127.0.0.1]", "localhost", "LOCALHOST:8100", "app.localhost", "baton")
FOREIGN = (
    "evil.example:8100",
    "evil.example.",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evil.local.example",
)


async def test_dns_rebinding_is_refused_by_the_host_header(text_model: TextModel) -> None:
    """DNS rebinding: to the browser, the page and the API have the same origin."""

    async def statuses(settings: HttpSettings, hosts: tuple[str, ...]) -> set[int]:
        app = create_app(FakeGenerator(), text_model, settings)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
            asked = [("GET", "/v1/models"), ("GET", "/requests"), ("POST", CHAT)]
            answers = [
                await client.request(method, path, json=GOOD[CHAT] if path == CHAT else None, headers={"host": host})
                for host in hosts
                for method, path in asked
            ]
        return {answer.status_code for answer in answers}

    shut = HttpSettings("tiny", local_names_only=True)
    own = (*LOCAL, socket.gethostname())
    assert await statuses(shut, own) == {200} and await statuses(shut, FOREIGN) == {403}
    named = replace(shut, allowed_origins=("https://chat.example",))
    assert await statuses(named, ("chat.example", "chat.example:8100")) == {200}
    assert await statuses(named, FOREIGN) == {403}
    assert await statuses(replace(shut, allowed_origins=("*",)), FOREIGN) == {200}
    assert await statuses(HttpSettings("tiny"), FOREIGN) == {200}


@pytest.mark.parametrize(
    "text",
    ["chat.example", "https://", "https://a/b", "http://[", "http://[1.2]", "https://a b", "https://a:99999", "*, x"],
)
def test_invalid_allowed_origins_are_refused_and_valid_ones_normalised(text: str) -> None:
    with pytest.raises(StartupError, match=r"--allowed-origins: .* is not an origin such as"):
        parse_origins(text)
    assert parse_origins(" https://A.example:8443, https://a.example:443,null,*,http://[::1]:3000,") == (
        "https://a.example:8443",
        "https://a.example",
        "null",
        "*",
        "http://[::1]:3000",
    )

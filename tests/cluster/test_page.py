"""The page at `/` in a real browser, with a running cluster: the chat box streams, the pools are drawn, a lost worker
is shown, the latest requests have timeline bars, and the page asks for an API key if keys are required.

`BATON_TEST_SCREENSHOT=FILE` saves a screenshot of the page under load."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx
import pytest

from tests.support.browser import CHROMIUM, Page, browse
from tests.support.cluster import cluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.timeout(180),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (Debian's package chromium)"),
]
ASK = "(text => { $('prompt').value = text; $('ask').requestSubmit(); })"
ANSWER = "[...document.querySelectorAll('#talk .answer')].at(-1)?.textContent"
KEY = "sk-0123456789abcdef"


def console_errors(page: Page) -> list[str]:
    return [line for line in page.console if '"level": "error"' in line or "exception" in line]


async def load(url: str) -> None:
    async with httpx.AsyncClient(timeout=60) as client:

        async def one(index: int) -> None:
            for number in range(100):
                prompt = [(7 * index + 3 * number + i) % 250 + 6 for i in range(300 + 40 * index)]
                await client.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 150})

        await asyncio.gather(*(one(index) for index in range(6)))


async def test_the_page_shows_chat_pools_and_timelines() -> None:
    with cluster("builtin", prefill=2, decode=2) as running:
        async with browse(running.url + "/") as page:
            await page.until("document.querySelectorAll('#picture rect').length >= 8")
            assert "builtin" in await page.evaluate("$('model').textContent")
            loading = asyncio.create_task(load(running.url))
            await page.evaluate(f"{ASK}('def read_lines(path):')")
            await page.until("$('speed').textContent.includes('events/s')")
            assert len(await page.evaluate(ANSWER)) > 20
            assert "prefill-" in await page.evaluate("$('speed').textContent")
            await page.until("document.querySelectorAll('#requests tr').length >= 10")
            assert await page.evaluate("document.querySelectorAll('#requests .track i').length") > 20
            await page.until("$('picture').textContent.includes('step ')")
            if kept := os.environ.get("BATON_TEST_SCREENSHOT"):
                await asyncio.sleep(2)
                await page.screenshot(Path(kept))
            wide = await page.evaluate(
                "[...document.querySelectorAll('#picture text')].every(t => t.getBBox().x + t.getBBox().width <= 620)"
            )
            assert wide, "text runs out of the picture"
            running.kill(running.pids("decode-1")[0])
            await page.until("/lost|disconnected/.test($('picture').textContent)")
            await page.until("!/lost|disconnected/.test($('picture').textContent)", timeout_s=40)
            loading.cancel()
            assert not console_errors(page), page.console


async def test_markup_in_a_prompt_or_request_id_is_shown_as_text() -> None:
    with cluster("builtin") as running:
        async with browse(running.url + "/") as page:
            evil = "<img src=x onerror=document.title=1>"
            headers = {"x-request-id": "<b>x</b>"}
            async with httpx.AsyncClient() as client:
                body = {"prompt": evil, "max_tokens": 4}
                assert (await client.post(f"{running.url}/v1/completions", json=body, headers=headers)).is_success
            await page.evaluate(f"{ASK}({evil!r})")
            await page.until("$('speed').textContent.includes('events/s')")
            await page.until("document.querySelectorAll('#requests tr').length >= 2")
            assert await page.evaluate("document.querySelectorAll('#talk img, #requests b').length") == 0
            assert await page.evaluate("document.title") == "Baton"


async def test_the_page_requires_a_configured_key_and_shows_pools_only_to_operators(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    with cluster("builtin", api_key_file=keys, admin_port=0) as running:
        async with browse(running.url + "/") as page:
            await page.until("!$('keybox').hidden")
            await page.evaluate(f"$('key').value = '{KEY}'; $('keybox').requestSubmit()")
            await page.until("typeof $ !== 'undefined' && $('model').textContent.includes('builtin')")
            await page.evaluate(f"{ASK}('def f(')")
            await page.until("$('speed').textContent.includes('events/s')")
            assert await page.evaluate("$('pools').hidden")
        async with browse(running.admin + "/") as page:
            await page.until("document.querySelectorAll('#picture rect').length >= 4")
            assert await page.evaluate("$('chat').hidden")

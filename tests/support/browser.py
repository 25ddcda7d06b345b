"""A headless Chromium with one page, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
START_S = 30.0


class Page:
    """`console` has the page's log entries and the exceptions of its scripts."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.console: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if (waiting := self._answers.pop(event.get("id", 0), None)) is not None:
                waiting.set_result(event)
            elif event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.console.append(json.dumps(event["params"])[:500])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(self._answers[number], 30)
        assert "error" not in answer, answer
        return dict(answer["result"])

    async def evaluate(self, script: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script: str, timeout_s: float = 20.0) -> Any:
        """Evaluates repeatedly until the value is true."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not (value := await self.evaluate(script)):
            assert asyncio.get_running_loop().time() < deadline, f"not within {timeout_s:g} s: {script}; {self.console}"
            await asyncio.sleep(0.05)
        return value

    async def screenshot(self, path: Path) -> None:
        size = await self.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        shot = await self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def browse(url: str) -> AsyncIterator[Page]:
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="baton-browser-", ignore_cleanup_errors=True) as profile:
        quiet = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
        own = ("--remote-debugging-port=0", f"--user-data-dir={profile}", "--window-size=1280,900")
        command = [CHROMIUM, *quiet, *own, "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            async with aiohttp.ClientSession() as session:
                endpoint = await _endpoint(session, Path(profile) / "DevToolsActivePort")
                async with session.ws_connect(endpoint, max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    await page.call("Page.navigate", url=url)
                    await page.until("document.readyState === 'complete'")
                    yield page
                    page._reader.cancel()
        finally:
            process.kill()
            process.wait(10)


async def _endpoint(session: aiohttp.ClientSession, file: Path) -> str:
    """Returns the WebSocket URL of the first page, once the browser has written its port."""
    deadline = asyncio.get_running_loop().time() + START_S
    while True:
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError, aiohttp.ClientError):
            port = int(file.read_text().split()[0])
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                pages = [each for each in await answer.json() if each["type"] == "page"]
                return str(pages[0]["webSocketDebuggerUrl"])
        assert asyncio.get_running_loop().time() < deadline, "the browser has not started"
        await asyncio.sleep(0.1)

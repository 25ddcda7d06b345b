"""A call of a link, or of its end of an edge, that is held at a point that a test chooses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.transfer.edge_endpoint import LocalEndpoint
from prefill.link import Link


class Gate:
    """Holds calls of a method of `Link`, or of its end of an edge, until `opened`: before or after the method runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, when: str) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()
        owner = Link if hasattr(Link, method) else LocalEndpoint
        original = getattr(owner, method)

        async def held(link: Any, *args: Any, **kwargs: Any) -> Any:
            if when == "before":
                await self._pass()
            result = await original(link, *args, **kwargs)
            if when == "after":
                await self._pass()
            return result

        monkeypatch.setattr(owner, method, held)

    async def _pass(self) -> None:
        self.reached.set()
        await self.opened.wait()

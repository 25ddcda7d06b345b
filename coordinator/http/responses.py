"""Stored answers of `/v1/responses`: reading and deleting them, and continuing from one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from baton.core.errors import NotFound
from baton.runtime.event_loop import off_loop
from baton.runtime.ignored_fields import IgnoredFields
from coordinator.http.errors import json_response
from coordinator.http.guard import CLIENT
from coordinator.openai.responses_items import Item, parsed_items, shown_items, stored_form
from coordinator.openai.responses_render import Keep
from coordinator.policy.quotas import Client
from coordinator.responses_store import Responses, Stored

MAX_ID_CHARS = 256
LARGE_BYTES = 64 * 1024


class KeptResponses:
    """The store of a front, and its routes. A client sees the answers of its own tenant."""

    def __init__(self, store: Responses) -> None:
        self._store = store

    async def conversation(self, client: Client, response_id: str) -> list[Item]:
        """Returns all items up to and including the answer's. Raises NotFound."""
        stored = await self._stored(client, response_id, "previous_response_id", "previous_response_not_found")
        large = stored.num_bytes > LARGE_BYTES
        items: list[Item] = await off_loop(large, lambda: parsed_items(stored.conversation(), IgnoredFields()))
        return items

    def keeper(self, client: Client, before: Sequence[Item], items: Sequence[Item]) -> Keep | None:
        """Returns what stores an answer to `items`, which came after the items `before`; None if nothing is stored."""
        if not self._store.max_bytes:
            return None
        return partial(self._keep, client.tenant, stored_form(before), stored_form(items))

    async def answer(self, request: Request, response_id: str) -> Response:
        stored = await self._stored(request.scope[CLIENT], response_id)
        return Response(stored.answer, media_type="application/json")

    async def delete(self, request: Request, response_id: str) -> Response:
        client = request.scope[CLIENT]
        await self._stored(client, response_id)
        await self._store.delete(client.tenant, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: Request, response_id: str) -> Response:
        stored = await self._stored(request.scope[CLIENT], response_id)
        items = shown_items(orjson.loads(stored.previous) + orjson.loads(stored.items), response_id)
        shown = items if request.query_params.get("order") == "asc" else items[::-1]
        ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]}
        return json_response({"object": "list", "data": shown, **ends, "has_more": False})

    async def _stored(
        self, client: Client, response_id: str, param: str = "response_id", code: str = "response_not_found"
    ) -> Stored:
        stored = await self._store.get(client.tenant, response_id[:MAX_ID_CHARS])
        if stored is None:
            message = f"no stored response '{response_id[:100]}': it was not stored, or dropped for newer ones"
            raise NotFound(message, code=code, param=param)
        return stored

    def _keep(
        self, tenant: str, before: list[dict[str, Any]], items: list[dict[str, Any]], answer: dict[str, Any]
    ) -> None:
        self._store.put(tenant, answer["id"], Stored(orjson.dumps(answer), orjson.dumps(items), orjson.dumps(before)))

"""Routes, and what `/openapi.json` says of them: the bodies that the strict models accept, and what is answered. They
read their bodies and write their answers themselves, which FastAPI cannot see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from coordinator.http.answers import SCHEMAS

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_LIMIT = {"name": "limit", "in": "query", "required": False, "schema": {"type": "integer", "minimum": 1}}
_AFTER = {"name": "after", "in": "query", "required": False, "schema": {"type": "string"}}
_PURPOSE = {"name": "purpose", "in": "query", "required": False, "schema": {"type": "string"}}
QUERIES = {
    "/requests": [_LIMIT],
    "/v1/files": [_LIMIT, _AFTER, _PURPOSE],
    "/v1/batches": [_LIMIT, _AFTER],
}
_UPLOAD = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
    "required": ["file", "purpose"],
}


def add_route(
    app: FastAPI, method: str, path: str, endpoint: Callable[..., Any], answer: str, body: type[BaseModel] | None = None
) -> None:
    """A route and what is said of it: `answer` names the schema of its JSON, or is the content type of what is none;
    with `body`, the model of the request's, comes that of a stream, where it may ask for one."""
    more: dict[str, Any] = {"parameters": QUERIES[path]} if method == "GET" and path in QUERIES else {}
    if answer == "File" and method == "POST":
        more["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
    if body is not None:
        more["requestBody"] = {"required": True, "content": _json(body.__name__)}
        app.state.bodies = [*getattr(app.state, "bodies", ()), body]
    content: dict[str, Any] = {answer: {"schema": {"type": "string"}}} if "/" in answer else _json(answer)
    if body is not None and "stream" in body.model_fields:
        content["text/event-stream"] = {"schema": _EVENT}
    responses: dict[int | str, dict[str, Any]] = {
        200: {"description": "OK", "content": content},
        "4XX": {"description": "Refused", "content": _json("ErrorResponse")},
        "5XX": {"description": "Failed", "content": _json("ErrorResponse")},
    }
    if answer == "Ready":
        responses[503] = {"description": "A pool has no ready worker", "content": _json("Ready")}
    app.add_api_route(
        path, endpoint, methods=[method], response_class=Response, responses=responses, openapi_extra=more
    )


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of `app`, made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        bodies: Any = [(model, "validation") for model in getattr(app.state, "bodies", ())]
        _, found = models_json_schema(bodies, ref_template="#/components/schemas/{model}")
        document["components"] = {"schemas": found.get("$defs", {}) | SCHEMAS | {"ErrorResponse": _ERROR}}
        app.openapi_schema = document
    return app.openapi_schema


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}

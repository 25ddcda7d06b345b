"""`/openapi.json`: the routes, with the request bodies that the strict models accept and what is answered.

The routes read their bodies and write their answers themselves, so FastAPI knows nothing of them; here the schemas are
put in.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from coordinator.http.answers import ANSWERS, SCHEMAS, STREAMED, TEXTS
from coordinator.openai import schema
from coordinator.openai.responses import ResponsesBody

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": schema.CompletionBody,
    "/v1/chat/completions": schema.ChatBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": schema.TokenizeBody,
    "/detokenize": schema.DetokenizeBody,
    "/v1/batches": schema.BatchBody,
}
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


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of `app`, made once."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    bodies = {path: model for path, model in BODIES.items() if path in document["paths"]}
    inputs = [(model, "validation") for model in bodies.values()]
    _, definitions = models_json_schema(inputs, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for made_by_fastapi in ("HTTPValidationError", "ValidationError"):
        schemas.pop(made_by_fastapi, None)
    schemas.update(definitions.get("$defs", {}), **SCHEMAS, ErrorResponse=_ERROR)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"] = _responses(method, path)
        if path in bodies:
            operations["post"]["requestBody"] = {"required": True, "content": _json(bodies[path].__name__)}
        if path in QUERIES:
            operations["get"].setdefault("parameters", []).extend(QUERIES[path])
    if files := document["paths"].get("/v1/files"):
        files["post"]["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
    app.openapi_schema = document
    return document


def _responses(method: str, path: str) -> dict[str, Any]:
    if (method, path) in TEXTS:
        content: dict[str, Any] = {TEXTS[method, path]: {"schema": {"type": "string"}}}
    else:
        content = _json(ANSWERS[method, path])
    if path in STREAMED:
        content["text/event-stream"] = {"schema": _EVENT}
    found = {
        "200": {"description": "OK", "content": content},
        "4XX": {"description": "Refused", "content": _json("ErrorResponse")},
        "5XX": {"description": "Failed", "content": _json("ErrorResponse")},
    }
    if ANSWERS.get((method, path)) == "Ready":
        found["503"] = {"description": "A pool has no ready worker", "content": _json("Ready")}
    return found


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}

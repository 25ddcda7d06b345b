"""`/openapi.json`: the routes, with the request bodies that the strict models accept.

The routes read their bodies themselves, so FastAPI knows nothing of them; here the models' schemas are put in.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from coordinator.openai import schema
from coordinator.openai.responses import ResponsesBody

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": schema.CompletionBody,
    "/v1/chat/completions": schema.ChatBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": schema.TokenizeBody,
    "/detokenize": schema.DetokenizeBody,
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


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of `app`, made once."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    inputs = [(model, "validation") for model in BODIES.values()]
    _, definitions = models_json_schema(inputs, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions["$defs"], ErrorResponse=_ERROR)
    for path, model in BODIES.items():
        operation = document["paths"][path]["post"]
        operation["requestBody"] = {"required": True, "content": _json(model.__name__)}
        operation["responses"]["4XX"] = {"description": "Refused", "content": _json("ErrorResponse")}
        operation["responses"]["5XX"] = {"description": "Failed", "content": _json("ErrorResponse")}
    app.openapi_schema = document
    return document


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}

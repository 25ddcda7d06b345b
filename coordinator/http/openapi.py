"""Routes, and their description in `/openapi.json`: the bodies that the strict models accept, and the answers.

Objects of answers are closed: a field that is missing here is a fault that the tests detect. Open are `Response` (the
tests check it against OpenAI's own types), `TokenizerInfo` (a file of the checkpoint) and `Workers` (for `baton ps`,
subject to change)."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.recent import KEPT

ROUTE = "baton.route"
"""The scope key of the path of a route, as it is added."""
Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
ANY: Schema = {"type": "object"}


def _object(**fields: Schema) -> Schema:
    """Returns the schema of a closed object. Fields whose name ends in `_` (removed from the name) are optional."""
    names = {name.rstrip("_"): schema for name, schema in fields.items()}
    required = [name for name in fields if not name.endswith("_")]
    return {"type": "object", "properties": names, "required": required, "additionalProperties": False}


def _each(schema: Schema, *names: str) -> dict[str, Schema]:
    """Returns fields with the same schema."""
    return dict.fromkeys(names, schema)


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _const(value: str) -> Schema:
    return {"const": value}


def _map(of: Schema) -> Schema:
    return {"type": "object", "additionalProperties": of}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_IDS = _list(WHOLE)
_SPAN = _object(**_each(TEXT, "name", "worker"), **_each(NUMBER, "start_ms", "ms"))
_PRICES = ("apart_ms", "on_decode_ms", "hand_over_ms", "apart_others_ms", "decode_others_ms")
_TIMELINE = {
    **_each(NUMBER, "total_ms", "first_token_ms"),
    **_each(TEXT, "prefill_worker", "decode_worker", "revision"),
    "split": _or_null(_object(**_each(TEXT, "prompt_on", "reason"), **_each(NUMBER, *_PRICES))),
    "spans": _list(_SPAN),
}
_PROMPT_SCORES = _list(_or_null(_map(_object(logprob=NUMBER, rank=WHOLE, decoded_token=TEXT))))
_CHOICE = {
    "index": WHOLE,
    "finish_reason": _or_null(TEXT),
    "stop_reason": _or_null({"type": ["string", "integer"]}),
    "timeline_": _object(**_TIMELINE),
    **_each(_or_null(_IDS), "token_ids_", "prompt_token_ids_"),
    "prompt_logprobs_": _or_null(_PROMPT_SCORES),
}
_TOKEN: dict[str, Schema] = {"token": TEXT, "logprob": NUMBER, "bytes": _or_null(_IDS)}
_SCORED = _object(**_TOKEN, top_logprobs_=_list(_object(**_TOKEN)))
_LOGPROBS = _object(
    tokens=_list(TEXT),
    token_logprobs=_list(_or_null(NUMBER)),
    top_logprobs=_list(_or_null(_map(NUMBER))),
    text_offset=_IDS,
)
_USAGE = _object(
    **_each(WHOLE, "prompt_tokens", "completion_tokens", "total_tokens"),
    prompt_tokens_details_=_object(cached_tokens=WHOLE),
    completion_tokens_details_=_map(WHOLE),
    speculation_=_object(**_each(WHOLE, "steps", "drafted_tokens", "accepted_tokens"), forced=FLAG),
)
_CALL = _object(id=TEXT, type=_const("function"), function=_object(name=TEXT, arguments=TEXT))
_HEAD = {"id": TEXT, "created": WHOLE, "model": TEXT, "system_fingerprint_": TEXT, "usage": _USAGE}
_STAMPS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")

_OPENAI_MODEL = _object(
    **_each(TEXT, "id", "owned_by", "root"),
    object=_const("model"),
    **_each(WHOLE, "created", "max_model_len"),
    parent=_or_null(TEXT),
    permission=_list(ANY),
)
_ANTHROPIC_MODEL = _object(
    type=_const("model"),
    **_each(TEXT, "id", "display_name", "created_at", "lifecycle"),
    **_each(WHOLE, "max_input_tokens", "max_tokens"),
)


def _page(of: str) -> Schema:
    ends = _each(_or_null(TEXT), "first_id", "last_id")
    return _object(object=_const("list"), data=_list(_ref(of)), **ends, has_more=FLAG)


_TENSOR = _object(**_each(TEXT, "name", "datatype"), shape=_list({"type": "integer"}))

SCHEMAS: dict[str, Schema] = {
    "Completion": _object(
        object=_const("text_completion"),
        choices=_list(_object(text=TEXT, logprobs=_or_null(_LOGPROBS), **_CHOICE)),
        **_HEAD,
    ),
    "ChatCompletion": _object(
        object=_const("chat.completion"),
        choices=_list(
            _object(
                message=_object(
                    role=_const("assistant"),
                    content=_or_null(TEXT),
                    refusal_=_or_null(TEXT),
                    reasoning_content_=TEXT,
                    tool_calls_=_list(_CALL),
                ),
                logprobs=_or_null(_object(content=_or_null(_list(_SCORED)), refusal_=_or_null(_list(_SCORED)))),
                **_CHOICE,
            )
        ),
        prompt_logprobs_=_or_null(_PROMPT_SCORES),
        prompt_token_ids_=_or_null(_list(WHOLE)),
        **_HEAD,
    ),
    "Response": {
        "type": "object",
        "properties": {
            **_each(TEXT, "id", "model"),
            "object": _const("response"),
            "created_at": WHOLE,
            "status": {"enum": ["completed", "incomplete", "failed"]},
            "output": _list(ANY),
            "usage": _or_null(ANY),
        },
        "required": ["id", "object", "created_at", "status", "model", "output", "usage"],
    },
    "Message": _object(
        type=_const("message"),
        role=_const("assistant"),
        **_each(TEXT, "id", "model"),
        content=_list(
            {
                "anyOf": [
                    _object(type=_const("text"), text=TEXT),
                    _object(type=_const("thinking"), **_each(TEXT, "thinking", "signature")),
                    _object(type=_const("tool_use"), **_each(TEXT, "id", "name"), input=ANY),
                ]
            }
        ),
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]},
        stop_sequence=_or_null(TEXT),
        usage=_object(
            **_each(WHOLE, "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
        ),
    ),
    "Embeddings": _object(
        object=_const("list"),
        data=_list(_object(object=_const("embedding"), index=WHOLE, embedding={"anyOf": [_list(NUMBER), TEXT]})),
        **_HEAD,
    ),
    "Classes": _object(
        object=_const("list"),
        data=_list(_object(index=WHOLE, label=TEXT, probs=_list(NUMBER), num_classes=WHOLE)),
        **_HEAD,
    ),
    "Scores": _object(
        object=_const("list"), data=_list(_object(index=WHOLE, object=_const("score"), score=NUMBER)), **_HEAD
    ),
    "Ranking": _object(
        **_each(TEXT, "id", "model"),
        results=_list(_object(index=WHOLE, relevance_score=NUMBER, document_=_object(text=TEXT))),
        usage=_USAGE,
    ),
    "TokenCount": _object(input_tokens=WHOLE),
    "ResponseDeleted": _object(id=TEXT, object=_const("response"), deleted=FLAG),
    "ItemList": _object(object=_const("list"), data=_list(ANY), **_each(TEXT, "first_id", "last_id"), has_more=FLAG),
    "InferenceServer": _object(**_each(TEXT, "name", "version"), extensions=_list(TEXT)),
    "InferenceModel": _object(
        **_each(TEXT, "name", "platform"), versions=_list(TEXT), **_each(_list(_TENSOR), "inputs", "outputs")
    ),
    "InferenceConfig": ANY,
    "InferenceStatistics": _object(
        model_stats=_list(
            _object(
                **_each(TEXT, "name", "version"),
                **_each(WHOLE, "last_inference", "inference_count", "execution_count"),
                inference_stats=_map(_object(**_each(WHOLE, "count", "ns"))),
                batch_stats=_list(ANY),
            )
        )
    ),
    "InferenceRepository": _list(_object(**_each(TEXT, "name", "version", "state", "reason"))),
    "InferenceResponse": _object(
        **_each(TEXT, "model_name", "model_version", "id_"),
        outputs=_list(_object(**_TENSOR["properties"], parameters_=ANY, data_=_list({}))),
    ),
    "GenerateBody": {
        "type": "object",
        "properties": {"text_input": TEXT, "id": TEXT, "parameters": ANY},
        "required": ["text_input"],
    },
    "GeneratedText": {
        "type": "object",
        "properties": _each(TEXT, "model_name", "model_version", "id") | {"text_output": {"type": ["string", "array"]}},
        "required": ["model_name", "model_version", "text_output"],
    },
    "Model": {"anyOf": [_OPENAI_MODEL, _ANTHROPIC_MODEL]},
    "ModelList": {
        "anyOf": [
            _object(object=_const("list"), data=_list(_OPENAI_MODEL)),
            _object(data=_list(_ANTHROPIC_MODEL), has_more=FLAG, **_each(_or_null(TEXT), "first_id", "last_id")),
        ]
    },
    "Tokens": _object(count=WHOLE, max_model_len=WHOLE, tokens=_list(WHOLE), token_strs=_or_null(_list(TEXT))),
    "Text": _object(prompt=TEXT),
    "Version": _object(version=TEXT),
    "ModelInfo": _object(
        **_each(TEXT, "model_path", "tokenizer_path"),
        **_each(FLAG, "is_generation", "has_chat_template"),
        **_each(WHOLE, "max_model_len", "vocab_size"),
    ),
    "TokenizerInfo": {"type": "object", "required": ["vocab_size"], "properties": {"vocab_size": WHOLE}},
    "ServerInfo": _object(
        **_each(TEXT, "version", "model"),
        **_each(WHOLE, "max_model_len", "vocab_size"),
        tool_parser=_or_null(TEXT),
        workers=_object(prefill=WHOLE, decode=WHOLE),
    ),
    "Loads": _list(
        _object(
            **_each(WHOLE, "dp_rank", "num_reqs", "num_running_reqs", "num_waiting_reqs", "num_choices"),
            token_usage=NUMBER,
        )
    ),
    "Live": _object(status=_const("ok")),
    "Ready": _object(ready=FLAG, reason_=TEXT),
    "Workers": {
        "type": "object",
        "properties": {"workers": _list(ANY), "coordinator": ANY},
        "required": ["workers", "coordinator"],
    },
    "Request": _object(
        **_each(TEXT, "id", "outcome"),
        **_each(WHOLE, "choice", "prompt_tokens", "cached_tokens", "generated_tokens", "attempts"),
        admitted_at=NUMBER,
        error=_or_null(TEXT),
        **_TIMELINE,
    ),
    "Requests": _object(requests=_list(_ref("Request"))),
    "File": _object(
        **_each(TEXT, "id", "filename", "purpose", "status"),
        object=_const("file"),
        **_each(WHOLE, "bytes", "created_at"),
        status_details=_or_null(TEXT),
        expires_at=_or_null(WHOLE),
    ),
    "FileList": _page("File"),
    "FileDeleted": _object(id=TEXT, object=_const("file"), deleted=FLAG),
    "Batch": _object(
        **_each(TEXT, "id", "endpoint", "input_file_id", "completion_window"),
        object=_const("batch"),
        errors=_or_null(_object(object=_const("list"), data=_list(ANY))),
        status={"enum": ["validating", *_STAMPS]},
        **_each(_or_null(TEXT), "output_file_id", "error_file_id"),
        **_each(WHOLE, "created_at", "expires_at"),
        request_counts=_object(**_each(WHOLE, "total", "completed", "failed")),
        metadata=_or_null(_map(TEXT)),
        **_each(_or_null(WHOLE), *(f"{name}_at" for name in _STAMPS)),
    ),
    "BatchList": _page("Batch"),
}
_NULLABLE: Schema = {"type": ["string", "null"]}
_OPENAI_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": _each(TEXT, "message", "type") | _each(_NULLABLE, "param", "code"),
        }
    },
}
_ANTHROPIC_ERROR = _object(
    type=_const("error"),
    error=_object(**_each(TEXT, "type", "message"), details=_object(error_code=TEXT)),
    request_id=TEXT,
)
_INFERENCE_ERROR = _object(error=TEXT)
_ERROR: Schema = {"anyOf": [_OPENAI_ERROR, _ANTHROPIC_ERROR, _INFERENCE_ERROR]}
_EVENT: Schema = {"type": "object", "properties": _each(TEXT, "event", "data"), "required": ["data"]}
_EVENTS = "text/event-stream"
MAX_FILES, MAX_BATCHES = 10_000, 100
"""In one page of a list."""


def _query(**fields: Schema) -> list[Schema]:
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in fields.items()]


def _limit(maximum: int) -> Schema:
    return {"type": "integer", "minimum": 1, "maximum": maximum, "default": 100}


QUERIES = {
    "/requests": _query(limit=_limit(KEPT)),
    "/v1/files": _query(limit=_limit(MAX_FILES), after=TEXT, purpose=TEXT),
    "/v1/batches": _query(limit=_limit(MAX_BATCHES), after=TEXT),
}
_UPLOAD = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
    "required": ["file", "purpose"],
}


def add_route(
    app: Starlette,
    method: str,
    path: str,
    endpoint: Callable[..., Awaitable[Response]],
    answer: str,
    body: type[BaseModel] | None = None,
    *,
    given: str = "",
) -> None:
    """Adds a route and its description. The endpoint gets the parameters of the path, and the request if it names it.
    `answer` names the schema of a JSON answer, or is the content type of any other; `body` is the model of the request
    body; if it has a field `stream`, a stream of events is described too. `given` names the schema of a body that has
    no model."""
    names = inspect.signature(endpoint).parameters

    @wraps(endpoint)
    async def handle(request: Request) -> Response:
        request.scope[ROUTE] = path
        return await endpoint(**({"request": request} if "request" in names else {}), **request.path_params)

    route = Route(path, handle, methods=[method])
    app.router.routes.append(route)
    operation: Schema = {"summary": endpoint.__name__.replace("_", " ").capitalize()}
    operation["operationId"] = f"{endpoint.__name__}_{route.path_format.strip('/')}_{method.lower()}"
    of_path = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in route.param_convertors]
    if parameters := of_path + (QUERIES.get(path, []) if method == "GET" else []):
        operation["parameters"] = parameters
    if answer == "File" and method == "POST":
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
    elif body is not None or given:
        operation["requestBody"] = {"required": True, "content": _json(body.__name__ if body is not None else given)}
    content: dict[str, Any] = {answer: {"schema": {"type": "string"}}} if "/" in answer else _json(answer)
    if answer == _EVENTS or (body is not None and "stream" in body.model_fields):
        content[_EVENTS] = {"schema": _EVENT}
    operation["responses"] = {
        "200": {"description": "OK", "content": content},
        "4XX": {"description": "Refused", "content": _json("ErrorResponse")},
        "5XX": {"description": "Failed", "content": _json("ErrorResponse")},
    }
    if answer == "Ready":
        operation["responses"]["503"] = {"description": "A pool has no ready worker", "content": _json("Ready")}
    described = route.path_format, method.lower(), operation, body
    app.state.described = [*getattr(app.state, "described", ()), described]


def describe(app: Starlette, version: str) -> Schema:
    """Returns the OpenAPI document of the routes of `app`."""
    paths: dict[str, Schema] = {}
    bodies: list[Any] = []
    for path, method, operation, body in app.state.described:
        paths.setdefault(path, {})[method] = operation
        if body is not None:
            bodies.append((body, "validation"))
    _, models = models_json_schema(bodies, ref_template="#/components/schemas/{model}")
    schemas = models.get("$defs", {}) | SCHEMAS | {"ErrorResponse": _ERROR}
    info = {"title": "Baton", "version": version}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}

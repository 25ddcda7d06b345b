"""What the routes answer, as JSON schemas for `/openapi.json`. Objects are closed: a field that is not here is a fault,
which the tests find. Open are `Response` (the tests hold it against OpenAI's own types), `TokenizerInfo` (a file of the
checkpoint) and `Workers` (what `baton ps` reads, which changes)."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
ANY: Schema = {"type": "object"}


def _object(**fields: Schema) -> Schema:
    """Fields whose name ends in `_` (left out then) need not be there."""
    names = {name.rstrip("_"): schema for name, schema in fields.items()}
    required = [name for name in fields if not name.endswith("_")]
    return {"type": "object", "properties": names, "required": required, "additionalProperties": False}


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


_SPAN = _object(name=TEXT, start_ms=NUMBER, ms=NUMBER, worker=TEXT)
_TIMELINE = {
    "total_ms": NUMBER,
    "first_token_ms": NUMBER,
    "prefill_worker": TEXT,
    "decode_worker": TEXT,
    "spans": _list(_SPAN),
}
_PROMPT_SCORES = _list(_or_null(_map(_object(logprob=NUMBER, rank=WHOLE, decoded_token=TEXT))))
_CHOICE = {
    "index": WHOLE,
    "finish_reason": _or_null(TEXT),
    "stop_reason": _or_null({"type": ["string", "integer"]}),
    "timeline_": _object(**_TIMELINE),
    "token_ids_": _or_null(_list(WHOLE)),
    "prompt_token_ids_": _or_null(_list(WHOLE)),
    "prompt_logprobs_": _or_null(_PROMPT_SCORES),
}
_SCORED: Schema = _object(
    token=TEXT,
    logprob=NUMBER,
    bytes=_or_null(_list(WHOLE)),
    top_logprobs_=_list(_object(token=TEXT, logprob=NUMBER, bytes=_or_null(_list(WHOLE)))),
)
_LOGPROBS = _object(
    tokens=_list(TEXT),
    token_logprobs=_list(_or_null(NUMBER)),
    top_logprobs=_list(_or_null(_map(NUMBER))),
    text_offset=_list(WHOLE),
)
_USAGE = _object(
    prompt_tokens=WHOLE,
    completion_tokens=WHOLE,
    total_tokens=WHOLE,
    prompt_tokens_details_=_object(cached_tokens=WHOLE),
    completion_tokens_details_=_map(WHOLE),
    speculation_=_object(steps=WHOLE, drafted_tokens=WHOLE, accepted_tokens=WHOLE, forced=FLAG),
)
_CALL = _object(id=TEXT, type=_const("function"), function=_object(name=TEXT, arguments=TEXT))
_HEAD = {"id": TEXT, "created": WHOLE, "model": TEXT, "system_fingerprint_": TEXT, "usage": _USAGE}
_MODEL = _object(id=TEXT, object=_const("model"), created=WHOLE, owned_by=TEXT, max_model_len=WHOLE)
_FILE = _object(
    id=TEXT,
    object=_const("file"),
    bytes=WHOLE,
    created_at=WHOLE,
    filename=TEXT,
    purpose=TEXT,
    status=TEXT,
    status_details=_or_null(TEXT),
    expires_at=_or_null(WHOLE),
)
_STAMPS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_BATCH = _object(
    id=TEXT,
    object=_const("batch"),
    endpoint=TEXT,
    errors=_or_null(_object(object=_const("list"), data=_list(ANY))),
    input_file_id=TEXT,
    completion_window=TEXT,
    status={"enum": ["validating", *_STAMPS]},
    output_file_id=_or_null(TEXT),
    error_file_id=_or_null(TEXT),
    created_at=WHOLE,
    expires_at=WHOLE,
    request_counts=_object(total=WHOLE, completed=WHOLE, failed=WHOLE),
    metadata=_or_null(_map(TEXT)),
    **{f"{name}_at": _or_null(WHOLE) for name in _STAMPS},
)
_REQUEST = _object(
    id=TEXT,
    choice=WHOLE,
    admitted_at=NUMBER,
    outcome=TEXT,
    error=_or_null(TEXT),
    prompt_tokens=WHOLE,
    cached_tokens=WHOLE,
    generated_tokens=WHOLE,
    attempts=WHOLE,
    **_TIMELINE,
)


def _page(of: str) -> Schema:
    end = _or_null(TEXT)
    return _object(object=_const("list"), data=_list(_ref(of)), first_id=end, last_id=end, has_more=FLAG)


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
            "id": TEXT,
            "object": _const("response"),
            "created_at": WHOLE,
            "status": {"enum": ["completed", "incomplete", "failed"]},
            "model": TEXT,
            "output": _list(ANY),
            "usage": _or_null(ANY),
        },
        "required": ["id", "object", "created_at", "status", "model", "output", "usage"],
    },
    "Model": _MODEL,
    "ModelList": _object(object=_const("list"), data=_list(_ref("Model"))),
    "Tokens": _object(count=WHOLE, max_model_len=WHOLE, tokens=_list(WHOLE), token_strs=_or_null(_list(TEXT))),
    "Text": _object(prompt=TEXT),
    "Version": _object(version=TEXT),
    "ModelInfo": _object(
        model_path=TEXT,
        tokenizer_path=TEXT,
        is_generation=FLAG,
        has_chat_template=FLAG,
        max_model_len=WHOLE,
        vocab_size=WHOLE,
    ),
    "TokenizerInfo": {"type": "object", "required": ["vocab_size"], "properties": {"vocab_size": WHOLE}},
    "ServerInfo": _object(
        version=TEXT,
        model=TEXT,
        max_model_len=WHOLE,
        vocab_size=WHOLE,
        tool_parser=_or_null(TEXT),
        workers=_object(prefill=WHOLE, decode=WHOLE),
    ),
    "Loads": _list(
        _object(dp_rank=WHOLE, num_reqs=WHOLE, num_running_reqs=WHOLE, num_waiting_reqs=WHOLE, token_usage=NUMBER)
    ),
    "Live": _object(status=_const("ok")),
    "Ready": _object(ready=FLAG, reason_=TEXT),
    "Workers": {
        "type": "object",
        "properties": {"workers": _list(ANY), "coordinator": ANY},
        "required": ["workers", "coordinator"],
    },
    "Request": _REQUEST,
    "Requests": _object(requests=_list(_ref("Request"))),
    "File": _FILE,
    "FileList": _page("File"),
    "FileDeleted": _object(id=TEXT, object=_const("file"), deleted=FLAG),
    "Batch": _BATCH,
    "BatchList": _page("Batch"),
}

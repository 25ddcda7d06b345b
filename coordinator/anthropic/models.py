"""The list of models in Anthropic's form."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def model_object(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """`created` is in Unix seconds. Prompt and output share the context of `max_model_len` tokens."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len - 1,
        "max_tokens": max_model_len,
    }


def model_page(model: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
    """Returns the page of the only model, or of nothing: before and after it there is none."""
    data = [] if {query.get("after_id"), query.get("before_id")} & {model["id"]} else [model]
    ends = dict.fromkeys(("first_id", "last_id"), data[0]["id"] if data else None)
    return {"data": data, "has_more": False, **ends}

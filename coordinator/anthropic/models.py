"""The list of models in Anthropic's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def model_page(models: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Returns the page of all models after, or before, the one that the query names."""
    ids = [model["id"] for model in models]
    after, before = query.get("after_id"), query.get("before_id")
    first = ids.index(after) + 1 if after in ids else 0
    last = ids.index(before) if before in ids else len(ids)
    data = models[first:last]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"data": data, "has_more": False, **ends}

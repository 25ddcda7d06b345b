"""What one message of the public gRPC API may cost: counted before it is looked at, and nothing kept of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.v1 import serving_pb2 as pb
from coordinator.api_keys import ApiKeys
from coordinator.grpc.service import Serving
from coordinator.text.model import TextModel
from coordinator.translate import Translator
from tests.support.fake_generator import FakeGenerator


class Untouchable:
    """A repeated field that has a length, and whose entries nobody may look at."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Any:
        raise AssertionError("entries were looked at")

    def __getitem__(self, index: object) -> Any:
        raise AssertionError("entries were looked at")


class Instead:
    """A message with other values in some fields."""

    def __init__(self, message: Any, **values: Any) -> None:
        self._message = message
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


MANY = Untouchable(4_000_000)
IDS = SimpleNamespace(ids=MANY)
ENTRIES = "{} has at most {} entries, not 4000000"
TOO_MANY: list[tuple[str, dict[str, Any], str]] = [
    ("stop", {"stop": MANY}, ENTRIES.format("stop", 64)),
    ("messages", {"messages": SimpleNamespace(messages=MANY)}, ENTRIES.format("messages", 4096)),
    ("prompt", {"token_ids": IDS}, "this model's context is 128 tokens; the prompt has 4000000 and needs room"),
    ("logit_bias", {"sampling": {"logit_bias": MANY}}, ENTRIES.format("logit_bias", 300)),
    ("stop_token_ids", {"sampling": {"stop_token_ids": MANY}}, ENTRIES.format("stop_token_ids", 64)),
    ("bad_words", {"sampling": {"bad_words": MANY}}, ENTRIES.format("bad_words", 128)),
    ("bad_words", {"sampling": {"bad_words": [IDS]}}, "an entry of bad_words is 1 to 64 tokens, not 4000000"),
    ("allowed_token_ids", {"sampling": {"allowed_token_ids": MANY}}, ENTRIES.format("allowed_token_ids", 512)),
]


@pytest.mark.parametrize(("param", "values", "message"), TOO_MANY, ids=lambda v: v if isinstance(v, str) else "")
async def test_entries_are_counted_before_they_are_looked_at(
    generator: FakeGenerator, text_model: TextModel, param: str, values: dict[str, Any], message: str
) -> None:
    serving = Serving(generator, Translator(text_model), "tiny", ApiKeys())
    request = pb.GenerateRequest(text="a")
    match values:
        case {"messages": _}:
            request.messages.SetInParent()
        case {"token_ids": _}:
            request.token_ids.SetInParent()
        case {"sampling": sampling}:
            values = {"sampling": Instead(request.sampling, **sampling)}
    with pytest.raises(InvalidRequest) as refused:
        await serving._submission(Instead(request, **values), None)  # type: ignore[arg-type]
    assert message in refused.value.message and refused.value.param == param

"""The body of `POST /v1/batches`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, StringConstraints

from coordinator.openai.fields import NOTHING, sift
from coordinator.openai.json_body import parse_object
from coordinator.openai.schema import MAX_METADATA, check_metadata
from coordinator.openai.validation import Strict, at_most, validate

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class BatchBody(Strict):
    input_file_id: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], AfterValidator(check_metadata), at_most(MAX_METADATA)] | None = None


def parse_batch(body: bytes) -> BatchBody:
    """Raises InvalidRequest, which names the field."""
    return validate(BatchBody, sift(parse_object(body), BatchBody.model_fields.keys(), NOTHING))

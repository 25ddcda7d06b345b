"""Renders deltas as an inference response, or as the answers of Triton's generate extension."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from baton.core.errors import BatonError
from baton.runtime import status
from coordinator.inference.model import Generation, outputs_of, piece_of
from coordinator.inference.schema import generate_response
from coordinator.inference.tensors import Tensor
from coordinator.openai.render import json_line
from coordinator.submission import Delta, Usage

WholeAnswer = Callable[[Sequence[Tensor]], tuple[bytes, Mapping[str, str]]]


class InferRender:
    """`whole_answer` makes the body and headers of an answer that is not streamed. `n` is the choices of a prompt."""

    continuous_usage = False
    has_large_opening = False
    end = b""

    def __init__(
        self, name: str, request_id: str, made: Generation, n: int, whole_answer: WholeAnswer | None = None
    ) -> None:
        self._name, self._id, self._made, self._n, self._whole_answer = name, request_id, made, n, whole_answer
        self.headers: Mapping[str, str] = {"content-type": "application/json"}

    def needs_event(self, delta: Delta) -> bool:
        return bool(delta.text)

    def whole(self, answers: Sequence[Delta], usage: Usage) -> bytes:
        outputs = outputs_of(self._made, answers, self._n)
        if self._whole_answer is None:
            return generate_response(self._name, self._id, outputs)
        body, self.headers = self._whole_answer(outputs)
        return body

    def opening(self, delta: Delta, usage: Usage) -> bytes:
        return b""

    def text(self, delta: Delta, usage: Usage) -> bytes:
        return b"data: " + generate_response(self._name, self._id, piece_of(self._made, delta)) + b"\n\n"

    def last(self, delta: Delta, usage: Usage) -> bytes:
        return self.text(delta, usage)

    def closing(self, usage: Usage) -> bytes:
        return b""

    def failed(self, error: BaseException) -> bytes:
        """Returns the last event of a failed stream."""
        return b"data: " + json_line(error_body(error)) + b"\n\n"


def error_body(error: BaseException) -> dict[str, str]:
    """Returns an error in the protocol's form, which is text alone: it names the field, too."""
    message, param = status.public_message(error), error.param if isinstance(error, BatonError) else None
    named = message if not param or param in message else f"'{param}': {message}"
    return {"error": f"{status.public_code(error)}: {named}"}

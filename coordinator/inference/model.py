"""A text model as the Open Inference Protocol describes it, and an inference request as a completion.

Inputs and outputs have the names that Triton's backends for language models use. Sampling fields are those of
`/v1/completions`, as a JSON object in `sampling_parameters` (Triton's vLLM backend), as input tensors (its TensorRT-LLM
backend, some under names of its own), or as parameters of the request. As in these backends a whole answer begins with
its prompt unless `exclude_input_in_output` is set; the answers of a stream are its pieces, without the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.errors import InvalidRequest
from baton.runtime.ignored_fields import IgnoredFields
from coordinator.inference.tensors import Tensor
from coordinator.openai.schema import CompletionBody
from coordinator.openai.validation import places_of, validate
from coordinator.submission import Delta, Submission
from coordinator.translate import Translator

TEXT, FINISH, PROMPT_TOKENS, OUTPUT_TOKENS = "text_output", "finish_reason", "num_input_tokens", "num_output_tokens"
INPUTS = (
    ("text_input", "BYTES"),
    ("stream", "BOOL"),
    ("sampling_parameters", "BYTES"),
    ("exclude_input_in_output", "BOOL"),
    ("return_finish_reason", "BOOL"),
    ("return_num_input_tokens", "BOOL"),
    ("return_num_output_tokens", "BOOL"),
    ("max_tokens", "INT32"),
    ("temperature", "FP32"),
    ("top_k", "INT32"),
    ("top_p", "FP32"),
    ("random_seed", "UINT64"),
    ("stop_words", "BYTES"),
    ("bad_words", "BYTES"),
    ("repetition_penalty", "FP32"),
    ("presence_penalty", "FP32"),
    ("frequency_penalty", "FP32"),
)
OUTPUTS = ((TEXT, "BYTES"), (FINISH, "BYTES"), (PROMPT_TOKENS, "UINT32"), (OUTPUT_TOKENS, "UINT32"))
_OTHER_NAMES = {"random_seed": "seed", "stop_words": "stop", "min_length": "min_tokens"}
_LISTS = ("stop", "bad_words")
_FLAGS = ("stream", "exclude_input_in_output")
_RETURNS = {f"return_{name}": name for name in (FINISH, PROMPT_TOKENS, OUTPUT_TOKENS)}
_WITHOUT_EFFECT = frozenset({"priority", "sequence_id", "sequence_start", "sequence_end"})
_OF_THE_PROTOCOL = _WITHOUT_EFFECT | {
    "binary_data_output",
    "headers",
    "timeout",
    "triton_enable_empty_final_response",
}
"""Parameters that do not say how to generate."""
_REFUSED = ("prompt", "echo", "logprobs", "prompt_logprobs", "best_of", "stream_options", "return_token_ids", "model")
"""Fields of `/v1/completions` whose effect has no place in an inference response."""


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One request, whatever carried it. `outputs` are the tensors asked for, by default `text_output` and those that an
    input asks for."""

    id: str
    inputs: tuple[Tensor, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """`body` is the completion to generate, for the model of `/v1/completions`, one prompt per text. `stream` is None
    if the request leaves it open. `timeout_s` is the client's limit for the whole request, `ignored` the parameters of
    the protocol that have no effect here."""

    body: dict[str, Any]
    prompts: tuple[str, ...]
    outputs: tuple[str, ...]
    timeout_s: float | None = None
    ignored: frozenset[str] = frozenset()
    stream: bool | None = None
    with_prompt: bool = True


def generation(request: InferRequest) -> Generation:
    """Returns what a request asks for. Raises InvalidRequest that names the input, parameter or output at fault."""
    fields: dict[str, Any] = {}
    prompts: tuple[str, ...] | None = None
    names: set[str] = set()
    for tensor in request.inputs:
        if tensor.name in names:
            where = f"inputs[{tensor.name[:100]}]"
            raise InvalidRequest(f"'{where}' is given twice", param=where)
        names.add(tensor.name)
        if tensor.name == "text_input":
            prompts = _texts(tensor)
        elif tensor.name == "sampling_parameters":
            _add(fields, _object(_one(tensor)))
        elif tensor.name in (*_LISTS, "stop_words"):
            _add(fields, {tensor.name: [text for text in _texts(tensor) if text]})
        else:
            _add(fields, {tensor.name: _one(tensor)})
    if prompts is None:
        raise InvalidRequest("the input 'text_input' is required", code="missing_required_parameter", param="inputs")
    _add(fields, {name: value for name, value in request.parameters.items() if name not in _OF_THE_PROTOCOL})
    return _generation(fields, prompts, request.outputs, request.parameters)


def text_generation(given: Mapping[str, Any]) -> tuple[str, Generation]:
    """Returns the id and what a body of the generate extension asks for: `text_input`, and fields beside it or in
    `parameters`. Raises InvalidRequest."""
    known = dict(given)
    name, prompt, parameters = known.pop("id", ""), known.pop("text_input", None), known.pop("parameters", None)
    if not isinstance(name, str):
        raise InvalidRequest("'id' must be a string", param="id")
    if prompt is None:
        raise InvalidRequest("'text_input' is required", code="missing_required_parameter", param="text_input")
    if not isinstance(prompt, str):
        raise InvalidRequest("'text_input' must be a string", param="text_input")
    if not isinstance(parameters or {}, dict):
        raise InvalidRequest("'parameters' must be an object", param="parameters")
    fields: dict[str, Any] = {}
    protocol: dict[str, Any] = {}
    for part in (known, parameters or {}):
        options = part.get("sampling_parameters")
        _add(protocol, {n: v for n, v in part.items() if n in _OF_THE_PROTOCOL})
        _add(fields, {n: v for n, v in part.items() if n not in _OF_THE_PROTOCOL and n != "sampling_parameters"})
        if options is not None:
            _add(fields, options if isinstance(options, dict) else _object(options))
    return name, _generation(fields, (prompt,), (), protocol)


def outputs_of(made: Generation, answers: Sequence[Delta], n: int) -> list[Tensor]:
    """Returns the output tensors of a whole answer: one element per choice, those of the first prompt first."""
    texts = [
        (made.prompts[index // n] if made.with_prompt else "") + answer.text for index, answer in enumerate(answers)
    ]
    usages = [answer.usage for answer in answers if answer.usage is not None]
    columns: dict[str, list[Any]] = {
        TEXT: texts,
        FINISH: [answer.finish_reason or "" for answer in answers],
        PROMPT_TOKENS: [usage.prompt_tokens for usage in usages],
        OUTPUT_TOKENS: [usage.completion_tokens for usage in usages],
    }
    return [Tensor(name, dict(OUTPUTS)[name], (len(answers),), tuple(columns[name])) for name in made.outputs]


def check_pieces(prompts: int, n: int) -> None:
    """Raises InvalidRequest if the pieces of a stream would be ambiguous: they name neither text nor choice."""
    if prompts > 1:
        raise InvalidRequest(f"the pieces of a stream are of one text, not of {prompts}", param="text_input")
    if n > 1:
        raise InvalidRequest(f"the pieces of a stream are of one choice, not of {n}", param="n")


def piece_of(made: Generation, delta: Delta) -> list[Tensor]:
    """Returns the output tensors of one piece of a stream. Counts are of the piece, except in the last one."""
    usage, last = delta.usage, delta.finish_reason is not None
    values: dict[str, Any] = {
        TEXT: delta.text,
        FINISH: delta.finish_reason or "",
        PROMPT_TOKENS: usage.prompt_tokens if usage is not None else 0,
        OUTPUT_TOKENS: usage.completion_tokens if last and usage is not None else len(delta.token_ids),
    }
    return [Tensor(name, dict(OUTPUTS)[name], (1,), (values[name],)) for name in made.outputs]


def _generation(
    fields: dict[str, Any], prompts: tuple[str, ...], outputs: Iterable[str], protocol: Mapping[str, Any]
) -> Generation:
    flags = {name: fields.pop(name, None) for name in (*_FLAGS, *_RETURNS)}
    for name, flag in flags.items():
        if not isinstance(flag, bool | None):
            raise InvalidRequest(f"'{name}' must be true or false", param=name)
    for name in _REFUSED:
        if name in fields:
            raise InvalidRequest(
                f"'{name}' has no effect that this protocol could return: use /v1/completions", param=name
            )
    requested = tuple(outputs) or (TEXT, *(name for flag, name in _RETURNS.items() if flags[flag]))
    for name in requested:
        if name not in dict(OUTPUTS):
            raise InvalidRequest(f"there is no output {name[:100]!r}: only {', '.join(dict(OUTPUTS))}", param="outputs")
    body = fields | {"prompt": list(prompts)}
    stream = flags["stream"]
    with_prompt = not stream and not flags["exclude_input_in_output"]
    ignored = frozenset(name for name in _WITHOUT_EFFECT if protocol.get(name))
    return Generation(body, prompts, requested, _timeout_s(protocol.get("timeout")), ignored, stream, with_prompt)


def _timeout_s(timeout_us: Any) -> float | None:
    """Returns the limit that a client sets with `timeout`; 0 sets none (Triton's schedule policy extension)."""
    if timeout_us is not None and (not isinstance(timeout_us, int) or isinstance(timeout_us, bool) or timeout_us < 0):
        raise InvalidRequest("'timeout' must be a whole number of microseconds, at least 0", param="timeout")
    return timeout_us / 1e6 if timeout_us else None


def _add(fields: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Adds fields under their names in `/v1/completions`. Raises InvalidRequest for a contradiction."""
    for given, value in more.items():
        name = _OTHER_NAMES.get(given, given)
        if name in fields and fields[name] != value:
            raise InvalidRequest(f"'{given[:100]}' is given twice, with different values", param=given[:100])
        fields[name] = value


def _object(text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except (TypeError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest("'sampling_parameters' must be a JSON object", param="sampling_parameters")
    return value


def _texts(tensor: Tensor) -> tuple[str, ...]:
    if tensor.datatype != "BYTES" or not tensor.values:
        raise InvalidRequest(f"'{tensor.name}' must be BYTES with one element at least", param=f"inputs[{tensor.name}]")
    return tensor.values


def _one(tensor: Tensor) -> Any:
    if len(tensor.values) != 1:
        message = f"'{tensor.name[:100]}' must have one element, not {len(tensor.values)}"
        raise InvalidRequest(message, param=f"inputs[{tensor.name[:100]}]")
    return tensor.values[0]


async def submissions_of(
    translator: Translator, made: Generation, request_id: str, *, strict: bool, deadline_s: float | None = None
) -> tuple[list[Submission], frozenset[str]]:
    """Returns the submissions, and the names of ignored fields; `strict` refuses unknown ones.

    Raises:
        InvalidRequest: names the field at fault.
    """
    if made.timeout_s is not None:
        deadline_s = min(made.timeout_s, made.timeout_s if deadline_s is None else deadline_s)
    ignored = IgnoredFields(strict=strict, places=places_of(CompletionBody))
    body = validate(CompletionBody, made.body, ignored)
    options = body.options()
    params = translator.checked(options)
    submissions = []
    for number, prompt in enumerate(made.prompts):
        name = request_id if len(made.prompts) == 1 else f"{request_id}-{number}"
        submissions.append(await translator.from_text(name, prompt, options, params=params, deadline_s=deadline_s))
    return submissions, body.ignored | made.ignored

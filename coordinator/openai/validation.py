"""Request bodies as models: values are not coerced, fields that are not served are named, and errors name the field.

Every field of the public requests that is not served, as data.

`null` always counts as not given, also for an unknown name. There are three kinds of fields besides the served ones:
- inert: they do not change the answer; accepted, and listed in the answer's `x-ignored-fields`;
- not served yet: accepted with a value that has the same effect as omitting the field, else refused by name, because
  the answer would not be what the client asked for;
- unknown: accepted and listed, unless they look like a mistake (baton/runtime/ignored_fields.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import cache, partial
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from baton.core.errors import InvalidRequest
from baton.runtime.ignored_fields import IgnoredFields
from baton.runtime.json_body import parse_object

Neutral = Mapping[str, tuple[Any, ...]]

INERT = frozenset(
    {
        *("guided_decoding_backend", "length_penalty", "metadata", "prediction", "prompt_cache_key"),
        *("prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "request_id", "safety_identifier"),
        *("service_tier", "store", "user", "verbosity"),
    }
)
"""Inert fields of a request. Some are also in the models, which limit their size."""

_BOTH: dict[str, tuple[Any, ...]] = {
    "custom_logit_processor": (),
    "logits_processors": (),
    "lora_path": (),
    "lora_request": (),
    "prompt_embeds": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
COMPLETION: Neutral = _BOTH | {"add_special_tokens": (True,)}
CHAT: Neutral = _BOTH | {
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "documents": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "web_search_options": (),
}
POOLING: dict[str, tuple[Any, ...]] = {"lora_request": (), "mm_processor_kwargs": (), "truncation_side": ("left",)}
EMBEDDINGS: Neutral = POOLING | {"embed_dtype": ("float32",), "endianness": ("native", "little")}
RERANK: Neutral = POOLING | {"max_chunks_per_doc": (), "max_tokens_per_doc": (), "rank_fields": (["text"],)}
NOT_OF_EMBEDDINGS = {"messages": "'input'", "prompt": "'input'"}
NOT_OF_COMPLETIONS = {
    "max_completion_tokens": "'max_tokens'",
    "messages": "/v1/chat/completions",
    "tools": "/v1/chat/completions",
    "top_logprobs": "'logprobs'",
}
NOT_OF_CHATS = {"best_of": "'n'", "prompt": "'messages'"}
"""Fields of the other endpoint without which the answer would be another: the end of the question `did you mean`."""
MESSAGE: Neutral = {
    "function_call": (),
    "partial": (False,),  # in other APIs: continue this message
    "prefix": (False,),
}


MODEL_VALUES = 10
"""The cost of unpickling a model object, in values of about 0.2 us."""


class RequestObject(BaseModel):
    """The base of every public body and of the objects in it. Values are strict: they are not coerced. `null` counts as
    not given, for any field name. Fields that are not served: `inert` ones are accepted and named in `ignored`;
    `neutral` ones are accepted only with the values that have no effect; unknown ones are accepted and named, unless
    they look like a mistake.

    `place` is the path of the object in its body, without indexes. `history`: it comes from an earlier answer, perhaps
    of another server, so that unknown fields are accepted even if `--strict-fields` is set. `elsewhere`, of a whole
    body, maps fields of other endpoints that are refused to the end of the question `did you mean`."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",  # `_sift` has removed what is accepted
        allow_inf_nan=False,
        frozen=True,
        json_schema_extra={"additionalProperties": True},
    )
    inert: ClassVar[Set[str]] = frozenset()
    neutral: ClassVar[Neutral] = {}
    place: ClassVar[str] = ""
    history: ClassVar[bool] = False
    elsewhere: ClassVar[Mapping[str, str]] = {}
    _ignored: frozenset[str] = PrivateAttr(frozenset())

    @property
    def ignored(self) -> frozenset[str]:
        """Of a whole body: the names of given fields that have no effect, at most MAX_NAMED + 1."""
        return self._ignored

    @classmethod
    def completed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Returns `given` with the values that follow from other fields."""
        return given

    @model_validator(mode="before")
    @classmethod
    def _sift(cls, given: Any, info: ValidationInfo[IgnoredFields | None]) -> Any:
        """Returns the served fields of an object; refuses or names the others."""
        if not isinstance(given, dict):
            return given
        served, ignored = served_names(cls), IgnoredFields.of(info.context)
        kept = {}
        for name, value in given.items():
            if value is None:
                continue
            if name in served:
                kept[name] = value
            if name in cls.neutral:
                if not any(_same(value, accepted) for accepted in cls.neutral[name]):
                    reason = f"is not supported yet{_accepted(cls.neutral[name])}"
                    raise PydanticCustomError("unsupported_parameter", reason, {"field": name})
            elif name in cls.inert:
                ignored.add(cls.place, name)
            elif name not in served:
                hint = cls.elsewhere.get(name, "")
                ignored.add_unknown(cls.place, name, known_names(cls), history=cls.history, hint=hint)
        return cls.completed(kept)


class ModelBody(RequestObject):
    """The body of a request to the model. It need not name the model: only one is served. `stand_ins` are the
    beginnings of other names that clients may use for it."""

    stand_ins: ClassVar[tuple[str, ...]] = ()

    model: str | None = None


@cache
def served_names(model: type[RequestObject]) -> frozenset[str]:
    """Returns the names of the served fields, other names of the same field included."""
    names: set[str] = set()
    for name, field in model.model_fields.items():
        alias = field.validation_alias or name
        names.update(map(str, alias.choices) if isinstance(alias, AliasChoices) else [str(alias)])
    return frozenset(names)


@cache
def known_names(model: type[RequestObject]) -> frozenset[str]:
    """Returns the names of all fields that are known at this place."""
    return served_names(model).union(model.neutral, model.inert)


@cache
def places_of(model: type[RequestObject]) -> Mapping[str, str]:
    """Returns the place of each name that is served somewhere in a body of this model, between quotes."""
    places: dict[str, str] = {}
    left = [model]
    for each in left:  # the outermost place of a name comes first
        for name in served_names(each):
            places.setdefault(name, f"'{each.place}.{name}'" if each.place else f"'{name}'")
        for field in each.model_fields.values():
            left += [inner for inner in _objects_in(field.annotation) if inner not in left]
    return places


def _objects_in(annotation: Any) -> list[type[RequestObject]]:
    if isinstance(annotation, type) and issubclass(annotation, RequestObject):
        return [annotation]
    return [each for argument in get_args(annotation) for each in _objects_in(argument)]


_Body = TypeVar("_Body", bound=RequestObject)


def counted(limit: int, value: Any) -> Any:
    """Returns `value` if it has at most `limit` entries; runs before they are validated: a body may have a million."""
    if isinstance(value, list | dict) and len(value) > limit:
        raise PydanticCustomError("too_many", f"at most {limit} entries, not {len(value)}")
    return value


def count_values(value: Any, limit: int) -> int:
    """Counts the values within a JSON value or a body, including itself, and MODEL_VALUES more for each model object;
    stops counting after `limit`."""
    left, count = [value], 0
    while left and count <= limit:
        item = left.pop()
        count += 1
        if isinstance(item, BaseModel):
            count += MODEL_VALUES
            left.extend(item.__dict__.values())
        elif isinstance(item, Mapping):
            left.extend(item.values())
        elif isinstance(item, list | tuple):
            left.extend(item)
    return count + len(left)


def at_most(limit: int) -> BeforeValidator:
    return BeforeValidator(partial(counted, limit))


def parse(model: type[_Body], body: bytes, *, strict: bool = False) -> _Body:
    """Parses a body; `strict` refuses unknown fields. Raises InvalidRequest that names the field at fault."""
    return validate(model, parse_object(body), IgnoredFields(strict=strict, places=places_of(model)))


def validate(model: type[_Body], given: Mapping[str, Any], ignored: IgnoredFields, *, path: str = "") -> _Body:
    """Validates an object, and adds its ignored fields to `ignored`. Raises InvalidRequest that names the field at
    fault, as part of `path`."""
    try:
        body = model.model_validate(given, context=ignored)
    except ValidationError as error:
        raise _refusal(error, path) from None
    body._ignored = frozenset(ignored.names)
    return body


_MUST_BE = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "extra_forbidden": "is another name of a field that is given too",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "list_type": "must be an array",
    "model_type": "must be an object",
    "string_type": "must be a string",
}


def _refusal(error: ValidationError, path: str) -> InvalidRequest:
    """Returns the error of the first fault, which repeats nothing of the input but the field's name."""
    first = error.errors(include_url=False, include_input=False)[0]
    kind, message = first["type"], first["msg"]
    param = path
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part[:64]}" if param else part[:64]
    if field := first.get("ctx", {}).get("field"):
        param += f".{field[:100]}" if param else field[:100]
    if kind == "missing":
        return InvalidRequest(f"'{param}' is required", code="missing_required_parameter", param=param)
    if kind == "unknown_parameter":
        return InvalidRequest(f"unknown field '{param}'{message}", code=kind, param=param)
    if kind == "unsupported_parameter":
        return InvalidRequest(f"'{param}' {message}", code=kind, param=param)
    return InvalidRequest(f"'{param}': {_MUST_BE.get(kind) or message[:200]}", param=param)


def _same(value: Any, accepted: Any) -> bool:
    return type(value) is type(accepted) and bool(value == accepted)


def _accepted(values: tuple[Any, ...]) -> str:
    shown = [repr(v).lower() if isinstance(v, bool) else repr(v) for v in values if not isinstance(v, float)]
    return f" (only {' or '.join(shown)})" if shown else ""

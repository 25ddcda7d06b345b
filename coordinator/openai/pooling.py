"""The bodies and answers of `/v1/embeddings` (OpenAI's), and of score and rerank as vLLM, Jina and Cohere have them."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import AliasChoices, BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from coordinator.openai.render import Head, Render, usage_object
from coordinator.openai.schema import Label, prompts
from coordinator.openai.validation import EMBEDDINGS, NOT_OF_EMBEDDINGS, POOLING, RERANK, ModelBody, Neutral, counted
from coordinator.pooled import MAX_INPUTS, Pairs, classify
from coordinator.submission import Delta, Usage
from coordinator.text.pooling import PoolingModel, vector_of
from coordinator.translate import PoolOptions


def _input(value: Any) -> list[str | Sequence[int]]:
    return prompts(value, "input", MAX_INPUTS)


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else counted(MAX_INPUTS, value)


def _documents(value: Any) -> list[str]:
    """Returns the texts of documents, each a string or an object with a `text`."""
    if not isinstance(value, list):
        raise PydanticCustomError("documents", "must be an array")
    texts: list[Any] = [each.get("text") if isinstance(each, dict) else each for each in counted(MAX_INPUTS, value)]
    if not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("documents", "a document must be a string, or an object with a string 'text'")
    return texts


_Input = Annotated[
    list[str | Sequence[int]],
    PlainValidator(_input, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
]
_Texts = Annotated[list[str], BeforeValidator(_texts, json_schema_input_type=str | list[str])]
_Documents = Annotated[list[str], PlainValidator(_documents, json_schema_input_type=list[str | dict[str, Any]])]


class PoolingBody(ModelBody):
    """The fields that all of these bodies share. `user` is inert."""

    inert = frozenset({"user", "request_id"})
    neutral: ClassVar[Neutral] = POOLING

    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: Label | None = None

    def options(self) -> PoolOptions:
        return PoolOptions(
            truncate=self.truncate_prompt_tokens,
            add_special_tokens=self.add_special_tokens is not False,
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
        )


class EmbeddingsBody(PoolingBody):
    neutral = EMBEDDINGS
    elsewhere = NOT_OF_EMBEDDINGS

    input: _Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None


class ClassifyBody(PoolingBody):
    elsewhere = NOT_OF_EMBEDDINGS

    input: _Input
    use_activation: bool | None = Field(default=None, validation_alias=AliasChoices("use_activation", "activation"))


class ScoreBody(PoolingBody):
    """One text is compared with each of several, or texts pair by pair."""

    text_1: _Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: _Texts = Field(validation_alias=AliasChoices("text_2", "documents", "data_2"))
    use_activation: bool | None = Field(default=None, validation_alias=AliasChoices("use_activation", "activation"))


class RerankBody(PoolingBody):
    neutral = RERANK

    query: str
    documents: _Documents
    top_n: int | None = Field(default=None, ge=0)
    return_documents: bool | None = None
    use_activation: bool | None = Field(default=None, validation_alias=AliasChoices("use_activation", "activation"))


class EmbeddingsRender(Render):
    """Never streamed, as the others."""

    id_prefix, whole_object, chunk_object = "embd-", "list", ""

    def __init__(self, head: Head, body: EmbeddingsBody, *, normalize: bool) -> None:
        super().__init__(head)
        self._body, self._normalize = body, normalize if body.normalize is None else body.normalize

    def whole(self, answers: Sequence[Delta], usage: Usage) -> bytes:
        # One by one: a call of orjson holds the GIL.
        data = [orjson.Fragment(orjson.dumps(self._entry(index, each))) for index, each in enumerate(answers)]
        return orjson.dumps(self._base(self.whole_object) | {"data": data, "usage": usage_object(usage)})

    def _entry(self, index: int, answer: Delta) -> dict[str, Any]:
        vector: Any = vector_of(answer.pooled, dimensions=self._body.dimensions, normalize=self._normalize)
        if self._body.encoding_format == "base64":
            vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        return {"object": "embedding", "index": index, "embedding": vector}


class ClassifyRender(Render):
    id_prefix, whole_object, chunk_object = "classify-", "list", ""

    def __init__(self, head: Head, model: PoolingModel, *, activation: bool) -> None:
        super().__init__(head)
        self._model, self._activation = model, activation

    def whole(self, answers: Sequence[Delta], usage: Usage) -> bytes:
        data = []
        for index, answer in enumerate(answers):
            made = classify(self._model, answer.pooled, activation=self._activation)
            shown = {"label": made.label, "probs": made.probs, "num_classes": len(made.probs)}
            data.append({"index": index, **shown})
        return orjson.dumps(self._base(self.whole_object) | {"data": data, "usage": usage_object(usage)})


@dataclass(frozen=True, slots=True)
class Ranking:
    """What of a ranking is shown: the best `top_n` documents (0: all), with their texts if there are `documents`."""

    top_n: int
    documents: Sequence[str] | None

    def results(self, scores: Sequence[float]) -> list[dict[str, Any]]:
        """Returns the documents by descending score; equal ones keep their order."""
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        shown = order[: self.top_n or None]
        texts = self.documents
        return [
            {"index": index, "relevance_score": scores[index]}
            | ({} if texts is None else {"document": {"text": texts[index]}})
            for index in shown
        ]


class ScoreRender(Render):
    """The scores of pairs, or a ranking by them."""

    id_prefix, whole_object, chunk_object = "score-", "list", ""

    def __init__(self, head: Head, pairs: Pairs, *, activation: bool, ranking: Ranking | None = None) -> None:
        super().__init__(head)
        self._pairs, self._activation, self._ranking = pairs, activation, ranking

    def whole(self, answers: Sequence[Delta], usage: Usage) -> bytes:
        scores = self._pairs.scores([answer.pooled for answer in answers], activation=self._activation)
        if self._ranking is not None:
            base = {"id": f"rerank-{self._head.request_id}", "model": self._head.model, "usage": usage_object(usage)}
            return orjson.dumps(base | {"results": self._ranking.results(scores)})
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return orjson.dumps(self._base(self.whole_object) | {"data": data, "usage": usage_object(usage)})

"""Embeddings, scores and rankings at the front: bodies, answers, refusals, and what a model directory is served for."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from starlette.applications import Starlette

from baton.core.errors import StartupError
from baton.v1 import serving_pb2, types_pb2
from coordinator.http.app import HttpSettings, create_app
from coordinator.policy.timeline import Timeline
from coordinator.submission import Delta, Sink, Submission, Usage
from coordinator.text.files import read_text_files
from coordinator.text.model import TextModel
from coordinator.text.pooling import PoolingModel, read_pooling
from tests.support.checkpoints import Arch, Shape, make_checkpoint, make_config
from tests.support.fake_generator import FakeGenerator
from tests.support.grpc_kit import served
from tests.support.model_dirs import text_dir

WIDTH = 4


def vector(prompt: tuple[int, ...]) -> list[float]:
    """The vector that the fake pipeline returns for a prompt; float32 holds its values."""
    return [float(len(prompt)), float(prompt[0] % 7), -1.5, float(sum(prompt) % 11)]


def unit(values: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]


class VectorGenerator(FakeGenerator):
    """`scores`: the vectors are scores of a classification head, the length of the prompt / 10 - 1."""

    def __init__(self, *, scores: bool = False) -> None:
        super().__init__()
        self.scores, self.running, self.most_running = scores, 0, 0

    async def generate(self, submission: Submission, sink: Sink | None = None) -> AsyncGenerator[Delta, None]:
        self.submissions.append(submission)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        await asyncio.sleep(0)
        self.running -= 1
        values = [len(submission.prompt) / 10 - 1] if self.scores else vector(submission.prompt)
        pooled = struct.pack(f"<{len(values)}f", *values)
        usage = Usage(len(submission.prompt), 0, 1)
        yield Delta("", finish_reason="stop", usage=usage, timeline=Timeline(), pooled=pooled)


@pytest.fixture(scope="module")
def make_text(tmp_path_factory: pytest.TempPathFactory) -> Any:
    files = read_text_files(text_dir(tmp_path_factory.mktemp("models") / "tiny"))
    models: list[TextModel] = []

    def make(**pooling: Any) -> TextModel:
        models.append(TextModel(files, pooling=PoolingModel(**{"hidden_size": WIDTH, **pooling})))
        return models[-1]

    yield make
    for model in models:
        model.close()


def front(text: TextModel, generator: FakeGenerator) -> Starlette:
    return create_app(generator, text, HttpSettings("tiny"))


async def post(app: Starlette, path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        return await client.post(path, json={"model": "tiny", **body})


@pytest.fixture
def generator() -> VectorGenerator:
    return VectorGenerator()


@pytest.fixture
def app(make_text: Any, generator: VectorGenerator) -> Starlette:
    return front(make_text(dimensions=None), generator)


async def test_the_official_client_gets_unit_vectors_in_both_encodings(
    official: openai.AsyncOpenAI, generator: VectorGenerator
) -> None:
    """It asks for base64 by default, and decodes it as little-endian float32."""
    for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = await official.embeddings.create(model="tiny", input=["Hello", "Hello world"], **encoding)
        expected = [unit(vector(each.prompt)) for each in generator.submissions[-2:]]
        assert [each.index for each in answer.data] == [0, 1]
        for each, values in zip(answer.data, expected, strict=True):
            embedding: Any = each.embedding
            if encoding.get("encoding_format") == "base64":
                embedding = list(struct.unpack(f"<{WIDTH}f", base64.b64decode(embedding)))
            assert embedding == pytest.approx(values, abs=1e-6)
        tokens = sum(len(each.prompt) for each in generator.submissions[-2:])
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    assert {each.pooling for each in generator.submissions} == {"last"}


async def test_every_form_of_input(app: Starlette, generator: VectorGenerator) -> None:
    for given, count in (("Hello", 1), (["Hello", "a"], 2), ([1, 2, 3], 1), ([[1], [2, 3]], 2)):
        answer = await post(app, "/v1/embeddings", {"input": given})
        assert len(answer.json()["data"]) == count, answer.text
    assert [each.prompt for each in generator.submissions[3:]] == [(1, 2, 3), (1,), (2, 3)]


async def test_dimensions_cut_and_normalise_again(app: Starlette) -> None:
    body = {"input": [1, 2, 3], "dimensions": 2}
    answer = (await post(app, "/v1/embeddings", body)).json()
    assert answer["data"][0]["embedding"] == pytest.approx(unit([3.0, 1.0]))
    raw = (await post(app, "/v1/embeddings", body | {"normalize": False})).json()
    assert raw["data"][0]["embedding"] == [3.0, 1.0]


async def test_a_request_with_2048_inputs_runs_128_at_a_time(app: Starlette, generator: VectorGenerator) -> None:
    answer = (await post(app, "/v1/embeddings", {"input": [[1 + number % 200] for number in range(2048)]})).json()
    assert [each["index"] for each in answer["data"]] == list(range(2048))
    assert answer["data"][700]["embedding"] == pytest.approx(unit(vector((1 + 700 % 200,))))
    assert (len(generator.submissions), generator.most_running) == (2048, 128)


REFUSED: list[tuple[str, dict[str, Any], str | None]] = [
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": [1, "a"]}, "input"),
    ("/v1/embeddings", {"input": [1 << 20]}, "input"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
    ("/v1/embeddings", {"input": [5] * 5000}, "input"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "a", "cache_salt": ""}, "cache_salt"),
    ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
    ("/v1/embeddings", {"input": "a", "dimension": 3}, "dimension"),
    ("/v1/embeddings", {"messages": [], "input": "a"}, "messages"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
    ("/v1/score", {"text_2": "a"}, "text_1"),
    ("/rerank", {"query": "a", "documents": [{"body": "b"}]}, "documents"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ("/rerank", {"query": "", "documents": ["b"]}, "query"),
    ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
async def test_refusals_name_the_field(app: Starlette, path: str, body: dict[str, Any], param: str) -> None:
    answer = await post(app, path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_unknown_fields_are_accepted_and_named(app: Starlette) -> None:
    answer = await post(app, "/v1/embeddings", {"input": "a", "user": "me", "frobnicate": 1})
    assert answer.status_code == 200
    assert set(answer.headers["x-ignored-fields"].split(", ")) == {"user", "frobnicate"}


async def test_a_long_text_is_truncated_to_its_last_tokens_on_request(
    app: Starlette, generator: VectorGenerator
) -> None:
    text = "Hello world " * 3000
    assert (await post(app, "/v1/embeddings", {"input": text})).status_code == 400
    for given, length in ((7, 7), (-1, 128)):
        answer = await post(app, "/v1/embeddings", {"input": text, "truncate_prompt_tokens": given})
        assert answer.status_code == 200, answer.text
        assert len(generator.submissions[-1].prompt) == length
    assert (await post(app, "/v1/embeddings", {"input": [5] * 128})).status_code == 200  # the whole context


async def test_dimensions_need_a_model_that_declares_them(make_text: Any) -> None:
    for dimensions, statuses in (((), (400, 400, 200)), ((2,), (400, 200, 200)), (None, (200, 200, 200))):
        app = front(make_text(dimensions=dimensions), VectorGenerator())
        answers = [await post(app, "/v1/embeddings", {"input": "a", "dimensions": n}) for n in (1, 2, WIDTH)]
        assert tuple(answer.status_code for answer in answers) == statuses


async def test_scores_are_cosines_of_embeddings(app: Starlette, generator: VectorGenerator) -> None:
    answer = (await post(app, "/v1/score", {"text_1": "Hello", "text_2": ["Hello", "a b c"]})).json()
    query, same, other = (unit(vector(each.prompt)) for each in generator.submissions)
    assert query == same
    scores = [each["score"] for each in answer["data"]]
    assert scores == pytest.approx([1.0, sum(a * b for a, b in zip(query, other, strict=True))])
    assert answer["object"] == "list" and answer["data"][1]["object"] == "score"
    pairs = {"text_1": ["Hello", "a b c"], "text_2": ["a b c", "a b c"]}
    answer = (await post(app, "/score", pairs)).json()
    assert [each["score"] for each in answer["data"]] == pytest.approx([scores[1], 1.0])


async def test_rankings_in_the_form_of_jina_and_cohere(app: Starlette) -> None:
    documents = ["a b c", {"text": "Hello"}, "Hello a"]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = (await post(app, path, {"query": "Hello", "documents": documents, "top_n": 2})).json()
        best, second = answer["results"]
        assert (best["index"], best["document"]) == (1, {"text": "Hello"})
        assert best["relevance_score"] == pytest.approx(1.0) and second["relevance_score"] <= 1.0
        assert answer["usage"]["total_tokens"] > 0 and answer["id"].startswith("rerank-")
    plain = {"query": "Hello", "documents": documents, "return_documents": False}
    results = (await post(app, "/rerank", plain)).json()["results"]
    assert sorted(result["index"] for result in results) == [0, 1, 2]
    assert all("document" not in result for result in results)


async def test_a_classification_head_scores_both_texts_as_one_prompt(make_text: Any) -> None:
    generator, text = VectorGenerator(scores=True), make_text(labels=("relevant",))
    app = front(text, generator)
    body = {"text_1": "Hello", "text_2": [" world", " a b c"]}
    answer = (await post(app, "/v1/score", body)).json()
    raw = [len(each.prompt) / 10 - 1 for each in generator.submissions]
    assert [each.prompt for each in generator.submissions] == [
        tuple(text.encode("Hello world")),
        tuple(text.encode("Hello a b c")),
    ]
    assert [each["score"] for each in answer["data"]] == pytest.approx([1 / (1 + math.exp(-score)) for score in raw])
    answer = (await post(app, "/v1/score", body | {"use_activation": False})).json()
    assert [each["score"] for each in answer["data"]] == pytest.approx(raw)
    refused = await post(app, "/v1/embeddings", {"input": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "model_not_embedding")
    several = front(make_text(labels=("a", "b", "c")), generator)
    assert (await post(several, "/v1/score", body)).json()["error"]["code"] == "model_not_scoring"


async def test_a_classification_head_names_the_most_likely_label(make_text: Any, app: Starlette) -> None:
    text = make_text(labels=("red", "green", "blue", "grey"))
    generator = VectorGenerator()
    body = {"input": [[3, 4], [3, 4, 5, 6, 7, 8, 9, 10, 11]]}
    answer = (await post(front(text, generator), "/classify", body)).json()
    for each, submission in zip(answer["data"], generator.submissions, strict=True):
        scores = vector(submission.prompt)
        weights = [math.exp(score) for score in scores]
        assert each["probs"] == pytest.approx([weight / sum(weights) for weight in weights])
        assert each["label"] == text.pooling.labels[scores.index(max(scores))] and each["num_classes"] == 4
    raw = (await post(front(text, generator), "/classify", body | {"use_activation": False})).json()
    assert raw["data"][0]["probs"] == vector((3, 4))
    refused = await post(app, "/classify", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "model_not_classifying")
    async with served(generator, text) as client:
        inputs = [serving_pb2.EmbedInput(token_ids=types_pb2.TokenIds(ids=[3, 4]))]
        over_grpc = await client.stub.Classify(serving_pb2.ClassifyRequest(inputs=inputs), timeout=30)
        (made,) = over_grpc.classifications
        assert made.label == answer["data"][0]["label"]
        assert list(made.probs) == pytest.approx(answer["data"][0]["probs"], abs=1e-6)


async def test_generation_is_refused_by_name_if_the_model_only_pools(make_text: Any) -> None:
    app, generator = front(make_text(generates=False), fake := VectorGenerator()), fake
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", chat),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", chat | {"max_tokens": 3}),
    ):
        answer = await post(app, path, body)
        assert answer.status_code == 400 and "does not generate" in answer.text, answer.text
    assert not generator.submissions
    assert (await post(app, "/v1/embeddings", {"input": "a"})).status_code == 200


@pytest.fixture
async def grpc_client(make_text: Any, generator: VectorGenerator) -> AsyncIterator[Any]:
    async with served(generator, make_text(dimensions=None)) as client:
        yield client


async def test_grpc_embeds_and_scores(grpc_client: Any, generator: VectorGenerator) -> None:
    ids = types_pb2.TokenIds(ids=[1, 2, 3])
    inputs = [serving_pb2.EmbedInput(text="Hello"), serving_pb2.EmbedInput(token_ids=ids)]
    answer = await grpc_client.stub.Embed(serving_pb2.EmbedRequest(request_id="mine", inputs=inputs), timeout=30)
    expected = [unit(vector(each.prompt)) for each in generator.submissions]
    assert answer.request_id == "mine" and len(answer.embeddings) == 2
    for embedding, values in zip(answer.embeddings, expected, strict=True):
        assert list(embedding.values) == pytest.approx(values, abs=1e-6)
    assert answer.prompt_tokens == sum(len(each.prompt) for each in generator.submissions)
    request = serving_pb2.ScoreRequest(firsts=["Hello"], seconds=["Hello", "a b c"])
    scores = list((await grpc_client.stub.Score(request, timeout=30)).scores)
    assert scores[0] == pytest.approx(1.0) and len(scores) == 2
    for request in (
        serving_pb2.EmbedRequest(),
        serving_pb2.EmbedRequest(inputs=inputs, dimensions=9),
        serving_pb2.EmbedRequest(inputs=inputs, model="other"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await grpc_client.stub.Embed(request, timeout=30)
        assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


# What a model directory is served for.


def model_dir(path: Path, arch: Arch = "qwen3", modules: list[str] | None = None, **options: Any) -> Path:
    path.mkdir()
    extra = options.pop("config", {})
    (path / "config.json").write_text(json.dumps(make_config(arch, Shape(**options)) | extra))
    if modules is not None:
        types = [
            {"idx": i, "path": f"{i}_{n}", "type": f"sentence_transformers.models.{n}"} for i, n in enumerate(modules)
        ]
        (path / "modules.json").write_text(json.dumps(types))
        (path / "1_Pooling").mkdir()
    return path


def pools_by(path: Path, **modes: Any) -> Path:
    (path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    return path


def test_a_generative_model_also_embeds(tmp_path: Path) -> None:
    served_for = read_pooling(model_dir(tmp_path / "m"))
    assert served_for == PoolingModel(hidden_size=64)
    assert served_for.generates and served_for.pooling == "last" and served_for.normalize
    assert not read_pooling(tmp_path / "m", runner="pooling").generates


def test_a_model_without_an_lm_head_does_not_generate(tmp_path: Path) -> None:
    assert not read_pooling(model_dir(tmp_path / "m", head="none")).generates
    scores = read_pooling(model_dir(tmp_path / "s", head="score", num_labels=3))
    assert (scores.generates, scores.labels) == (False, ("LABEL_0", "LABEL_1", "LABEL_2"))
    named = {"id2label": {"0": "no", "1": "yes"}}
    assert read_pooling(model_dir(tmp_path / "n", head="score", num_labels=2, config=named)).labels == ("no", "yes")
    with pytest.raises(StartupError, match="no LM head"):
        read_pooling(tmp_path / "m", runner="generate")
    with pytest.raises(StartupError, match="--pooling mean"):
        read_pooling(tmp_path / "s", pooling="mean")


def test_sentence_transformers_files_decide_pooling_and_normalisation(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "m", modules=["Transformer", "Pooling"])
    pools_by(path, pooling_mode_mean_tokens=True, pooling_mode_lasttoken=False, include_prompt=True)
    served_for = read_pooling(path)
    assert (served_for.generates, served_for.pooling, served_for.normalize) == (False, "mean", False)
    assert read_pooling(path, pooling="last", runner="generate").pooling == "last"
    assert read_pooling(path, runner="generate").generates
    path = model_dir(tmp_path / "n", modules=["Transformer", "Pooling", "Normalize"])
    assert read_pooling(pools_by(path, pooling_mode="lasttoken")).normalize


def test_what_sentence_transformers_adds_and_is_not_served_is_refused(tmp_path: Path) -> None:
    dense = model_dir(tmp_path / "d", modules=["Transformer", "Pooling", "Dense"])
    with pytest.raises(StartupError, match="Dense"):
        read_pooling(pools_by(dense, pooling_mode_mean_tokens=True))
    path = model_dir(tmp_path / "m", modules=["Transformer", "Pooling"])
    for modes in (
        {"pooling_mode_cls_token": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
        {},
    ):
        with pytest.raises(StartupError, match="pooling"):
            read_pooling(pools_by(path, **modes))
        assert read_pooling(path, pooling="mean").pooling == "mean"
    (path / "modules.json").write_text("[")
    with pytest.raises(StartupError, match=r"modules\.json"):
        read_pooling(path)


def test_matryoshka_dimensions_are_declared_or_allowed_by_an_option(tmp_path: Path) -> None:
    for number, (config, dimensions) in enumerate(
        [({}, ()), ({"is_matryoshka": True}, None), ({"matryoshka_dimensions": [8, 16]}, (8, 16))]
    ):
        path = model_dir(tmp_path / str(number), config=config)
        assert read_pooling(path).dimensions == dimensions
        assert read_pooling(path, matryoshka=True).dimensions is None


def test_a_checkpoint_is_read_through_the_text_model(tmp_path: Path) -> None:
    model = TextModel.load(make_checkpoint(tmp_path / "m", "qwen3", head="none"), pooling="mean")
    try:
        assert (model.pooling.generates, model.pooling.pooling) == (False, "mean")
    finally:
        model.close()

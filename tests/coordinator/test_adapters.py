"""LoRA adapters at the coordinator: read from a directory, loaded at all workers, chosen as the model on every API."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.core.commands import AdapterFailure, AdapterSource, AdapterStates, Prefill, SetAdapters
from baton.core.errors import InvalidRequest, NotFound, StartupError, Unavailable
from baton.models.adapter_config import WEIGHTS_FILE
from baton.models.model_config import parse_model_config
from coordinator.adapters import add_adapters, read_adapter
from coordinator.cluster import Cluster
from coordinator.http.app import HttpSettings, create_app
from coordinator.pipeline import Pipeline
from coordinator.policy.adapters import Adapter
from coordinator.policy.joining import OwnModel
from coordinator.submission import Delta, Timeline, Usage
from coordinator.text.model import TextModel
from coordinator.text.stream import Vocabulary
from tests.support.adapters import make_adapter
from tests.support.checkpoints import Shape, make_checkpoint, make_config
from tests.support.fake_generator import FakeGenerator
from tests.support.fake_workers import FakeWorker, bench
from tests.support.grpc_kit import Client
from tests.support.nodes import until
from tests.support.tokenizers_kit import byte_level

CONFIG = parse_model_config(make_config("llama", Shape()))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("adapters") / "m", "llama")


def adapter(name: str, digest: str = "x") -> Adapter:
    return Adapter(name, AdapterSource(digest, f"/adapters/{name}"), 1)


def test_an_adapter_is_known_by_its_bytes_not_by_its_path(model_dir: Path, tmp_path: Path) -> None:
    same = [read_adapter("a", str(make_adapter(tmp_path / n, model_dir)), CONFIG, 64) for n in ("one", "two")]
    other = read_adapter("a", str(make_adapter(tmp_path / "three", model_dir, seed=1)), CONFIG, 64)
    assert same[0].source.digest == same[1].source.digest != other.source.digest
    assert same[1].source.path == str(tmp_path / "two")


def test_a_directory_that_is_no_fitting_adapter_is_refused_in_one_line(model_dir: Path, tmp_path: Path) -> None:
    def refusal(path: Path, max_rank: int = 64) -> str:
        with pytest.raises(InvalidRequest) as caught:
            read_adapter("a", str(path), CONFIG, max_rank)
        assert "\n" not in caught.value.message and caught.value.param == "lora_path"
        return caught.value.message

    path = make_adapter(tmp_path / "a", model_dir)
    assert "--max-lora-rank allows 1 to 3" in refusal(path, 3)
    other = make_adapter(tmp_path / "b", make_checkpoint(tmp_path / "m", "llama", hidden_size=128))
    assert "lora_A.weight has shape [4, 128], expected [4, 64]" in refusal(other)
    (path / WEIGHTS_FILE).write_bytes(b"\0" * 20)
    assert f"{WEIGHTS_FILE}: damaged safetensors file" in refusal(path)
    (path / WEIGHTS_FILE).rename(path / "adapter_model.bin")
    assert "only adapter_model.safetensors is read" in refusal(path)
    assert "no such directory" in refusal(tmp_path / "c")
    (path / WEIGHTS_FILE).symlink_to("/dev/zero")
    assert "not a regular file" in refusal(path)
    (path / WEIGHTS_FILE).unlink()
    (path / WEIGHTS_FILE).touch()
    for size in (9 << 30, 20 << 20):  # the second: more than the tensors of this model can have
        os.truncate(path / WEIGHTS_FILE, size)  # takes no room on the disk
        assert f"{size} bytes, more than" in refusal(path)
    (tmp_path / "loop").symlink_to("loop")
    for nowhere in (tmp_path / "loop", tmp_path / ("a" * 300)):
        assert "no such directory" in refusal(nowhere)
    assert "~no-such-user/x: ~no-such-user is no user with a home directory here" in refusal(Path("~no-such-user/x"))


def test_adapters_of_the_command_line(model_dir: Path, tmp_path: Path) -> None:
    cluster = Cluster(3.0, 10, 1000)
    a, b = (make_adapter(tmp_path / name, model_dir, seed=number) for number, name in enumerate("ab"))
    add_adapters(cluster, f"a={a} b={b}", CONFIG)
    assert [each.name for each in cluster.adapters] == ["a", "b"]
    for option, message in ((f"a={a}", "--lora a: .* already been loaded"), ("c", "--lora 'c' is not NAME=DIR")):
        with pytest.raises(StartupError, match=message):
            add_adapters(cluster, option, CONFIG)


def report(worker: FakeWorker, *loaded: str, **failed: str) -> None:
    failures = tuple(AdapterFailure(digest, reason) for digest, reason in failed.items())
    worker.session.post_adapters(AdapterStates(loaded, failures))


def required(worker: FakeWorker) -> list[str]:
    """The digests of the last set that it was sent."""
    commands = worker.all(SetAdapters)
    return [source.digest for source in commands[-1].adapters] if commands else []


async def loading(b: Any, name: str, digest: str = "x", *, replace: bool = False) -> asyncio.Task[None]:
    """Begins to load an adapter; returns when all workers are to load it."""
    task = asyncio.create_task(b.cluster.load_adapter(adapter(name, digest), replace=replace))
    await until(lambda: all(digest in required(worker) for worker in b.workers), what=f"{digest} at the workers")
    return task


async def load(b: Any) -> None:
    """Loads adapter `a`, of digest `x`, at both workers."""
    task = await loading(b, "a")
    for worker in b.workers:
        report(worker, "x")
    await asyncio.wait_for(task, 10)


async def test_an_adapter_is_loaded_when_every_worker_of_both_tiers_has_it() -> None:
    async with bench("p0", "d0") as b:
        p, d = b.workers
        task = await loading(b, "a")
        report(p, "x")
        with pytest.raises(NotFound):
            b.pipeline.adapters.chosen("a", "m")
        report(d, "x")
        await asyncio.wait_for(task, 10)
        assert b.pipeline.adapters.chosen("a", "m") == "x"
        late = await b.add("d1")
        assert (await late.received(SetAdapters)).adapters == (adapter("a").source,)


async def test_what_one_worker_cannot_load_no_worker_keeps() -> None:
    async with bench("p0", "d0") as b:
        p, d = b.workers
        task = await loading(b, "a")
        report(p, "x")
        report(d, x="tensor T has shape [1]")
        with pytest.raises(InvalidRequest, match=r"d0: tensor T has shape \[1\]"):
            await asyncio.wait_for(task, 10)
        await until(lambda: required(p) == required(d) == [], what="the workers to drop it")
        assert not list(b.pipeline.adapters)


async def test_without_workers_no_adapter_is_loaded() -> None:
    async with bench("p0") as b:
        with pytest.raises(Unavailable, match="no decode worker is ready"):
            await b.cluster.load_adapter(adapter("a"))


async def test_a_model_that_only_pools_loads_adapters_without_decode_workers(model_dir: Path, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a", model_dir)
    async with bench("p0") as b:
        b.cluster.own_model = OwnModel(str(model_dir), "", CONFIG)
        pipeline = Pipeline(b.cluster, Vocabulary(byte_level()), generates=False)
        task = asyncio.create_task(pipeline.load_adapter("a", str(path), replace=False))
        await until(lambda: task.done() or required(b.workers[0]), what="the worker to load it")
        report(b.workers[0], *required(b.workers[0]))
        await asyncio.wait_for(task, 10)
        assert [each.name for each in pipeline.adapters] == ["a"]


async def test_running_requests_finish_with_an_adapter_that_is_unloaded() -> None:
    """Its name is free at once; the workers keep it until the last request has ended."""
    async with bench("p0", "d0") as b:
        p, d = b.workers
        await load(b)
        reader = b.submit(adapter="x")
        request = (await p.received(Prefill)).request
        assert request.adapter == "x"
        b.cluster.unload_adapter("a")
        task = await loading(b, "a", "y")
        report(p, "x", "y")
        report(d, "x", "y")
        await asyncio.wait_for(task, 10)
        assert required(p) == ["x", "y"] and b.pipeline.adapters.chosen("a", "m") == "y"
        p.report(request.sequence_id, 0, 5)
        p.hand_over(request.sequence_id, "d0")
        d.report(request.sequence_id, 0, 5, 6, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]
        await until(lambda: required(p) == required(d) == ["y"], what="the workers to drop the first one")


async def test_a_worker_that_was_away_learns_that_an_adapter_was_unloaded() -> None:
    async with bench("p0", "d0") as b:
        p, d = b.workers
        await load(b)
        b.cluster.unload_adapter("a")
        await until(lambda: required(p) == required(d) == [], what="the workers to drop it")
        again = await b.add("p0", incarnation=2)
        await until(lambda: bool(again.all(SetAdapters)), what="the set of adapters")
        assert required(again) == []


async def test_a_request_waits_for_a_restarted_worker_to_load_its_adapter() -> None:
    async with bench("p0", "d0") as b:
        await load(b)
        again = await b.add("p0", incarnation=2)
        readers = b.submit(adapter="x"), b.submit("plain")
        assert (await again.received(Prefill)).request.request_id == "plain"
        report(again, "x")
        assert (await again.received(Prefill, 2)).request.adapter == "x"
        for reader in readers:
            reader.task.cancel()


CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
]


@pytest.mark.parametrize(("path", "body"), CHOICES)
async def test_the_model_of_a_request_chooses_the_adapter(
    client: httpx.AsyncClient, generator: FakeGenerator, path: str, body: dict[str, Any]
) -> None:
    if path == "/v1/embeddings":
        pooled = b"\0\0\x80?" * 2
        generator.script = [Delta("", finish_reason="stop", usage=Usage(3, 0), timeline=Timeline(), pooled=pooled)]
    generator.adapters.load(adapter("gpt-a"))
    generator.adapters.loaded(adapter("gpt-a"))
    for model, digest in (("gpt-a", "x"), ("tiny", "")):
        response = await client.post(path, json={"model": model, **body})
        assert response.status_code == 200 and response.json()["model"] == model
        assert generator.submissions[-1].adapter == digest
    assert (await client.post(path, json={"model": "b", **body})).status_code == 404


async def test_the_model_of_an_inference_request_chooses_the_adapter(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.adapters.load(adapter("a"))
    generator.adapters.loaded(adapter("a"))
    for path in ("/v2/models/a/generate", "/v2/models/a/infer"):
        infer = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}]}
        response = await client.post(path, json=infer if path.endswith("infer") else {"text_input": "hi"})
        assert response.status_code == 200 and response.json()["model_name"] == "a"
        assert generator.submissions[-1].adapter == "x"
    assert (await client.get("/v2/models/a")).json()["name"] == "a"
    assert [each["name"] for each in (await client.post("/v2/repository/index")).json()] == ["tiny", "a"]
    assert (await client.post("/v2/models/b/generate", json={"text_input": "hi"})).status_code == 404


async def test_adapters_are_listed_with_their_parent_and_root(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.adapters.load(adapter("a"))
    generator.adapters.loaded(adapter("a"))
    base, own = (await client.get("/v1/models")).json()["data"]
    assert (base["id"], base["parent"], base["root"]) == ("tiny", None, "tiny")
    assert (own["id"], own["parent"], own["root"], own["created"]) == ("a", "tiny", "/adapters/a", 1)
    assert (await client.get("/v1/models/a")).json() == own
    headers = {"anthropic-version": "2023-06-01"}
    page = (await client.get("/v1/models", headers=headers)).json()
    assert [model["id"] for model in page["data"]] == ["tiny", "a"] == [page["first_id"], page["last_id"]]
    page = (await client.get("/v1/models?after_id=tiny", headers=headers)).json()
    assert [model["id"] for model in page["data"]] == ["a"]


async def test_adapters_are_loaded_and_unloaded_only_if_that_is_permitted(
    client: httpx.AsyncClient, generator: FakeGenerator, text_model: TextModel
) -> None:
    loads: list[tuple[str, str, bool]] = []

    async def load(name: str, path: str, *, replace: bool) -> None:
        if path == "/bad":
            raise InvalidRequest("d0: tensor T is missing", param="lora_path")
        loads.append((name, path, replace))

    generator.load_adapter = load  # type: ignore[attr-defined]
    generator.unload_adapter = generator.adapters.unload  # type: ignore[attr-defined]
    body = {"lora_name": "a", "lora_path": "/a"}
    refused = await client.post("/v1/load_lora_adapter", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "not_enabled" and not loads
    app = create_app(generator, text_model, HttpSettings("tiny", allow_lora_updating=True))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as operator:
        done = await operator.post("/v1/load_lora_adapter", json=body)
        assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'a' added successfully.")
        assert loads == [("a", "/a", False)]
        bad = await operator.post("/v1/load_lora_adapter", json=body | {"lora_path": "/bad"})
        assert bad.status_code == 400 and bad.json()["error"]["message"] == "d0: tensor T is missing"
        empty = await operator.post("/v1/load_lora_adapter", json=body | {"lora_path": ""})
        assert empty.status_code == 400 and "lora_path" in empty.json()["error"]["message"]
        missing = await operator.post("/v1/unload_lora_adapter", json={"lora_name": "b"})
        assert missing.status_code == 404 and "'b' cannot be found" in missing.json()["error"]["message"]
        generator.adapters.load(adapter("a"))
        generator.adapters.loaded(adapter("a"))
        done = await operator.post("/v1/unload_lora_adapter", json={"lora_name": "a", "lora_int_id": 1})
        assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'a' removed successfully.")


async def test_the_model_of_a_grpc_request_chooses_the_adapter(grpc_client: Client, generator: FakeGenerator) -> None:
    generator.adapters.load(adapter("a"))
    generator.adapters.loaded(adapter("a"))
    messages = await grpc_client.all(model="a")
    assert messages[0].started.model == "a" and generator.submissions[-1].adapter == "x"
    code, *_ = await grpc_client.refused(model="b")
    assert code.name == "NOT_FOUND"

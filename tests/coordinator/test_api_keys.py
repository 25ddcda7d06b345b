"""If API keys are required, both fronts accept requests that present one, and no others."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.routing import Route

from baton.core.errors import StartupError, Unauthenticated
from baton.v1 import serving_pb2, serving_pb2_grpc
from coordinator.api_keys import ApiKeys, is_short, read_api_keys
from coordinator.http.app import HttpSettings, create_app
from coordinator.http.guard import OPEN_PATHS
from coordinator.policy.quotas import ANONYMOUS, Client, KeyLimits
from coordinator.text.model import TextModel
from tests.support.fake_generator import FakeGenerator
from tests.support.front_kit import RawClient, running
from tests.support.grpc_kit import served
from tests.support.requests_kit import CHAT, COMPLETIONS, GOOD

KEY, OTHER = "sk-of-the-first-user", "sk-of-the-second-user"


def key_file(directory: Path, text: str, mode: int = 0o600) -> str:
    path = directory / "keys"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    digest = hashlib.sha256(OTHER.encode()).hexdigest()
    return read_api_keys(key_file(tmp_path, f"# users\n{KEY}\n\n  sha256:{digest}  \n"))


@pytest.fixture
async def guarded(text_model: TextModel, keys: ApiKeys) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(FakeGenerator(), text_model, HttpSettings("tiny", api_keys=keys))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        yield client


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_a_valid_key_is_accepted(keys: ApiKeys, key: str) -> None:
    assert keys.client(f"Bearer {key}") == keys.client(f"bearer  {key} ")


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ("", "missing_api_key"),
        ("Bearer", "missing_api_key"),
        ("Bearer ", "missing_api_key"),
        (f"Basic {KEY}", "missing_api_key"),
        (KEY, "missing_api_key"),
        (f"Bearer {KEY}x", "invalid_api_key"),
        (f"Bearer {KEY[:-1]}", "invalid_api_key"),
        ("Bearer ü", "invalid_api_key"),
        (f"Bearer sha256:{hashlib.sha256(OTHER.encode()).hexdigest()}", "invalid_api_key"),
    ],
)
def test_a_missing_or_invalid_key_is_refused(keys: ApiKeys, sent: str, code: str) -> None:
    with pytest.raises(Unauthenticated) as refused:
        keys.client(sent)
    assert refused.value.code == code
    assert KEY not in refused.value.message


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        ("", 0o600, "holds no key"),
        ("# nothing\n", 0o600, "holds no key"),
        (f"{KEY}\nshort\n", 0o600, "line 2: must be a key"),
        ("sha256:12\n", 0o600, "line 1: must be a key"),
        ("two words in one line\n", 0o600, "line 1: must be a key"),
        (f'{{"keys":["{KEY}"]}}\n', 0o600, "line 1: must be a key"),
        (f'{KEY}\n"{OTHER}",\n', 0o600, "line 2: must be a key"),
        (f"tenant=acme-{KEY}\n", 0o600, "line 1: must be a key"),
        (f"{KEY}\n", 0o644, "chmod 600"),
        ("schlüssel-mit-umlaut\n", 0o600, "keys must be ASCII"),
    ],
)
def test_an_invalid_key_file_is_refused_with_the_reason(tmp_path: Path, text: str, mode: int, expected: str) -> None:
    with pytest.raises(StartupError, match=expected) as refused:
        read_api_keys(key_file(tmp_path, text, mode))
    assert refused.value.message.startswith("--api-key-file ") and "short" not in refused.value.message


def test_only_named_tenants_have_metrics_of_their_own_and_not_too_many(tmp_path: Path) -> None:
    keys = [f"{KEY}-a name=search", f"{KEY}-b tenant=acme", f"{KEY}-c tenant=acme name=x", f"{KEY}-d"]
    assert read_api_keys(key_file(tmp_path, "\n".join(keys)), KEY).labelled_tenants() == ["search", "acme"]
    many = "\n".join(f"{KEY}-{number} name=n{number}" for number in range(300))
    (tmp_path / "keys").unlink()
    assert read_api_keys(key_file(tmp_path, many)).labelled_tenants() == [f"n{number}" for number in range(100)]
    assert ApiKeys().labelled_tenants() == []


def test_a_missing_key_file_is_refused_and_without_the_option_no_key_is_needed(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        read_api_keys(str(tmp_path / "none"))
    assert not read_api_keys("")
    assert read_api_keys("").client("") is ANONYMOUS


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
async def test_http_endpoints_require_a_key(guarded: httpx.AsyncClient, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer wrong-key-of-somebody"}):
        answer = await guarded.post(path, json=GOOD[path], headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["type"] == "invalid_request_error"
    assert (await guarded.post(path, json=GOOD[path], headers={"authorization": f"Bearer {KEY}"})).status_code == 200
    twice = [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")]
    assert (await guarded.post(path, json=GOOD[path], headers=twice)).status_code == 401


async def test_only_probes_need_no_key(guarded: httpx.AsyncClient) -> None:
    for path in ("/", "/live", "/health", "/ready"):
        assert (await guarded.get(path)).status_code == 200
    rest = ("/metrics", "/version", "/workers", "/requests", "/requests/x", "/v1/models", "/v1/models/tiny")
    tricks = ("/openapi.json", "/nowhere", "/;//health", "/HEALTH", "/health/", "/%68ealth/x", "/live%2f..%2fworkers")
    for path in (*rest, *tricks):
        assert (await guarded.get(path)).status_code == 401, path


def tricks(method: str, path: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Returns request lines, Host headers and further headers that have bypassed a check of keys in some server."""
    target = re.sub(r"{[^}]*}", "x", path)
    plain: list[tuple[str, str]] = [
        (target, "t"), (target, "evil/health?x="), (target, "t/live"), (target, "t."), (f"/{target}", "t"),
        (target.replace("/", "%2f"), "t"), (f"/%2e{target}", "t"), (target.upper(), "t"), (f"{target}/", "t"),
        (f"http://t/live{target}", "t"), (f"http://t{target}", "t"), (f"/live/..{target}", "t"),
        (f"/health%2f..{target}", "t"), (f"{target}?path=/health", "t"), (f"{target};/health", "t"),
        (f"{target}%00/health", "t"), (f"{target}#/health", "t"),
    ]  # fmt: skip
    lines = [(f"{method} {line} HTTP/1.1", host, ()) for line, host in plain]
    forwarded = ("X-Original-URL: /health", "X-Rewrite-URL: /health", "X-Forwarded-Prefix: /health")
    return [*lines, (f"{method} {target} HTTP/1.1", "t", forwarded), (f"{method} {target} HTTP/1.0", "t", ())]


async def test_the_key_check_cannot_be_bypassed_on_any_route(text_model: TextModel, keys: ApiKeys) -> None:
    """Every route is tried over a socket, since some tricks depend on the exact bytes."""
    generator = FakeGenerator()
    app = create_app(generator, text_model, HttpSettings("tiny", api_keys=keys, batches_address="127.0.0.1:1"))
    routes = {(min(route.methods), route.path) for route in app.routes if isinstance(route, Route)}
    shut = [route for route in sorted(routes) if route[1] not in OPEN_PATHS]
    assert len(shut) > 20 and ("DELETE", "/v1/files/{file_id}") in shut and ("GET", "/requests") in shut
    let_in = []
    async with running(app) as server:
        for method, path in shut:
            for line, host, headers in tricks(method, path):
                client = await RawClient.connect(server)
                head = "\r\n".join([line, f"Host: {host}", "Connection: close", *headers])
                await client.send(head.encode() + b"\r\n\r\n")
                status, _, _ = await client.answer()
                if status not in (400, 401):
                    let_in.append((line, host, status))
                await client.close()
    assert let_in == [] and generator.submissions == []


def test_every_key_is_compared_whole_and_in_constant_time(keys: ApiKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is the same for any key, so it does not reveal how much of a key is right, or whose it is."""
    compared = []

    def compare_digest(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare_digest)
    assert keys.client(f"Bearer {KEY}") and keys.client(f"Bearer {OTHER}")
    with pytest.raises(Unauthenticated):
        keys.client("Bearer sk-of-nobody")
    assert compared == [(32, 32)] * 6


async def test_admin_routes_are_served_on_a_separate_port(text_model: TextModel) -> None:
    """The admin port serves the operators' routes, the API port the clients'; on both are only the probes and the
    description of the port's own routes."""
    both = {"/", "/live", "/health", "/ready", "/openapi.json"}
    paths = {}
    for routes in ("api", "admin", "all"):
        app = create_app(FakeGenerator(), text_model, HttpSettings("tiny", routes=routes))  # type: ignore[arg-type]
        paths[routes] = {route.path for route in app.routes if isinstance(route, Route)}
    assert paths["api"] & paths["admin"] == both
    assert paths["api"] | paths["admin"] == paths["all"]
    assert {"/workers", "/metrics", "/requests"} <= paths["admin"] and "/v1/completions" in paths["api"]


async def test_the_openai_client_raises_authentication_error_for_a_wrong_key(
    guarded: httpx.AsyncClient, text_model: TextModel
) -> None:
    answer = await guarded.post(COMPLETIONS, json=GOOD[COMPLETIONS], headers={"authorization": "Bearer x"})
    request = httpx.Request("POST", "http://baton")
    found = openai.OpenAI(api_key="x")._make_status_error(
        answer.text, body=answer.json(), response=httpx.Response(401, request=request)
    )
    assert isinstance(found, openai.AuthenticationError)


async def test_grpc_calls_require_a_key(text_model: TextModel, keys: ApiKeys) -> None:
    generator = FakeGenerator()
    async with (
        served(generator, text_model, keys) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{client.port}") as channel,
    ):
        stub = serving_pb2_grpc.ServingStub(channel)
        asked = serving_pb2.GenerateRequest(text="Hello")
        for sent in ((), (("authorization", "Bearer wrong-key-of-somebody"),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stub.Generate(asked, metadata=sent, timeout=10):
                    pass
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GetModelInfo(serving_pb2.GetModelInfoRequest(), metadata=sent, timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert not generator.submissions
        right = (("authorization", f"Bearer {OTHER}"),)
        assert [message async for message in stub.Generate(asked, metadata=right, timeout=10)]
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=10)).status


LIMITS = "requests_at_once=2 requests_per_minute=9 tokens_per_minute=1000 max_running=4"
LINES = f"""
{KEY} name=search tenant=acme priority=5 weight=3 {LIMITS}
{OTHER}
"""


def test_a_key_line_sets_name_tenant_priority_and_limits(tmp_path: Path) -> None:
    keys = read_api_keys(key_file(tmp_path, LINES))
    assert keys.client(f"Bearer {KEY}") == Client("search", "acme", 5, KeyLimits(2, 9, 1000, 4), 3)
    name = hashlib.sha256(OTHER.encode()).hexdigest()[:8]
    assert keys.client(f"Bearer {OTHER}") == Client(name, name)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("nmae=x", "unknown option 'nmae'; did you mean 'name'"),
        ("name=a name=b", "name is given twice"),
        ("name=a/b", "name must be 1 to 64 letters"),
        ("priority=x", "priority must be an integer from -100 to 100"),
        ("priority=101", "priority must be an integer"),
        ("weight=0", "weight must be an integer from 1 to 1000"),
        ("requests_at_once=0", "requests_at_once must be an integer from 1"),
        ("tokens_per_minute=1e3", "tokens_per_minute must be an integer"),
        (f"tokens_per_minute={'9' * 5000}", "tokens_per_minute must be an integer"),
        (f"name=a\n{OTHER} name=a", "another key already has the name 'a'"),
        (f"\n{KEY}", "duplicate key"),
    ],
)
def test_an_invalid_key_option_is_refused_with_its_line_number(tmp_path: Path, words: str, expected: str) -> None:
    with pytest.raises(StartupError, match=r"line [12]: ") as refused:
        read_api_keys(key_file(tmp_path, f"{KEY} {words}\n"))
    assert expected in refused.value.message and KEY not in refused.value.message


async def test_both_fronts_apply_the_tenant_and_priority_of_the_key(text_model: TextModel, tmp_path: Path) -> None:
    """A client may lower the priority of its key, but not raise it."""
    keys = read_api_keys(key_file(tmp_path, LINES))
    generator = FakeGenerator()
    app = create_app(generator, text_model, HttpSettings("tiny", api_keys=keys))
    bearer = f"Bearer {KEY}"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        for path, more in ((COMPLETIONS, {"priority": 7}), (CHAT, {"priority": -7}), (CHAT, {})):
            answer = await client.post(path, json=GOOD[path] | more, headers={"authorization": bearer})
            assert answer.status_code == 200
    async with served(generator, text_model, keys) as grpc_client:
        asked = serving_pb2.GenerateRequest(text="Hello", priority=6)
        async for _ in grpc_client.stub.Generate(asked, metadata=(("authorization", bearer),), timeout=10):
            pass
    assert [s.priority for s in generator.submissions] == [7, 5, 5, 6]
    assert {s.client.tenant for s in generator.submissions} == {"acme"}


async def test_tokenize_and_detokenize_count_against_the_quota(text_model: TextModel, tmp_path: Path) -> None:
    keys = read_api_keys(key_file(tmp_path, f"{KEY} requests_per_minute=3"))
    generator = FakeGenerator()
    app = create_app(generator, text_model, HttpSettings("tiny", api_keys=keys))
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://baton", headers=headers
    ) as client:
        paths = ("/tokenize", "/detokenize", "/tokenize", "/tokenize", "/detokenize")
        answers = [await client.post(path, json=GOOD[path]) for path in paths]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
        assert answers[-1].json()["error"]["code"] == "rate_limit_exceeded"
        count = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
        assert (await client.post("/v1/messages/count_tokens", json=count)).status_code == 429
    (account,) = generator.quotas._accounts.values()
    assert account.running == 0


def test_given_keys_are_valid_beside_those_of_the_file(tmp_path: Path) -> None:
    third, of_up = "k", tmp_path / "api.keys"
    of_up.write_text(f"sha256:{hashlib.sha256(b'from-up').hexdigest()}\n")
    of_up.chmod(0o600)
    digest = f"sha256:{hashlib.sha256(b'as-digest').hexdigest()}"
    keys = read_api_keys(key_file(tmp_path, f"{KEY} name=search tenant=acme"), f"{third} {KEY} {digest}", str(of_up))
    assert keys.client(f"Bearer {KEY}").tenant == "acme", "the options of the file hold"
    for key in (third, "as-digest", "from-up"):
        client = keys.client(f"Bearer {key}")
        assert client.tenant == client.key == hashlib.sha256(key.encode()).hexdigest()[:8]
    with pytest.raises(Unauthenticated):
        keys.client(f"Bearer {OTHER}")
    assert read_api_keys("", third).client(f"Bearer {third}") and not read_api_keys("", "")


@pytest.mark.parametrize("wrong", ["sha256:12", "schlüssel", "a\x07b"])
def test_an_invalid_given_key_is_refused_without_repeating_it(wrong: str) -> None:
    with pytest.raises(StartupError, match="--api-key: ") as refused:
        read_api_keys("", wrong)
    assert wrong not in refused.value.message


def test_short_keys_are_reported() -> None:
    assert is_short(f"{KEY} short") and not is_short(KEY) and not is_short("")

"""HTTP and public gRPC over TLS."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from starlette.applications import Starlette

from baton.core.errors import StartupError
from baton.v1 import serving_pb2, serving_pb2_grpc
from coordinator.front_tls import FrontTls, read_front_tls
from coordinator.grpc.service import PublicServer
from coordinator.http import server as http_server
from coordinator.text.model import TextModel
from coordinator.translate import Translator
from launch.certificates import make_certificates
from tests.support.fake_generator import FakeGenerator
from tests.support.front_kit import running
from tests.support.requests_kit import COMPLETIONS, GOOD


@pytest.fixture(scope="module")
def certificate_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    make_certificates(directory, ("localhost", "127.0.0.1"), 1)
    return directory


@pytest.fixture
def front(certificate_dir: Path) -> FrontTls:
    found = read_front_tls(str(certificate_dir / "server.pem"), str(certificate_dir / "server-key.pem"))
    assert found is not None
    return found


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1")
async def test_https_serves_trusting_clients_and_refuses_plain_http_and_old_tls(
    app: Starlette, front: FrontTls, certificate_dir: Path
) -> None:
    trusts = ssl.create_default_context(cafile=str(certificate_dir / "ca.pem"))
    async with running(app, tls=front.context) as server:
        url = f"https://127.0.0.1:{server.address[1]}"
        async with httpx.AsyncClient(verify=trusts) as client:
            assert (await client.post(url + COMPLETIONS, json=GOOD[COMPLETIONS])).status_code == 200
            streamed = await client.post(url + COMPLETIONS, json=GOOD[COMPLETIONS] | {"stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get(url + "/live")
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(url.replace("https", "http") + "/live")
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(certificate_dir / "ca.pem")
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(*server.address, ssl=old)


async def test_a_stalled_tls_handshake_times_out(
    app: Starlette, front: FrontTls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.2)
    async with running(app, tls=front.context) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        async with asyncio.timeout(30):
            assert await reader.read(100) == b""
        writer.close()


async def test_grpc_serves_tls_clients_and_refuses_plaintext(
    front: FrontTls, certificate_dir: Path, text_model: TextModel
) -> None:
    server = PublicServer(FakeGenerator(), Translator(text_model), "tiny", 1 << 16, None, front.credentials)
    port = await server.start("127.0.0.1", 0)
    trusted = grpc.ssl_channel_credentials((certificate_dir / "ca.pem").read_bytes())
    asked = serving_pb2.GenerateRequest(text="Hello")
    try:
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted) as channel:
            stub = serving_pb2_grpc.ServingStub(channel)
            assert [message async for message in stub.Generate(asked, timeout=10)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in serving_pb2_grpc.ServingStub(channel).Generate(asked, timeout=5):
                    pass
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(0)


def test_invalid_tls_files_are_refused_with_the_name_of_their_flag(certificate_dir: Path, tmp_path: Path) -> None:
    assert read_front_tls("", "") is None
    certificate, key = str(certificate_dir / "server.pem"), str(certificate_dir / "server-key.pem")
    with pytest.raises(StartupError, match="--tls-cert-file requires --tls-key-file"):
        read_front_tls(certificate, "")
    with pytest.raises(StartupError, match="--tls-key-file requires --tls-cert-file"):
        read_front_tls("", key)
    with pytest.raises(StartupError, match="do not match"):
        read_front_tls(certificate, str(certificate_dir / "decode-key.pem"))
    with pytest.raises(StartupError, match=r"--tls-cert-file .*No such file"):
        read_front_tls(str(tmp_path / "none"), key)
    with pytest.raises(StartupError, match=r"--tls-key-file .*not a PEM"):
        (tmp_path / "key").write_text("x")
        (tmp_path / "key").chmod(0o600)
        read_front_tls(certificate, str(tmp_path / "key"))
    make_certificates(tmp_path / "old", ("localhost",), 1, datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
    with pytest.raises(StartupError, match=r"--tls-cert-file .*expired on 2020-01-02"):
        read_front_tls(str(tmp_path / "old" / "server.pem"), str(tmp_path / "old" / "server-key.pem"))
    with pytest.raises(StartupError, match=r"--tls-cert-file /dev/zero: not a regular file"):
        read_front_tls("/dev/zero", key)

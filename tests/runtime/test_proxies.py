"""No channel of a cluster or of its operators goes through a proxy, whatever the variables of the environment say."""

from __future__ import annotations

import asyncio
import itertools
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from baton.core.commands import Welcome
from baton.core.errors import NotFound
from baton.core.handover import LinkHello
from baton.runtime.admin import drain_worker
from baton.runtime.streams import LinkLost, MessageStream, dial, dial_link
from baton.v1 import worker_pb2, worker_pb2_grpc
from coordinator.cluster import Cluster
from coordinator.control import serve_control
from launch.bench.client import ServerTarget, client_session
from launch.cluster_api import get_cluster
from tests.runtime.test_streams import HELLO, WELCOME, echo, serving
from tests.support.builders import make_join

PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
CLOSED = "http://127.0.0.1:9"
ROWS = [
    {name: CLOSED for name, given in zip(PROXIES, chosen, strict=True) if given} | no_proxy
    for chosen in itertools.product((False, True), repeat=4)
    for no_proxy in ({}, {"no_proxy": "example.com"}, {"no_proxy": "127.0.0.1,localhost"})
]


def set_proxies(patch: pytest.MonkeyPatch, row: dict[str, str]) -> None:
    for name in (*PROXIES, "no_proxy"):
        for spelled in (name, name.upper()):
            patch.delenv(spelled, raising=False)
            if name in row:
                patch.setenv(spelled, row[name])


async def test_control_link_and_drain_channels_use_no_proxy() -> None:
    cluster = Cluster(lease_s=3.0, max_queued_requests=1, max_queued_tokens=1)
    server, port = await serve_control(cluster, "127.0.0.1", 0)
    control = f"127.0.0.1:{port}"
    try:
        async with serving(echo) as link:
            for number, row in enumerate(ROWS):
                with pytest.MonkeyPatch.context() as patch:
                    set_proxies(patch, row)
                    channel, stream, welcome = await dial(
                        control,
                        lambda c: worker_pb2_grpc.WorkerControlStub(c).Session,
                        worker_pb2.SessionRequest,
                        make_join(f"d{number}", 1),  # another id: the session before may still be open
                        timeout_s=10.0,
                    )
                    assert isinstance(welcome, Welcome), row
                    stream.end("done")
                    await channel.close()
                    dialled = await dial_link(link, HELLO, 10.0)
                    assert dialled.welcome == WELCOME, row
                    await dialled.close()
                    with pytest.raises(NotFound):
                        await asyncio.to_thread(drain_worker, control, "nobody", 1.0, "", 10.0)
    finally:
        await server.stop(0)


class Workers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"workers": []}')

    def log_message(self, *_: object) -> None: ...


async def test_commands_over_http_use_no_proxy() -> None:
    with HTTPServer(("127.0.0.1", 0), Workers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            for row in ROWS:
                with pytest.MonkeyPatch.context() as patch:
                    set_proxies(patch, row)
                    assert (await asyncio.to_thread(get_cluster, url, 10.0)).workers == (), row
                    target, sent = ServerTarget(url, "m", "", 10.0, {}), SimpleNamespace(written_at=0.0)
                    async with client_session(target) as session:
                        answer = await session.get(f"{url}/workers", trace_request_ctx=sent)
                        assert answer.status == 200, row
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("address", "reason"), [("127.0.0.1:9", "refused"), ("nowhere.invalid:80", "resolving nowhere.invalid")]
)
async def test_a_failed_dial_names_the_address_and_the_reason(address: str, reason: str) -> None:
    with pytest.raises(LinkLost, match=rf"^dialled {address}: UNAVAILABLE: .*{reason}"):
        await dial_link(address, HELLO, 10.0)


async def test_a_peer_that_does_not_reply_is_named() -> None:
    async def silent(stream: MessageStream, hello: LinkHello) -> None:
        await asyncio.sleep(10)

    async with serving(silent) as address:
        with pytest.raises(LinkLost, match=rf"^dialled {address}: connected, but received no reply within 0.5 s$"):
            await dial_link(address, HELLO, 0.5)

"""A cluster under attack, observed from inside: no request makes it unpickle, execute, open or dial anything, and it
listens only where it should. Rows S-2 to S-5 and S-18 of docs/security.md."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest

from baton.runtime.frames import VERSION
from tests.support import audit
from tests.support.cluster import Cluster, cluster, command_line
from tests.support.processes import LISTENS, Socket, sockets

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
SERVING = ("/baton.v1.Serving/Generate",)
INFO = ("/baton.v1.Serving/GetModelInfo",)  # its request has no fields, so calls succeed
CONTROL = ("/baton.v1.WorkerControl/Session", "/baton.v1.WorkerControl/DrainWorker")
LINK = ("/baton.v1.KVLink/Link",)
OPEN = ("01", "02")  # established, SYN sent
# Pickles that the coordinator's pools exchange with their own child processes, over pipes private to them.
OWN_PICKLES = (
    "('concurrent.futures.", "('multiprocessing.", "('coordinator.", "('baton.core.", "('queue'", "('_queue'",
    "('logging'",
)  # fmt: skip
FABRIC = (
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "remote_host",
    "remote_block_ids",
    "do_remote_prefill",
)
NAMES = (
    "../../canary",
    "/etc/canary",
    "file:///canary",
    "http://127.0.0.1:9/canary",
    "canary\0x",
    "~/canary",
    "C:\\canary",
)


def bomb(marker: Path) -> bytes:
    """A pickle that creates a file when it is loaded."""
    return f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()


def listeners(pids: list[int]) -> set[tuple[int, str, int]]:
    """(pid, address, port)"""
    return {(s.pid, s.address, s.port) for s in sockets(pids) if s.state == LISTENS}


@contextlib.contextmanager
def dialled(pids: list[int], ports: set[int]) -> Iterator[set[Socket]]:
    """Collects, 20 times a second, the connections of these processes that do not end at one of `ports`."""
    found, ended = set[Socket](), threading.Event()

    def look() -> None:
        while not ended.wait(0.05):
            found.update(s for s in sockets(pids) if s.state in OPEN and not {s.port, s.remote_port} & ports)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield found
    finally:
        ended.set()
        looking.join()


def encodings(payload: bytes) -> list[bytes]:
    """The payload as bare bytes, behind a length, as an HTTP body, and as a frame of the channel between ranks."""
    packed = b"\xc6" + struct.pack(">I", len(payload)) + payload  # msgpack: bytes
    frame = bytes([VERSION, 1]) + b"\x91" + packed
    head = f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: {{}}\r\nContent-Length: {len(payload)}\r\n\r\n"
    return [
        payload,
        struct.pack("<I", len(payload)) + payload,
        struct.pack(">I", len(payload)) + payload,
        struct.pack("<I", len(frame)) + frame,
        struct.pack(">I", len(frame)) + frame,
        *(head.format(kind).encode() + payload for kind in ("application/json", "application/octet-stream")),
    ]


def send_raw(port: int, data: bytes) -> None:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5.0) as thrown:
        thrown.settimeout(0.3)
        thrown.sendall(data)
        while thrown.recv(65536):
            pass


async def send_raw_grpc(port: int, methods: Sequence[str], payload: bytes) -> int:
    """Sends the bare bytes, and the payload as each of 15 fields, to every method; returns how many calls succeeded."""
    assert len(payload) < 128, "a length of one byte"
    messages = [payload, *(bytes([number << 3 | 2, len(payload)]) + payload for number in range(1, 16))]

    async def call(method: str, message: bytes) -> bool:
        answer = channel.stream_stream(method)(iter([message]), timeout=2.0)
        try:
            async for _ in answer:
                break
        except grpc.RpcError as refused:
            assert refused.code() is not grpc.StatusCode.UNIMPLEMENTED, method
            return False
        answer.cancel()
        return True

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        return sum(await asyncio.gather(*(call(method, message) for method in methods for message in messages)))


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def ask(running: Cluster, **fields: object) -> httpx.Response:
    body = {"prompt": "def f(x):", "max_tokens": 8, "temperature": 0, **fields}
    return httpx.post(running.url + "/v1/completions", json=body, timeout=60.0)


def attack(running: Cluster, payload: bytes, link: int) -> None:
    ports = {SERVING: port_of(running.grpc), CONTROL: port_of(running.control), LINK: link}
    answered = {methods: asyncio.run(send_raw_grpc(port, methods, payload)) for methods, port in ports.items()}
    assert answered == {SERVING: 1, CONTROL: 0, LINK: 0}, "one field of Generate is a text to go on with"
    asyncio.run(send_raw_grpc(port_of(running.grpc), INFO, payload))
    for name in FABRIC:
        for value in ("127.0.0.1:9", {"remote_host": "127.0.0.1", "remote_port": 9}, [1]):
            answer = ask(running, **{name: value})
            assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, name)
    for name in NAMES:
        assert ask(running, model=name).status_code in (400, 404)
        asked = httpx.get(f"{running.url}/v1/models/{name.replace(chr(0), '%00')}", timeout=10.0)
        assert asked.status_code in (400, 404)


def test_requests_cannot_make_the_cluster_unpickle_execute_open_or_dial_anything(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    payload = bomb(marker)
    with cluster("builtin", draft="none", env=audit.environment(tmp_path / "audit"), admin_port=0) as running:
        first = ask(running)
        assert first.status_code == 200 and ask(running, structured_outputs={"regex": "[a-z]+"}).status_code == 200
        serving = set(running.processes()) - {running.process.pid}
        since = time.time()

        pids = sorted(serving | {running.process.pid})
        found = listeners(pids)
        assert {address for _, address, _ in found} <= {"127.0.0.1", "::1"}, found
        front = {port_of(url) for url in (running.url, running.grpc, running.control)}
        assert {port for pid, _, port in found if pid == running.coordinator_pid()} == front
        workers = running.workers()
        (link,) = (port_of(str(row["address"])) for row in workers.values() if row["role"] == "decode")
        ports = {port for _, _, port in found}
        assert link in ports and len(ports) >= 4

        with dialled(pids, ports) as elsewhere, ThreadPoolExecutor(8) as throwers:
            for port in ports:
                list(throwers.map(send_raw, [port] * 7, encodings(payload)))
            attack(running, payload, link)
        assert not elsewhere and listeners(pids) == found
        again = ask(running)
        assert again.json()["choices"] == first.json()["choices"]
        assert {row["state"] for row in running.workers().values()} == {"ready"}
        left = set(running.processes())
        assert serving <= left, "a process has died"
        seen = audit.events(tmp_path / "audit", since)
        assert serving <= audit.watched(tmp_path / "audit"), "a process has not loaded the hook"
        forks = {pid for pid in left if "baton.runtime.grammar_process" in command_line(pid)}
        assert forks

    assert not marker.exists()
    never = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.bind")
    assert [e for e in seen if e.name in never and not (e.name == "os.fork" and e.pid in forks)] == []
    assert [e for e in seen if e.name == "pickle.find_class" and not e.args.startswith(OWN_PICKLES)] == []
    to_others = [e for e in seen if e.name == "socket.connect" and not any(f", {port})" in e.args for port in ports)]
    assert to_others == []
    assert [e for e in seen if "canary" in e.args] == []

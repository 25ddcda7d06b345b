"""Good streams beside a load of bad clients: gaps between tokens, and the resources that are held afterwards.

    python benchmarks/bad_clients.py                  10 minutes
    python benchmarks/bad_clients.py --seconds 20     a short trial

`baton up` serves the built-in model to four streams, in rounds: alone, beside clients that request the same tokens as
the bad clients and read them, and beside a process of bad clients, which repeat each kind of attempt: heads and bodies
that never end or arrive byte by byte, responses and streams that are not read, pipelined requests of a client that
disconnects, connections kept open with bare line breaks, bytes that are neither HTTP nor HTTP/2, silent connections to
every port, oversized bodies, heads, lists and messages, unauthorized joins. The outcome of each attempt is counted.
After the bad clients have ended, requests, tasks, open files and KV blocks must be back at their previous values, and
memory within `MEMORY_MIB` of its value after a first round. Writes `benchmarks/results/bad-clients.md`; exits with 1 if
a resource leaked or a good stream failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.v1 import serving_pb2, serving_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from benchmarks.kit import BATON, ROOT, commit, machine, ready_url
from launch.bench.client import ServerTarget, base_url, client_session, send
from launch.bench.load import LoadPlan
from sim.scale.workload import Lengths
from sim.stats import percentile

STREAMS, PROMPT, OUTPUT = 4, 64, 128
ROUND_S, CALM_S, WARM_UP_S, GONE_S = 60.0, 15.0, 3.0, 8.0
PATIENCE_S, CLOSING_S = 45.0, 8.0  # longer than any limit of the server
STEP_S = 0.25
MEMORY_MIB, FILES = 48.0, 4
GROW_ONCE = ("open files", "resident MiB")
MIB = 1 << 20

# ---- the bad clients: each attempt returns how it ended


@dataclass(frozen=True)
class Ports:
    http: tuple[str, int]
    grpc: tuple[str, int]
    control: tuple[str, int]


def address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def head(length: int, path: str = "/v1/completions") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


def post(**fields: Any) -> bytes:
    body = json.dumps({"model": "builtin", "prompt": "def f(x):", "temperature": 0} | fields).encode()
    return head(len(body)) + body


@contextlib.asynccontextmanager
async def connection(address: tuple[str, int], receive_bytes: int = 0) -> Any:
    sock = socket.socket()
    if receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, address)
    reader, writer = await asyncio.open_connection(sock=sock, limit=receive_bytes or 1 << 16)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def within(seconds: float, work: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of `work`, or raises TimeoutError after `seconds` of which this process saw each quarter: on a
    busy machine it may not run for as long as any limit (`idle_class`), while what it waits for has arrived."""
    task = asyncio.ensure_future(work)
    for _ in range(round(seconds / STEP_S)):
        await asyncio.wait({task}, timeout=STEP_S)
        if task.done():
            return task.result()
    task.cancel()
    raise TimeoutError


async def ending(reader: asyncio.StreamReader) -> str:
    """Reads until the server closes the connection; returns the HTTP status, or how the connection ended."""
    data = b""

    async def read() -> None:
        nonlocal data
        while piece := await reader.read(1 << 16):
            data = (data + piece)[:64]

    try:
        await within(PATIENCE_S, read())
    except TimeoutError:
        return "still open"
    except OSError:
        pass
    return data[9:12].decode("ascii", "replace") if data.startswith(b"HTTP/1.1 ") else "closed"


async def drip(writer: asyncio.StreamWriter, data: bytes, every_s: float) -> None:
    with contextlib.suppress(OSError):
        for byte in itertools.islice(itertools.cycle(data), round(PATIENCE_S / every_s)):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(every_s)


async def dripping(address: tuple[str, int], first: bytes, more: bytes, every_s: float) -> str:
    async with connection(address) as (reader, writer):
        writer.write(first)
        sending = asyncio.create_task(drip(writer, more, every_s))
        try:
            return await ending(reader)
        finally:
            sending.cancel()


async def says(address: tuple[str, int], data: bytes) -> str:
    async with connection(address) as (reader, writer):
        with contextlib.suppress(OSError):
            writer.write(data)
            await writer.drain()
        return await ending(reader)


async def unread(ports: Ports, **fields: Any) -> str:
    """Reads nothing after the answer's first byte until the server must have given up, and then what the kernels still
    buffer."""
    async with connection(ports.http, 4096) as (reader, writer):
        writer.write(post(ignore_eos=True, **fields))
        try:
            data = await within(PATIENCE_S, reader.read(1))
        except TimeoutError:
            return "no answer in time"
        if not data:
            return "closed"

        async def read() -> None:
            nonlocal data
            while piece := await reader.read(1 << 20):
                data += piece

        await asyncio.sleep(PATIENCE_S)
        try:
            await within(CLOSING_S, read())
        except TimeoutError:
            return "still open"
        except OSError:
            pass
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: ")), None)
    whole = body.endswith(b"0\r\n\r\n") if length is None else len(body) >= length
    return "served" if whole else "cut"


async def leaves(ports: Ports, *requests: bytes) -> str:
    async with connection(ports.http) as (reader, writer):
        writer.write(b"".join(requests))
        await reader.read(100)
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    return "left"


async def call(ports: Ports, request: serving_pb2.GenerateRequest, *, reads: bool) -> str:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel("{}:{}".format(*ports.grpc), options=options) as channel:
        generate = serving_pb2_grpc.ServingStub(channel).Generate(request, timeout=PATIENCE_S)
        try:
            if not reads:
                await generate.read()
                return f"{(await generate.code()).name}"
            async for _ in generate:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"


async def joins(ports: Ports) -> str:
    async with grpc.aio.insecure_channel("{}:{}".format(*ports.control)) as channel:
        session = worker_pb2_grpc.WorkerControlStub(channel).Session(timeout=PATIENCE_S)
        try:
            join = worker_pb2.Join(worker_id="decode-0", role=worker_pb2.ROLE_DECODE, incarnation=9)
            await session.write(worker_pb2.SessionRequest(join=join))
            await session.read()
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "taken in"


UNREAD: dict[str, dict[str, Any]] = {
    "a stream that nobody reads": {"stream": True, "max_tokens": 1500, "logprobs": 5},
    "an answer that nobody reads": {"n": 4, "max_tokens": 300, "logprobs": 20},
}
LEFT: dict[str, Any] = {"stream": True, "max_tokens": 3900, "ignore_eos": True}
PIPELINED: dict[str, Any] = {"max_tokens": 30}


def readers(ports: Ports) -> dict[str, Callable[[], Awaitable[str]]]:
    """Clients that request the same tokens as the bad clients, as often, and read them."""

    async def reads(pause_s: float, *requests: bytes) -> str:
        for request in requests:
            await says(ports.http, request)
        await asyncio.sleep(pause_s)
        return "read"

    pause_s = PATIENCE_S - 5.0
    clients = {name: lambda f=fields: reads(pause_s, post(ignore_eos=True, **f)) for name, fields in UNREAD.items()}
    clients["a call that nobody reads"] = lambda: reads(pause_s, post(**LEFT | {"max_tokens": 1500}))
    clients["leaves its stream"] = lambda: reads(0.0, post(**LEFT | {"max_tokens": 1}))
    clients["leaves what it pipelined"] = lambda: reads(0.0, post(**PIPELINED))
    return clients


def kinds(ports: Ports) -> dict[str, Callable[[], Awaitable[str]]]:
    generate = serving_pb2.GenerateRequest
    endless = generate(text="def f(x):", max_tokens=1500, sampling=types_pb2.SamplingParams(ignore_eos=True))
    many = list(range(300, 1300))
    noise = random.Random(7).randbytes(5000)
    return {
        "says nothing": lambda: says(ports.http, b""),
        "a head that drips": lambda: dripping(ports.http, b"", b"GET / HTTP/1.1\r\nx: " + b"y" * 500, 0.25),
        "a head without an end": lambda: says(ports.http, b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000),
        "a body that stops": lambda: says(ports.http, head(MIB) + b"{" * 1000),
        "a body that drips": lambda: dripping(ports.http, head(MIB), b" ", 0.5),
        "line breaks for ever": lambda: dripping(ports.http, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n", 1.0),
        **{name: lambda f=fields: unread(ports, **f) for name, fields in UNREAD.items()},
        "leaves its stream": lambda: leaves(ports, post(**LEFT)),
        "leaves what it pipelined": lambda: leaves(
            ports, *[post(**PIPELINED).replace(b"connection: close\r\n", b"")] * 8
        ),
        "no HTTP": lambda: says(ports.http, noise),
        "a body over its limit": lambda: says(ports.http, head(64 * MIB)),
        "deep JSON": lambda: says(ports.http, head(60_000) + b"[" * 60_000),
        "a million ids": lambda: says(ports.http, post(prompt=many * 700)),
        "scores for everything": lambda: says(ports.http, post(prompt=many, n=128, echo=True, logprobs=20)),
        "too many stop strings": lambda: says(ports.http, post(stop=["x"] * 10_000)),
        "silent at gRPC": lambda: says(ports.grpc, b""),
        "no HTTP/2 at gRPC": lambda: says(ports.grpc, noise),
        "silent at the control port": lambda: says(ports.control, b""),
        "a message over its limit": lambda: call(ports, generate(text="x" * (20 * MIB)), reads=True),
        "a call that nobody reads": lambda: call(ports, endless, reads=False),
        "a join of a stranger": lambda: joins(ports),
    }


async def attack(attempts: dict[str, Callable[[], Awaitable[str]]]) -> None:
    """Repeats all attempts until killed; prints a line at the end of each."""

    async def again(name: str, attempt: Callable[[], Awaitable[str]]) -> None:
        while True:
            try:
                ended = await attempt()
            except OSError as error:
                ended = type(error).__name__
            print(json.dumps([name, ended]), flush=True)
            await asyncio.sleep(1.0)

    await asyncio.gather(*(again(name, attempt) for name, attempt in attempts.items()))


# ---- the good clients, and the measurements


@dataclass
class Found:
    """The results of a run: gaps in seconds, a list for each round. `left` names every count that did not return to its
    value before."""

    calm: list[list[float]] = field(default_factory=list)
    asked: list[list[float]] = field(default_factory=list)
    beside: list[list[float]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    ended: dict[str, Counter[str]] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def ratios(self, other: list[list[float]]) -> list[float]:
        """ITL p99 beside the bad clients / in `other`, of each round in which `other` had any, sorted."""
        pairs = zip(self.beside, other, strict=True)
        return sorted(percentile(sorted(bad), 99) / percentile(sorted(gaps), 99) for bad, gaps in pairs if gaps)


async def good_streams(url: str, seconds: float, seed: int, failed: list[str]) -> list[float]:
    """The gaps of STREAMS clients, each of which sends one stream after the other."""
    target = ServerTarget(base_url(url), "builtin", "", 120.0, {})
    load = LoadPlan(seed, Lengths(PROMPT, PROMPT), Lengths(OUTPUT, OUTPUT))
    gaps: list[float] = []
    ends = time.monotonic() + seconds
    async with client_session(target) as session:

        async def stream(index: int) -> None:
            while time.monotonic() < ends:
                record = await send(session, target, load.job(index))
                index += STREAMS
                gaps.extend(record.gaps_s)
                if record.error or record.output_tokens != OUTPUT:
                    failed.append(record.error or f"{record.output_tokens} tokens")

        await asyncio.gather(*(stream(index) for index in range(STREAMS)))
    return gaps


def state(url: str, coordinator: int) -> dict[str, float]:
    """Counts of the coordinator and its workers, which must return to their values before."""
    with urllib.request.urlopen(f"{url}/workers", timeout=10) as answer:
        known = json.loads(answer.read())
    pages = int(Path(f"/proc/{coordinator}/statm").read_text().split()[1])
    counts = {
        "requests": known["coordinator"]["requests"],
        "tasks": known["coordinator"]["tasks"],
        "open files": len(os.listdir(f"/proc/{coordinator}/fd")),
        "resident MiB": pages * os.sysconf("SC_PAGE_SIZE") / MIB,
    }
    for worker in known["workers"]:
        for name in ("sequences", "running", "blocks_reserved"):
            if name in worker:
                counts[f"{worker['id']} {name}"] = worker[name]
    return counts


def grown(before: dict[str, float]) -> dict[str, float]:
    """The same, without limits on what grows once at first use: a child that parses large bodies, caches."""
    return before | dict.fromkeys(GROW_ONCE, float("inf"))


def compare(before: dict[str, float], after: dict[str, float]) -> list[str]:
    slack = {"resident MiB": MEMORY_MIB, "open files": FILES}
    return [
        f"{name}: {before.get(name, 0):g} before, {value:g} after"
        for name, value in ({name: float("inf") for name in before} | after).items()
        if value > before.get(name, 0) + slack.get(name, 0)
    ]


def idle_class() -> None:
    """Runs this process only when no other needs the processor: in production, clients run on other machines, so their
    own computation must not affect the measurement."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


@contextlib.contextmanager
def other_clients(kind: str, ports: Ports, ended: dict[str, Counter[str]], idle: bool) -> Any:
    """Runs a process of other clients, `kinds` or `readers`, in the idle class if `idle`; counts in `ended` how their
    attempts ended."""
    command = [sys.executable, __file__, f"--{kind}", json.dumps([ports.http, ports.grpc, ports.control])]
    with tempfile.TemporaryFile("w+") as lines:
        process = subprocess.Popen(command, stdout=lines, cwd=ROOT, preexec_fn=idle_class if idle else None)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not os.fstat(lines.fileno()).st_size and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)  # while it loads its libraries
            yield
            if process.poll() is not None:
                raise SystemExit(f"{kind}: the process ended with {process.returncode}")
        finally:
            process.kill()
            process.wait()
        lines.seek(0)
        for line in lines:
            name, how = json.loads(line)
            ended.setdefault(name, Counter())[how] += 1


def until_back(url: str, coordinator: int, before: dict[str, float]) -> tuple[dict[str, float], list[str]]:
    """Waits until nothing is left, GONE_S at most; returns the state and what is left."""
    deadline = time.monotonic() + GONE_S
    while True:
        after = state(url, coordinator)
        left = compare(before, after)
        if not left or time.monotonic() > deadline:
            return after, left
        time.sleep(0.5)


def run(seconds: float, directory: Path, *, idle: bool = True, start: Callable[..., Any] = subprocess.Popen) -> Found:
    """`idle`: other clients get the processor when no process needs it, as gaps of good streams are measured. On a busy
    machine they may then take minutes to start; those that have not ended an attempt do so once nothing is measured any
    more. `start` starts the cluster, as Popen does."""
    flags = ["--device", "cpu", "--port", "0", "--grpc-port", "0", "--control-port", "0", "--run-dir", str(directory)]
    log = (directory.parent / "up.log").open("wb")
    with (
        log,
        start(
            [*BATON, "up", "--model", "builtin", *flags], cwd=ROOT, stdout=log, stderr=log, env={**os.environ}
        ) as cluster,
    ):
        try:
            url = ready_url(cluster, directory / "cluster.json")
            known = json.loads((directory / "cluster.json").read_text())
            ports = Ports(*(address(known[name]) for name in ("http", "grpc", "control")))
            coordinator = next(
                int(pid)
                for pid in Path(f"/proc/{cluster.pid}/task/{cluster.pid}/children").read_text().split()
                if b"coordinator" in Path(f"/proc/{pid}/cmdline").read_bytes()
            )
            outcome = Found()
            asyncio.run(good_streams(url, 1.0, 1, outcome.failed))
            outcome.before, _ = until_back(url, coordinator, grown(state(url, coordinator)) | {"requests": 0})
            with other_clients("kinds", ports, {}, idle):
                time.sleep(max(WARM_UP_S, min(seconds / 10, 60.0)))
            after, _ = until_back(url, coordinator, grown(outcome.before))
            outcome.before |= {name: after[name] for name in GROW_ONCE}
            rounds = max(1, round(seconds / ROUND_S))
            each_s = seconds / rounds
            calm_s = min(CALM_S, each_s / 2)
            for number in range(rounds):
                seed = 3 * number + 2
                outcome.calm.append(asyncio.run(good_streams(url, calm_s, seed, outcome.failed)))
                with other_clients("readers", ports, {}, idle):
                    outcome.asked.append(asyncio.run(good_streams(url, calm_s, seed + 1, outcome.failed)))
                with other_clients("kinds", ports, outcome.ended, idle):
                    outcome.beside.append(asyncio.run(good_streams(url, each_s, seed + 2, outcome.failed)))
            if idle and outcome.ended.keys() < kinds(ports).keys():  # a busy machine hardly runs the idle class
                with other_clients("kinds", ports, outcome.ended, idle=False):
                    time.sleep(2 * PATIENCE_S + CLOSING_S)
            outcome.after, outcome.left = until_back(url, coordinator, outcome.before)
            return outcome
        finally:
            cluster.send_signal(signal.SIGINT)
            cluster.wait(40)


def report(outcome: Found, seconds: float) -> str:
    lines = [
        "# Good streams beside bad clients",
        "",
        f"    python benchmarks/bad_clients.py --seconds {seconds:g}",
        "",
        f"Commit {commit()}, {datetime.date.today()}. {machine()}. {STREAMS} streams of the built-in model; the bad"
        " clients, the good ones and the cluster share the cores.",
        "",
        "| | gaps | p50 | p99 | longest |",
        "|---|---|---|---|---|",
    ]
    windows = (("alone", outcome.calm), ("beside readers", outcome.asked), ("beside bad clients", outcome.beside))
    for name, rounds in windows:
        gaps = sorted(gap for gaps in rounds for gap in gaps)
        p50, p99, worst = (percentile(gaps, p) * 1e3 for p in (50, 99, 100))
        lines.append(f"| {name} | {len(gaps):,} | {p50:.1f} ms | {p99:.1f} ms | {worst:.1f} ms |")
    alone, asked = outcome.ratios(outcome.calm), outcome.ratios(outcome.asked)
    lines += [
        "",
        f"p99 beside bad clients, round by round: {alone[0]:.2f} to {alone[-1]:.2f} times that alone, median"
        f" {median(alone):.2f} (bar: 1.5), and {asked[0]:.2f} to {asked[-1]:.2f} times that beside readers, who ask for"
        f" the same tokens, median {median(asked):.2f}. Good requests that failed: {len(outcome.failed)}.",
        "",
    ]
    lines += ["| bad client | how its attempts ended |", "|---|---|"]
    for name, counts in outcome.ended.items():
        lines.append(f"| {name} | {', '.join(f'{count} {how}' for how, count in counts.most_common())} |")
    lines += ["", "| | before | after |", "|---|---|---|"]
    for name, value in outcome.after.items():
        lines.append(f"| {name} | {outcome.before.get(name, 0):,.0f} | {value:,.0f} |")
    lines += ["", f"Left behind: {'; '.join(outcome.left) or 'nothing'}.", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "bad-clients.md")
    for attempts in (kinds, readers):
        parser.add_argument(f"--{attempts.__name__}", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for attempts in (kinds, readers):
        if text := getattr(arguments, attempts.__name__):
            asyncio.run(attack(attempts(Ports(*map(tuple, json.loads(text))))))
            return 0
    with tempfile.TemporaryDirectory() as directory:
        outcome = run(arguments.seconds, Path(directory) / "run")
    text = report(outcome, arguments.seconds)
    arguments.out.write_text(text)
    print(text)
    return 1 if outcome.left or outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The cost of a streamed token at the coordinator, without a model: tokens per second and core, by open streams.

    python benchmarks/front.py                        16 to 10,000 streams, at half load and at full load
    python benchmarks/front.py --before DIR           also another checkout, in turns
    python benchmarks/front.py --profile FILE         the coordinator's own profile (cProfile) of the last size

A real coordinator serves HTTP. A prefill worker and decode workers of `--streams-each` streams (64, the default of
`--max-running`) are stubs that speak the real protocol in a separate process: a prompt takes no time, every stream gets
one token per step, `--tokens-per-s` in total, and the decode workers step in turn. The clients are a third process.
Counted between two instants at which all streams run are the tokens that reached clients and the processor time of the
coordinator's threads (schedstat of the kernel), which depends little on other load: `tokens/s per core` is their
quotient. If more tokens arrive than one core can send, readers lag and tokens are sent together. `added latency` is the
time from the stub's post of a step to the token's arrival in the kernel's socket of its client (SO_TIMESTAMPNS), for
one of 16 streams: the client process's own delay is not included. The coordinator has the first core to itself; stubs
and clients share the others, where the stubs have priority: the kernel timestamps arrivals regardless of when a client
reads, but a stub's wait for a core would count as latency. `machine` is measured with only a loop running on the first
core: the share of time in which the loop paused for over a millisecond, and the longest such pause, which no server on
this machine can avoid. Writes `benchmarks/results/front.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import hashlib
import itertools
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "results" / "front.md"
STREAMS = (16, 256, 2000, 10000)
RATES = (10000.0, 40000.0)
STREAMS_EACH = 64
MOST_OPENED_UNDER_FULL_LOAD = 256  # opening more takes minutes at full load
SAMPLED = 16  # latency is sampled for one stream in so many
WARM_S, MEASURED_S, LAG_S, LIMIT_S = 8.0, 6.0, 1.0, 120.0
PAUSES_S, PAUSE_S = 3.0, 1e-3
TEXT = " the"  # one token, so that readers can count them
MAX_TOKENS = 100_000  # plus the number of the stream, by which its posts and arrivals are matched
SO_TIMESTAMPNS = 35  # the option and its control message: a timespec


# ---- the workers


async def stubs(control: str, model: str, step_s: float, decoders: int) -> None:
    """Runs a prefill worker and `decoders` decode workers, which take their steps in turn, until a session ends. At a
    line on stdin, prints when the tokens of the sampled streams were posted, and exits."""
    from baton.core.commands import Abort, Join, Prefill
    from baton.core.compatibility import PROTOCOL_VERSION, Compatibility
    from baton.core.events import HandedOver, Load, SequenceEnded, StepEvents, TokenEvent
    from baton.core.request import SequenceId
    from baton.engine.checkpoint import model_digest, read_model_config
    from baton.runtime.session import WorkerSession
    from coordinator.text.model import TextModel

    directory = Path(model)
    config = read_model_config(directory)
    text = TextModel.load(directory)
    ids = tuple(text.tokenizer.encode(TEXT, add_special_tokens=False).ids)
    facts = Compatibility(
        protocol_version=PROTOCOL_VERSION,
        model_digest=model_digest(directory),
        config_digest=hashlib.sha256((directory / "config.json").read_bytes()).hexdigest(),
        layout=config.kv_layout(16, "float32"),
        dtype="float32",
        kv_dtype="float32",
        code_version="stub",
        exact=False,
        quantize="none",
        model_impl="baton",
        edge_kind="gloo",
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
    )
    blocks = 10_000_000
    posted: dict[int, list[float]] = {}  # by max_tokens, for the sampled streams

    class Stub:
        def __init__(self, role: str, number: int) -> None:
            self.name, self.role = f"{role}{number}", role
            self.running: dict[SequenceId, list[int]] = {}  # the index of the next token, and the token limit
            self.sampled: dict[SequenceId, list[float]] = {}
            self.step = 0
            self.session = WorkerSession(control, self)  # type: ignore[arg-type]

        def join(self, run_id: str) -> Join:
            return Join(
                self.name,
                self.role,  # type: ignore[arg-type]
                1,
                facts,
                link_address="127.0.0.1:1" if self.role == "decode" else "",
                host="127.0.0.1",
                pids=(1,),
                blocks_total=blocks,
                step_tokens=1 << 20,
                max_running=100_000,
                run_id=run_id,
            )

        def load(self) -> Load:
            count = len(self.running)
            return Load(blocks_total=blocks, blocks_free=blocks, running=count, sequences=count)

        def welcome(self, welcome: object) -> None: ...

        def sequence_ids(self) -> tuple[SequenceId, ...]:
            return tuple(self.running)

        def abandon(self, reason: str, keep: object = ()) -> None: ...

        def command(self, command: object) -> None:
            if isinstance(command, Abort):
                for worker in decode.values():
                    worker.running.pop(command.sequence, None)
            if isinstance(command, Prefill):
                sequence = command.request.sequence_id
                target = command.targets[0].worker_id
                first = TokenEvent(sequence, 0, (ids[0],))
                self.session.post(StepEvents(tokens=(first,), handed_over=(HandedOver(sequence, target, 1),)))
                limit = command.request.max_tokens
                decode[target].running[sequence] = [1, limit]
                if limit % SAMPLED == 0:
                    posted[limit] = decode[target].sampled[sequence] = [time.time()]

        def compute(self) -> None:
            """Runs a step."""
            self.step += 1
            ended = []
            tokens = []
            for sequence, state in self.running.items():
                tokens.append(TokenEvent(sequence, state[0], ids))
                state[0] += 1
                if state[0] >= state[1]:
                    ended.append(SequenceEnded(sequence, "length"))
            for end in ended:
                del self.running[end.sequence]
            now = time.time()
            for times in self.sampled.values():
                times.append(now)
            self.session.post(StepEvents(self.step, tuple(tokens), tuple(ended), load=self.load()))

    decode = {worker.name: worker for worker in (Stub("decode", number) for number in range(decoders))}
    tasks = [asyncio.create_task(worker.session.run()) for worker in (Stub("prefill", 0), *decode.values())]
    asked = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    due = time.monotonic()
    for worker in itertools.cycle(decode.values()):
        due = max(due + step_s / decoders, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        if asked.done():
            print(json.dumps(posted), flush=True)
            os._exit(0)
        if any(task.done() for task in tasks):
            raise SystemExit("a session ended")
        if worker.running:
            worker.compute()


# ---- the clients


async def clients(url: str, streams: int) -> None:
    """Opens the streams and prints "open". At each of the first two lines on stdin prints the tokens so far; at the
    third, when the tokens of the sampled streams arrived, and exits."""
    host, _, port = url.removeprefix("http://").partition(":")
    token = TEXT.encode()
    count = opened = 0
    arrived: dict[int, list[float]] = {}

    def request(limit: int) -> bytes:
        body = json.dumps({"model": "m", "prompt": [5] * 8, "max_tokens": limit, "stream": True, "ignore_eos": True})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()

    async def one(limit: int) -> None:
        nonlocal count, opened
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request(limit))
        seen = False
        while data := await reader.read(1 << 16):
            if not seen:
                seen = True
                opened += 1
                if b" 200 " not in data[:40]:
                    raise SystemExit(data[:400].decode())
            count += data.count(token)

    async def sampled(limit: int) -> None:
        """A stream whose arrivals the kernel timestamps."""
        nonlocal count, opened
        loop, times, ended = asyncio.get_running_loop(), arrived.setdefault(limit, []), asyncio.Event()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        sock.setblocking(False)
        await loop.sock_connect(sock, (host, int(port)))
        await loop.sock_sendall(sock, request(limit))

        def readable() -> None:
            nonlocal count, opened
            data, control, _, _ = sock.recvmsg(1 << 16, 64)
            if not data:
                ended.set()
                return
            if not times:
                opened += 1
            seconds, nanoseconds = struct.unpack("qq", control[0][2])
            received = data.count(token)
            count += received
            times.extend([seconds + nanoseconds / 1e9] * received)

        loop.add_reader(sock, readable)
        await ended.wait()

    tasks = []
    for number in range(streams):
        limit = MAX_TOKENS + number
        tasks.append(asyncio.create_task(one(limit) if limit % SAMPLED else sampled(limit)))
        if number % 10 == 9:
            await asyncio.sleep(0.02)
    while opened < streams:
        await asyncio.sleep(0.05)
        for task in tasks:
            if task.done():
                task.result()
    print("open", flush=True)
    loop = asyncio.get_running_loop()
    for _ in range(2):
        await loop.run_in_executor(None, sys.stdin.readline)
        print(json.dumps({"tokens": count, "at": time.time()}), flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    print(json.dumps(arrived), flush=True)
    os._exit(0)


# ---- a run


def processor_s(pid: int) -> float:
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def pauses(core: int) -> tuple[float, float]:
    """The share of time for which a loop on `core` is paused, and its longest pause in seconds."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    gaps = [0.0]
    begin = last = time.perf_counter()
    while last - begin < PAUSES_S:
        now = time.perf_counter()
        if now - last > PAUSE_S:
            gaps.append(now - last)
        last = now
    os.sched_setaffinity(0, allowed)
    return sum(gaps) / PAUSES_S, max(gaps)


def model_directory(directory: Path) -> Path:
    """A copy of the built-in target whose context is long enough for endless streams."""
    from baton.runtime.model_source import builtin_directory

    made = directory / "model"
    shutil.copytree(builtin_directory("target"), made)
    config = json.loads((made / "config.json").read_text()) | {"max_position_embeddings": 2 * MAX_TOKENS}
    (made / "config.json").write_text(json.dumps(config))
    return made


def added_latencies(
    posted: dict[str, list[float]], arrived: dict[str, list[float]], span: tuple[float, float]
) -> list[float]:
    """Seconds from post to arrival of the tokens that were posted in `span`, sorted."""
    begin, end = span
    pairs = [pair for stream, times in posted.items() for pair in zip(times, arrived.get(stream, ()), strict=False)]
    return sorted(came - sent for sent, came in pairs if begin <= sent < end)


def measure(
    tree: Path, streams: int, streams_each: int, step_ms: float, profile: Path | None = None
) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    own = [sys.executable, __file__, "--tree", str(tree)]
    first, *other_cores = sorted(os.sched_getaffinity(0))
    paused, longest = pauses(first)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        ready = Path(directory) / "ready.json"
        flags = ["--port", "0", "--grpc-port", "0", "--control-port", "0", "--ready-file", str(ready)]
        model = str(model_directory(Path(directory)))
        flags += [
            "--model",
            model,
            "--served-model-name",
            "m",
            "--max-queued-requests",
            "100000",
            "--max-queued-tokens",
            "100000000",
        ]
        program = (
            ["-m", "coordinator"] if profile is None else ["-m", "cProfile", "-o", str(profile), "-m", "coordinator"]
        )
        log = stack.enter_context(open(Path(directory) / "log", "w+"))

        def start(command: list[str], cores: list[int], **more: Any) -> subprocess.Popen[str]:
            command = ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]
            process = subprocess.Popen(command, env=environment, cwd=tree, text=True, **more)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        coordinator = start([sys.executable, *program, *flags], [first], stderr=log)
        deadline = time.monotonic() + LIMIT_S
        while not ready.exists():
            if coordinator.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                raise SystemExit(f"the coordinator did not start: {log.read()[-2000:]}")
            time.sleep(0.05)
        addresses = json.loads(ready.read_text())
        url = f"http://{addresses['http']}"
        decoders = -(-streams // streams_each)
        stub = start(
            [*own, "--stubs", addresses["control"], model, str(step_ms / 1e3), str(decoders)],
            other_cores or [first],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        while len(json.loads(urllib.request.urlopen(url + "/workers", timeout=10).read())["workers"]) <= decoders:
            if stub.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the stubs did not join")
            time.sleep(0.05)
        reader = start(
            ["nice", "-n", "19", *own, "--clients", addresses["http"], str(streams)],
            other_cores or [first],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        if reader.stdout is None or reader.stdin is None or reader.stdout.readline() != "open\n":
            log.seek(0)
            raise SystemExit(f"streams did not open: {log.read()[-2000:]}")
        time.sleep(WARM_S)
        marks = []
        for _ in range(2):
            marks.append((asked(reader), processor_s(coordinator.pid)))
            if len(marks) == 1:
                time.sleep(MEASURED_S)
        memory = resident_mib(coordinator.pid)
        time.sleep(LAG_S)  # until the last tokens of the span have arrived
        arrived, posted = asked(reader), asked(stub)
    (before, used_before), (after, used_after) = marks
    tokens, wall = after["tokens"] - before["tokens"], after["at"] - before["at"]
    used = used_after - used_before
    late = added_latencies(posted, arrived, (before["at"], after["at"]))
    return {
        "per_core": tokens / used,
        "us": used / tokens * 1e6,
        "per_s": tokens / wall,
        "share": used / wall,
        "mib": memory,
        "p50_ms": late[len(late) // 2] * 1e3,
        "p95_ms": late[len(late) * 95 // 100] * 1e3,
        "p99_ms": late[len(late) * 99 // 100] * 1e3,
        "paused": paused,
        "longest_ms": longest * 1e3,
    }


def asked(process: subprocess.Popen[str]) -> Any:
    """Sends the process a line; returns its reply."""
    if process.stdin is None or process.stdout is None:
        raise SystemExit("no pipes")
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--tokens-per-s", type=float, nargs="+", default=list(RATES), help="of all streams together")
    parser.add_argument("--streams-each", type=int, default=STREAMS_EACH, help="on a decode worker")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--tree", type=Path, default=ROOT, help=argparse.SUPPRESS)
    parser.add_argument("--stubs", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--clients", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(options.tree))
    if options.stubs:
        control, model, step_s, decoders = options.stubs
        asyncio.run(stubs(control, model, float(step_s), int(decoders)))
        return
    if options.clients:
        asyncio.run(clients(options.clients[0], int(options.clients[1])))
        return
    from benchmarks.kit import commit, machine

    trees = {**({"before": options.before.resolve()} if options.before else {}), "now": ROOT}
    lines = [
        "| streams | tokens/s that come | tree | tokens/s sent | of a core | tokens/s per core | us per token "
        "| added latency p50, p95, p99 (ms) | resident MiB | machine |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for streams in options.streams:
        for rate in options.tokens_per_s:
            if rate > RATES[0] and streams > MOST_OPENED_UNDER_FULL_LOAD:
                continue
            for _ in range(options.turns):
                for name, tree in trees.items():
                    figures = measure(tree, streams, options.streams_each, streams / rate * 1e3, options.profile)
                    line = f"| {streams:,} | {rate:,.0f} | {name} | {figures['per_s']:,.0f} | {figures['share']:.2f} "
                    line += f"| {figures['per_core']:,.0f} | {figures['us']:.1f} "
                    line += f"| {figures['p50_ms']:.1f}, {figures['p95_ms']:.1f}, {figures['p99_ms']:.1f} "
                    line += f"| {figures['mib']:.0f} | {figures['paused']:.2%}, {figures['longest_ms']:.1f} ms |"
                    lines.append(line)
                    print(lines[-1], flush=True)
    today = datetime.date.today().isoformat()
    command = "python benchmarks/front.py" + (" --before DIR" if options.before else "")
    head = [
        "# A streamed token at the coordinator",
        "",
        f"    {command}",
        "",
        f"Commit {commit()}, {today}. {machine()}.",
        "",
    ]
    options.out.write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()

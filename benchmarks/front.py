"""What a streamed token costs the coordinator, without a model: tokens per second and core, over open streams.

    python benchmarks/front.py                        16 to 2,000 streams
    python benchmarks/front.py --before DIR           another checkout beside it, by turns
    python benchmarks/front.py --profile FILE         the coordinator's own profile (cProfile) of the last size

A real coordinator serves HTTP; one prefill and one decode worker are stubs that speak the real protocol in a process of
their own: a prompt takes no time, and every stream gets one token a step, `--tokens-per-s` in all. Clients are a third
process. What is counted is the coordinator's processor time between two instants in which all streams run (schedstat of
its threads, by the kernel), so it depends little on what else the machine does: `tokens/s per core` is its inverse.
Writes `benchmarks/results/front.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "results" / "front.md"
STREAMS = (16, 256, 1000, 2000)
WARM_S, MEASURED_S, LIMIT_S = 2.0, 6.0, 120.0
TEXT = " the quick brown fox jumps over the lazy dog and runs away from all of them"


# ---- the workers


async def stubs(control: str, step_s: float) -> None:
    """Both workers, until their sessions end."""
    from baton.core.commands import Abort, Join, Prefill, WorkerFacts
    from baton.core.events import HandedOver, Load, SequenceEnded, StepEvents, TokenEvent
    from baton.core.request import SequenceId
    from baton.engine.checkpoint import model_digest, read_model_config
    from baton.model_source import builtin_directory
    from baton.rpc.session import WorkerSession
    from coordinator.text.model import TextModel

    directory = builtin_directory("target")
    config = read_model_config(directory)
    text = TextModel.load(directory, config)
    ids = tuple(text.tokenizer.encode(TEXT, add_special_tokens=False).ids)
    facts = WorkerFacts(
        model_digest=model_digest(directory),
        config_digest=hashlib.sha256((directory / "config.json").read_bytes()).hexdigest(),
        layout=config.kv_layout(16, "float32"),
        dtype="float32",
        code_version="stub",
        exact=False,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
    )
    blocks = 10_000_000
    running: dict[SequenceId, list[int]] = {}  # the index of its next token, and how many it may have

    class Stub:
        def __init__(self, name: str) -> None:
            self.name, self.role = name, name.rstrip("0")
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
            return Load(blocks_total=blocks, blocks_free=blocks, running=len(running), sequences=len(running))

        def welcome(self, welcome: object) -> None: ...

        def sequence_ids(self) -> tuple[SequenceId, ...]:
            return tuple(running) if self.role == "decode" else ()

        def abandon(self, reason: str, keep: object = ()) -> None: ...

        def command(self, command: object) -> None:
            if isinstance(command, Abort):
                running.pop(command.sequence, None)
            if isinstance(command, Prefill):
                sequence = command.request.sequence_id
                target = command.targets[0].worker_id
                first = TokenEvent(sequence, 0, (ids[0],))
                self.session.post(StepEvents(tokens=(first,), handed_over=(HandedOver(sequence, target, 1),)))
                running[sequence] = [1, command.request.max_tokens]

    workers = [Stub("prefill0"), Stub("decode0")]
    tasks = [asyncio.create_task(worker.session.run()) for worker in workers]
    step, due = 0, time.monotonic()
    while not any(task.done() for task in tasks):
        due = max(due + step_s, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        if not running:
            continue
        step += 1
        ended = []
        tokens = []
        for sequence, state in running.items():
            tokens.append(TokenEvent(sequence, state[0], (ids[state[0] % len(ids)],)))
            state[0] += 1
            if state[0] >= state[1]:
                ended.append(SequenceEnded(sequence, "length"))
        for end in ended:
            del running[end.sequence]
        workers[1].session.post(StepEvents(step, tuple(tokens), tuple(ended), load=workers[1].load()))
        await asyncio.sleep(0)


# ---- the clients


async def clients(url: str, streams: int) -> None:
    """Opens them, says so, and counts events between two lines on stdin."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps({"model": "m", "prompt": [5] * 8, "max_tokens": 4000, "stream": True, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()
    events = opened = 0

    async def one() -> None:
        nonlocal events, opened
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        seen = False
        while data := await reader.read(1 << 16):
            if not seen:
                seen = True
                opened += 1
                if b" 200 " not in data[:40]:
                    raise SystemExit(data[:400].decode())
            events += data.count(b"data: {")

    tasks = []
    for number in range(streams):
        tasks.append(asyncio.create_task(one()))
        if number % 50 == 49:
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
        print(json.dumps({"events": events, "at": time.monotonic()}), flush=True)
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


def measure(tree: Path, streams: int, step_ms: float, profile: Path | None = None) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    own = [sys.executable, __file__, "--tree", str(tree)]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        ready = Path(directory) / "ready.json"
        flags = ["--port", "0", "--grpc-port", "0", "--control-port", "0", "--ready-file", str(ready)]
        flags += ["--served-model-name", "m", "--max-queued-requests", "100000", "--max-queued-tokens", "100000000"]
        program = (
            ["-m", "coordinator"] if profile is None else ["-m", "cProfile", "-o", str(profile), "-m", "coordinator"]
        )
        log = stack.enter_context(open(Path(directory) / "log", "w+"))

        def start(command: list[str], **more: Any) -> subprocess.Popen[str]:
            process = subprocess.Popen(command, env=environment, cwd=tree, text=True, **more)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        coordinator = start([sys.executable, *program, *flags], stderr=log)
        deadline = time.monotonic() + LIMIT_S
        while not ready.exists():
            if coordinator.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                raise SystemExit(f"the coordinator did not start: {log.read()[-2000:]}")
            time.sleep(0.05)
        addresses = json.loads(ready.read_text())
        url = f"http://{addresses['http']}"
        start([*own, "--stubs", addresses["control"], str(step_ms / 1e3)])
        while json.loads(urllib.request.urlopen(url + "/workers", timeout=10).read())["workers"][1:] == []:
            time.sleep(0.05)
        reader = start(
            [*own, "--clients", addresses["http"], str(streams)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if reader.stdout is None or reader.stdin is None or reader.stdout.readline() != "open\n":
            log.seek(0)
            raise SystemExit(f"streams did not open: {log.read()[-2000:]}")
        time.sleep(WARM_S)
        marks = []
        for _ in range(2):
            reader.stdin.write("\n")
            reader.stdin.flush()
            marks.append((json.loads(reader.stdout.readline()), processor_s(coordinator.pid)))
            if len(marks) == 1:
                time.sleep(MEASURED_S)
        memory = resident_mib(coordinator.pid)
        events = marks[1][0]["events"] - marks[0][0]["events"]
        wall = marks[1][0]["at"] - marks[0][0]["at"]
        used = marks[1][1] - marks[0][1]
        reader.kill()
        reader.wait()
    return {
        "streams": streams,
        "per_core": events / used,
        "us": used / events * 1e6,
        "per_s": events / wall,
        "share": used / wall,
        "mib": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--tokens-per-s", type=float, default=5000.0, help="of all streams together")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--tree", type=Path, default=ROOT, help=argparse.SUPPRESS)
    parser.add_argument("--stubs", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--clients", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(options.tree))
    if options.stubs:
        asyncio.run(stubs(options.stubs[0], float(options.stubs[1])))
        return
    if options.clients:
        asyncio.run(clients(options.clients[0], int(options.clients[1])))
        return
    from benchmarks.serving import commit, machine

    trees = {**({"before": options.before.resolve()} if options.before else {}), "now": ROOT}
    lines = [
        "| streams | tree | tokens/s per core | us per token | tokens/s | of a core | resident MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for streams in options.streams:
        step_ms = streams / options.tokens_per_s * 1e3
        for _ in range(options.turns):
            for name, tree in trees.items():
                found = measure(tree, streams, step_ms, options.profile)
                line = f"| {streams} | {name} | {found['per_core']:,.0f} | {found['us']:.1f} | {found['per_s']:,.0f} |"
                lines.append(f"{line} {found['share']:.2f} | {found['mib']:.0f} |")
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

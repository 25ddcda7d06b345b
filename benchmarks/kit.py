"""Shared by benchmarks: the machine's description, clusters and servers that stop at exit, alternation, reports."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from launch.bench.client import ServerTarget, base_url, client_session, first_model, send
from launch.bench.load import PlannedRequest
from launch.bench.stats import RequestRecord
from tools.provenance import ROOT, commit, machine

RESULTS = ROOT / "benchmarks" / "results"
BATON = [sys.executable, "-m", "launch.cli"]
T = TypeVar("T")


def parser(doc: str | None, out: str = "") -> argparse.ArgumentParser:
    """A parser that shows the module's text; with `out`, it has `--out`, by default that file of benchmarks/results."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if out:
        made.add_argument("--out", type=Path, default=RESULTS / out)
    return made


def command_line() -> str:
    """The command line of this process; absolute paths are reduced to their names."""
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def report(out: Path, title: str, *parts: str, about: str = "") -> None:
    """Writes and prints a report: machine, commit, date, remarks `about` this run, its command line and the parts, each
    a paragraph."""
    head = f"{machine()}. Commit {commit()}, {datetime.date.today()}. {about}".rstrip()
    text = "\n\n".join([f"# {title}", head, f"    {command_line()}", *parts]) + "\n"
    out.write_text(text, encoding="utf-8")
    print(f"{text}\nwritten to {out}")


def by_turns(number: int, ways: Iterable[T]) -> list[T]:
    """The ways in order, reversed in every other turn, so that drift of the machine affects all of them."""
    return list(ways)[:: 1 if number % 2 == 0 else -1]


@contextlib.contextmanager
def checkpoint(shape: str) -> Iterator[Path]:
    """A checkpoint of random weights, in a shape of benchmarks/make_checkpoint.py."""
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / shape
        subprocess.run([sys.executable, "benchmarks/make_checkpoint.py", shape, str(made)], cwd=ROOT, check=True)
        yield made


@dataclass(frozen=True, slots=True)
class Cluster:
    """A ready `baton up`, and the directory of its logs."""

    url: str
    run_dir: Path


@contextlib.contextmanager
def cluster(*flags: str, tree: Path = ROOT, environment: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """Runs a cluster of the checkout `tree` on free ports, until the context ends."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        up = ["up", "--port", "0", "--grpc-port", "0", "--control-port", "0", "--run-dir", str(run_dir), *flags]
        here = {**os.environ, "PYTHONPATH": str(tree), **(environment or {})}
        here.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed worker compiles no bytecode as it starts
        process = subprocess.Popen([*BATON, *up], cwd=tree, stdout=subprocess.DEVNULL, env=here)
        try:
            yield Cluster(ready_url(process, run_dir / "cluster.json"), run_dir)
        finally:
            _stop(process, 60)


def ready_url(process: subprocess.Popen[bytes], file: Path, timeout_s: float = 180.0) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists():
            return str(json.loads(file.read_text())["url"])
        time.sleep(0.1)
    raise SystemExit(f"no ready cluster within {timeout_s:g} s")


@dataclass(frozen=True, slots=True)
class Server:
    """A server under test."""

    name: str
    target: ServerTarget

    @property
    def url(self) -> str:
        return self.target.base.removesuffix("/v1")

    def run(self, requests: Sequence[tuple[ServerTarget, PlannedRequest]], clients: int) -> list[RequestRecord]:
        """Sends the requests in a closed loop of `clients` clients; ends the benchmark if one fails."""
        return self.good(asyncio.run(self._run(requests, clients)))

    async def _run(self, requests: Sequence[tuple[ServerTarget, PlannedRequest]], clients: int) -> list[RequestRecord]:
        waiting, records = iter(requests), list[RequestRecord]()
        async with client_session(self.target) as session:

            async def client() -> None:
                for target, job in waiting:
                    records.append(await send(session, target, job))

            await asyncio.gather(*(client() for _ in range(clients)))
        return records

    def good(self, records: list[RequestRecord]) -> list[RequestRecord]:
        failed = [record.error for record in records if record.error is not None]
        if failed:
            raise SystemExit(f"{self.name}: {len(failed)} of {len(records)} requests failed: {failed[0]}")
        return records


@contextlib.contextmanager
def serving(
    name: str,
    command: list[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    ready: str = "/ready",
    tree: Path = ROOT,
) -> Iterator[Server]:
    """Starts a server of the checkout `tree` on a free port, which is added to its command, and waits until its path
    `ready` reports that it serves."""
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=tree,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    try:
        base = base_url(f"127.0.0.1:{port}")
        _wait(process, f"http://127.0.0.1:{port}{ready}", log)
        yield Server(name, ServerTarget(base, first_model(base, ""), "", 600.0, {}))
    finally:
        _stop(process, 30)


def _stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Interrupts a process, and kills it if it does not end; processes that a launcher started end with it."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, timeout_s: float = 1500.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"a server ended with {process.returncode}:\n{log.read_text()[-2000:]}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2.0) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise SystemExit(f"no server at {url} within {timeout_s:g} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""Baton beside vLLM's CPU build, or beside an earlier commit: the same work on the same cores, in turns, as ratios.

    python benchmarks/peers_install.py /somewhere/vllm
    python benchmarks/peers.py --vllm /somewhere/vllm [--pairs 5] [--only single eight long] [--vllm-dtype float32]
    python benchmarks/peers.py --before CHECKOUT      into benchmarks/results/peers-before.md

Both servers are up, one of them idle while the other is measured; each pair measures one and then the other, in an
order that alternates. A ratio is Baton / the other within a pair; the table has the median over pairs. vLLM computes
with two threads on both cores; Baton's prefill worker has one core, its decode worker the other. On a processor without
AVX-512 vLLM computes bf16 by generic code: there its best is `--vllm-dtype float32`. Writes
`benchmarks/results/peers-vllm.md`.

    single   1 client, 512 tokens in, 64 out: TTFT p50, TPOT p50
    eight    8 clients, the same: output tokens/s, TPOT p50
    calm     4 streams alone: ITL p99, TPOT p50
    long     4 streams while a prompt of 4,096 tokens arrives every 4 s: the same, and the TTFT of the long prompts
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from peers_install import TORCH, VLLM  # noqa: E402
from serving import commit, machine  # noqa: E402

from launch.bench.client import Target, base_url, client_session, first_model, run_load, send  # noqa: E402
from launch.bench.load import Job, Lengths, Load  # noqa: E402
from launch.bench.stats import Record, percentile  # noqa: E402
from launch.bench.stats import statistics as numbers  # noqa: E402

IDS = Lengths(300, 48_999)
Figures = dict[str, float]
BARS = {
    ("single", "TPOT p50 ms"): ("at most", 1.0),
    ("single", "TTFT p50 ms"): ("at most", 1.3),
    ("eight", "output tokens/s"): ("at least", 1.2),
    ("long", "ITL p99 ms"): ("at most", 0.1),
    ("long", "TPOT p50 ms"): ("at most", 0.5),
    ("long", "TTFT of long prompts p50 ms"): ("at most", 1.2),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of each kind of work one measurement does."""

    single: int = 6
    eight: int = 32
    long_s: float = 32.0
    long_every_s: float = 4.0
    calm_s: float = 12.0


class Server:
    """A server under test, its load numbered so that no prompt ever comes twice."""

    def __init__(self, name: str, target: Target) -> None:
        self.name, self.target = name, target
        self._seed = 0

    def load(self, input_len: int, output_len: int) -> Load:
        self._seed += 1
        return Load(self._seed, Lengths(input_len, input_len), Lengths(output_len, output_len), token_ids=IDS)

    def measure(self, work: str, plan: Plan) -> Figures:
        match work:
            case "single":
                return self._closed(1, plan.single)
            case "eight":
                return self._closed(8, plan.eight)
            case "calm":
                return asyncio.run(self._streams(plan.calm_s, None))
            case "long":
                return asyncio.run(self._streams(plan.long_s, plan.long_every_s))
        raise ValueError(work)

    def _closed(self, clients: int, count: int) -> Figures:
        records = asyncio.run(
            run_load(self.target, self.load(512, 64).sessions(0, count), clients, lambda record: None)
        )
        found = numbers(_good(records, self.name))
        return {
            "TTFT p50 ms": found.ttft.p50 * 1e3,
            "TPOT p50 ms": found.tpot.p50 * 1e3,
            "output tokens/s": found.output_tokens_per_s,
        }

    async def _streams(self, duration_s: float, long_every_s: float | None) -> Figures:
        """4 endless streams, each of short requests one after the other; long prompts beside them by the clock."""
        load, longs = self.load(128, 256), self.load(4096, 4)
        records: list[Record] = []
        waits: list[Record] = []
        async with client_session(self.target) as session:
            ends = time.monotonic() + duration_s

            async def stream(first: int) -> None:
                index = first
                while time.monotonic() < ends:
                    records.append(await send(session, self.target, load.job(index)))
                    index += 4

            async def arrive(number: int, every_s: float) -> None:
                await asyncio.sleep(2.0 + number * every_s)
                job: Job = longs.job(number)
                waits.append(await send(session, self.target, job))

            arrivals = int((duration_s - 2.0) / long_every_s) if long_every_s else 0
            await asyncio.gather(
                *(stream(first) for first in range(4)), *(arrive(n, long_every_s or 0.0) for n in range(arrivals))
            )
        good = _good(records, self.name)
        # Only what ran while long prompts came: the last requests of a stream may end after the last of them.
        gaps = sorted(gap for record in good for gap in record.gaps_s)
        figures = {"ITL p99 ms": percentile(gaps, 99) * 1e3, "TPOT p50 ms": numbers(good).tpot.p50 * 1e3}
        if waits:
            figures["TTFT of long prompts p50 ms"] = numbers(_good(waits, self.name)).ttft.p50 * 1e3
        return figures


def _good(records: list[Record], name: str) -> list[Record]:
    failed = [record.error for record in records if record.error is not None]
    if failed:
        raise SystemExit(f"{name}: {len(failed)} of {len(records)} requests failed: {failed[0]}")
    return records


@contextlib.contextmanager
def serving(
    name: str,
    command: list[str],
    port: int,
    log: Path,
    extra: dict[str, str],
    ready: str = "/health",
    directory: Path = ROOT,
) -> Iterator[Server]:
    """Starts a server in `directory` and waits until it serves, as its path `ready` tells."""
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=directory, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **extra}
        )
    try:
        _wait(process, f"{url}{ready}", log)
        base = base_url(url)
        yield Server(name, Target(base, first_model(base, ""), "", 600.0, {}))
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


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


def report(pairs: dict[str, list[tuple[Figures, Figures]]], lines: list[str], other: str) -> str:
    """The medians of both sides and of the ratios, beside vLLM with the bars that issue and design set."""
    lines = [
        *lines,
        f"| work | figure | Baton | {other} | ratio, median (all) | bar | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for work, runs in pairs.items():
        for figure in runs[0][0]:
            ours, theirs = [run[0][figure] for run in runs], [run[1][figure] for run in runs]
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            middle, bar = statistics.median(ratios), BARS.get((work, figure)) if other == "vLLM" else None
            met = "" if bar is None else ("yes" if (middle <= bar[1]) == (bar[0] == "at most") else "**no**")
            every = " ".join(f"{ratio:.2f}" for ratio in ratios)
            lines.append(
                f"| {work} | {figure} | {statistics.median(ours):.1f} | {statistics.median(theirs):.1f}"
                f" | {middle:.2f} ({every}) | {f'{bar[0]} {bar[1]}' if bar else ''} | {met} |"
            )
    if "calm" in pairs and "long" in pairs:
        for side, name in enumerate(("Baton", other)):
            calm, busy = (
                statistics.median(run[side]["ITL p99 ms"] for run in pairs[work]) for work in ("calm", "long")
            )
            bar_text = "bar: at most 1.3" if side == 0 else ""
            lines.append(f"\n{name}: ITL p99 with long prompts / without = {busy / calm:.2f} {bar_text}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside = parser.add_mutually_exclusive_group(required=True)
    beside.add_argument("--vllm", type=Path, help="the environment that peers_install.py made")
    beside.add_argument("--before", type=Path, help="another checkout, run by the same Python environment")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=("single", "eight", "calm", "long"))
    parser.add_argument("--quick", action="store_true", help="a third of the work: to look, not to publish")
    parser.add_argument("--vllm-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--up", nargs="*", default=[], help="more options of `baton up`")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    other = "vLLM" if arguments.vllm else "before"
    out: Path = arguments.out or ROOT / "benchmarks" / "results" / f"peers-{other.lower()}.md"
    works = arguments.only or ["single", "eight", "calm", "long"]
    plan = replace(Plan(), single=3, eight=16, long_s=14.0, calm_s=6.0) if arguments.quick else Plan()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        work_dir = Path(directory)
        model = work_dir / "135m"
        subprocess.run([sys.executable, "tools/make_checkpoint.py", "135m", str(model)], cwd=ROOT, check=True)
        ours = [sys.executable, "-m", "launch.cli", "up", "--model", str(model), "--grpc-port", "0", *arguments.up]
        ports = free_port(), free_port()
        port = ("--port", str(ports[1]))
        at = f"{machine()}. Commit {commit()}, {datetime.date.today()}. 135 M Llama shape, random bf16 weights, random"
        at += f" token-id prompts, greedy, `ignore_eos`. {arguments.pairs} interleaved pairs"
        at += f"{' (quick)' if arguments.quick else ''}; the client shares the cores."
        baton_up = " ".join(["    baton up --model 135m", *arguments.up])
        tail = f" --pairs {arguments.pairs} --only {' '.join(works)}\n"
        if arguments.vllm:
            theirs = [str(arguments.vllm / "bin" / "vllm"), "serve", str(model), *port]
            theirs += ["--dtype", arguments.vllm_dtype, "--max-model-len", "8192"]
            environment = {
                "VLLM_CPU_KVCACHE_SPACE": "4",
                "VLLM_TARGET_DEVICE": "cpu",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
            }
            second = serving(other, theirs, ports[1], work_dir / "vllm.log", environment)
            header = [
                "# Baton beside vLLM's CPU build\n",
                f"{at} vLLM {VLLM}, torch {TORCH}.\n",
                baton_up,
                f"    VLLM_CPU_KVCACHE_SPACE=4 vllm serve 135m --dtype {arguments.vllm_dtype} --max-model-len 8192",
                f"    python benchmarks/peers.py --vllm DIR --vllm-dtype {arguments.vllm_dtype}{tail}",
            ]
        else:
            tree = arguments.before.resolve()
            theirs, log = [*ours, "--control-port", "0", *port], work_dir / "before.log"
            second = serving(other, theirs, ports[1], log, {"PYTHONPATH": str(tree)}, "/ready", tree)
            earlier = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=tree, text=True).strip()
            header = [
                "# Baton beside an earlier commit\n",
                f"{at} Before: {earlier}.\n",
                baton_up,
                f"    python benchmarks/peers.py --before CHECKOUT{tail}",
            ]
        baton = stack.enter_context(
            serving("Baton", [*ours, "--port", str(ports[0])], ports[0], work_dir / "baton.log", {}, "/ready")
        )
        beside_it = stack.enter_context(second)
        pairs: dict[str, list[tuple[Figures, Figures]]] = {}
        for server in (baton, beside_it):
            server.measure("eight", replace(plan, eight=8))  # warm-up: kernels, allocators, compiled shapes
        for number in range(arguments.pairs):
            for work in works:
                order = (baton, beside_it) if number % 2 == 0 else (beside_it, baton)
                found = {server.name: server.measure(work, plan) for server in order}
                pairs.setdefault(work, []).append((found["Baton"], found[other]))
                print(number, work, found, flush=True)
                out.write_text(report(pairs, header, other))
    print(f"written to {out}")


if __name__ == "__main__":
    main()

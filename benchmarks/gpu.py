"""The first run on a GPU: one command, one report, at most 8 minutes, results even where several parts fail.

    python benchmarks/gpu.py [--part NAME ...] [--out benchmarks/results/gpu.md] [--wheels DIR]
    python benchmarks/gpu.py --rehearse          every part on the CPU: Gloo, Triton's interpreter, tiny shapes
    python benchmarks/gpu.py --rehearse --quick  the same, without repeating anything with another setting
    python benchmarks/gpu.py --prepare DIR       makes the folder that travels: this tree and the wheels that a machine
                                                 without network may lack

Each part is a process with its own time limit, in the order of PARTS: the first four give kernel times, a decode step
and an edge over NCCL within 90 s, what explains them follows. A part that fails or exceeds its limit is ended and
named; the others still run. After a CUDA error a part runs once more with CUDA_LAUNCH_BLOCKING=1, which names the
kernel. After the first failure of NCCL no other part uses it: those that can use IPC instead, the others are skipped.
Meanwhile other processes compile the Triton kernels of all parts. The report ends with the table of bars.

The output of a part is shown as it arrives and written to the report immediately. This file needs only Python.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "results" / "gpu.md"
REHEARSAL_OUT = ROOT / "benchmarks" / "results" / "gpu-rehearsal.md"
REHEARSAL, QUICK = "BATON_REHEARSE", "BATON_REHEARSE_QUICK"
EDGE_KIND = "BATON_GPU_EDGE_KIND"
"""`ipc` for a part that uses NCCL, once NCCL has failed."""
FAULT = "BATON_GPU_FAULT"
"""Plants faults, for the script's own tests: NAME:KIND, separated by commas. Kinds: `fail`, `hang`, `killed`, `cuda` (a
CUDA error unless launches block)."""
BAR = "@bar "
"""Begins a line of a part's output that is a row of the table of bars, as JSON: name, measured, limit, met."""
BUDGET_S = 480
CUDA_ERROR = re.compile(rb"CUDA error|CUDA_ERROR|device-side assert|illegal memory access|unspecified launch failure")
_GRACE_S = 2.0
_LEAST_S = 3.0  # a part that would have less time is not started

# Packages that a machine with torch, transformers and pytest may lack, or have in an older version.
WHEELS = (
    "annotated-types", "click", "googleapis-common-protos", "grpcio",
    "grpcio-health-checking", "grpcio-reflection", "grpcio-status", "h11", "httptools", "httpx", "httpcore", "anyio",
    "prometheus_client", "llguidance", "cryptography", "cffi", "pycparser", "python-multipart", "nvidia-ml-py",
    "idna", "certifi", "msgpack", "orjson", "protobuf", "pydantic", "pydantic_core", "rich", "markdown-it-py", "mdurl",
    "Pygments", "starlette", "typing-inspection", "typing_extensions", "uvicorn", "xxhash", "aiohttp",
    "aiohappyeyeballs", "aiosignal", "attrs", "frozenlist", "multidict", "propcache", "yarl", "Jinja2", "MarkupSafe",
    "gguf", "rapidfuzz",
)  # fmt: skip
TRAVELS = 60 << 20
"""The most bytes that travel."""
NOT_CARRIED = (".venv", "node_modules", ".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache")


@dataclass(frozen=True)
class Part:
    """A part and its time limit: `limit_s`, in a rehearsal (on two busy cores) `rehearsal_s`. `nccl`: it uses NCCL;
    `or_ipc`: it can use IPC instead. `quiet`: kernels are no longer compiled beside it, since it measures the host."""

    name: str
    about: str
    limit_s: int
    rehearsal_s: int = 120
    nccl: bool = False
    or_ipc: bool = False
    quiet: bool = False
    bars: tuple[str, ...] = ()


PARTS = (
    Part("environment", "versions, devices, a compiler for Triton, missing modules by name", 15),
    Part("kernel-times", "attention of a layer of 8 B", 20, bars=("attention reads at 60 % of copy bandwidth",)),
    Part(
        "first-step", "8 B with random weights: a decode step", 35, bars=("decode step, batch 1, in 1.2 of its floor",)
    ),
    Part(
        "first-edge", "NCCL alone: connect, 1 B to 64 MB", 20, nccl=True, bars=("NCCL edge connects and moves bytes",)
    ),
    Part("up", "`baton up` as a user starts it: one completion, 8 streams", 45, bars=("baton up serves 8 streams",)),
    Part(
        "tokens",
        "the built-in model against the CPU's float32",
        30,
        bars=("float32 tokens of the CPU", "bfloat16 tokens of the CPU"),
    ),
    Part("kernels", "every Triton kernel against its PyTorch equivalent", 40),
    Part("graphs", "captured decode steps against launched ones while memory is freed", 30),
    Part(
        "8b",
        "8 B: decode, prefill, sampling, planned ahead",
        60,
        quiet=True,
        bars=("decode step, batch 64, in 1.4 of its floor", "prefill of 8,192 at 60 % of matrix rate"),
    ),
    Part("8b-http", "8 B over HTTP: prefill and decode workers on the device", 75, bars=("8 B over HTTP",)),
    Part(
        "edges-nccl",
        "NCCL alone: bytes, a piece of KV, a peer killed, stopped, aborted",
        40,
        nccl=True,
        bars=("NCCL peer lost: freed within 5 s",),
    ),
    Part(
        "edges-ipc",
        "the same over IPC",
        30,
        bars=("IPC peer lost: freed within 5 s",),
    ),
    Part(
        "cluster",
        "tokens through a hand-over, ITL beside hand-overs",
        60,
        300,
        nccl=True,
        or_ipc=True,
        bars=("tokens through a hand-over",),
    ),
    Part(
        "kill",
        "a decode worker killed, and one stopped",
        60,
        300,
        nccl=True,
        or_ipc=True,
        bars=("killed worker detected within 5 s",),
    ),
    Part("engine", "the engine's tests on the device (tests/gpu)", 60),
    Part("tp2", "tensor parallelism: tokens of 2 decode ranks", 40, nccl=True, bars=("tokens of 2 decode ranks",)),
    Part("8b-profile", "8 B: the kernels of a decode step and of a prefill", 40),
    Part("transformers", "the same 8 B work with transformers", 40),
    Part("flashinfer", "FlashInfer against the kernels that it replaces, if it is installed", 120),
)
FIRST = 4
"""The parts that give the first figures, within 90 s."""


class Report:
    """Prints every line immediately and keeps the file complete at any moment."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise SystemExit(f"--out {path}: {error.strerror or error}") from None

    def line(self, text: str = "") -> None:
        print(text, flush=True)
        self._file.write(text + "\n")
        self._file.flush()


@dataclass
class Ended:
    """How a run of a part ended. `bars`: its rows of the table of bars."""

    outcome: str = "ok"
    cuda_error: bool = False
    bars: list[dict[str, str]] = field(default_factory=list)


def run_part(part: Part, report: Report, environment: Mapping[str, str], limit_s: float) -> Ended:
    started = time.monotonic()
    command = [sys.executable, "-u", "-m", "benchmarks.gpu_parts", part.name]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    ended = Ended()
    try:
        ended.outcome = _follow(process, report, started + limit_s, ended)
    finally:
        end_group(process)
    took_s = time.monotonic() - started
    report.line(f"\npart {part.name}: **{ended.outcome}** after {took_s:.1f} s (limit {limit_s:.0f} s)")
    return ended


def _follow(process: subprocess.Popen[bytes], report: Report, deadline: float, ended: Ended) -> str:
    """Copies the part's output to the report until the part ends; returns how it ended."""
    if process.stdout is None:
        return "it has no output"
    os.set_blocking(process.stdout.fileno(), False)
    left = b""

    def take(line: bytes) -> None:
        ended.cuda_error |= bool(CUDA_ERROR.search(line))
        text = line.decode(errors="replace").replace(str(ROOT), ".").replace(str(Path.home()), "~")
        if text.startswith(BAR):
            ended.bars.append(json.loads(text.removeprefix(BAR)))
        else:
            report.line(text)

    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if selector.select(min(0.5, max(deadline - time.monotonic(), 0))):
                read = process.stdout.read()
                if read == b"":
                    break
                *lines, left = (left + (read or b"")).split(b"\n")
                for line in lines:
                    take(line)
            elif process.poll() is not None:  # a process that the part started may still hold the pipe
                break
        else:
            return "timed out"
    if left:
        take(left)
    try:
        code = process.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        return "timed out"
    return "ok" if code == 0 else f"failed with exit code {code}" if code > 0 else f"killed by signal {-code}"


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends every process that a part started, except those that created their own session."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sig)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + _GRACE_S
        while sig is signal.SIGTERM and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    process.wait()


class Run:
    """All parts, one after the other. Complete state: how each ended, the rows of bars, why NCCL is not used any more
    (empty while it is), and until when there is time."""

    def __init__(self, report: Report, environment: Mapping[str, str], *, factor: float, rehearsal: bool) -> None:
        self._report, self._environment, self._factor, self._rehearsal = report, environment, factor, rehearsal
        self._deadline = math.inf if rehearsal else time.monotonic() + BUDGET_S * factor
        self.results: dict[str, str] = {}
        self.bars: dict[str, dict[str, str]] = {}
        self._no_nccl = ""

    def part(self, part: Part) -> None:
        limit_s = (part.rehearsal_s if self._rehearsal else part.limit_s) * self._factor
        self._report.line(f"\n## {part.name}\n\n{part.about}\n")
        environment = dict(self._environment)
        if part.nccl and self._no_nccl:
            if not part.or_ipc:
                self._report.line(f"skipped: {self._no_nccl}")
                self.results[part.name] = f"skipped: {self._no_nccl}"
                return
            self._report.line(f"over IPC: {self._no_nccl}\n")
            environment[EDGE_KIND] = "ipc"
        ended = self._run(part, environment, limit_s)
        if ended is not None and ended.outcome != "ok" and ended.cuda_error:
            self._report.line("\nonce more, with CUDA_LAUNCH_BLOCKING=1:\n")
            again = self._run(part, {**environment, "CUDA_LAUNCH_BLOCKING": "1"}, limit_s)
            if again is not None:
                self.results[part.name] = f"{ended.outcome}; with CUDA_LAUNCH_BLOCKING=1: {again.outcome}"
        if part.nccl and EDGE_KIND not in environment and ended is not None and ended.outcome != "ok":
            self._no_nccl = f"NCCL failed in {part.name}"

    def _run(self, part: Part, environment: Mapping[str, str], limit_s: float) -> Ended | None:
        left_s = self._deadline - time.monotonic()
        if left_s < _LEAST_S:
            self._report.line("not run: no time is left")
            self.results.setdefault(part.name, "not run: no time was left")
            return None
        ended = run_part(part, self._report, environment, min(limit_s, left_s))
        self.results[part.name] = ended.outcome
        self.bars |= {bar["name"]: bar for bar in ended.bars}
        return ended

    def tables(self, parts: list[Part]) -> None:
        self._report.line("\n## Parts\n\n| part | result |\n|---|---|")
        for part in parts:
            self._report.line(f"| {part.name} | {self.results.get(part.name, 'not run')} |")
        self._report.line("\n## Bars\n\n| bar | measured | limit | met |\n|---|---|---|---|")
        for part in parts:
            for name in part.bars:
                bar = self.bars.pop(name, {"measured": "not measured", "limit": "", "met": "**no**"})
                self._report.line(f"| {name} | {bar['measured']} | {bar['limit']} | {bar['met']} |")
        for name, bar in self.bars.items():
            self._report.line(f"| {name} | {bar['measured']} | {bar['limit']} | {bar['met']} |")


def commit() -> str:
    """The commit, if there is a repository; a copy of the tree on another machine may have none."""
    try:
        ran = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown (no git)"
    if ran.returncode == 0:
        return ran.stdout.strip()
    carried = ROOT / "COMMIT"
    return carried.read_text().strip() if carried.exists() else "unknown (no repository)"


def install(wheels: Path, target: Path) -> str:
    """Unpacks the wheels into `target`; returns the error, or an empty string."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        return f"{wheels} has no wheels"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    ran = subprocess.run([*pip, "--upgrade", "--target", str(target), *files], capture_output=True, text=True)
    return "" if ran.returncode == 0 else ran.stderr.strip().splitlines()[-1]


def prepare(target: Path, python: str) -> None:
    """Makes the folder that travels: the tree of the current commit, its name, and under `.wheels` the wheels at the
    versions of constraints.txt for Linux x86-64."""
    target.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(target)], input=archive, check=True)
    (target / "COMMIT").write_text(commit() + "\n")
    wheels = target / ".wheels"
    download(wheels, python)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    print(f"{target}: {size / (1 << 20):.1f} MiB; there: python benchmarks/gpu.py")
    if size > TRAVELS:
        raise SystemExit(f"more than the {TRAVELS >> 20} MiB that travel")


def download(wheels: Path, python: str) -> None:
    text = (ROOT / "constraints.txt").read_text()
    pinned = {re.sub(r"[-_.]+", "-", n.lower()): v for n, v in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)}
    requirements = [f"{name}=={pinned[re.sub(r'[-_.]+', '-', name.lower())]}" for name in WHEELS]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
    named = (*platforms, "manylinux2014_x86_64", "manylinux1_x86_64")
    flags = ["--python-version", python, "--implementation", "cp", *(f"--platform={name}" for name in named)]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, *flags, "-d", str(wheels), *requirements], check=True)
    print(f"{len(requirements)} wheels for Python {python}")


def report_path(rehearse: bool, parts: list[str] | None) -> Path:
    """The path of the report: a report of some parts does not overwrite a complete one."""
    whole = REHEARSAL_OUT if rehearse else OUT
    return whole.with_stem("-".join([whole.stem, *sorted(parts)])) if parts else whole


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=[part.name for part in PARTS], metavar="NAME")
    parser.add_argument("--out", type=Path, help="the report")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU")
    parser.add_argument("--quick", action="store_true", help="with --rehearse: nothing twice")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".wheels", help="what --prepare has downloaded")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="make the folder that travels, and nothing else")
    parser.add_argument("--python", default="3.12", help="of the machine that --prepare is for")
    parser.add_argument("--limit-factor", type=float, default=1.0, help="limits times this, for slow machines")
    arguments = parser.parse_args()
    if arguments.prepare is not None and arguments.prepare.exists() and not arguments.prepare.is_dir():
        parser.error(f"--prepare {arguments.prepare} is no folder")
    if arguments.quick and not arguments.rehearse:
        parser.error("--quick goes with --rehearse")
    if not 0 < arguments.limit_factor < math.inf:
        parser.error("--limit-factor is a positive number")
    return arguments


def environment_of(arguments: argparse.Namespace, directory: Path, report: Report) -> dict[str, str]:
    """The environment of the parts; installs the wheels."""
    environment = dict(os.environ)
    # Kernels compiled by one part are reused by the next, and by the same part when it is run again.
    environment.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".cache" / "baton" / "triton"))
    environment["NCCL_DEBUG_FILE"] = str(directory / "nccl.%h.%p.log")  # not in the output of a part, which is parsed
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    if arguments.rehearse:
        environment |= {REHEARSAL: "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment[QUICK] = str(int(arguments.quick))
    if arguments.wheels.is_dir() and not arguments.rehearse:
        wrong = install(arguments.wheels, directory / "site")
        report.line(f"\nwheels: {wrong or f'unpacked from {arguments.wheels.name}'}")
        environment["PYTHONPATH"] += os.pathsep + str(directory / "site")
    return environment


def main() -> int:
    arguments = arguments_of()
    if arguments.prepare is not None:
        prepare(arguments.prepare, arguments.python)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the part is ended, too
    report = Report(arguments.out or report_path(arguments.rehearse, arguments.part))
    shown = shlex.join(Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:])
    report.line(f"# {'A rehearsal on CPU of the first run' if arguments.rehearse else 'The first run'} on a GPU\n")
    when = datetime.datetime.now(datetime.UTC)
    machine = f"{platform.system()} {platform.machine()}"
    report.line(f"Commit {commit()}, {when:%Y-%m-%d %H:%M} UTC, {machine}.\n")
    report.line(f"    python benchmarks/gpu.py {shown}".rstrip())
    if planted := os.environ.get(FAULT):
        report.line(f"\nPlanted faults: {planted}")
    parts = [part for part in PARTS if arguments.part is None or part.name in arguments.part]
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as directory:
        environment = environment_of(arguments, Path(directory), report)
        run = Run(report, environment, factor=arguments.limit_factor, rehearsal=arguments.rehearse)
        compiling = None
        if not arguments.rehearse and arguments.part is None:
            command = [sys.executable, "-m", "benchmarks.gpu_parts", "compile"]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            compiling = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **quiet)
        try:
            for part in parts:
                if part.quiet and compiling is not None:
                    end_group(compiling)
                    compiling = None
                run.part(part)
        finally:
            if compiling is not None:
                end_group(compiling)
    run.tables(parts)
    return 0 if set(run.results.values()) <= {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())

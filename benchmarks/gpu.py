"""The first run on a GPU: eight stages, each a process with its own time limit, in under 8 minutes.

    python benchmarks/gpu.py [--stage N ...] [--out benchmarks/results/gpu.md] [--wheels DIR]
    python benchmarks/gpu.py --rehearse          every stage on the CPU: Gloo, Triton's interpreter, tiny shapes
    python benchmarks/gpu.py --rehearse --quick  the same, without repeating a part with another setting
    python benchmarks/gpu.py --prepare DIR       downloads the wheels that a machine without network may lack

1 environment     versions, devices, a compiler for Triton, missing modules by name
2 kernels         every Triton kernel against its PyTorch equivalent; attention timed alone
3 graphs          captured decode steps against launched ones: 200 replays while memory is allocated and freed
4 edges           two processes: NCCL and IPC alone; 1 B to 64 MB; the cost of a chunk; a peer killed, stopped, aborted
5 engine          the engine's tests on the device (tests/gpu)
6 8b              an 8 B shape with random weights against the limits of the GPU's memory and matrix units
7 cluster         prefill and decode over NCCL: tokens, hand-over, ITL beside hand-overs, kill, stop, TP 2
8 transformers    the same 8 B work with transformers

The output of a stage is shown as it arrives and written to the report immediately. A stage that fails or exceeds its
limit is ended and named; the others still run. This file needs only Python and runs what it can if modules are missing.
"""

from __future__ import annotations

import argparse
import datetime
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "results" / "gpu.md"
REHEARSAL_OUT = ROOT / "benchmarks" / "results" / "gpu-rehearsal.md"
REHEARSAL, QUICK = "BATON_REHEARSE", "BATON_REHEARSE_QUICK"
FAULT = "BATON_GPU_FAULT"
"""For the script's own tests: `N:fail` or `N:hang` makes stage N do so."""
_GRACE_S = 2.0

# Packages that a machine with torch, transformers and pytest may lack, or have in an older version.
WHEELS = (
    "annotated-doc", "annotated-types", "click", "fastapi", "googleapis-common-protos", "grpcio",
    "grpcio-health-checking", "grpcio-reflection", "grpcio-status", "h11", "httptools", "httpx", "httpcore", "anyio",
    "prometheus_client", "llguidance", "cryptography", "cffi", "pycparser", "python-multipart", "nvidia-ml-py",
    "idna", "certifi", "msgpack", "orjson", "protobuf", "pydantic", "pydantic_core", "rich", "markdown-it-py", "mdurl",
    "Pygments", "starlette", "typing-inspection", "typing_extensions", "uvicorn", "xxhash", "aiohttp",
    "aiohappyeyeballs", "aiosignal", "attrs", "frozenlist", "multidict", "propcache", "yarl", "Jinja2", "MarkupSafe",
)  # fmt: skip
WHEELS_LIMIT = 60 << 20


@dataclass(frozen=True)
class Stage:
    """A stage and its time limit: `limit_s`, in a rehearsal (on two busy cores) `rehearsal_s`."""

    number: int
    name: str
    limit_s: int
    rehearsal_s: int = 120


STAGES = (
    Stage(1, "environment", 35),
    Stage(2, "kernels", 60),
    Stage(3, "graphs", 30),
    Stage(4, "edges", 60),
    Stage(5, "engine", 60),
    Stage(6, "8b", 60),
    Stage(7, "cluster", 140, 300),
    Stage(8, "transformers", 30),
)


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


def run_stage(stage: Stage, report: Report, environment: dict[str, str], limit_s: float) -> str:
    """Runs a stage; returns `ok`, or why it failed."""
    report.line(f"\n## {stage.number}. {stage.name}\n")
    started = time.monotonic()
    command = [sys.executable, "-u", str(ROOT / "benchmarks" / "gpu_stages.py"), stage.name]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        found = _follow(process, report, started + limit_s)
    finally:
        _end_group(process)
    took_s = time.monotonic() - started
    report.line(f"\nstage {stage.number} ({stage.name}): **{found}** after {took_s:.1f} s (limit {limit_s:g} s)")
    return found


def _follow(process: subprocess.Popen[bytes], report: Report, deadline: float) -> str:
    """Copies the stage's output to the report until the stage ends; returns how it ended."""
    if process.stdout is None:
        return "it has no output"
    os.set_blocking(process.stdout.fileno(), False)
    left = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if selector.select(min(0.5, max(deadline - time.monotonic(), 0))):
                read = process.stdout.read()
                if read == b"":
                    break
                *lines, left = (left + (read or b"")).split(b"\n")
                for line in lines:
                    report.line(line.decode(errors="replace"))
            elif process.poll() is not None:  # a process that the stage started may still hold the pipe
                break
        else:
            return "timed out"
    if left:
        report.line(left.decode(errors="replace"))
    try:
        code = process.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        return "timed out"
    return "ok" if code == 0 else f"failed with exit code {code}" if code > 0 else f"killed by signal {-code}"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends every process that the stage started, except those that created their own session."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sig)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + _GRACE_S
        while sig is signal.SIGTERM and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    process.wait()


def commit() -> str:
    """The commit, if there is a repository; a copy of the tree on another machine may have none."""
    try:
        ran = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown (no git)"
    return ran.stdout.strip() if ran.returncode == 0 else "unknown (no repository)"


def install(wheels: Path, target: Path) -> str:
    """Unpacks the wheels into `target`; returns the error, or an empty string."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        return f"{wheels} has no wheels"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    ran = subprocess.run([*pip, "--upgrade", "--target", str(target), *files], capture_output=True, text=True)
    return "" if ran.returncode == 0 else ran.stderr.strip().splitlines()[-1]


def prepare(target: Path, python: str) -> None:
    """Downloads WHEELS at the versions of constraints.txt for Linux x86-64."""
    text = (ROOT / "constraints.txt").read_text()
    pinned = {re.sub(r"[-_.]+", "-", n.lower()): v for n, v in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)}
    wanted = [f"{name}=={pinned[re.sub(r'[-_.]+', '-', name.lower())]}" for name in WHEELS]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
    named = (*platforms, "manylinux2014_x86_64", "manylinux1_x86_64")
    flags = ["--python-version", python, "--implementation", "cp", *(f"--platform={name}" for name in named)]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, *flags, "-d", str(target), *wanted], check=True)
    size = sum(file.stat().st_size for file in target.glob("*.whl"))
    print(f"{len(wanted)} wheels for Python {python} in {target}: {size / (1 << 20):.1f} MiB")
    if size > WHEELS_LIMIT:
        raise SystemExit(f"more than the {WHEELS_LIMIT >> 20} MiB that travel")


def report_path(rehearse: bool, stages: list[int] | None) -> Path:
    """The path of the report: a report of some stages does not overwrite a complete one."""
    whole = REHEARSAL_OUT if rehearse else OUT
    return whole.with_stem("-".join([whole.stem, "stage", *map(str, sorted(stages))])) if stages else whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, nargs="+", choices=[stage.number for stage in STAGES], metavar="N")
    parser.add_argument("--out", type=Path, help="the report")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU")
    parser.add_argument("--quick", action="store_true", help="with --rehearse: nothing twice")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".wheels", help="what --prepare has downloaded")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="download wheels into DIR, and nothing else")
    parser.add_argument("--python", default="3.12", help="of the machine that --prepare is for")
    parser.add_argument("--limit-factor", type=float, default=1.0, help="limits times this, for slow machines")
    arguments = parser.parse_args()
    if arguments.prepare is not None:
        if arguments.prepare.exists() and not arguments.prepare.is_dir():
            parser.error(f"--prepare {arguments.prepare} is no folder")
        prepare(arguments.prepare, arguments.python)
        return 0
    if arguments.quick and not arguments.rehearse:
        parser.error("--quick goes with --rehearse")
    if not 0 < arguments.limit_factor < math.inf:
        parser.error("--limit-factor is a positive number")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the stage is ended, too
    report = Report(arguments.out or report_path(arguments.rehearse, arguments.stage))
    shown = shlex.join(Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:])
    report.line(f"# {'A rehearsal on CPU of the first run' if arguments.rehearse else 'The first run'} on a GPU\n")
    when = datetime.datetime.now(datetime.UTC)
    machine = f"{platform.system()} {platform.machine()}"
    report.line(f"Commit {commit()}, {when:%Y-%m-%d %H:%M} UTC, {machine}.\n")
    report.line(f"    python benchmarks/gpu.py {shown}".rstrip())
    environment = dict(os.environ)
    # Kernels compiled by one stage are reused by the next, and by the same stage when it is run again.
    environment.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".cache" / "baton" / "triton"))
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    if arguments.rehearse:
        environment |= {REHEARSAL: "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment[QUICK] = str(int(arguments.quick))
    results: dict[Stage, str] = {}
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as directory:
        if arguments.wheels.is_dir() and not arguments.rehearse:
            wrong = install(arguments.wheels, Path(directory))
            report.line(f"\nwheels: {wrong or f'unpacked from {arguments.wheels.name}'}")
            environment["PYTHONPATH"] += os.pathsep + directory
        for stage in STAGES:
            if arguments.stage is None or stage.number in arguments.stage:
                limit_s = (stage.rehearsal_s if arguments.rehearse else stage.limit_s) * arguments.limit_factor
                results[stage] = run_stage(stage, report, environment, limit_s)
    report.line("\n## Stages\n\n| stage | result |\n|---|---|")
    for stage, found in results.items():
        report.line(f"| {stage.number}. {stage.name} | {found} |")
    return 0 if set(results.values()) <= {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())

"""`baton up` and `baton bench` on one shape after the other, into one report.

    python benchmarks/serving.py                         the built-in model and the 135 M shape, 8 clients each
    python benchmarks/serving.py --clients 1 8 --only builtin

Writes `benchmarks/results/serving.md`: machine, commit, date, command lines, and the table of each run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BATON = [sys.executable, "-m", "launch.cli"]
WORK = {"builtin": ("512", "64", "300-3999"), "135m": ("512", "64", "300-48999")}


def machine() -> str:
    """One line: processor, what of it matters to bf16, cores, memory."""
    info = Path("/proc/cpuinfo").read_text()
    lines = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    flags = [f for f in ("amx_bf16", "avx512_bf16") if f in fields.get("flags", "").split()]
    memory = int(Path("/proc/meminfo").read_text().split()[1]) >> 20
    name = fields.get("model name", "unknown processor")
    return f"{name}, {info.count('processor' + chr(9))} cores, {', '.join(flags) or 'no bf16'}, {memory} GiB"


def commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return described.stdout.strip()


def measure(model: str, shape: str, clients: int, requests: int) -> str:
    """Starts a cluster, measures it, ends it; returns the Markdown of one run."""
    prompt, output, ids = WORK[shape]
    with tempfile.TemporaryDirectory() as directory:
        run_dir, table = Path(directory) / "run", Path(directory) / "table.md"
        up = ["up", "--model", model, "--port", "0", "--grpc-port", "0", "--run-dir", str(run_dir)]
        process = subprocess.Popen([*BATON, *up], cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            url = ready_url(process, run_dir / "cluster.json")
            bench = ["bench", url, "--concurrency", str(clients), "--input-len", prompt, "--output-len", output]
            bench += ["--token-ids", ids, "--requests", str(requests)]
            subprocess.run([*BATON, *bench, "--markdown", str(table)], cwd=ROOT, check=True)
            shown = "baton " + " ".join(bench).replace(url, "URL")
            return (
                f"## {shape}, {clients} clients\n\n    baton up --model {shape}\n    {shown}\n\n{table.read_text()}\n"
            )
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def ready_url(process: subprocess.Popen[bytes], file: Path, timeout_s: float = 180.0) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists():
            return str(json.loads(file.read_text())["url"])
        time.sleep(0.1)
    raise SystemExit(f"no ready cluster within {timeout_s:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--only", choices=WORK)
    parser.add_argument("--per-client", type=int, default=6, help="requests of each client")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "serving.md")
    arguments = parser.parse_args()
    parts = [
        "# Serving: one prefill and one decode worker, one core and thread each\n",
        f"{machine()}. Commit {commit()}, {datetime.date.today()}. Random token-id prompts, `ignore_eos`; bf16 where"
        " the processor has it. The client runs on the same cores.\n",
    ]
    with tempfile.TemporaryDirectory() as directory:
        for shape in [arguments.only] if arguments.only else list(WORK):
            model = shape
            if shape != "builtin":
                model = str(Path(directory) / shape)
                subprocess.run([sys.executable, "tools/make_checkpoint.py", shape, model], cwd=ROOT, check=True)
            for clients in arguments.clients:
                parts.append(measure(model, shape, clients, clients * arguments.per_client))
                arguments.out.write_text("\n".join(parts))
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()

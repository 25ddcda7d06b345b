"""Time from the start of a worker's launcher until the coordinator lists it as ready, and the memory of the launcher.

    python benchmarks/launchers.py --runs 5

Compares plain torchrun, launch.torchrun (the scripts) and launch.agent in turn, with one and with two ranks. Memory is
the PSS of all processes that are not ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from baton.runtime.process import children, descendants

FLAGS = ["--nnodes", "1", "--node-rank", "0", "--max-restarts", "0", "--master-addr", "127.0.0.1"]
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", *FLAGS, "--master-port", "9000"],
    "launch.torchrun": ["-m", "launch.torchrun", *FLAGS],
    "launch.agent": ["-m", "launch.agent", *FLAGS],
}
LIMIT_S = 120.0
POLL_S = 0.02


def worker(url: str, name: str) -> dict[str, object]:
    with urllib.request.urlopen(f"{url}/workers", timeout=5) as answer:
        workers: list[dict[str, object]] = json.load(answer)["workers"]
    return next((w for w in workers if w["id"] == name), {"state": ""})


def pss_mib(pid: int) -> float:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1]) / 1024


def measure(url: str, control: str, launcher: str, ranks: int, where: Path, number: int) -> tuple[float, float]:
    """Returns seconds and MiB of one start, and ends the worker."""
    name = f"prefill-{number}"
    words = [*LAUNCHERS[launcher], "--nproc-per-node", str(ranks), "-m", "prefill", "--model", "builtin"]
    words += ["--coordinator", control, "--worker-id", name, "--device", "cpu", "--kv-memory-gib", "0.05"]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "LOGS": str(where / "logs")}
    began = time.monotonic()
    with (where / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *words], env=environment, stdout=log, stderr=log)
    while worker(url, name)["state"] != "ready":
        if time.monotonic() - began > LIMIT_S or process.poll() is not None:
            raise SystemExit((where / f"{name}.log").read_text())
        time.sleep(POLL_S)
    took_s = time.monotonic() - began
    ranks_of = worker(url, name)["pids"]
    assert isinstance(ranks_of, list)
    memory = sum(pss_mib(pid) for pid in (process.pid, *descendants(process.pid)) if pid not in ranks_of)
    process.terminate()
    process.wait(60)
    assert not children(process.pid)
    return took_s, memory


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as made:
        where = Path(made)
        ready = where / "ready.json"
        ports = ["--port", "0", "--grpc-port", "0", "--control-port", "0", "--ready-file", str(ready)]
        coordinator = subprocess.Popen([sys.executable, "-m", "coordinator", "--model", "builtin", *ports])
        try:
            while not ready.exists():
                time.sleep(POLL_S)
            bound = json.loads(ready.read_text())
            found: dict[tuple[int, str], list[tuple[float, float]]] = {}
            for number in range(runs * 2 * len(LAUNCHERS)):
                launcher = list(LAUNCHERS)[number % len(LAUNCHERS)]
                ranks = 1 + number // len(LAUNCHERS) % 2
                result = measure(f"http://{bound['http']}", bound["control"], launcher, ranks, where, number)
                found.setdefault((ranks, launcher), []).append(result)
            for (ranks, launcher), results in sorted(found.items()):
                times, memory = ([r[n] for r in results] for n in (0, 1))
                print(
                    f"{ranks} rank(s)  {launcher:16} {statistics.median(times):5.2f} s "
                    f"({min(times):.2f} to {max(times):.2f})  {statistics.median(memory):6.1f} MiB"
                )
        finally:
            coordinator.terminate()
            coordinator.wait(30)


if __name__ == "__main__":
    main()

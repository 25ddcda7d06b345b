"""The most memory that each rank has while it loads a checkpoint, beside its part of the weights.

    python benchmarks/load_memory.py [--shape 1b] [--model-impl baton,transformers] [--sizes 1,2]

A rank is a process that first loads a tiny model, so that libraries and kernels are there, and then its part of the
checkpoint. The most resident memory of each stage of loading, with pages of mapped files, less that before is compared
with the part: the bytes of the parameters, of which a tied head's count twice on Baton's own path, which packs it.
Writes `benchmarks/results/load-memory.md`.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.core.ranks import Ranks
from benchmarks.kit import checkpoint, parser, report, table

BAR = 1.3
KV_BYTES = 64 << 20
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """Of one rank, in bytes: `before` the load, the most in each stage, `after` it, and its part of the weights."""

    before: int
    stages: tuple[tuple[str, int], ...]
    after: int
    part: int

    @property
    def peak(self) -> int:
        return max(peak for _, peak in self.stages) - self.before


def status(field: str) -> int:
    """A number of bytes from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10


def load(end: Connection, models: tuple[Path, Path], impl: str, ranks: Ranks, env: dict[str, str]) -> None:
    """Loads a tiny model and then the other on one rank, and sends what it took."""
    import torch

    from baton.engine.loading import load_runner
    from baton.engine.options import EngineOptions
    from baton.engine.parallel import open_store

    torch.set_num_threads(1)
    options: dict[str, Any] = {"model_impl": impl, "device": "cpu", "dtype": "bfloat16", "kv_memory_bytes": KV_BYTES}
    load_runner(EngineOptions(model_dir=models[0], **options))
    gc.collect()
    before, stages = status("VmRSS"), list[tuple[str, int]]()
    _restart()

    def on_stage(name: str, _: float) -> None:
        stages.append((name, status("VmHWM")))
        _restart()

    store = open_store(env) if ranks.size > 1 else None
    runner = load_runner(EngineOptions(model_dir=models[1], **options), on_stage, ranks=ranks, store=store)
    end.send(Loaded(before, tuple(stages), status("VmRSS"), runner.parameter_bytes))


def _restart() -> None:
    """VmHWM counts from now."""
    Path("/proc/self/clear_refs").write_text("5")


def loaded(models: tuple[Path, Path], impl: str, size: int) -> Iterator[Loaded]:
    """Loads a model on `size` ranks; yields what each took."""
    from baton.transfer.rendezvous import EdgeStore

    context, store = multiprocessing.get_context("spawn"), EdgeStore("127.0.0.1")
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    started = []
    for rank in range(size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=load, args=(theirs, models, impl, Ranks(rank, size, rank, size), env))
        process.start()
        theirs.close()
        started.append((process, mine))
    try:
        for _, mine in started:
            if not mine.poll(TIMEOUT_S):
                raise SystemExit(f"a rank did not load within {TIMEOUT_S:g} s")
            yield mine.recv()
    finally:
        for process, _ in started:
            process.kill()
            process.join()
        store.close()


def main() -> None:
    options = parser(__doc__, "load-memory.md")
    options.add_argument("--shape", default="1b")
    options.add_argument("--model-impl", default="baton,transformers")
    options.add_argument("--sizes", default="1,2", help="numbers of ranks")
    given = options.parse_args()
    rows, stages = [], []
    with checkpoint("tiny") as tiny, checkpoint(given.shape) as model:
        for impl in given.model_impl.split(","):
            for size in map(int, given.sizes.split(",")):
                for rank, memory in enumerate(loaded((tiny, model), impl, size)):
                    name, ratio = f"{impl}, rank {rank} of {size}", memory.peak / memory.part
                    sizes = (memory.before, memory.part, memory.peak, memory.after - memory.before)
                    rows.append([name, *(f"{each / 2**20:.0f}" for each in sizes), f"{ratio:.2f}"])
                    peaks = [f"{stage} {(peak - memory.before) / 2**20:.0f}" for stage, peak in memory.stages]
                    stages.append(f"- {name}: {', '.join(peaks)}")
                    print(*rows[-1], stages[-1], flush=True)
    headings = ("path", "before", "part", "most beyond before", "in the end beyond before", f"most / part (bar: {BAR})")
    about = f"Shape {given.shape}, bf16, KV of {KV_BYTES >> 20} MiB in all."
    shown = "The most beyond what was there before, MiB, by stage:"
    report(given.out, "Memory while loading", table(headings, rows), shown, "\n".join(stages), about=about)


if __name__ == "__main__":
    main()

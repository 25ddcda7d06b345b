"""Are steps of a decode worker late while KV of another prompt is stored?

    python benchmarks/scatter.py [--rounds 40]

Received KV is checked and scattered on the thread of its edge, beside the step loop. This times steps of the built-in
model (batch 8 at 512 tokens of context) with that thread idle, and while it checks and scatters chunks of 512 tokens
without a pause, faster than any link delivers them. The two are interleaved. The processor time of the computing thread
shows the work of a step, wall time the delay of a stream; under other load, wall time means little. Writes
`benchmarks/results/scatter.md`.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.engine.loading import load_runner
from baton.engine.options import EngineOptions
from baton.runtime.model_source import builtin_directory
from baton.transfer.checksum import checksum
from baton.transfer.staging import PagedLayers, locate, pack, unpack
from benchmarks.engine import decode
from benchmarks.kit import parser, report, table
from launch.bench.stats import percentile

CHUNK, BLOCK, STEPS = 512, 16, 10


class Scatterer(threading.Thread):
    """Checks and scatters one chunk again and again while `busy` is set."""

    def __init__(self, layers: list[tuple[torch.Tensor, torch.Tensor]], first_block: int) -> None:
        super().__init__(daemon=True)
        self.busy, self.ended = threading.Event(), threading.Event()
        self.chunks, self.seconds, self._layers = 0, 0.0, PagedLayers.of(layers)
        blocks = tuple(range(first_block, first_block + CHUNK // BLOCK))
        self._slots = locate(self._layers, blocks, BLOCK, 0, CHUNK)
        self._buffer = pack(self._layers, self._slots)

    def run(self) -> None:
        while not self.ended.is_set():
            if not self.busy.wait(0.1):
                continue
            started = time.perf_counter()
            checksum(b"", self._buffer)
            unpack(self._buffer, self._layers, self._slots)
            self.seconds += time.perf_counter() - started
            self.chunks += 1

    @property
    def num_bytes(self) -> int:
        return self._buffer.numel()


def main() -> None:
    options = parser(__doc__, "scatter.md")
    options.add_argument("--rounds", type=int, default=40)
    arguments = options.parse_args()
    runner = load_runner(
        EngineOptions(model_dir=builtin_directory("target"), device="cpu", threads=1, kv_memory_bytes=128 << 20)
    )
    plan = decode(8, 512)
    scatterer = Scatterer(runner.kv.layers, max(max(row.block_ids) for row in plan.rows) + 1)
    scatterer.start()
    wall: dict[bool, list[float]] = {False: [], True: []}
    own: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * arguments.rounds):
        busy = number % 2 == 1
        (scatterer.busy.set if busy else scatterer.busy.clear)()
        time.sleep(0.01)
        for _ in range(STEPS):
            started, used = time.perf_counter(), time.thread_time()
            runner.step(plan)
            own[busy].append(time.thread_time() - used)
            wall[busy].append(time.perf_counter() - started)
    scatterer.ended.set()

    rows = []
    for name, busy in (("nothing arrives", False), ("KV arrives without a pause", True)):
        times = sorted(wall[busy])
        figures = (statistics.median(times), percentile(times, 95), statistics.median(own[busy]))
        rows.append([name, *(f"{1e3 * seconds:.2f} ms" for seconds in figures)])
    rate = scatterer.chunks * scatterer.num_bytes / scatterer.seconds / 1e9
    what = (
        f"Built-in model, batch 8 at 512 tokens, {len(wall[False])} steps of each kind. Beside them {scatterer.chunks}"
        f" chunks of {CHUNK} tokens, {scatterer.num_bytes / 1e6:.1f} MB each, were checked and scattered at"
        f" {rate:.1f} GB/s. Load average {os.getloadavg()[0]:.1f}."
    )
    shown = table(("", "step, median", "step, 95 %", "processor time, median"), rows)
    about = f"Kernels: {runner.kernels}, {runner.dtype_name}."
    report(arguments.out, "Steps beside scattered KV", what, shown, about=about)


if __name__ == "__main__":
    main()

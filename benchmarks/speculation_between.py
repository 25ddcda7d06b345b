"""Decode time of eight greedy clients at two commits, alternately on one core.

    git worktree add ../before COMMIT
    python benchmarks/speculation_between.py ../before --core 0 --starts 50

One commit measured twice differs by up to a fifth, because of where the memory of a process lies. Therefore each start
has a new process of either commit; both decode the same requests on the same core (`measure` of their own
`benchmarks/speculation.py`), a tenth of a second each, in turns. Prints here / there, the processor time a token: the
geometric mean over starts, its standard error, and the range of single starts.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("without", "with")
ROUNDS = 4


def child(clients: int) -> None:
    """Prints milliseconds per token and stream for each line WAY SEED on its standard input."""
    import benchmarks.speculation as at

    if not Path(at.__file__).is_relative_to(Path.cwd()):
        raise SystemExit(f"{at.__file__} is not of the commit in {Path.cwd()}")
    model = at.resolve_model("builtin")
    options = at.EngineOptions(
        model_dir=model, device="cpu", dtype="bfloat16", threads=1, kv_memory_bytes=1 << 29, max_model_len=2048
    )
    runner = at.load_runner(options)
    drafting, engine = at.prepare(
        at.WorkerConfig(step_tokens=512, model="builtin", draft="auto", max_running=64), runner
    )
    texts = at.prompts(model, 64, min(runner.model_config.vocab_size, 4096))
    print("ready", flush=True)
    for line in sys.stdin:
        way, seed = line.split()
        chosen = random.Random(int(seed)).sample(texts, clients)
        batch = [
            at.GenerateRequest(f"r{i}", tuple(text[:200]), 128, replace(at.SAMPLINGS["greedy"], seed=i))
            for i, text in enumerate(chosen)
        ]
        if way == "with":
            print(at.measure(runner, drafting, engine, batch).tpot_ms, flush=True)
        else:
            plain = at.SpeculativeEngine(runner, None)
            print(at.measure(runner, at.Speculation(), plain, batch, 0).tpot_ms, flush=True)


def start(commit: Path, core: int, clients: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(commit), "OMP_NUM_THREADS": "1"}
    command = ["taskset", "-c", str(core), sys.executable, "-P", __file__, "--child", str(clients)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=commit, env=environment, text=True, **pipes)  # type: ignore[call-overload]


def reply(process: subprocess.Popen[str], request: str = "") -> str:
    assert process.stdin is not None and process.stdout is not None
    if request:
        process.stdin.write(request + "\n")
        process.stdin.flush()
    if not (line := process.stdout.readline()):
        raise SystemExit("a measured process ended")
    return line


def compare(here: Path, there: Path, core: int, clients: int, number: int) -> list[float]:
    """Returns the logarithms of here / there, without draft tokens and with, of one start of both."""
    pair = [start(commit, core, clients) for commit in ((here, there) if number % 2 else (there, here))]
    for process in pair:
        reply(process)
    if not number % 2:
        pair.reverse()
    sums = dict.fromkeys(WAYS, 0.0)
    for turn in range(ROUNDS + 1):  # the first warms up
        for way in WAYS:
            times = {}
            for which in (0, 1) if (turn + number) % 2 else (1, 0):
                times[which] = float(reply(pair[which], f"{way} {turn + ROUNDS * (number % 3)}"))
            sums[way] += math.log(times[0] / times[1]) / ROUNDS if turn else 0.0
    for process in pair:
        process.communicate()
    return list(sums.values())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("there", type=Path)
    options.add_argument("--core", type=int, default=0)
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--starts", type=int, default=50)
    arguments = options.parse_args()
    found = []
    for number in range(arguments.starts):
        found.append(compare(ROOT, arguments.there.resolve(), arguments.core, arguments.clients, number))
        print(number, *(f"{math.exp(each):.3f}" for each in found[-1]), flush=True)
    for way, ratios in zip(WAYS, zip(*found, strict=True), strict=True):
        error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
        print(
            f"{way} draft tokens: {math.exp(statistics.fmean(ratios)):.3f}, standard error {error:.3f}, "
            f"{math.exp(min(ratios)):.2f} to {math.exp(max(ratios)):.2f}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(int(sys.argv[2]))
    else:
        main()

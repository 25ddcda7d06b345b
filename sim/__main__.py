"""`python -m sim --seed N [--mode safety|liveness] [--trace]` runs one seed; `--seeds N` runs seeds 1 to N."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from sim.loop import Trace
from sim.seeds import MODES, Mode, Result, run_seed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim", description="Runs a cluster in virtual time, from seeds.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="run this seed")
    which.add_argument("--seeds", type=int, help="run seeds 1 to SEEDS, or from --first on")
    parser.add_argument("--first", type=int, default=1, help="the first of --seeds (default 1)")
    parser.add_argument("--mode", choices=MODES, help="default: both")
    parser.add_argument("--window", type=int, default=0, help="positions that each layer attends to (default: all)")
    parser.add_argument("--stop", action="store_true", help="stop --seeds at the first failure")
    parser.add_argument("--trace", action="store_true", help="print every event of --seed")
    options = parser.parse_args(arguments)
    if options.window < 0:
        parser.error(f"--window must be 0 or more, not {options.window}")
    modes: tuple[Mode, ...] = (options.mode,) if options.mode else MODES
    if options.seed is not None:
        return _one(options.seed, modes, options.window, trace=options.trace)
    return _many(range(options.first, options.first + options.seeds), modes, options.window, stop=options.stop)


def _one(seed: int, modes: tuple[Mode, ...], window: int, *, trace: bool) -> int:
    failed = False
    for mode in modes:
        result = run_seed(seed, mode, window=window, trace=Trace(keep=trace))
        for line in result.lines:
            print(line)
        print(_summary(result))
        failed = failed or bool(result.error)
    return int(failed)


def _summary(result: Result) -> str:
    ended = ", ".join(f"{count} {name}" for name, count in sorted(result.ended.items()))
    state = f"FAILED {result.error}" if result.error else "ok"
    trace = f"trace {result.digest} | " if result.digest else ""
    return (
        f"seed {result.seed} {result.mode}: {state} | {trace}{result.virtual_s:.1f} virtual s,"
        f" {result.events} events | {ended}"
    )


def _many(seeds: range, modes: tuple[Mode, ...], window: int, *, stop: bool) -> int:
    began, failed = time.process_time(), 0
    ended: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    events = 0
    for seed in seeds:
        for mode in modes:
            result = run_seed(seed, mode, window=window)
            ended.update(result.ended)
            counts.update(result.counts)
            events += result.events
            if result.error:
                failed += 1
                again = f"python -m sim --seed {seed} --mode {mode}{f' --window {window}' * bool(window)} --trace"
                print(f"{_summary(result)}\n    {again}", flush=True)
                if stop:
                    return 1
    took_s, runs = time.process_time() - began, len(seeds) * len(modes)
    print(f"{runs} runs, {failed} failed | {took_s / runs * 1e3:.1f} ms of processor time each, {events} events")
    print("choices: " + ", ".join(f"{count} {name}" for name, count in ended.most_common()))
    print("events: " + ", ".join(f"{count} {name}" for name, count in counts.most_common()))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

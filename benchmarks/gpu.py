"""Everything that wants a GPU, in one call of under 8 minutes: correctness, then the engine's speed, one table last.

    python benchmarks/gpu.py [--out benchmarks/results/gpu.md] [--model DIR] [--skip-tests]

1. `tests/gpu`: the engine on CUDA against the CPU in float32, the Triton kernel against its plain twin, hand-overs over
   NCCL with several ranks on this one GPU, a peer killed and a peer stopped.
2. An 8 B Llama shape with random bf16 weights: a decode step at batch 1 and at batch 64 with 1,024 tokens of context,
   against the bytes it must read at the copy bandwidth measured here; a prefill of 8,192 tokens against the bf16 matrix
   rate measured here; both against transformers on the same GPU.
3. Steps as a worker takes them, one by one and planned ahead (ahead.py): the gap is the device's wait for the host. And
   steps of the built-in pair with guesses, with two waits and with one.

Without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import ahead  # noqa: E402
from engine import decode, prefill  # noqa: E402
from serving import commit, machine  # noqa: E402

from baton.core.step import StepPlan  # noqa: E402
from baton.engine.runner import EngineOptions, Runner, load_runner  # noqa: E402
from baton.model_source import builtin_directory  # noqa: E402

TESTS_LIMIT_S = 200
PROMPT, BATCH, CONTEXT = 8192, 64, 1024


def median_s(work: Callable[[], object], repeat: int) -> float:
    """Median seconds of `work`, the device idle before and after each."""
    times = []
    for _ in range(repeat + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def copy_bandwidth() -> float:
    """Bytes per second read and written by a copy of 4 GiB."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_s(lambda: target.copy_(source), 5)


def matrix_rate() -> float:
    """FLOP per second of a bf16 product of 8,192 x 8,192 x 8,192."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / median_s(lambda: a @ b, 10)


def parameters(runner: Runner) -> int:
    return runner.memory.parameter_bytes // 2


def of_baton(model: Path, lines: list[str], bandwidth: float, rate: float) -> None:
    blocks = BATCH * (CONTEXT // 16 + 2) + PROMPT // 16
    options = EngineOptions(model_dir=model, device="cuda", dtype="bfloat16", max_model_len=PROMPT + 16)
    runner = load_runner(options)
    if runner.num_blocks < blocks:
        raise SystemExit(f"{runner.num_blocks} KV blocks fit on this GPU, {blocks} are needed")
    weights = runner.memory.parameter_bytes
    kv = BATCH * CONTEXT * runner.layout.bytes_per_token

    def step(plan: StepPlan) -> Callable[[], object]:
        return lambda: runner.step(plan)

    one = median_s(step(decode(1, 512)), 30)
    many = median_s(step(decode(BATCH, CONTEXT)), 20)
    long = median_s(step(prefill(PROMPT)), 5)
    config = runner.model_config
    attention = 2 * PROMPT**2 * config.num_heads * config.head_dim * config.num_layers
    work = 2 * parameters(runner) * PROMPT + attention
    lines.append(_line("decode, batch 1", one, weights / bandwidth, "weights / bandwidth", 1.2))
    lines.append(
        _line(f"decode, batch {BATCH} at {CONTEXT}", many, (weights + kv) / bandwidth, "bytes / bandwidth", 1.4)
    )
    lines.append(_line(f"prefill of {PROMPT}", long, work / rate, "FLOP / matrix rate", 1 / 0.6))
    lines += ["", "Steps of a decode worker, one by one and planned ahead:\n", *ahead.HEAD]
    lines += ahead.lines(runner, [(1, 512), (16, CONTEXT), (BATCH, CONTEXT)])
    lines += ["", "Steps of the built-in pair with guesses:\n", *of_the_pair()]
    lines += ["", "The same work by transformers:\n", "| work | median | | | | |", "|---|---|---|---|---|---|"]


def of_the_pair() -> list[str]:
    target, draft = (
        load_runner(EngineOptions(model_dir=builtin_directory(name), device="cuda", kv_memory_bytes=1 << 30))
        for name in ("target", "draft")
    )
    return ahead.guessing_lines(target, draft, [(1, 256), (16, 256)])


def of_transformers(model: Path, lines: list[str]) -> None:
    from transformers import AutoModelForCausalLM, DynamicCache

    twin = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, device_map="cuda").eval()
    with torch.inference_mode():
        ids = torch.randint(0, 4000, (1, PROMPT), device="cuda")
        long = median_s(lambda: twin(ids, logits_to_keep=1), 3)
        for batch, context in ((1, 512), (BATCH, CONTEXT)):
            cache = DynamicCache(config=twin.config)
            twin(ids[:, :context].repeat(batch, 1), past_key_values=cache, logits_to_keep=1)

            def step(cache: DynamicCache = cache, batch: int = batch, context: int = context) -> None:
                twin(ids[:, :1].repeat(batch, 1), past_key_values=cache)
                cache.crop(context)

            took = median_s(step, 10)
            lines.append(f"| transformers: decode, batch {batch} at {context} | {took * 1e3:.2f} ms | | | | |")
    lines.append(f"| transformers: prefill of {PROMPT} | {long * 1e3:.1f} ms | | | | |")


def _line(name: str, took: float, floor: float, what: str, bar: float) -> str:
    met = "yes" if took <= bar * floor else "**no**"
    return f"| {name} | {took * 1e3:.2f} ms | {floor * 1e3:.2f} ms ({what}) | {took / floor:.2f} | {bar:.2f} | {met} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.md")
    parser.add_argument("--model", type=Path, help="a checkpoint of the 8 B shape; made where none is given")
    parser.add_argument("--skip-tests", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return
    versions = (
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    )
    lines = [
        "# On a GPU\n",
        f"{torch.cuda.get_device_name()}; {machine()}. {versions}. Commit {commit()}, {datetime.date.today()}.\n",
        "    python benchmarks/gpu.py\n",
    ]
    if not arguments.skip_tests:
        pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "--durations=10"]
        try:
            run = subprocess.run(pytest, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_LIMIT_S)
            print(run.stdout[-6000:])
            said = run.stdout.strip().splitlines()[-1:]
        except subprocess.TimeoutExpired:
            said = [f"did not end within {TESTS_LIMIT_S} s"]
        lines.append(f"`pytest tests/gpu`: {' '.join(said)}\n")
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    lines.append(f"Copy {bandwidth / 1e12:.2f} TB/s, bf16 matrix product {rate / 1e12:.0f} TFLOP/s.\n")
    lines += ["| work | median | floor | ratio | bar | met |", "|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as directory:
        model = arguments.model or Path(directory) / "8b"
        if arguments.model is None:
            subprocess.run([sys.executable, "tools/make_checkpoint.py", "8b", str(model)], cwd=ROOT, check=True)
        of_baton(model, lines, bandwidth, rate)
        torch.cuda.empty_cache()
        arguments.out.write_text("\n".join(lines) + "\n")
        of_transformers(model, lines)
    arguments.out.write_text("\n".join(lines) + "\n")
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()

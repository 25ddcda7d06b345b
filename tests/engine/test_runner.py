"""What a runner offers besides logits: options, dtypes, stages, sampling through `step`."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import StartupError
from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Draw, Row, StepPlan
from baton.engine import device as device_module
from baton.engine.batch import RowSpan
from baton.engine.device import check_capability, choose_dtype
from baton.engine.first_steps import largest_step, load_kernels
from baton.engine.kernels import build
from tests.support.engine_driver import GREEDY, Job, all_logits, random_tokens, run, tiny_runner
from tests.support.sampler_cases import sample


def row(runner: Any, name: str, tokens: list[int], first_block: int, **options: Any) -> Row:
    blocks = tuple(range(first_block, first_block + runner.layout.blocks_for(len(tokens))))
    return Row(SequenceId(name, choice=1), 0, tuple(tokens), blocks, **options)


def test_step_samples_from_its_logits(checkpoint: Callable[..., Path]) -> None:
    runner = tiny_runner(checkpoint("llama"))
    seeded = SamplingParams(temperature=0.9, top_k=40, seed=5)
    plan = StepPlan(
        7,
        (
            row(runner, "a", random_tokens(9), 0, sampling=seeded, num_sampled=3, output_index=4),
            row(runner, "b", random_tokens(20), 10, sampling=seeded),
            row(runner, "c", random_tokens(5), 20, sampling=GREEDY, num_sampled=1),
        ),
    )
    outcome = runner.step(plan)
    logits = runner.step_logits(plan)
    assert outcome.step_id == 7
    assert [len(tokens) for tokens in outcome.sampled] == [3, 0, 1]
    assert [part.shape for part in logits] == [(3, 320), (0, 320), (1, 320)]
    assert all(part.dtype == torch.float32 for part in logits)
    assert outcome.sampled[0] == tuple(sample(logits[0], [Draw(seeded, 1, index) for index in (4, 5, 6)]))
    assert outcome.sampled[2] == (int(logits[2].argmax()),)
    assert outcome.elapsed_s > 0
    assert runner.step(plan).sampled == outcome.sampled


def test_step_sets_the_configured_thread_count_in_its_thread(checkpoint: Callable[..., Path]) -> None:
    """OpenMP has a thread count per calling thread, and a new thread starts with all cores; torch applies its own
    setting at the thread's first parallel operation. A step must have one before its first oneDNN call."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    loaded = [line.split()[-1] for line in maps if "gomp" in line or "iomp" in line]
    if not loaded:
        pytest.skip("torch without OpenMP")
    openmp = ctypes.CDLL(loaded[0])
    runner = tiny_runner(checkpoint("llama"), threads=1, kernels="torch")  # compiled kernels get it as an argument
    counts = []

    def compute() -> None:
        openmp.omp_set_num_threads(3)
        runner.step(StepPlan(1, (row(runner, "a", [1, 2], 0, sampling=GREEDY, num_sampled=1),)))
        counts.append(openmp.omp_get_max_threads())

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert counts == [1]


def test_step_allocates_pages_ahead_of_its_blocks(checkpoint: Callable[..., Path]) -> None:
    runner = tiny_runner(checkpoint("llama"), kv_memory_bytes=80 << 20)
    pages = runner.kv.pages
    assert pages is not None and pages.wait(30.0)
    start = pages.blocks_warm
    assert start == 1 + pages.ahead_blocks < runner.num_blocks  # by the warm-up, which uses block 0

    block = pages.ahead_blocks // 2
    runner.step(StepPlan(1, (row(runner, "r", [1, 2], block, sampling=GREEDY),)))

    assert pages.wait(30.0)
    assert pages.blocks_warm > start


def test_empty_plan_samples_nothing(checkpoint: Callable[..., Path]) -> None:
    assert tiny_runner(checkpoint("llama")).step(StepPlan(3, ())).sampled == ()


def test_loading_reports_its_stages_and_sets_the_runners_facts(checkpoint: Callable[..., Path]) -> None:
    stages: list[str] = []
    from baton.engine.loading import load_runner
    from baton.engine.options import EngineOptions

    options = EngineOptions(
        model_dir=checkpoint("qwen3"), device="cpu", dtype="float32", exact=True, block_size=32, kv_memory_bytes=8 << 20
    )
    runner = load_runner(options, lambda stage, seconds: stages.append(stage))
    assert stages == ["check", "load", "kv", "warm-up", "self-test"]
    assert runner.layout == runner.model_config.kv_layout(32, "float32")
    assert runner.num_blocks == (8 << 20) // runner.layout.bytes_per_block
    assert (runner.max_model_len, runner.dtype_name) == (4096, "float32")
    assert torch.equal(all_logits(runner, random_tokens(70), [9]), all_logits(runner, random_tokens(70), [70], seed=4))


def test_max_model_len_is_bounded_by_the_model_and_kv_memory(checkpoint: Callable[..., Path]) -> None:
    model_dir = checkpoint("llama")
    assert tiny_runner(model_dir, max_model_len=100).max_model_len == 100
    assert tiny_runner(model_dir, kv_memory_bytes=10 * 16 * 768).max_model_len == 160
    with pytest.raises(StartupError, match=r"max-model-len must be from 2 to 4096, .*, not 4097"):
        tiny_runner(model_dir, max_model_len=4097)
    with pytest.raises(StartupError, match=r"KV memory of .* is too small"):
        tiny_runner(model_dir, max_model_len=161, kv_memory_bytes=10 * 16 * 768)


def test_default_kv_memory_is_bounded_by_what_sequences_can_use(checkpoint: Callable[..., Path]) -> None:
    runner = tiny_runner(checkpoint("llama"), kv_memory_bytes=None, max_model_len=64)
    assert runner.num_blocks == 256 * 64 // 16


@pytest.mark.parametrize(("field", "value"), [("device", "tpu"), ("dtype", "float16")])
def test_unknown_device_or_dtype_is_refused(checkpoint: Callable[..., Path], field: str, value: str) -> None:
    with pytest.raises(StartupError, match=f"{field} must be"):
        tiny_runner(checkpoint("llama"), **{field: value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_cuda_without_a_gpu_is_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(StartupError, match="torch finds no CUDA device"):
        tiny_runner(checkpoint("llama"), device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("missing", ["libcuda", "compiler", "headers", "cache"])
def test_a_gpu_on_which_triton_cannot_launch_kernels_is_refused_before_anything_is_loaded(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Triton's own driver runs up to what this machine lacks; each reason is the one that Triton gives."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import build, driver

    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'Python.h: No such file or directory' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(nvidia.CudaDriver, "is_active", staticmethod(lambda: True))
    for name in ("_default", "_active"):
        monkeypatch.setattr(driver, name, None, raising=False)
    for name, value in (("is_available", lambda: True), ("device_count", lambda: 1)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    if missing != "libcuda":
        monkeypatch.setattr(nvidia, "library_dirs", list)
    if missing == "compiler":
        monkeypatch.delenv("CC")
        monkeypatch.setattr(build.shutil, "which", lambda name: None)
    elif missing == "cache":
        monkeypatch.setenv("TRITON_CACHE_DIR", str(compiler))
    reasons = {
        "libcuda": "libcuda.so",
        "compiler": "find C compiler",
        "headers": "cc ended with exit code 1",
        "cache": str(compiler),
    }

    with pytest.raises(
        StartupError, match=f"^device cuda: Triton cannot launch .*{reasons[missing]}.*TRITON_CACHE_DIR"
    ):
        tiny_runner(checkpoint("llama"), device="cuda", exact=False)


@pytest.mark.parametrize(("capability", "served"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_with_too_little_shared_memory_is_refused(
    capability: tuple[int, int], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    if served:
        check_capability(torch.device("cuda", 1))
        return
    with pytest.raises(StartupError, match=r"^cuda:1: attention needs compute capability 8\.0, this GPU has 7\.5"):
        check_capability(torch.device("cuda", 1))


def test_dtype_depends_on_the_option_the_device_and_exact_mode() -> None:
    assert choose_dtype("auto", torch.device("cuda"), exact=False) == "bfloat16"
    assert choose_dtype("auto", torch.device("cpu"), exact=True) == "float32"
    assert choose_dtype("float32", torch.device("cuda"), exact=False) == "float32"


@pytest.mark.parametrize(
    ("levels", "kernels", "dtype"),
    [
        (("avx2",), "auto", "bfloat16"),
        (("avx2",), "avx2", "bfloat16"),
        (("avx2",), "torch", "float32"),
        (("avx2", "avx512"), "auto", "bfloat16"),
        (("avx2", "avx512"), "avx2", "bfloat16"),
        (("avx2", "avx512"), "avx512", "bfloat16"),
        (("avx2", "avx512"), "torch", "float32"),
        ((), "auto", "float32"),
    ],
)
def test_dtype_auto_depends_on_the_kernels(
    monkeypatch: pytest.MonkeyPatch, levels: tuple[str, ...], kernels: str, dtype: str
) -> None:
    monkeypatch.setattr(device_module, "cpu_multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(build, "processor_levels", lambda cpuinfo="": levels)
    monkeypatch.setenv("CXX", sys.executable)  # found, and never started
    assert choose_dtype("auto", torch.device("cpu"), exact=False, kernels=kernels) == dtype
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert choose_dtype("auto", torch.device("cpu"), exact=False, kernels=kernels) == "float32"


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_half_precision_checkpoints_computed_in_float32_match_transformers(
    checkpoint: Callable[..., Path], stored: str
) -> None:
    from transformers import AutoModelForCausalLM

    model_dir = checkpoint("llama", dtype=stored)
    tokens = random_tokens(60)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)(torch.tensor([tokens])).logits[
            0
        ]
    assert torch.allclose(all_logits(tiny_runner(model_dir), tokens, [16]), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_bfloat16_is_close_to_float32_and_keeps_greedy_tokens_away_from_ties(
    checkpoint: Callable[..., Path], arch: str
) -> None:
    model_dir = checkpoint(arch, dtype="bfloat16")
    half, full = tiny_runner(model_dir, dtype="bfloat16"), tiny_runner(model_dir)
    assert half.dtype_name == "bfloat16"
    assert half.layout.bytes_per_token * 2 == full.layout.bytes_per_token
    tokens = random_tokens(120)
    a, b = all_logits(half, tokens, [50, 1, 1, 7]), all_logits(full, tokens, [120])
    assert (a - b).abs().max() < 0.6
    assert (a - b).abs().mean() < 0.06
    clear = b.topk(2).values.diff().abs().flatten() > 0.5
    assert clear.sum() > 40
    assert torch.equal(a.argmax(-1)[clear], b.argmax(-1)[clear])


def test_bfloat16_is_deterministic(checkpoint: Callable[..., Path]) -> None:
    runner = tiny_runner(checkpoint("llama", dtype="bfloat16"), dtype="bfloat16")
    runs = []
    for _ in range(2):
        jobs = [Job(random_tokens(n, seed=n), 10, chunk=13) for n in (5, 40, 41, 90)]
        run(runner, jobs)
        runs.append(torch.cat([logits for job in jobs for logits in job.logits]))
    assert torch.equal(*runs)


@pytest.mark.parametrize("options", [{}, {"kv_memory_bytes": 64 << 10, "max_model_len": 20, "max_num_tokens": 50}])
def test_steps_that_load_gpu_kernels_fit_any_pool_and_use_every_sampling_option(
    checkpoint: Callable[..., Path], options: dict[str, int]
) -> None:
    """They run at load on a GPU only; their plans must fit any model and any pool."""
    runner = tiny_runner(checkpoint("llama"), kernels="torch", **{"max_num_tokens": 300, **options})
    plans = load_kernels(runner, (1, 17, 64))
    assert [len(runner.step(plan).sampled) for plan in plans] == [1, 1, 1, 2, 1, 1, 1]
    assert [plan.rows[0].pooling for plan in plans[5:]] == ["last", "mean"]
    assert [len(plan.rows[0].tokens) for plan in plans[:3]] == [1, 17, min(64, runner.max_model_len)]
    sampling = plans[3].rows[0].sampling
    assert (
        sampling.penalises and sampling.bad_words and sampling.logit_bias and sampling.logprobs and sampling.top_p < 1
    )
    largest = largest_step(runner, 5)
    assert [len(tokens) for tokens in runner.step(largest).sampled][:1] == [5]
    assert largest.num_tokens == runner.max_num_tokens and largest.rows[0].end == runner.max_model_len


def test_on_a_gpu_the_largest_step_is_measured_before_the_pool_is_sized_and_warm_up_comes_last(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captures empty torch's cache of free memory, so what a warm-up before them reserved would be lost."""
    from baton.engine import first_steps, loading, opening

    events: list[object] = []

    def peak_bytes(device: torch.device, run: Callable[[], None]) -> int:
        run()
        events.append("measured")
        return 3 << 20

    def budget(*arguments: Any) -> int:
        events.append(("budget", arguments[-1]))
        return 4 << 20

    made = loading.how_to_compute

    def how_to_compute(*arguments: Any) -> Any:
        computing = made(*arguments)

        def compute(batch: Any) -> torch.Tensor:
            events.append(int(batch.lengths.sum()))
            return computing.compute(batch)

        def compute_pooled(batch: Any) -> Any:
            events.append(int(batch.lengths.sum()))
            return computing.compute_pooled(batch)

        return replace(
            computing,
            compute=compute,
            compute_pooled=compute_pooled,
            prepare=lambda: events.append("capture"),
            row_lengths=(1, 20, 70),
        )

    for module in (opening, first_steps):
        monkeypatch.setattr(module, "is_gpu", lambda _: True)
    monkeypatch.setattr(opening, "check_triton", lambda: None)
    monkeypatch.setattr(opening, "check_capability", lambda _: None)
    monkeypatch.setattr(loading, "peak_bytes", peak_bytes)
    monkeypatch.setattr(loading, "kv_budget", budget)
    monkeypatch.setattr(loading, "how_to_compute", how_to_compute)
    runner = tiny_runner(checkpoint("llama"), kernels="torch", max_num_tokens=300)
    assert events[:5] == ["capture", 300, "measured", ("budget", 3 << 20), "capture"]
    assert events[5:] == [16, 1, 300, 1, 20, 70, 2, 1, 70, 70]
    assert runner.num_blocks > 1


def test_warm_up_has_rows_of_every_kind_that_attention_computes_differently(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Triton in the place of a compiler: after the warm-up no prompt of any length needs another variant."""
    attention_triton = pytest.importorskip("baton.engine.attention_triton")
    from tests.support.attention import shape

    monkeypatch.setattr(attention_triton, "flash_supports", lambda *_: True)
    for heads, kv_heads in ((4, 4), (4, 2), (32, 2), (40, 1)):
        for dtype in (torch.bfloat16, torch.float32):
            kernel = attention_triton.TritonAttention(shape(heads, kv_heads, 16), 64, dtype, torch.device("cpu"))
            for flash in (True, False):
                kernel._flash = flash

                def variants(length: int, kernel: Any = kernel, heads: int = heads // kv_heads) -> set[object]:
                    prepared = kernel.prepare([RowSpan(0, 0, length, (0,) * 64)], 0)
                    rows = {max(16, 1 << (tiles.queries * heads - 1).bit_length()) for tiles in prepared.tiles}
                    return rows | ({"flash"} if prepared.flash else set())

                warm = set[object]().union(*map(variants, kernel.row_lengths))
                assert set[object]().union(*map(variants, range(1, 300))) == warm

"""Compiles every Triton kernel in every variant that serving uses, for GPUs that this machine need not have, and
reports the registers, spills and shared memory of each.

    python benchmarks/kernels_compiled.py [--arch 80 90 100] [--only NAME] [--out FILE]

The code that launches kernels runs as in serving, on CPU tensors; Triton is given a GPU's driver and compiles instead
of launching, with the types, alignments and constants of serving. `--json` prints one line per variant.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton.core.request import SamplingParams
from baton.core.step import Draw
from baton.engine.attention_triton import TritonAttention, split_buckets, split_plan
from baton.engine.batch import RowSpan
from baton.engine.kernels import fused
from baton.engine.kernels.linear import FixedLinear
from baton.engine.kernels.masks import mask_rows
from baton.engine.kernels.paged_attention import Tiles, paged_attention
from baton.engine.kernels.rank_sum import sum_by_rank
from baton.engine.kernels.sampling import decide
from baton.engine.kernels.symmetric_sum import SymmetricMemory, symmetric_sum
from baton.engine.layers import Rotary
from baton.engine.weights import Projection
from baton.models.model_config import ModelConfig, parse_model_config
from baton.transfer.device_kernels import add_mixed_words
from baton.transfer.sections import SPLITMIX
from benchmarks.kit import RESULTS, parser, report, table
from tests.support.whole_warps import partly_reached

ARCHS = (80, 90, 100)
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that one program may have."""
CPU = torch.device("cpu")
LONGEST = 131_072


@dataclass(frozen=True)
class Model:
    """A rank's share of a model; `main`: its kernels must not spill."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    dtype: torch.dtype = torch.bfloat16
    window: int = 0
    norms: bool = False
    ranks: int = 1
    main: bool = True

    def config(self) -> ModelConfig:
        return parse_model_config(
            {
                "architectures": ["Qwen3ForCausalLM" if self.norms else "LlamaForCausalLM"],
                "vocab_size": 128,
                "hidden_size": self.hidden,
                "intermediate_size": self.inner,
                "num_hidden_layers": 1,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "max_position_embeddings": LONGEST,
            }
        )


MODELS = (
    Model("Llama 8B", 32, 8, 128, 4096, 14336),
    Model("Llama 70B, 1 of 8 ranks", 8, 1, 128, 8192, 28672, ranks=8),
    Model("Llama 405B, 1 of 8 ranks", 16, 1, 128, 16384, 53248, ranks=8),
    Model("Qwen3 8B", 32, 8, 128, 4096, 12288, norms=True),
    Model("Mistral 7B, window", 32, 8, 128, 4096, 14336, window=4096),
    Model("Qwen2 0.5B", 14, 2, 64, 896, 4864),
    Model("135M, float32", 9, 3, 64, 576, 1536, dtype=torch.float32, main=False),
    Model("Phi, 32 heads of 96", 32, 32, 96, 3072, 8192),
    Model("405B with a window, 1 of 8 ranks", 16, 1, 128, 16384, 53248, window=4096, ranks=8),  # all kernels at once
)


class CompilingDriver:
    """The part of a driver that Triton uses before it launches."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        """A number for each GPU, the key of its compiled kernels."""
        return int(self._target.arch)

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return CPU


def without_ptxas(backend: object = None, stages: dict[str, Any] | None = None, *_: object) -> tuple[str, str]:
    """A hook by which Triton does not assemble what it compiles: `assembled` does. Without arguments it returns what is
    part of the names of such kernels in Triton's cache, so that no others are taken for them."""
    if stages is not None:
        stages["cubin"] = lambda source, metadata: b""
    return "no cubin", "no cubin"


@contextlib.contextmanager
def compiling(arch: int, on_compiled: Callable[[Any, Any], None]) -> Iterator[None]:
    """Makes launches compile for `arch`; calls `on_compiled` with the kernel and its compiled form at each launch."""
    launch = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **named: Any) -> Any:
        on_compiled(self, launch(self, *arguments, grid=grid, warmup=True, **named))

    driver.set_active(CompilingDriver(arch))
    JITFunction.run, knobs.runtime.add_stages_inspection_hook = run, without_ptxas
    try:
        yield
    finally:
        JITFunction.run, knobs.runtime.add_stages_inspection_hook = launch, None


@dataclass(frozen=True)
class Variant:
    """One compiled kernel."""

    model: str
    kernel: str
    arch: int
    constants: str
    warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    main: bool
    partly_reached: int  # instructions for whole warps that a part of a warp may reach


def attention_calls(model: Model, kernel: TritonAttention) -> None:
    """Steps of all kinds over contexts up to the longest: prompts, decode, verification, captured and launched."""
    dtype, size = model.dtype, 16
    keys, values = (torch.empty(4, size, model.kv_heads, model.head_dim, dtype=dtype) for _ in range(2))
    contexts = (1, 17, 128, 129, 1000, 1024, 1025, 4096, 9999, 32_768, 100_001, LONGEST)
    for context in contexts:
        blocks = tuple([0] * -(-context // size))
        for batch, length in ((1, 1), (2, 1), (7, 1), (64, 1), (256, 1), (1, 5), (3, 2), (1, 16), (1, 100), (1, 2048)):
            if length > context or batch * context > 2_000_000:
                continue
            spans = [RowSpan(row * length, context - length, context, blocks) for row in range(batch)]
            queries = torch.empty(batch * length, model.heads, model.head_dim, dtype=dtype)
            kernel.attend(queries, keys, values, kernel.prepare(spans, model.window))
    for rows, length in ((1, 1), (8, 1), (256, 1), (1, 2), (32, 5), (32, 9)):  # captured
        tokens = split_plan(rows * model.kv_heads, LONGEST)[1]
        ints = torch.zeros(4096, dtype=torch.int32)
        queries = torch.empty(rows * length, model.heads, model.head_dim, dtype=dtype)
        kernel.reserve(rows)
        for splits in split_buckets(rows * model.kv_heads, LONGEST):
            table = torch.zeros(rows, splits, dtype=torch.int32)
            parts = tuple(ints[at : at + rows] for at in (0, 3, 5, 7, 1, 2))
            tiles = Tiles(*parts, table, splits, tokens, min(length, kernel.long_tile))
            paged_attention(queries, keys, values, tiles, model.window, torch.empty_like(queries), kernel.arrived)


def layer_calls(model: Model) -> None:
    config = model.config()
    rotary = Rotary(config, 64, model.dtype, CPU)
    weight, head_weight = torch.ones(model.hidden, dtype=model.dtype), torch.ones(model.head_dim, dtype=model.dtype)
    norm, head_norm = fused.FusedNorm(weight, 1e-5), fused.FusedNorm(head_weight, 1e-5)
    heads = fused.FusedHeads(config, (head_norm, head_norm) if model.norms else None, rotary)
    cache = tuple(torch.empty(4, 16, model.kv_heads, model.head_dim, dtype=model.dtype) for _ in range(2))
    for tokens in (1, 2, 16, 64, 1000, 8192):
        x = torch.empty(tokens, model.hidden, dtype=model.dtype)
        norm(x)
        norm.add(x, x)
        qkv = torch.empty(tokens, model.heads + 2 * model.kv_heads, model.head_dim, dtype=model.dtype)
        heads(qkv, torch.zeros(tokens, dtype=torch.int64), cache, torch.zeros(tokens, dtype=torch.int64))  # type: ignore[arg-type]
        fused.swiglu(torch.empty(tokens, 2 * (model.inner // model.ranks), dtype=model.dtype))
        if model.ranks > 1:
            sum_by_rank(torch.empty(model.ranks, tokens, model.hidden, dtype=model.dtype))
            memory = SymmetricMemory(0, torch.zeros(model.ranks, dtype=torch.int64), torch.zeros(2).long(), 8 << 20)
            for shared in (False, True):
                symmetric_sum(x, memory, shared)


def exact_calls(model: Model) -> None:
    """Linear layers and attention of exact mode."""
    config = model.config()
    inner, heads = model.inner // model.ranks, (model.heads + 2 * model.kv_heads) * model.head_dim
    sizes = ((heads, model.hidden, True), (model.hidden, model.heads * model.head_dim, False))
    sizes += (
        (2 * inner, model.hidden, False),
        (model.hidden, inner, False),
        (128_256 // model.ranks, model.hidden, False),
    )
    for outputs, inputs, bias in sizes:
        of_bias = torch.empty(outputs, dtype=model.dtype) if bias else None
        linear = FixedLinear(Projection(torch.empty(outputs, inputs, dtype=model.dtype), of_bias))
        for tokens in (1, 2, 16, 100, 1000):
            linear(torch.empty(tokens, inputs, dtype=model.dtype))
    keys, values = (torch.empty(4, 16, model.kv_heads, model.head_dim, dtype=model.dtype) for _ in range(2))
    kernel = TritonAttention(config, 16, model.dtype, CPU, exact=True)
    for context, length in ((1, 1), (129, 3), (1000, 1000), (LONGEST, 1), (LONGEST, 100)):
        spans = [RowSpan(0, context - length, context, tuple([0] * -(-context // 16)))]
        queries = torch.empty(length, model.heads, model.head_dim, dtype=model.dtype)
        kernel.attend(queries, keys, values, kernel.prepare(spans, model.window))


def sampling_calls(model: Model) -> None:
    for vocab in (32_000, 128_256, 151_936):
        for rows in (1, 2, 64):
            decide(torch.empty(rows, vocab), [Draw(SamplingParams(), 0, 0)] * rows)
            mask_rows(torch.empty(rows, vocab), [(row, np.zeros(-(-vocab // 8), np.uint8)) for row in range(rows)])


def transfer_calls(model: Model) -> None:
    for count in (1, 1000, 4 << 20):
        add_mixed_words(torch.empty(count, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), *SPLITMIX)


def variants(model: Model, arch: int) -> list[Variant]:
    """All variants that serving this model compiles."""
    compiled: dict[str, tuple[Any, Any]] = {}
    with compiling(arch, lambda kernel, made: compiled.setdefault(made.metadata.hash, (kernel, made))):
        attention_calls(model, TritonAttention(model.config(), 16, model.dtype, CPU))
        layer_calls(model)
        exact_calls(model)
        sampling_calls(model)
        transfer_calls(model)
    return [describe(model, arch, kernel, made) for kernel, made in compiled.values()]


def describe(model: Model, arch: int, kernel: Any, made: Any) -> Variant:
    registers, spilled = assembled(made.asm["ptx"])
    names = kernel.arg_names
    constants = {names[path[0]]: value for path, value in made.src.constants.items() if isinstance(value, int | bool)}
    shown = " ".join(f"{name}={value}" for name, value in constants.items() if abs(value) < 1 << 40)
    return Variant(
        model.name,
        kernel.fn.__name__,
        arch,
        shown,
        made.metadata.num_warps,
        registers,
        spilled,
        made.metadata.shared,
        model.main,
        len(partly_reached(made.asm["llir"])),
    )


@cache
def assembled(ptx: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills (stores and loads), as ptxas reports."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    target = re.search(r"\.target (sm_\w+)", ptx)
    if target is None:
        raise SystemExit("PTX without a target")
    blackwell = folder / "ptxas-blackwell"
    ptxas = blackwell if target[1].startswith(("sm_10", "sm_12")) and blackwell.exists() else folder / "ptxas"
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(ptxas), "-v", f"--gpu-name={target[1]}", str(source), "-o", str(source.with_suffix(".cubin"))]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    registers = re.search(r"Used (\d+) registers", ran.stderr)
    spills = re.findall(r"(\d+) bytes spill", ran.stderr)
    if registers is None:
        raise SystemExit(f"ptxas says nothing of registers: {ran.stderr}")
    return int(registers[1]), sum(map(int, spills))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--arch", type=int, nargs="+", default=list(ARCHS), choices=ARCHS)
    options.add_argument("--only", nargs="+", choices=[model.name for model in MODELS], help="models")
    options.add_argument("--json", action="store_true", help="a line for each variant, and no report")
    options.add_argument("--out", type=Path, help="the report; by default in benchmarks/results")
    arguments = options.parse_args()
    whole = arguments.only is None and list(arguments.arch) == list(ARCHS)
    out = arguments.out or RESULTS / f"kernels-compiled{'' if whole else '-part'}.md"
    if not out.parent.is_dir():
        options.error(f"--out: there is no folder {out.parent}")
    models = [model for model in MODELS if arguments.only is None or model.name in arguments.only]
    compiled = []
    for model in models:
        for arch in arguments.arch:
            for variant in variants(model, arch):
                compiled.append(variant)
                if arguments.json:
                    print(json.dumps(asdict(variant)), flush=True)
    if not arguments.json:
        write(out, compiled)


def write(out: Path, compiled: list[Variant]) -> None:
    setting = (
        "Every variant that serving a model compiles, over contexts from 1 to 131,072 tokens, steps of 1 to 256 rows,\n"
        "launched and captured. Spills in bytes a thread, shared memory in bytes a program."
    )
    parts = []
    for model in dict.fromkeys(variant.model for variant in compiled):
        mine = sorted((v for v in compiled if v.model == model), key=lambda v: (v.kernel, v.constants, v.arch))
        numbers = [(v.arch, v.warps, v.registers, v.spill_bytes, v.shared_bytes) for v in mine]
        rows = [[v.kernel, *map(str, of), v.constants] for v, of in zip(mine, numbers, strict=True)]
        names = ("kernel", "sm", "warps", "registers", "spills", "shared", "constants")
        parts.append(f"## {model}\n\n{table(names, rows)}")
    about = f"Triton {triton.__version__}, torch {torch.__version__}."
    report(out, "Triton kernels, compiled without a device", setting, *parts, about=about)


if __name__ == "__main__":
    main()

"""The memory plan against what ranks report after they have loaded, and the dry run that prints it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from baton.core.errors import StartupError
from baton.engine.checkpoint import Checkpoint, read_model_config
from baton.engine.kernels.build import processor_levels
from baton.engine.loading import load_runner
from baton.engine.options import EngineOptions
from baton.engine.parallel import TPGroup
from baton.engine.weights import WeightReader, parameter_bytes
from baton.gguf.files import checkpoint_directory
from baton.runtime.config import WorkerConfig
from baton.transfer import nccl
from decode.speculation.draft_model import load_draft
from launch.dry_run import CHANNEL_BYTES, RankMemory, dry_run, rank_memory
from launch.members import Programs
from launch.plan import Plan, local_topology, make_plan
from launch.up_config import UpConfig
from tests.support.checkpoints import ARCHS, Arch, make_checkpoint
from tests.support.engine_driver import kv_bytes
from tests.support.gguf_writer import write_gguf
from tests.support.quantized import awq, gptq, packed, plain, write_quantized

LAYERS = {"gptq": gptq(), "awq": awq(), "packed, 8 bits": packed(bits=8), "fp8": plain("float", (128, 128), "fp8")}


def plan(model: Path, **options: object) -> Plan:
    config = UpConfig(device="cpu", dtype="float32", **options)
    return make_plan(local_topology(config, [0, 1], ()), str(model), "m")


def first_memory(of: Plan, model: Path) -> RankMemory:
    return rank_memory(of, of.parts[0], read_model_config(model), model)


@pytest.mark.parametrize("quantized", ["none", "int8", "int4"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("arch", ARCHS)
def test_parameter_bytes_equal_the_bytes_that_each_rank_reads(
    arch: Arch, size: int, quantized: str, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "m", arch, hidden_size=128, intermediate_size=256, head_dim=32)
    config = read_model_config(model)
    for rank in range(size):
        share, cpu = TPGroup(rank, size), torch.device("cpu")
        reader = WeightReader(Checkpoint(model), config, share, torch.float32, cpu, quantized=quantized)
        reader.embedding(), reader.head(), reader.final_norm()
        for layer in range(config.num_layers):
            reader.layer(layer)
        assert parameter_bytes(config, size, rank, 4, quantized) == reader.bytes_read


@pytest.mark.parametrize(("size", "quantized"), [(1, "none"), (1, "int4"), (2, "none")])
@pytest.mark.parametrize("stored", ["Q8_0", "Q4_1", "gptq", "awq", "packed, 8 bits", "fp8"])
def test_bytes_of_matrices_that_stay_in_blocks_are_known_before_they_are_read(
    stored: str, size: int, quantized: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTQ and AWQ have minima that take float32; with two ranks the inputs of `down` cut blocks."""
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    made = make_checkpoint(tmp_path / "m", "llama", hidden_size=256, intermediate_size=96, head_dim=64)
    if stored[0] == "Q":
        model = checkpoint_directory(write_gguf(made, tmp_path / "m.gguf", stored))
    else:
        model = tmp_path / "q"
        write_quantized(made, model, LAYERS[stored])
    config = read_model_config(model)
    for rank in range(size):
        share, cpu = TPGroup(rank, size), torch.device("cpu")
        reader = WeightReader(Checkpoint(model), config, share, torch.bfloat16, cpu, quantized=quantized)
        reader.in_blocks = True
        reader.embedding(), reader.head(), reader.final_norm()
        for layer in range(config.num_layers):
            reader.layer(layer)
        assert parameter_bytes(config, size, rank, 2, quantized, Checkpoint(model)) == reader.bytes_read


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("quantize", ["none", *(["int8"] if processor_levels() else [])])
def test_parameters_and_kv_equal_those_of_a_running_engine(quantize: str, kv_dtype: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", "llama")
    options = EngineOptions(model_dir=model, dtype="float32", kv_memory_bytes=1 << 20, kv_dtype=kv_dtype)
    runner = load_runner(replace(options, quantize=quantize))
    made = plan(model, kv_memory_gib=1 / 1024, quantize=quantize, kv_dtype=kv_dtype)
    found = first_memory(made, model)
    assert found.parameter_bytes == runner.parameter_bytes
    assert (found.kv_bytes, found.kv_blocks) == (kv_bytes(runner), runner.num_blocks)
    assert (found.edges, found.edge_bytes) == (1, 0)


def test_draft_memory_is_planned_for_decode_workers_and_equals_a_running_one(tmp_path: Path) -> None:
    model, draft = (make_checkpoint(tmp_path / name, "llama") for name in ("m", "d"))
    runner = load_runner(EngineOptions(model_dir=model, dtype="float32", kv_memory_bytes=1 << 20, kernels="torch"))
    running = load_draft(
        WorkerConfig(step_tokens=512, model=str(model), draft=str(draft), kernels="torch", max_running=5), runner
    )
    assert running is not None
    made = plan(model, kv_memory_gib=1 / 1024, draft=str(draft), max_running=5)
    config = read_model_config(model)
    prefill, decode = (rank_memory(made, part, config, model).draft_bytes for part in made.parts)
    assert (prefill, decode) == (0, running.parameter_bytes + kv_bytes(running))


@pytest.mark.parametrize("draft", ["none", "ngram", "auto"])
def test_no_draft_memory_is_planned_without_a_draft_model(draft: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", "llama")
    made = plan(model, draft=draft)
    assert [rank_memory(made, part, read_model_config(model), model).draft_bytes for part in made.parts] == [0, 0]


def test_dry_run_shows_the_memory_of_the_built_in_draft_but_not_of_a_missing_one() -> None:
    def shown(**options: object) -> list[str]:
        out = io.StringIO()
        console = Console(file=out, width=200, soft_wrap=True)
        dry_run(plan(Path("builtin"), **options), Programs(("C",), ("T",)), console)
        lines = out.getvalue().split("memory of each rank")[1].splitlines()
        return [line.split()[-1] for line in lines if line.startswith(("prefill-0", "decode-0"))][:2]

    assert shown(kv_memory_gib=4.0) == ["0.0", "261.3"]  # 5.3 and 256
    assert shown(draft="/not/on/this/host") == ["0.0", "?"]


def test_every_pair_of_ranks_that_share_heads_is_an_edge(tmp_path: Path) -> None:
    made = plan(make_checkpoint(tmp_path / "m", "llama"), prefill_tp=2, decode=2)
    config = read_model_config(tmp_path / "m")
    assert [rank_memory(made, part, config, tmp_path / "m").edges for part in made.parts] == [2, 2, 2]


def test_too_small_kv_memory_is_reported_before_any_process_starts(tmp_path: Path) -> None:
    made = plan(make_checkpoint(tmp_path / "m", "llama"), kv_memory_gib=0.00001, max_model_len=256)
    with pytest.raises(StartupError, match="too small"):
        first_memory(made, tmp_path / "m")


def test_too_small_staging_memory_is_reported_before_any_process_starts(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", "llama")
    made = plan(model, staging_mib=0.001)
    with pytest.raises(StartupError, match=r"^prefill-0: staging memory of 1049 bytes is too small: one KV block"):
        first_memory(made, model)


def test_plan_for_gpus_can_be_made_on_a_host_without_gpus(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", "llama")
    made = make_plan(local_topology(UpConfig(device="cuda"), [0, 1], ("0", "1")), str(model), "m")
    found = rank_memory(made, made.parts[1], read_model_config(model), model)
    assert (found.kv_bytes, found.kv_blocks) == (0, 0)  # a share of the GPU's free memory
    assert found.edge_bytes == nccl.MAX_CTAS * CHANNEL_BYTES  # of NCCL
    assert found.parameter_bytes == parameter_bytes(read_model_config(model), 1, 0, 2)  # bfloat16


def test_a_dry_run_prints_placement_ports_memory_and_commands(tmp_path: Path) -> None:
    out = io.StringIO()
    made = plan(make_checkpoint(tmp_path / "m", "llama"), kv_memory_gib=1 / 1024)
    assert dry_run(made, Programs(("C",), ("torchrun",)), Console(file=out, width=200, soft_wrap=True)) == 0
    text = out.getvalue()
    for words in ("placement", "core 1, 1 thread", "ports", "8100", "any", "memory of each rank", "1.0", "commands"):
        assert words in text
    lines = text.splitlines()
    assert any(line.startswith("C --model") for line in lines)
    assert any("torchrun --nnodes 1" in line and "-m decode" in line and "--threads 1" in line for line in lines)


def test_dry_run_truncates_no_number_in_a_narrow_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    made = plan(make_checkpoint(tmp_path / "m", "llama"), kv_memory_gib=1 / 1024)
    dry_run(made, Programs(("C",), ("torchrun",)), Console(file=out, width=40, soft_wrap=True))
    assert "\u2026" not in out.getvalue()
    assert "edge buffers MiB  staging MiB" in out.getvalue()

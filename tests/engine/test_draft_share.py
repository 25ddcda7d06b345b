"""Memory for a draft beside its target, in numbers: both fit together, and one more block would not."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from baton.core.blocks import BlockTable, Holder
from baton.core.commands import Role
from baton.core.prefix_cache import KeptBlocks, PrefixCache
from baton.core.ranks import Ranks
from baton.core.request import SequenceId
from baton.engine import memory
from baton.engine.checkpoint import read_model_config
from baton.engine.loading import load_runner
from baton.engine.memory import DEFAULT_SEQUENCES, DraftShare, default_budget, draft_share
from baton.engine.options import EngineOptions
from baton.engine.runner import Runner
from baton.runtime.config import WorkerConfig
from baton.runtime.worker_main import _engine_options
from decode.speculation.draft_model import load_draft, prepare
from tests.support.builders import make_layout
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_driver import kv_bytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LAYOUT = make_layout(4)  # 1024 bytes a block


def total_bytes(share: DraftShare, blocks: int, target_block_bytes: int) -> int:
    return blocks * target_block_bytes + share.parameter_bytes + share.kv_bytes(blocks)


def test_target_gets_as_many_blocks_as_fit_beside_the_draft() -> None:
    chance = random.Random(5)
    for _ in range(300):
        share = DraftShare(chance.randrange(50_000), LAYOUT, chance.randrange(1, 60), 64)
        budget, target = chance.randrange(400_000), chance.choice((512, 1024, 5000))
        blocks = share.left_of(budget, target) // target
        if blocks:
            assert total_bytes(share, blocks, target) <= budget
        assert total_bytes(share, blocks + 1, target) > budget


@pytest.mark.parametrize(("most", "left"), [(10, 1_000_000 - 30_000 - 11 * 1024), (1000, 236 * 3072)])
def test_memory_left_by_the_draft_equals_hand_computed_values(most: int, left: int) -> None:
    """A draft whose sequences use few blocks leaves the rest; one that can use as many as the target gets as many."""
    assert LAYOUT.bytes_per_block == 1024
    assert DraftShare(30_000, LAYOUT, most, 64).left_of(1_000_000, 3072) // 3072 == left // 3072


def test_draft_that_does_not_fit_leaves_no_memory_to_the_target() -> None:
    assert DraftShare(10_000, LAYOUT, 4, 16).left_of(5_000, 1024) == 0


def test_draft_memory_is_reserved_before_loading_only_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "default_kv_bytes", lambda device, local_size, share: 1_000_000 // local_size)
    share = DraftShare(30_000, LAYOUT, 10, 1 << 20)
    longest = 1 << 20  # 256 such sequences need more than the memory
    assert default_budget(LAYOUT, longest, CUDA, 1, None) == 1_000_000
    assert default_budget(LAYOUT, longest, CUDA, 1, share) == share.left_of(1_000_000, 1024) < 1_000_000
    assert default_budget(LAYOUT, longest, CUDA, 2, share) == share.left_of(500_000, 1024)
    assert default_budget(LAYOUT, longest, CPU, 1, share) == 1_000_000
    assert default_budget(LAYOUT, 4, CUDA, 1, share) == DEFAULT_SEQUENCES * 1024  # as much as these sequences can use


def test_a_draft_stores_kv_as_its_target_does(tmp_path: Path) -> None:
    wide, _ = shares = [loaded(tmp_path / kv_dtype, kv_dtype)[1:] for kv_dtype in ("auto", "fp8")]
    for made, share in shares:
        assert (made.parameter_bytes, kv_bytes(made)) == (share.parameter_bytes, share.kv_bytes(made.num_blocks))
    assert shares[1][0].facts.kv_dtype == "float8_e4m3fn"
    assert wide[1].layout.bytes_per_block == 4 * shares[1][1].layout.bytes_per_block


def loaded(tmp_path: Path, kv_dtype: str = "auto") -> tuple[Runner, Runner, DraftShare]:
    """A target, its draft and the expected memory of the draft."""
    target, draft = (make_checkpoint(tmp_path / name, "llama") for name in ("target", "draft"))
    options = EngineOptions(model_dir=target, dtype="float32", kv_memory_bytes=1 << 20, kernels="torch")
    runner = load_runner(replace(options, kv_dtype=kv_dtype))
    config = WorkerConfig(
        step_tokens=512,
        model=str(target),
        draft=str(draft),
        device="cpu",
        kernels="torch",
        max_running=3,
        kv_dtype=kv_dtype,
    )
    made = load_draft(config, runner)
    assert made is not None
    share = draft_share(draft, read_model_config(draft), runner.max_model_len, 16, "float32", 3, kv_dtype)
    return runner, made, share


def test_draft_dir_is_set_only_for_a_decode_leader_with_a_draft_model_off_the_cpu(tmp_path: Path) -> None:
    target, draft = (make_checkpoint(tmp_path / name, "llama") for name in ("target", "draft"))
    config = WorkerConfig(step_tokens=512, model=str(target), draft=str(draft), max_running=3)
    leader, follower = Ranks(), Ranks(1, 2, 1, 2)
    known = _engine_options("decode", config, "cuda", leader)
    assert (known.draft_dir, known.max_running) == (draft.resolve(), 3)
    for role, changed, device, ranks in (
        ("decode", config, "cpu", leader),
        ("decode", replace(config, draft="ngram"), "cuda", leader),
        ("decode", config, "cuda", follower),
        ("prefill", config, "cuda", leader),
    ):
        assert _engine_options(role, changed, device, ranks).draft_dir is None  # type: ignore[arg-type]


def test_a_worker_for_both_roles_has_the_options_of_the_one_that_needs_more(tmp_path: Path) -> None:
    target, draft = (make_checkpoint(tmp_path / name, "llama") for name in ("target", "draft"))
    config = WorkerConfig(model=str(target), draft=str(draft), max_running=3, both_roles="on")
    prefill, decode = (_engine_options(role, config, "cuda", Ranks()) for role in get_args(Role))
    assert prefill == decode
    assert (decode.max_num_tokens, decode.decode_rows, decode.draft_dir) == (4096 + 48, 3, draft.resolve())
    assert _engine_options("decode", replace(config, both_roles="auto"), "cuda", Ranks()).max_num_tokens == 512 + 48
    assert _engine_options("prefill", replace(config, both_roles="auto"), "cpu", Ranks()).decode_rows == 3


def test_measuring_at_a_change_of_role_overwrites_no_cached_block(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", max_position_embeddings=1024)
    runner = load_runner(EngineOptions(model_dir=target, dtype="float32", kv_memory_bytes=1 << 20, kernels="torch"))
    for keys, values in runner.kv.layers:
        keys.normal_(), values.normal_()
    before = [(keys.clone(), values.clone()) for keys, values in runner.kv.layers]
    cache, holder = (
        PrefixCache(BlockTable(runner.num_blocks), runner.layout.block_size),
        Holder("send", SequenceId("s")),
    )
    names, blocks = [bytes([n]) * 32 for n in range(40)], cache.blocks.allocate(40, holder)
    assert blocks == tuple(range(40))
    cache.store(names, blocks)
    cache.blocks.release(blocks, holder)
    config = WorkerConfig(step_tokens=64, model=str(target), draft="ngram", device="cpu", kernels="torch")
    prepare(config, runner, KeptBlocks(cache, 7))
    kept = [block for name in names for block in cache.match([name])]
    assert kept == list(range(17, 40))
    for (keys, values), (old_keys, old_values) in zip(runner.kv.layers, before, strict=True):
        assert not torch.equal(keys[0], old_keys[0]), "measuring writes KV"
        assert torch.equal(keys[kept], old_keys[kept]) and torch.equal(values[kept], old_values[kept])


def test_target_with_a_draft_loads_with_fewer_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mocks a GPU with 1 MB of free memory."""
    target, draft = (make_checkpoint(tmp_path / name, "llama") for name in ("target", "draft"))
    monkeypatch.setattr(memory, "default_kv_bytes", lambda device, local_size, share: 1_000_000)
    monkeypatch.setattr(memory, "default_budget", lambda *where: default_budget(*where[:2], CUDA, *where[3:]))
    options = EngineOptions(model_dir=target, dtype="float32", kernels="torch", draft_dir=draft, max_running=3)
    beside, alone = load_runner(options), load_runner(replace(options, draft_dir=None))
    share = draft_share(draft, read_model_config(draft), beside.max_model_len, 16, "float32", 3)
    block = alone.kv.layout.bytes_per_block
    assert total_bytes(share, beside.num_blocks, block) <= 1_000_000 < total_bytes(share, alone.num_blocks, block)


def test_draft_uses_the_memory_that_was_computed_for_it(tmp_path: Path) -> None:
    runner, made, share = loaded(tmp_path)
    assert made.parameter_bytes == share.parameter_bytes
    assert (made.num_blocks, kv_bytes(made)) == (
        share.num_blocks(runner.num_blocks),
        share.kv_bytes(runner.num_blocks),
    )

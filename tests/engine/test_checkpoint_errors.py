"""Loading a damaged model directory fails with one plain line that names the file and, if any, the tensor."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import StartupError
from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.checkpoint import model_digest
from tests.support.engine_driver import tiny_runner

Damage = Callable[[Path], None]
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def load_error(model_dir: Path) -> str:
    """Returns the line with which loading fails."""
    with pytest.raises(StartupError) as caught:
        tiny_runner(model_dir)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500
    return caught.value.message


@pytest.fixture
def single(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "m"))


@pytest.fixture
def sharded(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llama", shards=3), tmp_path / "m"))


# Files


def set_header_length(length: int) -> Damage:
    return lambda file: file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])


def edit_header(edit: Callable[[dict[str, Any]], object]) -> Damage:
    """Rewrites the header; the data stays as it is."""

    def damage(file: Path) -> None:
        content = file.read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + size])
        edit(header)
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])

    return damage


def offsets(begin: int, end: int) -> Damage:
    return edit_header(lambda header: header[Q_PROJ].update(data_offsets=[begin, end]))


def raw_header(text: bytes) -> Damage:
    return lambda file: file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))


DAMAGED_FILES: dict[str, Damage] = {
    "cut by one byte": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "cut in half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "cut in the header": lambda file: file.write_bytes(file.read_bytes()[:100]),
    "empty": lambda file: file.write_bytes(b""),
    "seven bytes": lambda file: file.write_bytes(b"1234567"),
    "trailing bytes": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "header length 2^63": set_header_length(1 << 63),
    "header length 200 MB": set_header_length(200 << 20),
    "header length 0": set_header_length(0),
    "header not JSON": raw_header(b"{not json}" + b" " * 6),
    "header not UTF-8": raw_header(b'{"\xff\xfe": 1}' + b" " * 5),
    "header not an object": raw_header(b"[1, 2, 3]       "),
    "overlap": offsets(0, 16384),
    "negative offset": offsets(-4, 16380),
    "offset past the end": offsets(1 << 40, (1 << 40) + 16384),
    "end before begin": offsets(16384, 0),
    "shape not equal bytes": edit_header(lambda header: header[Q_PROJ].update(shape=[64, 65])),
    "shape overflows": edit_header(lambda header: header[Q_PROJ].update(shape=[1 << 40, 1 << 40])),
    "negative shape": edit_header(lambda header: header[Q_PROJ].update(shape=[-64, -64])),
    "hole": edit_header(lambda header: header.pop(Q_PROJ)),
    "unknown dtype": edit_header(lambda header: header[Q_PROJ].update(dtype="F31")),
}


@pytest.mark.parametrize("damage", DAMAGED_FILES)
def test_damaged_file_is_refused_by_name(single: Path, damage: str) -> None:
    DAMAGED_FILES[damage](single / SINGLE)
    assert load_error(single).startswith(SINGLE)


def test_damaged_shard_is_refused_by_name(sharded: Path) -> None:
    (sharded / SHARD).write_bytes((sharded / SHARD).read_bytes()[:-1])
    assert load_error(sharded).startswith(SHARD)


# Tensors


def rewrite(file: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def poison(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors[Q_PROJ].view(-1).__setitem__(777, value)


WRONG_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing": (lambda t: t.pop(Q_PROJ), f"tensor {Q_PROJ} is missing"),
    "missing norm": (lambda t: t.pop("model.norm.weight"), "tensor model.norm.weight is missing"),
    "missing head": (lambda t: t.pop("lm_head.weight"), "tensor lm_head.weight is missing"),
    "extra": (lambda t: t.update({"model.layers.3.x": torch.ones(2)}), "tensor model.layers.3.x does not belong"),
    "transposed": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(64, 160)}),
        "tensor model.layers.0.mlp.up_proj.weight has shape [64, 160], config.json requires [160, 64]",
    ),
    "wrong vocabulary": (
        lambda t: t.update({"lm_head.weight": torch.ones(321, 64)}),
        "tensor lm_head.weight has shape [321, 64], config.json requires [320, 64]",
    ),
    "empty tensor": (lambda t: t.update({Q_PROJ: torch.ones(0, 64)}), f"tensor {Q_PROJ} has shape [0, 64]"),
    "mixed dtypes": (lambda t: t.update({Q_PROJ: t[Q_PROJ].bfloat16()}), f"tensor {Q_PROJ} has dtype torch.bfloat16"),
    "integers": (lambda t: t.update({Q_PROJ: t[Q_PROJ].int()}), f"tensor {Q_PROJ} has unsupported dtype I32"),
    "NaN": (poison(float("nan")), f"tensor {Q_PROJ} holds NaN or infinite values"),
    "infinity": (poison(float("inf")), f"tensor {Q_PROJ} holds NaN or infinite values"),
    "minus infinity": (poison(float("-inf")), f"tensor {Q_PROJ} holds NaN or infinite values"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_wrong_tensor_is_refused_by_name(single: Path, case: str) -> None:
    edit, message = WRONG_TENSORS[case]
    rewrite(single / SINGLE, edit)
    assert message in load_error(single)


def test_weights_in_another_dtype_than_the_config_are_refused(single: Path) -> None:
    def swap(header: dict[str, Any]) -> None:
        for entry in header.values():
            if entry.get("dtype") == "F32":
                entry["dtype"] = "BF16"
                entry["shape"][-1] *= 2

    edit_header(swap)(single / SINGLE)
    assert "has shape" in load_error(single)
    rewrite(single / SINGLE, lambda t: t.update({k: v.view(torch.float32).half() for k, v in t.items()}))
    assert "has dtype torch.float16, expected torch.float32" in load_error(single)


def test_lm_head_that_differs_from_tied_embeddings_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model_dir = Path(shutil.copytree(checkpoint("llama", tied=True), tmp_path / "m"))
    rewrite(model_dir / SINGLE, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    tiny_runner(model_dir)
    rewrite(model_dir / SINGLE, lambda t: t["lm_head.weight"].add_(0.01))
    assert "lm_head.weight differs from model.embed_tokens.weight" in load_error(model_dir)


def test_stored_rotary_frequencies_are_ignored(single: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    before = tiny_runner(single)
    rewrite(single / SINGLE, lambda t: t.update({name: torch.ones(8)}))
    after = tiny_runner(single)
    plan = StepPlan(1, (Row(SequenceId("r"), 0, (1, 2, 3), (0,), SamplingParams(temperature=0.0), 1),))
    assert before.step(plan).sampled == after.step(plan).sampled
    keys = [runner.kv.layers[0][0][0, :3] for runner in (before, after)]
    assert torch.equal(*keys), "keys rotated by other frequencies would differ"


# Index


def edit_index(edit: Callable[[dict[str, str]], object]) -> Damage:
    def damage(model_dir: Path) -> None:
        index = json.loads((model_dir / INDEX).read_text())
        edit(index["weight_map"])
        (model_dir / INDEX).write_text(json.dumps(index))

    return damage


def fifo(model_dir: Path) -> None:
    (model_dir / SHARD).unlink()
    os.mkfifo(model_dir / SHARD)


def directory(model_dir: Path) -> None:
    (model_dir / SHARD).unlink()
    (model_dir / SHARD).mkdir()


def link_outside(model_dir: Path) -> None:
    shutil.move(model_dir / SHARD, model_dir.parent / "elsewhere.safetensors")
    (model_dir / SHARD).symlink_to(model_dir.parent / "elsewhere.safetensors")


def in_two_shards(model_dir: Path) -> None:
    first = "model-00001-of-00003.safetensors"
    tensors = load_file(model_dir / first)
    rewrite(model_dir / SHARD, lambda t: t.update({"model.embed_tokens.weight": tensors["model.embed_tokens.weight"]}))


WRONG_INDEXES: dict[str, tuple[Damage, str]] = {
    "shard missing": (lambda d: (d / SHARD).unlink(), f"{SHARD}: No such file"),
    "mapped to another shard": (
        edit_index(lambda m: m.update({Q_PROJ: "model-00001-of-00003.safetensors"})),
        f"tensor {Q_PROJ} is in {SHARD}, but the index names model-00001-of-00003.safetensors",
    ),
    "not in the index": (edit_index(lambda m: m.pop(Q_PROJ)), f"tensor {Q_PROJ} is in {SHARD}, but the index names"),
    "in the index only": (edit_index(lambda m: m.update(ghost=SHARD)), f"{SHARD}: tensor ghost is missing"),
    "in two shards": (in_two_shards, f"{SHARD}: tensor model.embed_tokens.weight is also in model-0"),
    "parent directory": (edit_index(lambda m: m.update({Q_PROJ: f"../{SHARD}"})), f"{Q_PROJ} is mapped to '../"),
    "absolute path": (edit_index(lambda m: m.update({Q_PROJ: f"/tmp/{SHARD}"})), f"{Q_PROJ} is mapped to '/tmp"),
    "pickled shard": (edit_index(lambda m: m.update({Q_PROJ: "x.bin"})), f"{Q_PROJ} is mapped to 'x.bin'"),
    "not a name": (edit_index(lambda m: m.update({Q_PROJ: 7})), f"{Q_PROJ} is mapped to 7"),
    "NUL": (edit_index(lambda m: m.update({Q_PROJ: "a\0.safetensors"})), f"{Q_PROJ} is mapped to 'a\\x00.safe"),
    "half a character": (edit_index(lambda m: m.update({Q_PROJ: "\ud800.safetensors"})), f"{Q_PROJ} is mapped to "),
    "line end": (edit_index(lambda m: m.update({Q_PROJ: "a\n.safetensors"})), f"{Q_PROJ} is mapped to 'a\\n.safe"),
    "empty map": (edit_index(lambda m: m.clear()), "weight_map is missing or empty"),
    "not JSON": (lambda d: (d / INDEX).write_text("{"), INDEX),
    "deep JSON": (lambda d: (d / INDEX).write_text("[" * 100_000), INDEX),
    "not an object": (lambda d: (d / INDEX).write_text("[]"), "weight_map is missing"),
    "link that leaves": (link_outside, f"{SHARD}: symbolic link points outside the model directory"),
    "directory": (directory, f"{SHARD}: not a regular file"),
    "fifo": (fifo, f"{SHARD}: not a regular file"),
}


@pytest.mark.parametrize("case", WRONG_INDEXES)
def test_wrong_index_is_refused_with_the_reason(sharded: Path, case: str) -> None:
    damage, message = WRONG_INDEXES[case]
    damage(sharded)
    assert message in load_error(sharded)


# Directories


def test_missing_model_directory_is_refused(tmp_path: Path) -> None:
    assert "no such model directory" in load_error(tmp_path / "nothing")


def test_config_that_is_missing_or_not_json_is_refused(single: Path) -> None:
    (single / "config.json").write_text("{'a': 1}")
    assert "config.json is not JSON" in load_error(single)
    (single / "config.json").unlink()
    assert "config.json: No such file" in load_error(single)


def test_missing_and_pickled_weights_are_refused(single: Path) -> None:
    (single / SINGLE).unlink()
    assert "found neither model.safetensors nor" in load_error(single)
    (single / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "found only pickled weights" in load_error(single)


def test_symlinks_of_a_hub_cache_are_followed(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "rev", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in checkpoint("llama").iterdir():
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert tiny_runner(snapshot).facts.model_digest == model_digest(checkpoint("llama"))


def test_digest_covers_the_config_and_every_weight_byte(sharded: Path) -> None:
    seen = {model_digest(sharded)}
    for file in ("config.json", SHARD):
        content = bytearray((sharded / file).read_bytes())
        content[-1] ^= 1
        (sharded / file).write_bytes(content)
        seen.add(model_digest(sharded))
    assert len(seen) == 3
    assert all(len(digest) == 32 for digest in seen)

"""A model in GGUF gives the tensors, the config and the tokens of the checkpoint that it was written from."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from baton.core.errors import StartupError
from baton.engine.checkpoint import Checkpoint, model_digest, read_model_config, weight_files
from baton.gguf.config import llama3_scaling, shortest
from baton.gguf.files import KINDS, checkpoint_directory, gguf_file
from baton.models.model_config import parse_model_config
from baton.runtime.model_source import resolve_model, served_name
from coordinator.text.model import TextModel
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_writer import TYPES, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(arch: str = "llama2", **options: object) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp("source"), arch, **options)  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama2", {}),
        ("llama2", {"bias": True, "tied": True}),
        ("mistral", {"sliding_window": 0}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_every_tensor_and_the_config_equal_the_source(
    source: Callable[..., Path], tmp_path: Path, arch: str, options: dict[str, object]
) -> None:
    origin = source(arch, **options)
    made = Checkpoint(directory := checkpoint_directory(write_gguf(origin, tmp_path / "m.gguf")))
    stored = load_file(origin / "model.safetensors")
    assert made.tensors.keys() == stored.keys()
    for name, tensor in stored.items():
        if tensor.dim() == 1:
            assert torch.equal(made.read(name), tensor) and torch.equal(made.read(name, slice(3, 9)), tensor[3:9])
            continue
        assert torch.equal(made.read(name), tensor), name
        assert torch.equal(made.read(name, slice(16, 48), slice(8, 24)), tensor[16:48, 8:24]), name
    ours, theirs = read_model_config(directory), read_model_config(origin)
    different = {field for field in ours.__slots__ if getattr(ours, field) != getattr(theirs, field)}
    assert different <= {"torch_dtype", "windows" if arch == "qwen2" else "torch_dtype", "o_bias", "qkv_bias"} - (
        set() if arch == "llama2" and options else {"o_bias", "qkv_bias"}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_packed_types_are_read_as_the_gguf_package_dequantises_them(
    source: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    origin = source(hidden_size=256, intermediate_size=256, num_layers=1)
    file = write_gguf(origin, tmp_path / "m.gguf", kind if kind in TYPES else "Q8_0")
    quantized = gguf.GGMLQuantizationType[kind]
    checkpoint = Checkpoint(checkpoint_directory(file))
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    name, theirs = "model.layers.0.mlp.down_proj.weight", reader["blk.0.ffn_down.weight"]
    if kind not in TYPES:  # the package has no quantiser for it: any bytes are valid, up to their scales
        block, size = gguf.GGML_QUANT_SIZES[quantized]
        raw = np.random.default_rng(7).integers(0, 256, (256, 256 // block * size), dtype=np.uint8)
        scales = {"Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (size - 2, size)}[kind]
        raw.reshape(-1, size)[:, slice(*scales)] = np.tile(
            np.array([0.01], np.float16).view(np.uint8), (scales[1] - scales[0]) // 2
        )
        expected = gguf.quants.dequantize(raw, quantized)
        path = tmp_path / "raw.gguf"
        raw.tofile(path)
        stored = checkpoint._files.index.tensors  # type: ignore[union-attr]
        stored[name] = type(stored[name])(0, kind, (256, 256), 0)  # type: ignore[index]
        checkpoint._files._mapped[0] = np.memmap(path, np.uint8, "r")  # type: ignore[union-attr]
    else:
        assert theirs.tensor_type == quantized or kind == "F32"
        expected = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
    assert np.array_equal(checkpoint.read(name).numpy(), expected)
    assert np.array_equal(checkpoint.read(name, slice(5, 9), slice(32, 64)).numpy(), expected[5:9, 32:64])
    blocks = checkpoint.blocks(name, slice(5, 200), slice(32, 224))
    assert (blocks is None) is (kind not in ("Q8_0", "Q4_0", "Q4_1", "Q4_K"))
    if blocks is not None:
        assert np.array_equal(blocks.dequantized().numpy(), expected[5:200, 32:224])
        assert checkpoint.blocks(name, columns=slice(16, 64)) is None
        rotated = "model.layers.0.self_attn.q_proj.weight"
        if kind in TYPES and (of_queries := checkpoint.blocks(rotated)) is not None:
            assert torch.equal(of_queries.dequantized(), checkpoint.read(rotated))


def test_tokens_and_chats_equal_those_of_the_source(source: Callable[..., Path], tmp_path: Path) -> None:
    origin = source("llama2")
    ours = TextModel.load(checkpoint_directory(write_gguf(origin, tmp_path / "m.gguf")))
    theirs = TextModel.load(origin)
    for text in ("", "the thing in a hall", "  two  spaces\n\n", "ünïcödé 12345 🙂", "<|user|>the<|end|>"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.chat_template == theirs.chat_template and ours.special_tokens == theirs.special_tokens
    assert set(ours.eos_token_ids) <= set(theirs.eos_token_ids)


def test_outputs_end_at_every_token_that_llama_cpp_ends_them_at(source: Callable[..., Path], tmp_path: Path) -> None:
    """A file of Llama 3.1 has the id of <|eot_id|> alone; its generation_config.json, which GGUF lacks, lists three."""
    ends = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>"]
    fields = gguf.GGUFReader(write_gguf(origin := source(), tmp_path / "as-it-is.gguf")).fields
    tokens, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    first = len(tokens) - len(ends)
    tokens[first:], types[first:] = ends, [3, 3, 3, 1]  # the last is text like any other
    extra = {"tokens": tokens, "token_type": types, "eos_token_id": first + 2}
    file = write_gguf(
        origin, tmp_path / "m.gguf", extra={f"tokenizer.ggml.{name}": each for name, each in extra.items()}
    )
    eos = TextModel.load(checkpoint_directory(file)).eos_token_ids
    assert set(eos) >= {first, first + 1, first + 2} and first + 3 not in eos


def test_a_changed_file_is_derived_again_and_an_unchanged_one_is_not(
    source: Callable[..., Path], tmp_path: Path, cache: Path
) -> None:
    file = write_gguf(source(), tmp_path / "m.gguf")
    first = checkpoint_directory(file)
    (first / "config.json").write_text("{}")
    assert checkpoint_directory(file) == first and (first / "config.json").read_text() == "{}"
    write_gguf(source(seed=1), file)
    second = checkpoint_directory(file)
    assert second != first and read_model_config(second).num_layers == 3
    assert sorted(cache.iterdir()) == sorted([first, second])
    assert weight_files(second) == [file] and len(model_digest(second)) == 32


def test_a_model_is_a_file_or_a_directory_with_one(source: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = write_gguf(source(), folder / "small-Q8_0.gguf", "Q8_0")
    assert resolve_model(str(folder)) == resolve_model(str(file)) == checkpoint_directory(file)
    assert served_name(str(file)) == "small-Q8_0"
    write_gguf(source(), folder / "other.gguf")
    with pytest.raises(StartupError, match="holds 2 models in GGUF: name one"):
        gguf_file(folder)


@pytest.mark.parametrize(
    "name", ["a b \u00fc.gguf", "\u6a21" * 80 + ".gguf", "m-00001-of-00000.gguf", "m-00003-of-00002.gguf"]
)
def test_a_file_may_have_any_name(source: Callable[..., Path], tmp_path: Path, name: str) -> None:
    directory = resolve_model(str(write_gguf(source(), tmp_path / name)))
    assert weight_files(directory) == [tmp_path / name] and len(Checkpoint(directory).tensors) > 10


def test_a_split_model_is_one_model(source: Callable[..., Path], tmp_path: Path) -> None:
    origin = source()
    whole = write_gguf(origin, tmp_path / "whole.gguf")
    parts = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    reader = gguf.GGUFReader(whole)
    for number, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "llama")
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                sub = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    with pytest.raises(StartupError, match=r"m-00002-of-00002.gguf is missing"):
        parts[1].rename(tmp_path / "away")
        checkpoint_directory(parts[0])
    (tmp_path / "away").rename(parts[1])
    made = Checkpoint(checkpoint_directory(parts[1]))
    for name, tensor in load_file(origin / "model.safetensors").items():
        assert torch.equal(made.read(name), tensor)
    assert [file.name for file in weight_files(made.model_dir)] == [part.name for part in parts]
    shutil.copy(parts[0], tmp_path / "alone.gguf")
    (tmp_path / "set").mkdir()
    shutil.copy(parts[0], tmp_path / "set" / parts[0].name)
    shutil.copy(parts[0], tmp_path / "set" / "m-00001-of-00003.gguf")
    with pytest.raises(StartupError, match="holds 2 models in GGUF: name one"):
        gguf_file(tmp_path / "set")
    named = r"^alone.gguf: by its metadata it is part 1 of 2 of a split model, by its name a whole model$"
    with pytest.raises(StartupError, match=named):
        checkpoint_directory(tmp_path / "alone.gguf")
    shutil.copy(parts[1], parts[0])
    named = r"^m-00001-of-00002.gguf: by its metadata it is part 2 of 2 of a split model, by its name part 1 of 2$"
    with pytest.raises(StartupError, match=named):
        checkpoint_directory(parts[0])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count 8 is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type 'yarn' is not supported"),
        ({"llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.factor 4.0 is not supported"),
        ({"llama.rope.scale_linear": 2.0}, "llama.rope.scale_linear 2.0 is not supported"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "llama.rope.scaling.attn_factor 1.5 is not supported"),
        ({"llama.attention.causal": False}, "llama.attention.causal false is not supported"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.context_length": "long"}, "llama.context_length must be int"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count must be the head size, 16"),
        ({"tokenizer.ggml.pre": "bloom"}, "tokenizer.ggml.pre 'bloom' is not supported"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model 'rwkv' is not supported"),
        ({"tokenizer.ggml.merges": ["th"]}, "tokenizer.ggml.merges has 'th', which is not two tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries for 320 tokens"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base must be a number that float32 holds, not nan"),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 320},
            "tokenizer.ggml.bos_token_id must be a token of the 320, not 320",
        ),
        ({"llama.block_count": 1 << 31}, "m.gguf: llama.block_count must be an integer from 1 to 1000, not 2147483648"),
        (
            {"llama.attention.head_count": 7},
            "llama.attention.head_count 7 is not a multiple of llama.attention.head_count_kv 2",
        ),
        ({"llama.rope.freq_base": 0.0}, "llama.rope.freq_base must be a finite number of at least 1.0, not 0.0"),
        ({"tokenizer.ggml.merges": ["t \u0416"]}, "merges has 't \u0416': a part, or what they make, is no token"),
        (
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.scores": [0.0] * 320,
                "tokenizer.ggml.tokens": [f"{number} " + "x" * (number == 8) * 2000 for number in range(320)],
            },
            "tokenizer.ggml.tokens: token 8 has more than 1024 characters",
        ),
        ({"tokenizer.ggml.pre": ["gpt-2"]}, "damaged metadata: TypeError: unhashable"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(
    source: Callable[..., Path], tmp_path: Path, extra: dict[str, object], message: str
) -> None:
    file = write_gguf(source(), tmp_path / "m.gguf", extra=extra)
    with pytest.raises(StartupError, match=message) as refused:
        checkpoint_directory(file)
    assert refused.value.message.startswith("m.gguf: ") and "\n" not in refused.value.message


@pytest.mark.parametrize(
    "extra",
    [
        {"llama.rope.scaling.factor": 1.0, "llama.rope.scale_linear": 0.0, "llama.attention.causal": True},
        {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0},
    ],
    ids=str,
)
def test_settings_without_effect_are_accepted(
    source: Callable[..., Path], tmp_path: Path, extra: dict[str, object]
) -> None:
    assert checkpoint_directory(write_gguf(source(), tmp_path / "m.gguf", extra=extra)).is_dir()


def test_other_architectures_tensors_and_types_are_refused_by_name(source: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    with pytest.raises(StartupError, match=r"general.architecture 'gemma3' is not supported"):
        checkpoint_directory(write_gguf(source(), file, arch="gemma3"))
    more = {"blk.0.ffn_gate_exps.weight": np.zeros((4, 32), np.float32)}
    with pytest.raises(StartupError, match=r"tensor blk.0.ffn_gate_exps.weight is not part of this model"):
        checkpoint_directory(write_gguf(source(), file, tensors=more))
    rope = {"rope_freqs.weight": np.full(8, 2.0, np.float32)}
    with pytest.raises(StartupError, match=r"rope_freqs.weight does not hold the rope scaling of a Llama 3"):
        checkpoint_directory(write_gguf(source(), file, tensors=rope))


@pytest.mark.parametrize("keep", [0, 3, 2000, -64])
def test_a_damaged_file_is_one_plain_line(source: Callable[..., Path], tmp_path: Path, keep: int) -> None:
    file = write_gguf(source(), tmp_path / "m.gguf")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(StartupError, match=r"m\.gguf: ") as refused:
        Checkpoint(checkpoint_directory(file))
    assert "\n" not in refused.value.message


def test_a_missing_file_is_not_searched_in_the_hub() -> None:
    with pytest.raises(StartupError, match=r"^model file models/missing.gguf does not exist$"):
        resolve_model("models/missing.gguf")


def test_counts_and_sizes_beyond_the_end_are_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    key = struct.pack("<Q", 20) + b"general.architecture"
    for value in (struct.pack("<IIQ", 9, 4, 1 << 20), struct.pack("<IQ", 8, 1 << 62)):  # an array; a string
        file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + value)
        with pytest.raises(StartupError, match=r"m.gguf: .* the file ends before the data that its header announces"):
            checkpoint_directory(file)


def test_a_file_in_the_byte_order_of_other_machines_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    order = gguf.GGUFEndian.BIG if sys.byteorder == "little" else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(file, "llama", endianess=order)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        StartupError, match=r"^m.gguf: a GGUF file in the byte order of other machines is not supported"
    ):
        checkpoint_directory(file)


def test_a_full_disk_is_one_plain_line_and_leaves_nothing(
    source: Callable[..., Path], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str, **_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    file = write_gguf(source(), tmp_path / "m.gguf")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StartupError, match=r"m.gguf: cannot write the cache .*: No space left on device; set BATON_CA"):
        checkpoint_directory(file)
    assert not list(cache.iterdir())


def test_a_file_that_was_cut_after_it_was_derived_is_refused(source: Callable[..., Path], tmp_path: Path) -> None:
    file = write_gguf(source(), tmp_path / "m.gguf")
    directory = checkpoint_directory(file)
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(StartupError, match="ends beyond the file"):
        Checkpoint(directory)


def test_an_index_outside_our_cache_does_not_count(source: Callable[..., Path], tmp_path: Path) -> None:
    """A downloaded checkpoint could name any file of this machine."""
    directory = checkpoint_directory(write_gguf(source(), tmp_path / "m.gguf"))
    other = tmp_path / "downloaded"
    other.mkdir()
    for file in directory.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    with pytest.raises(StartupError, match=r"found neither model.safetensors"):
        Checkpoint(other)


def test_rope_scaling_of_llama_3_follows_from_its_factors() -> None:
    """transformers computes Llama 3's frequencies; GGUF stores what divides the unscaled ones."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    config = LlamaConfig(head_dim=64, rope_parameters=scaling, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500_000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    with pytest.raises(StartupError, match="does not hold the rope scaling of a Llama 3"):
        llama3_scaling((plain / scaled).tolist(), 500_000.0, 1 << 40)  # refused before any of these is computed
    found = llama3_scaling((plain / scaled).tolist(), 500_000.0, 64)
    assert found == {k: v for k, v in scaling.items() if k != "rope_theta"}


def test_numbers_are_the_shortest_that_the_file_can_mean() -> None:
    stored = [float(np.float32(value)) for value in (1e-5, 1e-6, 5e-4, 10_000.0, 500_000.0, 1_000_000.0)]
    assert [shortest(value) for value in stored] == [1e-5, 1e-6, 5e-4, 10_000.0, 500_000.0, 1_000_000.0]


def test_the_config_of_a_derived_directory_is_a_valid_config(source: Callable[..., Path], tmp_path: Path) -> None:
    directory = checkpoint_directory(write_gguf(source("qwen3"), tmp_path / "m.gguf"))
    parse_model_config(json.loads((directory / "config.json").read_text()))

"""A rank never holds more than its part of the weights, 0.3 of that, and a listed remainder, while it loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.transfer.rendezvous import EdgeStore
from tests.engine.test_kernels_blocks import LEVELS
from tests.support.checkpoints import make_checkpoint
from tests.support.forks import start
from tests.support.quantized import awq, write_quantized

PIECE = 66 << 20
"""Remainder: the last piece of memory for packed weights (native.Arena), up to the size of a piece."""
SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "num_layers": 4, "num_heads": 16, "num_kv_heads": 8}
IN_FLOAT32 = 112 << 20
"""Remainder: a layer that the self-check of a model of transformers unpacks and converts, and its KV in float32."""
COMMAND = [sys.executable, "-m", "tests.support.load_peak"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("models")
    large = make_checkpoint(made / "bf16", "llama", dtype="bfloat16", head_dim=64, **SHAPE)
    write_quantized(large, made / "awq", awq(group=128))
    return {"tiny": make_checkpoint(made / "tiny", "llama", dtype="bfloat16"), "bf16": large, "awq": made / "awq"}


MORE = [pytest.param(*case, marks=pytest.mark.long) for case in (("bf16", 1, 2), ("awq", 0, 1))]


@pytest.mark.skipif(not LEVELS, reason="no processor with bf16 products")
@pytest.mark.parametrize(("kind", "rank", "size"), [("bf16", 0, 1), ("awq", 1, 2), *MORE])
def test_the_peak_is_the_part_and_a_remainder(models: dict[str, Path], kind: str, rank: int, size: int) -> None:
    command = [*COMMAND, LEVELS[-1], str(models["tiny"]), str(models[kind]), str(rank), str(size)]
    with start(command, env={**os.environ}, stdout=subprocess.PIPE) as process:
        peak, part = json.loads(process.communicate(timeout=100)[0])
    assert part > {"bf16": 100 << 20, "awq": 35 << 20}[kind] // size
    assert peak < 1.3 * part + PIECE, (peak / part, part)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("stored", "size", "tied"),
    [
        ("float32", 1, True),
        *(pytest.param(s, n, False, marks=pytest.mark.long) for s in ("bfloat16", "float32") for n in (1, 2)),
    ],
)
def test_a_model_of_transformers_is_there_once(stored: str, size: int, tied: bool, tmp_path: Path) -> None:
    """Not mapped or converted beside its packed weights, and not whole in float32 while it is checked; a tied head
    packed, not as an embedding, too."""
    tiny = make_checkpoint(tmp_path / "tiny", "llama", dtype="bfloat16")
    large = make_checkpoint(
        tmp_path / "large", "llama", dtype=stored, head_dim=64, vocab_size=32_768, tied=tied, **SHAPE
    )
    store = EdgeStore("127.0.0.1")
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    command = [*COMMAND, "transformers", str(tiny), str(large)]
    ranks = [start([*command, str(rank), str(size)], env=env, stdout=subprocess.PIPE) for rank in range(size)]
    try:
        for rank in ranks:
            shown, _ = rank.communicate(timeout=300)
            peak, part = json.loads(shown)
            assert part > (150 << 20 if tied else 200 << 20) // size
            assert peak < 1.15 * part + PIECE + IN_FLOAT32, (peak / part, part)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
        store.close()

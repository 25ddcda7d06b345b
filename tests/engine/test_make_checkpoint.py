"""The checkpoint builders: equal arguments give equal bytes, and the engine loads what the tool writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer

from baton.engine.checkpoint import model_digest
from tests.support.checkpoints import END_ID, EOS_ID, TOKENIZER_SIZE, make_checkpoint
from tests.support.engine_driver import tiny_runner

ROOT = Path(__file__).resolve().parents[2]


def test_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    digests = [model_digest(make_checkpoint(tmp_path / str(i), "qwen3", seed=i // 2)) for i in range(4)]
    assert digests[0] == digests[1] != digests[2] == digests[3]


def test_tokenizer_is_smaller_than_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(make_checkpoint(tmp_path) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == TOKENIZER_SIZE < 320
    assert tokenizer.token_to_id("<|eos|>") == EOS_ID
    assert tokenizer.token_to_id("<|end|>") == END_ID
    assert tokenizer.decode([300, *tokenizer.encode("the é").ids, 319]) == "the é"


def test_engine_loads_a_checkpoint_of_the_tool(tmp_path: Path) -> None:
    tool = [sys.executable, str(ROOT / "benchmarks" / "make_checkpoint.py"), "tiny", str(tmp_path / "m")]
    assert b"tiny: " in subprocess.run(tool, check=True, capture_output=True).stdout
    assert tiny_runner(tmp_path / "m").model_config.hidden_size == 64

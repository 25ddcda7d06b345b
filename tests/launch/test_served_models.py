"""`baton models`: what is served, and how or why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from baton.core.errors import StartupError
from launch.cli import baton
from launch.served_models import OWN, describe, rows
from tests.support.checkpoints import make_checkpoint
from tests.support.transformers_models import SERVED, make_transformers_checkpoint


def test_the_list_agrees_with_the_tests_and_names_a_reason_for_each_refusal() -> None:
    listed = {kind: (path, proven) for kind, _, path, proven in rows()}
    assert all(listed[kind][0] in ("baton", "transformers") for kind in SERVED)
    assert [kind for kind, (path, _) in listed.items() if path == "baton"] == list(OWN)
    refused = [proven for path, proven in listed.values() if proven.startswith("refused")]
    assert len(refused) > 50 and all(len(proven) > len("refused: ") for proven in refused)


def test_the_command_lists_what_is_served_and_with_all_the_others() -> None:
    served, everything = (CliRunner().invoke(baton, ["models", *more]).output for more in ([], ["--all"]))
    assert "gemma2" in served and "mamba" not in served
    assert "keeps a state of each sequence beside its KV" in everything
    with pytest.raises(StartupError, match="the model's name is empty"):
        CliRunner().invoke(baton, ["models", ""], catch_exceptions=False, standalone_mode=False)


def test_a_checkpoint_is_described_by_its_path(tmp_path: Path) -> None:
    own = make_checkpoint(tmp_path / "own", "qwen3")
    text = (
        "own: served by Baton's own path, up to 4096 tokens, 0.00 GiB of weights, 384 bytes of KV a token in bfloat16"
    )
    assert describe(str(own), "auto") == text
    assert describe("builtin", "auto").startswith("builtin: served by Baton's own path")
    other = make_transformers_checkpoint(tmp_path / "other", "deepseek_v3")
    text = describe(str(other), "auto")
    assert text.startswith(
        "other: served by transformers (architectures 'DeepseekV3ForCausalLM' is not supported (only"
    )
    assert "224 bytes of KV a token in bfloat16; tokens equal transformers'" in text
    with pytest.raises(StartupError, match="mamba: not served: never calls transformers' attention interface"):
        describe(str(make_transformers_checkpoint(tmp_path / "mamba", "mamba")), "auto")

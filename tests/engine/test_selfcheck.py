"""The self-check of models that transformers computes, where rounding to bfloat16 changes logits by much."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.engine.attention_native import NativeAttention
from baton.engine.kernels.build import processor_levels
from baton.engine.selfcheck import check_against_reference
from tests.support.engine_driver import tiny_runner
from tests.support.transformers_models import make_transformers_checkpoint


@pytest.fixture(scope="module")
def near_ties(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many layers of many experts, whose router often finds two nearly tied."""
    changes = {"num_hidden_layers": 24, "num_local_experts": 16}
    return make_transformers_checkpoint(tmp_path_factory.mktemp("models") / "m", "mixtral", torch.bfloat16, **changes)


def test_a_model_whose_logits_rounding_changes_is_served(near_ties: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "baton.engine"):
        tiny_runner(near_ties, dtype="bfloat16")
    assert [r for r in caplog.records if "rounding moves transformers' own logits" in r.message]


@pytest.mark.skipif(not processor_levels(), reason="no compiled kernels on this machine")
def test_a_fault_in_bfloat16_alone_is_larger_than_rounding(near_ties: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = NativeAttention.attend

    def wrong(attention: NativeAttention, queries: Tensor, *given: Tensor) -> Tensor:
        result = attend(attention, queries, *given)  # type: ignore[arg-type]
        return result * 2.0 if queries.dtype == torch.bfloat16 else result

    monkeypatch.setattr(NativeAttention, "attend", wrong)
    with pytest.raises(StartupError, match=r"more than 0\.1 \(\S+ from its result in float32, itself"):
        tiny_runner(near_ties, dtype="bfloat16")


@torch.no_grad()
def test_what_rounding_explains_is_compared_with_the_reference_in_float32(tmp_path: Path) -> None:
    path = make_transformers_checkpoint(tmp_path / "m", "olmo2", torch.bfloat16)
    runner = tiny_runner(path, dtype="bfloat16")
    exact = check_against_reference(runner, runner.adapters._model.reference)
    spread = (exact - exact.mean(-1, keepdim=True)).norm(dim=-1, keepdim=True)
    away = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))
    away *= spread / away.norm(dim=-1, keepdim=True)
    rounded = exact + 0.3 * away
    check_against_reference(runner, lambda _: rounded, in_float32=exact)
    with pytest.raises(StartupError, match=r"by 0\.(29|3) of the logits' spread, more than 0\.1: this model"):
        check_against_reference(runner, lambda _: rounded)
    with pytest.raises(StartupError, match=r"more than 0\.1 \(0\.5\d* from its result in float32, itself 0\.2\d*\)"):
        check_against_reference(runner, lambda _: rounded, in_float32=exact + 0.6 * away)

"""Hand-overs over NCCL with several ranks on one GPU: tokens, a peer killed, a peer stopped, the edge rebuilt."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.support.one_gpu import ON_GPU, one_gpu_settings
from tests.support.rank_tokens import eight_heads, same_tokens_as_one_rank, silent_peer

pytestmark = [ON_GPU, pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
def test_tokens_equal_those_of_one_rank(prefill_tp: int, decode_tp: int, tmp_path: Path) -> None:
    model = eight_heads(tmp_path / "m", 4)
    flags = {**one_gpu_settings(), "prefill_tp": prefill_tp, "decode_tp": decode_tp}
    asyncio.run(same_tokens_as_one_rank(model, **flags))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_cluster_recovers_from_a_killed_or_stopped_decode_worker(how: signal.Signals, tmp_path: Path) -> None:
    asyncio.run(silent_peer(how, eight_heads(tmp_path / "m", 4)))

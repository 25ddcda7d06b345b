"""A rank dies during a step: the other ranks return from it immediately and name the lost rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.core.request import SequenceId
from baton.core.step import Row, StepPlan
from tests.support.engine_driver import GREEDY, random_tokens
from tests.support.limits import HANG_S, Stall
from tests.support.rank_pool import LOST_EXIT_CODE, Lost, RankPool, receive

SEEN_WITHIN_S = 0.5
LONG = StepPlan(1, (Row(SequenceId("long"), 0, tuple(random_tokens(4000)), tuple(range(250)), GREEDY, 1),))


@pytest.mark.parametrize(
    ("tp", "victim", "delay_s"),
    [
        (2, 1, 0.05),
        *[pytest.param(4, victim, delay, marks=pytest.mark.long) for victim in (0, 1, 3) for delay in (0.0, 0.02, 0.2)],
    ],
)
def test_a_rank_killed_in_a_step_ends_the_others(
    checkpoint: Callable[..., Path], tp: int, victim: int, delay_s: float
) -> None:
    model_dir = checkpoint("llama", num_layers=24, num_heads=8, head_dim=16)
    with RankPool(tp) as pool:
        facts = pool.start(model_dir, tp, kv_memory_bytes=1 << 30, max_model_len=4096)
        pids = facts[0].pids
        others = [rank for rank in range(tp) if rank != victim]
        with Stall() as stall:
            pool.pipes[0].send(("step", LONG))
            time.sleep(delay_s)
            killed = time.monotonic()
            os.kill(pids[victim], signal.SIGKILL)
            for rank in others:
                pool.processes[rank].wait(HANG_S)
        assert [pool.processes[rank].returncode for rank in others] == [LOST_EXIT_CODE] * (tp - 1)
        for rank in others:  # when each detected it, not when it exited
            found = receive(pool.pipes[rank])
            assert isinstance(found, Lost) and 0 < found.at - killed < stall.allows(SEEN_WITHIN_S)
            assert rank or found.message.startswith(f"lost the connection to rank {victim}: ")

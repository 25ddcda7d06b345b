"""`baton calibrate` on a running cluster: counters, processor times and start times of real processes."""

from __future__ import annotations

import pytest

from baton.core.errors import StartupError
from launch.bench.run import find_target
from launch.capacity import calibrate as command
from launch.capacity.loads import ClosedLoop
from launch.capacity.loads import LoadClient as Measured
from sim.scale.costs import parse_calibration
from sim.scale.members import ClusterShape
from sim.scale.replay import Replay
from sim.trace import TraceRow
from tests.support.cluster import cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

LOADS = [
    ClosedLoop("warm-up", 2, 2, 30, 4),
    *(ClosedLoop("prefill", 2, 1, n, 1) for n in (20, 200, 400, 600)),
    *(ClosedLoop("prefill backlog", 6, 3, n, 1) for n in (30, 200)),
    *(ClosedLoop("decode", n, n, 30, 20, shared=True) for n in (1, 3, 6)),
    *(ClosedLoop("decode", n, n, 300, 20) for n in (1, 2, 4)),
    *(ClosedLoop("hand-over", 3, 1, n, 4) for n in (20, 200, 400)),
]


def test_a_running_cluster_is_calibrated_and_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "loads", lambda limits: LOADS)
    with cluster("builtin", draft="none") as running:
        measured = Measured(running.url, find_target(running.url, "", "", 60.0), seed=1)
        made = command.calibrate(measured, "cpu", shared_host=True, progress=lambda line: None)
        row = running.workers()["decode-0"]
    assert (made.block_size, made.max_model_len, made.token_bytes) == (16, 4096, 5 * 2 * 2 * 64 * 2)
    assert made.decode_worker.blocks == row["blocks_total"] and made.decode_worker.max_running == 64
    assert 0.1 < made.decode_worker.start_s < 120
    prompt_s, step_s = made.prefill.prompt_s(512, 512), made.decode.plain_s(1, 100)
    assert 1e-3 < prompt_s < 1 and 1e-5 < step_s < 0.1 and prompt_s > step_s
    assert made.front.admit_cpu_s(100) + made.front.deliver_cpu_s(20, 20) > 1e-4
    assert {"prefill step", "decode step", "hand-over", "coordinator", "client"} == set(made.residuals)
    assert parse_calibration(made.as_json()) == made
    outcome = Replay(ClusterShape(made, 1, made, 1), [TraceRow(i / 4, 200, 20) for i in range(8)]).run()
    assert outcome.ttft.p50 > prompt_s / 4 and outcome.tpot.p50 > step_s / 2


def test_a_cluster_with_several_workers_of_a_role_is_refused() -> None:
    class Two:
        def rows(self) -> list[dict[str, object]]:
            return [{"role": role, "state": "ready"} for role in ("prefill", "decode", "decode")]

    with pytest.raises(StartupError, match="one ready decode worker; this cluster has 2"):
        command.calibrate(Two(), "cpu", shared_host=False, progress=lambda line: None)  # type: ignore[arg-type]


def test_workers_of_one_role_that_differ_are_refused() -> None:
    class Different:
        def rows(self) -> list[dict[str, object]]:
            names = ("block_size", "max_model_len", "blocks_total", "max_running", "tensor_parallel")
            same = {"state": "ready", **dict.fromkeys(names, 8)}
            return [{"role": "prefill", "step_tokens": tokens, **same} for tokens in (8, 9)]

    with pytest.raises(StartupError, match=r"needs equal prefill workers; their step_tokens are \[8, 9\]"):
        command.calibrate(Different(), "cpu", shared_host=True, progress=lambda line: None)  # type: ignore[arg-type]

"""Measured costs and loads for tests of scale mode."""

from __future__ import annotations

from dataclasses import replace

from sim.scale.costs import Calibration, DecodeCosts, FrontCosts, LinkCosts, PrefillCosts, WorkerKind
from sim.scale.members import ClusterShape
from sim.trace import TraceRow

CALIBRATION = Calibration(
    name="gpu",
    block_size=16,
    max_model_len=32768,
    token_bytes=131072,
    tensor_parallel=1,
    prefill=PrefillCosts(base_s=0.005, token_s=8e-5, row_s=1e-4, pair_s=1e-9),
    decode=DecodeCosts(base_s=0.008, row_s=2e-4, context_s=2e-8, token_s=8e-5),
    link=LinkCosts(latency_s=0.003, bytes_per_s=5e9),
    front=FrontCosts(request_s=0.003, request_cpu_s=5e-4, token_cpu_s=3e-5),
    prefill_worker=WorkerKind(blocks=4000, step_tokens=2048),
    decode_worker=WorkerKind(blocks=4000, step_tokens=512, max_running=256),
)


def shape(num_prefill: int = 1, num_decode: int = 1, *, blocks: int = 4000, max_running: int = 256) -> ClusterShape:
    worker = replace(CALIBRATION.decode_worker, blocks=blocks, max_running=max_running)
    calibration = replace(CALIBRATION, decode_worker=worker)
    return ClusterShape(calibration, num_prefill, calibration, num_decode)


def even(count: int, every_s: float, input_len: int = 300, output_len: int = 50) -> list[TraceRow]:
    """Requests at equal intervals, whose lengths vary a little."""
    return [TraceRow(i * every_s, input_len + i % 7, output_len + i % 11) for i in range(count)]

"""What activations in 8 bits cost a model's logits, measured at start."""

from __future__ import annotations

import logging

from baton.engine.kv_error import median_error, random_step
from baton.engine.model_native import NativeModel
from baton.engine.runner import Runner

log = logging.getLogger("baton.engine")
TOKENS = 16
"""Few, since a model of billions of weights computes them twice."""


def report_activation_error(runner: Runner, model: NativeModel) -> None:
    """Logs the result of `measure_activation_error`."""
    error = measure_activation_error(runner, model)
    if error is not None:
        log.info(
            "activations in int8: the logits of random tokens differ by %.2f %% of their spread from those with"
            " --activations bfloat16",
            100 * error,
        )


def measure_activation_error(runner: Runner, model: NativeModel) -> float | None:
    """The median, over random tokens, of the error's share of the logits' own spread. Writes KV into blocks that no
    sequence owns yet. Every rank calls it; only the leader gets a result."""
    positions = runner.layout.positions_in(runner.num_blocks)
    plan = random_step(runner, min(TOKENS, runner.max_model_len, runner.max_num_tokens, positions))
    (logits,) = runner.step_logits(plan)
    with model.bfloat16_activations():
        (expected,) = runner.step_logits(plan)
    return median_error(logits, expected) if runner.group.leads else None

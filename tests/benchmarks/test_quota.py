"""Costs of workers that have a part of a core, and what counts as within the limits in each phase."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace

import pytest

from benchmarks.flips import LONG, PHASES, ROWS, SHORT, WORK, counted, limits, mean, rates, turning_mix
from benchmarks.quota import page_faults, shape
from sim.stats import Slo
from sim.trace import TraceRow
from tests.support.scale import CALIBRATION

LINK = replace(CALIBRATION.link, send_s=0.002, send_token_s=1e-6, receive_s=0.003, offer_s=0.001, accept_s=0.004)
KIND = replace(CALIBRATION, link=LINK, decode=replace(CALIBRATION.decode, accepted=0.5, idle_s=0.001))


def test_each_phase_of_the_mix_keeps_as_many_workers_busy_with_one_role() -> None:
    slo, (long_rate, short_rate) = limits(KIND), rates(KIND)
    rows = turning_mix(KIND, 400.0, 1.0)
    prompts_s = sum(KIND.prompt_s(row.input_len) for row in rows if row.at_s < 400.0)
    assert prompts_s / 400.0 == pytest.approx(WORK, rel=0.1)
    assert slo.ttft_s == pytest.approx(8 * KIND.prompt_s(round(mean(LONG[0]))), abs=0.001)
    context = mean(SHORT[0]) + mean(SHORT[1]) / 2
    assert slo.tpot_s == pytest.approx(KIND.decode.plain_s(ROWS, ROWS * context) + 0.001, abs=0.001)
    receives_s = LINK.accept_s + LINK.receive_s + LINK.receive_token_s * mean(SHORT[0])
    assert short_rate * (mean(SHORT[1]) * slo.tpot_s / ROWS + receives_s) == pytest.approx(WORK)
    assert long_rate * 400.0 == pytest.approx(sum(row.at_s < 400.0 for row in rows), rel=0.1)


def test_each_worker_has_a_core_and_the_coordinator_another_one() -> None:
    made = shape(KIND, 2, 1, max_workers=5)
    assert made.cores == ((0,), (1,), (2,)) and made.front_cores == (5,) and made.host_cores == 6


def test_requests_count_in_the_phase_in_which_they_are_due() -> None:
    rows = [TraceRow(at_s, 10, 10) for at_s in (0.0, 9.9, 10.0, 19.0, 19.5)]
    times = [(1.0, 0.01), (None, None), (0.5, None), (3.0, 0.01), (1.5, 0.02)]
    made = counted(rows, times, Slo(2.0, 0.05), 10.0, 3)
    assert PHASES == 2 and [phase.share for phase in made.phases] == [0.5, 2 / 3]
    assert [phase.ttft_s for phase in made.phases] == [1.0, 1.5] and made.phases[1].tpot_s == 0.01
    assert made.goodput == 3 / 20.0 and made.flips == 3


def test_a_process_counts_the_pages_that_it_is_given() -> None:
    before = page_faults(os.getpid())
    with mmap.mmap(-1, 1000 * mmap.PAGESIZE) as memory:
        for start in range(0, len(memory), mmap.PAGESIZE):
            memory[start] = 1
    assert 1000 <= page_faults(os.getpid()) - before < 2000

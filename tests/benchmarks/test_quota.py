"""Costs of workers that have a part of a core, and what counts as within the limits in each phase."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.flips import PHASES, counted
from benchmarks.quota import shape, within
from sim.trace import TraceRow
from tests.support.scale import CALIBRATION

LINK = replace(CALIBRATION.link, send_s=0.002, send_token_s=1e-6, receive_s=0.003, offer_s=0.001, accept_s=0.004)
KIND = replace(CALIBRATION, link=LINK, decode=replace(CALIBRATION.decode, accepted=0.5, idle_s=0.001))


def test_within_a_quota_processor_time_takes_longer_and_waits_do_not() -> None:
    slow = within(KIND, 0.25)
    assert slow.prompt_s(900) == pytest.approx(4 * KIND.prompt_s(900))
    assert slow.decode.plain_s(8, 4000) == pytest.approx(4 * KIND.decode.plain_s(8, 4000))
    assert slow.link.receive_s == 4 * LINK.receive_s and slow.link.accept_s == 4 * LINK.accept_s
    assert (slow.link.latency_s, slow.link.bytes_per_s) == (LINK.latency_s, LINK.bytes_per_s)
    assert (slow.decode.accepted, slow.decode.idle_s) == (0.5, 0.001)
    assert slow.front == KIND.front and slow.prefill_worker == KIND.prefill_worker


def test_each_worker_has_a_core_and_the_coordinator_another_one() -> None:
    made = shape(KIND, 2, 1, most=5)
    assert made.cores == ((0,), (1,), (2,)) and made.front_cores == (5,) and made.host_cores == 6


def test_requests_count_in_the_phase_in_which_they_are_due() -> None:
    rows = [TraceRow(at_s, 10, 10) for at_s in (0.0, 9.9, 10.0, 19.0, 19.5)]
    made = counted(rows, [True, False, True, False, True], 10.0, 3)
    assert PHASES == 2 and made.phases == (0.5, 2 / 3)
    assert made.goodput == 3 / 20.0 and made.flips == 3

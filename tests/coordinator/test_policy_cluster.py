"""Requests survive their workers: the policies of all tiers in virtual time, with a death every few steps."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest

from baton.core.errors import WorkerLost
from baton.core.request import GenerateRequest
from coordinator.policy.requests import ALONE_DEATHS
from tests.support.cluster_sim import ClusterSim, undisturbed

NAMES = ("p0", "p1", "d0", "d1")


def make_requests(count: int, seed: int) -> list[GenerateRequest]:
    generator = random.Random(seed)
    return [
        GenerateRequest(
            f"r{i}",
            tuple(generator.randrange(1, 40) for _ in range(generator.randint(1, 30))),
            generator.randint(1, 30),
            eos_token_ids=(0,),
            deadline_s=1e6,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 6))])
def test_a_thousand_requests_stay_correct_with_a_worker_loss_every_twenty_steps(seed: int) -> None:
    """Each request ends with the tokens of the undisturbed run, or with `WorkerLost` and a prefix of them if workers
    died while they ran it alone. No worker keeps anything."""
    sim = ClusterSim(*NAMES, seed=seed, kill_every=20, lost_acks=0.03, damaged=0.002)
    requests = make_requests(1000, seed)
    for i, request in enumerate(requests):
        sim.submit(request, at=i * 0.01)
    sim.run(len(requests))
    finished = 0
    for r in sim.sent:
        expected = undisturbed(r.request)
        if r.error is None:
            assert r.journal.tokens == expected and r.journal.finish is not None, r
            finished += 1
        else:
            assert isinstance(r.error, WorkerLost) and (r.alone_deaths == ALONE_DEATHS or len(r.deaths) == 5), r.error
            assert r.journal.tokens == expected[: len(r.journal.tokens)] != expected, r
    assert finished > 700
    seen = (sim.kills, sim.requests.rescheduled, sim.requests.reassigned, sim.lost_acks, sim.requests.stale_events)
    assert all(n > 10 for n in seen), seen
    assert min(sim.transfers, sim.chunks_early) > 100 and sim.chunks_resent, (sim.chunks_early, sim.chunks_resent)


def test_a_request_that_ends_every_worker_in_whose_step_it_runs_is_ended_and_no_other() -> None:
    sim = ClusterSim(*NAMES)
    requests = make_requests(60, 3)
    killer = requests[20] = replace(requests[20], max_tokens=12)
    sim.killers.add(killer.request_id)
    for i, request in enumerate(requests):
        sim.submit(request, at=i * 0.01)
    sim.run(len(requests))
    (failed,) = [r for r in sim.sent if r.error is not None]
    assert failed.request.request_id == killer.request_id and isinstance(failed.error, WorkerLost)
    assert (sim.kills, len(failed.deaths), failed.alone_deaths) == (4, 4, ALONE_DEATHS)
    assert all(r.journal.tokens == undisturbed(r.request) for r in sim.sent if r is not failed)
    assert max(r.alone_deaths for r in sim.sent if r is not failed) == 0


def test_nothing_is_computed_twice_without_worker_losses() -> None:
    sim = ClusterSim(*NAMES)
    requests = make_requests(200, 7)
    for request in requests:
        sim.submit(request, at=0.0)
    sim.run(len(requests))
    assert all(r.journal.tokens == undisturbed(r.request) for r in sim.sent)
    assert (sim.requests.rescheduled, sim.requests.stale_events) == (0, 0)


def test_every_request_finishes_after_a_single_worker_loss() -> None:
    for victim in NAMES:
        sim = ClusterSim(*NAMES)
        requests = make_requests(100, 5)
        for request in requests:
            sim.submit(request, at=0.0)
        sim.later(0.3, lambda sim=sim, victim=victim: sim.kill(victim))
        sim.run(len(requests))
        assert [r.error for r in sim.sent if r.error] == []
        assert all(r.journal.tokens == undisturbed(r.request) for r in sim.sent)
        assert sim.requests.rescheduled > 0


def test_the_simulation_needs_no_socket_thread_or_torch() -> None:
    script = "import sys, tests.support.cluster_sim; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert not set(done.stdout.split()) & {"torch", "grpc", "asyncio", "fastapi", "socket", "threading"}

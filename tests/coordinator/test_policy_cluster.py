"""Requests survive their workers: the policies of all tiers in virtual time, with a death every few steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.errors import WorkerLost
from coordinator.policy.losses import ALONE_DEATHS
from sim.engine import expected
from tests.support.virtual_cluster import make_cluster, make_requests, outcome, policy_request, run, send_all


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 6))])
def test_hundreds_of_requests_stay_correct_with_many_worker_losses(seed: int) -> None:
    """Each request ends with the tokens of the undisturbed run, or with `WorkerLost` and a prefix of them if workers
    died while they ran it alone. No worker keeps anything."""
    cluster = make_cluster(seed, kill_every_s=0.3)
    cluster.chunk_faults.damaged, cluster.network.faults.broken = 0.002, 0.001
    requests = make_requests(250, seed)
    send_all(cluster, requests, every_s=0.02)
    run(cluster, len(requests))  # its clients compare every token
    finished = [client for client in cluster.clients if outcome(client).ended != "error"]
    for client in cluster.clients:
        if client not in finished:
            assert outcome(client).code == WorkerLost.code and outcome(client).tokens != expected(client.request)[0]
    assert len(finished) > 220
    policy, network = cluster.coordinator.requests, cluster.network.counters
    seen = (cluster.kills, policy.rescheduled, policy.reassigned, network.broken)
    assert all(n > 5 for n in seen), seen


def test_a_request_that_ends_every_worker_in_whose_step_it_runs_is_ended_and_no_other() -> None:
    cluster = make_cluster(1)
    requests = make_requests(60, 3)
    killer = requests[20] = replace(requests[20], max_tokens=12)
    cluster.poison.add(killer.request_id)
    send_all(cluster, requests, every_s=0.01)
    run(cluster, len(requests))
    (failed,) = [client for client in cluster.clients if outcome(client).ended == "error"]
    assert failed.request.request_id == killer.request_id and outcome(failed).code == WorkerLost.code
    r = policy_request(failed)
    assert (cluster.kills, len(r.deaths), r.alone_deaths) == (4, 4, ALONE_DEATHS)
    assert max(policy_request(client).alone_deaths for client in cluster.clients if client is not failed) == 0


def test_nothing_is_computed_twice_without_worker_losses() -> None:
    cluster = make_cluster(1)
    requests = make_requests(200, 7)
    send_all(cluster, requests)
    run(cluster, len(requests))
    policy = cluster.coordinator.requests
    assert (policy.rescheduled, policy.stale_events) == (0, 0)


@pytest.mark.parametrize("victim", ["p0", "p1", "d0", "d1"])
def test_every_request_finishes_after_a_single_worker_loss(victim: str) -> None:
    cluster = make_cluster(1)
    requests = make_requests(100, 5)
    send_all(cluster, requests, at_s=1.0)
    cluster.loop.later(1.3, cluster.kill, victim)
    run(cluster, len(requests))
    assert {outcome(client).ended for client in cluster.clients} == {"stop", "length"}
    assert cluster.coordinator.requests.rescheduled > 0

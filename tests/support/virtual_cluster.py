"""The simulated cluster (`sim.cluster`) as tests of the policy use it: two workers of each role, and many requests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from baton.core.request import GenerateRequest
from coordinator.policy.choice import Choice
from sim.client import ChoiceOutcome, SimClient
from sim.cluster import SimCluster, SimClusterOptions, SimPoolOptions
from sim.coordinator import SimCoordinatorOptions


def make_requests(count: int, seed: int) -> list[GenerateRequest]:
    draw = random.Random(seed)
    return [
        GenerateRequest(
            f"r{i}",
            tuple(draw.randrange(1, 40) for _ in range(draw.randint(1, 30))),
            draw.randint(1, 30),
            eos_token_ids=(0,),
            deadline_s=1e6,
        )
        for i in range(count)
    ]


def make_cluster(seed: int, *, kill_every_s: float = 0.0) -> SimCluster:
    """Two prefill and two decode workers of two ranks. With `kill_every_s` one of them is killed that often."""
    pool = SimPoolOptions(2)
    options = SimClusterOptions(
        pool, SimPoolOptions(2, tensor_parallel=2), SimCoordinatorOptions(max_queued_requests=1 << 20, hold_s=60.0)
    )
    cluster = SimCluster(options, seed)

    def kill() -> None:
        if cluster.running:
            cluster.kill(cluster.loop.random.choice(("p0", "p1", "d0", "d1")))
        cluster.loop.later(kill_every_s, kill)

    if kill_every_s:
        cluster.loop.later(1.0, kill)
    return cluster


def send_all(
    cluster: SimCluster, requests: Sequence[GenerateRequest], *, at_s: float = 0.0, every_s: float = 0.0
) -> None:
    for index, request in enumerate(requests):
        cluster.send(request, at_s + index * every_s)


def run(cluster: SimCluster, count: int, limit_s: float = 10_000.0) -> None:
    """Runs until `count` requests have ended, and checks that no state of them is left anywhere."""
    cluster.run(limit_s, lambda: not cluster.running)
    assert len(cluster.clients) == count and not cluster.running, f"no end: {cluster.coordinator.requests!r}"
    cluster.run(cluster.loop.now + 60.0, lambda: cluster.settled)
    cluster.check_settled()


def outcome(client: SimClient) -> ChoiceOutcome:
    (only,) = client.outcomes
    return only


def policy_request(client: SimClient) -> Choice:
    """The coordinator's state of a request with one choice."""
    (choice,) = client.choices
    assert choice is not None
    return choice.request

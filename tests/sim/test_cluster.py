"""The simulated cluster without faults: every token is right, nothing is left."""

from __future__ import annotations

import random
import subprocess
import sys

from baton.core.request import GenerateRequest, SamplingParams
from sim.client import Behaviour
from sim.cluster import SimCluster, SimClusterOptions, SimPoolOptions
from sim.worker import Timeouts
from tests.support.constant_model import ConstantModel


def requests(count: int, seed: int) -> list[GenerateRequest]:
    draw = random.Random(seed)
    return [
        GenerateRequest(
            f"r{i}",
            tuple(draw.randrange(1, 40) for _ in range(draw.randint(1, 30))),
            draw.randint(1, 30),
            SamplingParams(seed=i),
            eos_token_ids=(0,),
            deadline_s=1e6,
        )
        for i in range(count)
    ]


def run(cluster: SimCluster, count: int) -> None:
    cluster.run(600.0, lambda: not cluster.running)
    assert len(cluster.clients) == count
    cluster.run(cluster.loop.now + 1.0)
    cluster.check_settled()


def test_every_choice_has_the_tokens_of_the_model_and_nothing_is_computed_twice() -> None:
    options = SimClusterOptions(SimPoolOptions(2), SimPoolOptions(2, tensor_parallel=2, drafts="model", draft_tokens=2))
    cluster = SimCluster(options, seed=1)
    for i, request in enumerate(requests(40, 1)):
        cluster.send(request, at_s=i * 0.02, behaviour=Behaviour(choices=1 + (i % 4 == 0)))
    run(cluster, 40)  # the clients compare every token
    outcomes = [outcome for client in cluster.clients for outcome in client.outcomes]
    assert len(outcomes) == 50 and {outcome.ended for outcome in outcomes} == {"stop", "length"}
    policy = cluster.coordinator.requests
    assert (policy.rescheduled, policy.reassigned, policy.stale_events) == (0, 0, 0)


def test_a_model_without_kv_serves_runs_of_which_only_the_times_matter() -> None:
    options = SimClusterOptions(SimPoolOptions(4), SimPoolOptions(4))
    cluster = SimCluster(
        options,
        seed=1,
        engine=lambda *_: ConstantModel(),
        timeouts=Timeouts(watched=False),
        verify=False,
    )
    for i, request in enumerate(requests(40, 1)):
        cluster.send(request, at_s=i * 0.02)
    run(cluster, 40)
    assert all(c.outcomes[0].tokens == [ConstantModel.TOKEN] * c.request.max_tokens for c in cluster.clients)
    assert all(c.sent_at < c.outcomes[0].first_token_at <= c.outcomes[0].ended_at for c in cluster.clients)


def test_the_simulator_needs_no_socket_thread_or_torch() -> None:
    script = "import sys, sim.cluster; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert not set(done.stdout.split()) & {"torch", "grpc", "asyncio", "starlette", "socket", "threading"}

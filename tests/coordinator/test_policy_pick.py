"""A placement picks the same workers as a linear scan over all workers would."""

from __future__ import annotations

import random

import pytest

from baton.core.events import KVCacheEvents, Load
from coordinator.policy.choice import Choice
from coordinator.policy.expectation import OutputExpectation
from coordinator.policy.membership import DISCONNECTED, DRAINING, LOST, READY
from coordinator.policy.pick import PREFIX_SLACK, pick_decode, pick_prefill
from coordinator.policy.pool import BACKLOG_STEPS, Worker
from coordinator.policy.workers import WorkerTable
from tests.support.builders import add_worker, bring_to
from tests.support.placing import make_choice

SIZES = (4, 8)
HINTS = {size: tuple(bytes([size, n]) for n in range(12)) for size in SIZES}


def held_tokens(worker: Worker, choice: Choice) -> int:
    return worker.cached.count(choice.prefix.get(worker.block_size, ())) * worker.block_size


def plain_prefill(table: WorkerTable, choice: Choice) -> str | None:
    """The reference for pick_prefill, as a linear scan."""
    scored = []
    for worker in table.present():
        to_compute = max(1, choice.request.num_prefill_tokens - held_tokens(worker, choice))
        backlog = worker.backlog_tokens
        under_cap = backlog == 0 or backlog + to_compute <= BACKLOG_STEPS * worker.step_tokens
        if (
            worker.ready
            and worker.role == "prefill"
            and under_cap
            and choice.request.num_prefill_tokens <= worker.max_tokens
        ):
            scored.append((backlog + to_compute, backlog, worker.worker_id))
    return min(scored)[-1] if scored else None


def plain_decode(expectation: OutputExpectation, table: WorkerTable, choice: Choice) -> list[str]:
    """The reference for pick_decode, as a linear scan."""
    fits = []
    for worker in table.present():
        tokens = expectation.tokens(choice.request.num_prefill_tokens, choice.request.max_kv_tokens)
        blocks = -(-tokens // worker.block_size)
        left = worker.load.blocks_free if worker.load else worker.join.blocks_total
        left = left - worker.reserved_blocks - worker.growth
        if worker.load and worker.load.preempted:
            left = 0
        if worker.running == 0:
            left = worker.join.blocks_total
        holds = worker.running < worker.max_running and choice.request.max_kv_tokens <= worker.max_tokens
        if worker.ready and worker.role == "decode" and holds and blocks <= left:
            fits.append(worker)
    emptiest = min((w.running for w in fits), default=0)

    def score(w: Worker) -> tuple[int, int, int, str]:
        held = held_tokens(w, choice) if w.running <= emptiest + PREFIX_SLACK else 0
        return -held, w.running, w.reserved_blocks, w.worker_id

    return [w.worker_id for w in sorted(fits, key=score)][:2]


def disturb(dice: random.Random, table: WorkerTable, name: str, sizes: tuple[int, ...]) -> None:
    worker = table.get(name)
    if worker is None or dice.random() < 0.1:
        limits = {"blocks": dice.choice((20, 60, 200)), "step_tokens": dice.choice((20, 60))}
        add_worker(table, name, block_size=dice.choice(sizes), max_running=dice.choice((0, 3)), **limits)
        return
    size, what = worker.block_size, dice.randrange(5)
    if what == 0:
        bring_to(worker, dice.choice((READY, READY, DISCONNECTED, DRAINING, LOST)))
    elif what == 1:
        worker.load = Load(blocks_free=dice.randrange(worker.join.blocks_total), preempted=dice.random() < 0.2)
    elif what == 2:
        evicted = tuple(dice.sample(HINTS[size], 3))
        worker.update_cached(KVCacheEvents(HINTS[size][: dice.randrange(12)], evicted, dice.random() < 0.1))
    else:
        change = {"backlog": dice.randrange(40), "running": dice.randrange(4), "reserved": dice.randrange(6)}
        worker.count(**change, growth=dice.randrange(4))


@pytest.mark.parametrize("sizes", [SIZES, SIZES[:1]], ids=str)
@pytest.mark.parametrize("workers", [24, 2])
def test_pick_equals_a_linear_scan_over_all_workers(workers: int, sizes: tuple[int, ...]) -> None:
    dice, table = random.Random(workers), WorkerTable(3.0)
    expectation = OutputExpectation()
    names = [f"{role}{n}" for role in "pd" for n in range(workers)]
    found = {"of a prefix": 0, "no decode": 0, "no prefill": 0}
    for turn in range(1500):
        disturb(dice, table, dice.choice(names), sizes)
        prefix = {size: hints[: dice.randrange(12)] for size, hints in HINTS.items()}
        tokens = dice.randrange(1, 120)
        choice = make_choice(f"r{turn}", tokens, tokens + dice.randrange(200), prefix=prefix)
        of_workers = next(iter(table.classes))
        prefill = pick_prefill(choice, of_workers.prefill)
        decode = pick_decode(choice, of_workers.decode, expectation.blocks(choice.request, of_workers.decode))
        assert (prefill[0].worker_id if prefill else None) == plain_prefill(table, choice), turn
        assert prefill is None or prefill[1] == max(1, tokens - held_tokens(prefill[0], choice))
        of_workers.prefill.check()
        of_workers.decode.check()
        targets = [worker.worker_id for worker in decode]
        assert targets == plain_decode(expectation, table, choice), turn
        found["of a prefix"] += prefill is not None and held_tokens(prefill[0], choice) > 0
        found["no prefill"] += prefill is None
        found["no decode"] += not decode
    assert found["of a prefix"] > 50 and (workers > 2 or min(found.values()) > 50), found

"""Workers join, drain and leave while requests run: real workers, and a coordinator in this process, so that a test can
inspect and control what a client cannot. Every request gets the expected tokens; afterwards every block is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.commands import Join
from baton.core.compatibility import Compatibility
from baton.core.errors import BatonError
from baton.core.handover import Accept, Handle, LinkHello, Offer, Refuse, sign
from baton.core.request import GenerateRequest, SequenceId
from baton.runtime.streams import DialledLink, dial_link
from tests.support.checkpoints import make_checkpoint
from tests.support.fake_workers import Bench, Reader, bench
from tests.support.jobs import Workers, workers
from tests.support.limits import HANG_S, Stall
from tests.support.misfits import MISFITS, REFUSED_WITHIN_S, changed
from tests.support.nodes import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

START_S = 120.0
PAUSE_S = 0.3  # after each request, so that clients do not slow down the workers that start
EXACT = {"exact": True, "step_tokens": 64}

SMALL_POOL_GIB = 0.003
"""256 blocks: one offer can reserve them all."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("elastic") / "m", arch="llama", max_position_embeddings=4096)


class Elastic:
    """A coordinator in this process and real workers."""

    def __init__(self, b: Bench, jobs: Workers) -> None:
        self.b, self.jobs = b, jobs

    async def join(self, *names: str, **flags: object) -> None:
        for name in names:
            self.jobs.start(name, **{**EXACT, **flags})  # type: ignore[arg-type]
        await self.state("ready", *names)

    async def state(self, state: str, *names: str) -> None:
        for name in names:
            await until(lambda name=name: self.b.state(name) == state, START_S, f"{name} {state}")  # type: ignore[misc]

    def submit(self, name: str, max_tokens: int, length: int = 40) -> Reader:
        prompt = tuple((7 * n + len(name) + sum(name.encode())) % 250 + 1 for n in range(length))
        return self.b.submit(name, prompt=prompt, max_tokens=max_tokens, deadline_s=240.0)

    async def answers(self, names: list[str], max_tokens: int) -> dict[str, list[int]]:
        readers = {name: self.submit(name, max_tokens) for name in names}
        return {name: await reader.done(240.0) for name, reader in readers.items()}

    def load(self, name: str):  # type: ignore[no-untyped-def]
        record = self.b.cluster.workers.get(name)
        assert record is not None
        return record.load

    def prompt_tokens(self, name: str) -> int:
        """Returns the prompt tokens computed plus those found in the cache."""
        load = self.load(name)
        return int(load.prompt_tokens_computed + load.prompt_tokens_cached)

    async def idle(self) -> None:
        def free() -> bool:
            loads = [r.load for r in self.b.cluster.workers.all() if not r.lost]
            return all(load.blocks_free == load.blocks_total and not load.sequences for load in loads)

        await until(free, 10.0, "every block free")


@contextlib.asynccontextmanager
async def elastic(tmp_path: Path, model: Path, *names: str, hold_s: float = HANG_S) -> AsyncIterator[Elastic]:
    async with bench(hold_s=hold_s) as b:
        with workers(tmp_path, model, f"127.0.0.1:{b.port}") as jobs:
            e = Elastic(b, jobs)
            await e.join(*names)
            yield e
            await e.idle()


@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_workers_join_and_leave_under_load(rounds: int, tmp_path: Path, model: Path) -> None:
    """Clients keep eight requests in flight while the pair of workers is replaced `rounds` times."""
    async with elastic(tmp_path, model, "p0", "d0") as e:
        expected = await e.answers([f"r{n}" for n in range(8)], 48)
        stop, answered = asyncio.Event(), 0

        async def client(number: int) -> None:
            nonlocal answered
            while not stop.is_set():
                reader = e.submit(f"r{number}", 48)
                assert await reader.done(60.0) == expected[f"r{number}"]
                answered += 1
                await asyncio.sleep(PAUSE_S)

        clients = [asyncio.create_task(client(n)) for n in range(8)]
        try:
            for old, new in ((("p0", "d0"), ("p1", "d1")), (("d1", "p1"), ("d2", "p2")))[:rounds]:
                await e.join(*new)
                for name in old:
                    job = e.jobs.jobs[name]
                    job.terminate()
                    assert await job.wait_exit() == 0, job.log
                    assert e.b.state(name) == "forgotten"
                before = answered
                await until(lambda before=before: answered >= before + 8, 60.0, "work on the new ones")  # type: ignore[misc]
                assert not any(c.done() for c in clients)
        finally:
            stop.set()
            await asyncio.gather(*clients)
        assert e.load(f"p{rounds}").prompt_tokens_computed > 0
        assert e.load(f"d{rounds}").tokens_generated > 0


async def test_a_draining_decode_worker_finishes_its_sequences_before_it_leaves(tmp_path: Path, model: Path) -> None:
    async with elastic(tmp_path, model, "p0", hold_s=3.0) as e:
        await e.join("d0", drain_timeout_s=240.0)
        # Long enough that they still run when the state is checked, however late that is.
        readers = [e.submit(f"r{n}", 3600) for n in range(2)]
        for reader in readers:
            await reader.got(5)
        job = e.jobs.jobs["d0"]
        job.terminate(job.ranks()[0])  # signals the leader itself; the agent passes its exit code on
        await e.state("draining", "d0")
        assert (await e.b.submit("late").failed()).code == "no_decode_worker"
        for reader in readers:
            assert len(await reader.done(240.0)) == 3600
        assert await job.wait_exit() == 0, job.log
        assert e.b.state("d0") == "forgotten"


async def test_a_decode_worker_gives_its_sequences_back_at_the_drain_timeout(tmp_path: Path, model: Path) -> None:
    """At its drain timeout a worker ends its sequences, and other workers continue them with the same tokens."""
    async with elastic(tmp_path, model, "p0") as e:
        await e.join("d0", drain_timeout_s=0.2)
        names = [f"r{n}" for n in range(2)]
        expected, _ = await asyncio.gather(e.answers(names, 3600), e.join("d1"))
        e.b.set_ready("d1", False)
        before = e.prompt_tokens("p0")
        readers = {name: e.submit(name, 3600) for name in names}
        for reader in readers.values():
            await reader.got(20)
        e.b.set_ready("d1", True)
        job = e.jobs.jobs["d0"]
        job.terminate()
        assert await job.wait_exit() == 0, job.log
        rescheduled = 0  # a sequence that started before the others may have finished already
        for name, reader in readers.items():
            assert await reader.done(240.0) == expected[name]
            timeline = reader.deltas[-1].timeline
            assert timeline is not None
            rescheduled += timeline.decode_worker == "d1"
        assert rescheduled and f"ending {rescheduled} sequences: the drain timeout has passed" in job.log
        # The prompts of rescheduled sequences count twice, and the tokens of their journals once.
        assert e.prompt_tokens("p0") - before > len(names) * 40 + rescheduled * (40 + 20)


async def fill(e: Elastic, name: str) -> DialledLink:
    """Reserves all blocks of a decode worker, posing as a prefill worker unknown to the coordinator: the decode worker
    refuses other offers until this link is closed."""
    record = e.b.cluster.workers.get(name)
    assert record is not None
    join = record.join
    facts = join.facts
    link = await dial_link(join.link_address, _hello(e, facts), 10.0)
    prompt = (1,) * (join.blocks_total * facts.layout.block_size - 1)
    request = GenerateRequest(f"fill-{name}", prompt, 1, deadline_s=100.0)
    await link.stream.send(Offer(request, _handle(e, request.sequence_id, name, join.incarnation), len(prompt)))
    assert isinstance(await link.stream.receive(), Accept)
    return link


def _hello(e: Elastic, facts: Compatibility) -> LinkHello:
    return LinkHello("px", 1, e.b.cluster.run_id, facts, 1)


def _handle(e: Elastic, sequence: SequenceId, name: str, incarnation: int, **changes: object) -> Handle:
    values: dict[str, object] = {"source_worker": "px", "source_incarnation": 1, "destination_worker": name}
    values |= {"destination_incarnation": incarnation, "expires_ms": 1 << 50, "nonce": b"n", **changes}
    return sign(e.b.cluster.handle_key, Handle(sequence, **values))  # type: ignore[arg-type]


@pytest.mark.long
async def test_parked_kv_is_recomputed_when_its_prefill_worker_leaves(tmp_path: Path, model: Path) -> None:
    """Both decode workers refuse, so the KV stays parked until the drain timeout; then another prefill worker starts
    from the prompt and the first token."""
    async with elastic(tmp_path, model, "p1") as e:
        await e.join("d0", "d1", kv_memory_gib=SMALL_POOL_GIB)
        await e.join("p0", drain_timeout_s=0.5)
        names = [f"r{n}" for n in range(4)]
        expected = await e.answers(names, 24)
        await e.idle()
        e.b.set_ready("p1", False)
        full = [await fill(e, "d0"), await fill(e, "d1")]
        readers = {name: e.submit(name, 24) for name in names}
        for reader in readers.values():
            await reader.got(1)
        await until(lambda: all(r.times_parked for r in e.b.requests), 10.0, "parked KV")
        e.b.set_ready("p1", True)
        job = e.jobs.jobs["p0"]
        job.terminate()
        assert await job.wait_exit() == 0, job.log
        assert not any(reader.task.done() for reader in readers.values())
        for link in full:
            await link.close()
        for name, reader in readers.items():
            assert await reader.done(30.0) == expected[name]
            timeline = reader.deltas[-1].timeline
            assert timeline is not None and timeline.prefill_worker == "p1"


async def test_parked_kv_is_handed_over_while_its_worker_drains(tmp_path: Path, model: Path) -> None:
    async with elastic(tmp_path, model, "p0") as e:
        await e.join("d0", kv_memory_gib=SMALL_POOL_GIB)
        (expected,) = (await e.answers(["r"], 24)).values()
        await e.idle()
        full = await fill(e, "d0")
        reader = e.submit("r", 24)
        await reader.got(1)
        await until(lambda: all(r.times_parked for r in e.b.requests), 10.0, "parked KV")
        job = e.jobs.jobs["p0"]
        job.terminate()
        await e.state("draining", "p0")
        await full.close()
        assert await reader.done(30.0) == expected
        assert await job.wait_exit() == 0, job.log


@pytest.mark.long  # test_torchrun.py drains two nodes of two ranks at one signal
async def test_a_worker_of_two_ranks_drains_as_one(tmp_path: Path, model: Path) -> None:
    async with elastic(tmp_path, model) as e:
        e.jobs.start("p0", ranks=2, step_tokens=64)
        await e.state("ready", "p0")
        job = e.jobs.jobs["p0"]
        assert len(job.ranks()) == 2
        job.terminate()
        assert await job.wait_exit() == 0, job.log
        assert e.b.state("p0") == "forgotten"


async def check_mismatched_links_are_refused(e: Elastic, join: Join) -> None:
    hello = _hello(e, join.facts)
    bad = [(why, changed(hello, changes)) for why, changes in MISFITS if "token" not in changes]
    bad = [(why, other) for why, other in bad if other != hello]
    assert len(bad) >= len(MISFITS) - 4
    for why, other in bad:
        field = why.partition(":")[0].partition("[")[0]
        with pytest.raises(BatonError, match=f"^link refused: {field}") as caught:
            async with asyncio.timeout(HANG_S):
                with Stall() as stall:
                    await dial_link(join.link_address, other, HANG_S)
        assert stall.took_s < stall.allows(REFUSED_WITHIN_S)
        assert caught.value.code == "join_refused"
    await until(lambda: e.load("d0").links_refused == len(bad), 5.0, "all counted")


async def check_every_bad_handle_is_refused_and_counted(e: Elastic, join: Join) -> None:
    """All 1,000 bad handles sent over a link are refused."""
    facts = join.facts
    link = await dial_link(join.link_address, _hello(e, facts), 10.0)
    spent = GenerateRequest("spent", (1,), 2)
    once = Offer(spent, _handle(e, spent.sequence_id, "d0", join.incarnation), 1)
    await link.stream.send(once)
    assert isinstance(await link.stream.receive(), Accept)
    for n in range(1000):
        request = GenerateRequest(f"r{n}", (1,), 2)
        good = _handle(e, request.sequence_id, "d0", join.incarnation)
        bad = {
            0: replace(good, signature=good.signature[:-1] + bytes([good.signature[-1] ^ 1])),
            1: _handle(e, request.sequence_id, "d0", join.incarnation, expires_ms=1),
            2: _handle(e, request.sequence_id, "d0", join.incarnation - 1),
            3: _handle(e, request.sequence_id, "d1", join.incarnation),
            4: _handle(e, spent.sequence_id, "d0", join.incarnation),
            5: _handle(e, request.sequence_id, "d0", join.incarnation, source_worker="p0"),
            6: _handle(e, request.sequence_id, "d0", join.incarnation, source_incarnation=2),
        }.get(n % 8)
        await link.stream.send(once if bad is None else Offer(request, bad, 1))
        answer = await link.stream.receive()
        assert isinstance(answer, Refuse) and answer.code == "stale_handle", (n, answer)
    await link.close()
    await until(lambda: e.load("d0").handles_refused == 1000, 5.0, "1,000 refusals")


async def check_a_second_signal_ends_a_draining_worker(e: Elastic) -> None:
    # Long enough that they still run at the second signal, however late that is.
    readers = [e.submit(f"r{n}", 4000) for n in range(6)]
    await readers[0].got(5)
    job = e.jobs.jobs["d0"]
    job.terminate()
    await e.state("draining", "d0")
    job.terminate(number=signal.SIGINT)
    assert await job.wait_exit(5.0) == 128 + signal.SIGINT
    await e.state("lost", "d0")
    for reader in readers:
        await reader.leave()  # otherwise it would wait for another decode worker


async def check_one_signal_ends_a_loading_worker(e: Elastic) -> None:
    loading = e.jobs.start("d1", **EXACT)
    await until(loading.ranks, 30.0, "a rank of d1")
    loading.terminate()
    assert await loading.wait_exit() == 0, loading.log


async def test_a_worker_serves_on_after_bad_links_and_handles_until_a_second_signal(
    tmp_path: Path, model: Path
) -> None:
    async with elastic(tmp_path, model, "p0", "d0") as e:
        expected = await e.answers(["r"], 8)
        record, pids = e.b.cluster.workers.get("d0"), e.jobs.jobs["d0"].ranks()
        assert record is not None
        for check in (check_mismatched_links_are_refused, check_every_bad_handle_is_refused_and_counted):
            await check(e, record.join)
            assert e.jobs.jobs["d0"].ranks() == pids
            assert await e.answers(["r"], 8) == expected
        await check_a_second_signal_ends_a_draining_worker(e)
        await check_one_signal_ends_a_loading_worker(e)

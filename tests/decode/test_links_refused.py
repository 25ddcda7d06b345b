"""Two incompatible workers: the link is refused, naming the field, and counted, and both sides continue to serve."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from baton.core import reshard
from baton.core.errors import BatonError
from baton.core.request import SequenceId
from baton.core.reshard import shared_gpu
from baton.runtime.streams import dial_link
from tests.support.builders import make_layout, make_request
from tests.support.limits import HANG_S, Stall
from tests.support.misfits import MISFITS, REFUSED_WITHIN_S, changed
from tests.support.nodes import pair, until

IDS = [f"{n}-{why.split(':')[0]}" for n, (why, _) in enumerate(MISFITS)]


@pytest.mark.parametrize(("why", "changes"), MISFITS, ids=IDS)
async def test_incompatible_link_is_refused_with_the_reason_and_counted(
    why: str, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with pair() as (source, [decode]):
        decode.worker.main_loop.token = source.worker.main_loop.token = "secret"
        hello = changed(source.worker._hello(), changes)
        with pytest.raises(BatonError) as caught, caplog.at_level(logging.WARNING):
            async with asyncio.timeout(HANG_S):
                with Stall() as stall:
                    await dial_link(decode.address, hello, HANG_S)
        assert stall.took_s < stall.allows(REFUSED_WITHIN_S)
        assert caught.value.code == "join_refused"
        assert caught.value.message.startswith(f"link refused: {why}") and "\n" not in caught.value.message
        (line,) = [r.getMessage() for r in caplog.records if r.name == "baton.worker"]
        assert line == f"{caught.value.message} (from 'p0')"
        assert decode.worker.load().links_refused == 1
        good = await dial_link(decode.address, source.worker._hello(), 2.0)  # links are still accepted
        assert decode.worker.load().links_refused == 1
        await good.close()


@pytest.mark.parametrize(("why", "changes"), MISFITS, ids=IDS)
async def test_prefill_worker_parks_kv_and_logs_the_refusal_in_one_line(
    why: str, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with pair() as (source, [decode]):
        decode.worker.main_loop.token = source.worker.main_loop.token = "secret"
        hello, outgoing = source.worker._hello(), source.worker.sender
        outgoing._make_hello = lambda: changed(hello, changes)
        with caplog.at_level(logging.WARNING):
            source.submit(make_request("r", 8, max_tokens=4), decode)
            source.compute()
            await until(lambda: source.posted.parked, what="parked KV")
        reason = source.posted.parked[0].reason
        assert reason.startswith(f"d0: link refused: {why}") and "\n" not in reason
        (line,) = [r.getMessage() for r in caplog.records if r.name == "baton.handover"]
        assert line.endswith(f" is parked: {reason}")
        outgoing._make_hello = lambda: hello
        source.assign(SequenceId("r"), 2, decode)
        await until(lambda: source.posted.handed_over, what="the hand-over")
        decode.compute()
        assert decode.worker.load().links_refused == 1


async def test_prefill_worker_checks_the_compatibility_of_a_decode_worker_itself() -> None:
    """The dialling side makes the same comparison, in case the decode worker accepted the link."""
    async with pair() as (source, [decode]):
        decode.worker.facts = replace(decode.worker.facts, layout=make_layout(6))
        decode.worker._check_fits = lambda hello: None  # type: ignore[method-assign]
        source.submit(make_request("r", 8, max_tokens=4), decode)
        source.compute()
        await until(lambda: source.posted.parked, what="parked KV")
        reason = f"block_size: 4 at the prefill worker and 6 at {decode.address}; one must be a multiple"
        assert reason in source.posted.parked[0].reason
        source.abort(SequenceId("r"))


async def test_decode_worker_that_claims_more_ranks_than_allowed_is_refused_before_planning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[int] = []
    plan = reshard.reshard

    def counted(heads: Any, prefill_tp: int, decode_tp: int) -> Any:
        planned.append(decode_tp)
        return plan(heads, prefill_tp, min(decode_tp, 2))

    monkeypatch.setattr(reshard, "reshard", counted)
    async with pair() as (source, [decode]):
        decode.worker._check_fits = lambda hello: None  # type: ignore[method-assign]
        for number, claimed in enumerate((1 << 30, reshard.MAX_TENSOR_PARALLEL + 1, 0, -1)):
            name = f"r{number}"
            decode.worker.tensor_parallel = claimed
            source.submit(make_request(name, 8, max_tokens=4), decode)
            source.compute()
            await until(lambda n=number: len(source.posted.parked) > n, what="parked KV")
            assert (
                f"tensor_parallel: {claimed} tensor-parallel ranks on the decode side"
                in source.posted.parked[-1].reason
            )
            source.abort(SequenceId(name))
        assert set(planned) == {1}  # only the decode worker planned, for its true rank count


GPUS = ("NVIDIA H200 PCI 0000:1b:00 of h", "NVIDIA H200 PCI 0000:1c:00 of h")


@pytest.mark.parametrize(
    ("prefill", "decode", "shared"),
    [
        (GPUS[:1], GPUS[:1], True),
        (GPUS[:1], GPUS[1:], False),
        ((), GPUS[:1], False),
        (GPUS[:1], (), False),
        (("",), ("",), False),
    ],
)
async def test_workers_on_one_gpu_are_refused_before_nccl_would_fail(
    prefill: tuple[str, ...], decode: tuple[str, ...], shared: bool
) -> None:
    async with pair() as (source, [target]):
        target.worker._gpus = decode
        hello = replace(source.worker._hello(), gpus=prefill)
        if not shared:
            await (await dial_link(target.address, hello, HANG_S)).close()
            return
        with pytest.raises(BatonError) as caught:
            await dial_link(target.address, hello, HANG_S)
        what = f"link refused: gpus: {GPUS[0]!r} is that of prefill rank 0 and of decode rank 0; NCCL does not connect"
        assert caught.value.message.startswith(what) and "--edge-kind ipc" in caught.value.message
        assert target.worker.load().links_refused == 1


def test_only_ranks_with_an_edge_must_have_different_gpus() -> None:
    """Of two prefill and two decode ranks on the same two GPUs, each pair that shares heads is one GPU or two."""
    for theirs, refused in ((GPUS, True), (GPUS[::-1], False)):
        plans = reshard.reshard([2], 2, 2)
        assert shared_gpu(plans, theirs, GPUS) == ((0, 0, GPUS[0]) if refused else None)

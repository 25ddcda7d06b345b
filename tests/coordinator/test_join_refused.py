"""A worker that does not fit is refused at the join, over the wire, within a second, by field name, and counted."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from baton.core.commands import Join, Welcome
from baton.core.errors import BatonError, NotFound, Unavailable
from baton.runtime.admin import drain_worker
from baton.runtime.streams import dial
from baton.v1 import worker_pb2, worker_pb2_grpc
from tests.support.builders import make_facts, make_layout
from tests.support.fake_workers import bench
from tests.support.limits import Stall
from tests.support.misfits import REFUSED_WITHIN_S

TOKEN = "correct horse battery staple"
HERE = Join("d0", "decode", 1, make_facts(), "127.0.0.1:1", "127.0.0.1", (7,), 16, 8, 8, token=TOKEN)


def facts(**changes: Any) -> Join:
    return replace(HERE, worker_id="d1", facts=make_facts(**changes))


TWO_RANKS = replace(facts(), tensor_parallel=2)


# Further refusals are in test_policy_workers.py.
CASES: dict[str, tuple[Join, str]] = {
    "another model": (facts(model_digest="other"), "model_digest"),
    "larger heads": (facts(layout=make_layout(head_dim=16)), "layers[0].head_dim"),
    "fewer processes than ranks": (TWO_RANKS, "tensor_parallel"),
    "no blocks": (replace(facts(), blocks_total=0), "blocks_total"),
    "the other role": (replace(HERE, role="prefill", incarnation=2), "role"),
    "another token": (replace(facts(), token="correct horse battery stable"), "token"),
    "no token": (replace(facts(), token=""), "token"),
    "a token no text can be": (replace(facts(), token="tök\u0000en" * 100), "token"),
    # Without the token, a refusal reveals nothing about the cluster.
    "no token and another model": (replace(facts(model_digest="other"), token=""), "token"),
}


async def join(port: int, request: Join) -> Any:
    channel, stream, answer = await dial(
        f"127.0.0.1:{port}",
        lambda c: worker_pb2_grpc.WorkerControlStub(c).Session,
        worker_pb2.SessionRequest,
        request,
        timeout_s=5.0,
    )
    stream.end("enough")
    await channel.close()
    return answer


@pytest.mark.parametrize("case", CASES)
async def test_join_is_refused_with_the_name_of_the_field(case: str, caplog: pytest.LogCaptureFixture) -> None:
    request, field = CASES[case]
    async with bench(token=TOKEN) as b:
        assert isinstance(await join(b.port, HERE), Welcome)
        with Stall() as stall, pytest.raises(BatonError, match="refused") as caught:
            await join(b.port, request)
        assert stall.took_s < stall.allows(REFUSED_WITHIN_S)
        assert caught.value.code == "join_refused"
        assert f" {field}: " in caught.value.message
        assert b.pipeline.workers()["joins_refused"] == {field: 1}
        assert "(peer: ipv4:127.0.0.1:" in caplog.text
        assert TOKEN not in caplog.text + caught.value.message + repr(HERE)
        assert [r.worker_id for r in b.cluster.workers.all()] == ["d0"]
        record = b.cluster.workers.get("d0")
        assert record is not None and record.join.token == ""


async def test_worker_with_another_tensor_parallel_size_joins() -> None:
    async with bench(token=TOKEN) as b:
        for number, request in enumerate((HERE, replace(TWO_RANKS, pids=(1, 2)))):
            assert isinstance(await join(b.port, replace(request, worker_id=f"d{number}")), Welcome)


async def test_join_with_a_token_is_refused_if_the_cluster_has_none() -> None:
    """The worker would refuse the links of the other workers, which have no token."""
    async with bench() as b:
        with pytest.raises(BatonError, match="token: this cluster has no token; remove --cluster-token-file"):
            await join(b.port, HERE)
        assert isinstance(await join(b.port, replace(HERE, token="")), Welcome)


async def test_draining_a_worker_requires_the_cluster_token() -> None:
    async with bench(token=TOKEN) as b:
        address = f"127.0.0.1:{b.port}"
        await join(b.port, HERE)
        for token in ("", "wrong"):
            with pytest.raises(BatonError, match="token: it is"):
                await asyncio.to_thread(drain_worker, address, "d0", 1.0, token)
        assert b.cluster.joins_refused == {"token": 2}
        with pytest.raises(NotFound, match="no worker 'd9'"):
            await asyncio.to_thread(drain_worker, address, "d9", 1.0, TOKEN)
        await asyncio.to_thread(drain_worker, address, "d0", 1.0, TOKEN)
        assert b.state("d0") == "draining"
    with pytest.raises(Unavailable, match="no reply from a coordinator"):
        await asyncio.to_thread(drain_worker, address, "d0", 1.0, TOKEN, 0.5)

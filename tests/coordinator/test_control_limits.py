"""What the control port reads before it has checked a token is small."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.core.errors import BatonError
from baton.runtime.admin import drain_worker, set_traffic
from baton.runtime.first_message import parsed
from coordinator import control
from coordinator.cluster import Cluster
from coordinator.control import OPERATOR_BYTES, serve_control


async def test_a_large_request_of_an_operator_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = list[str]()

    def counted(kind: Any, content: bytes) -> Any:
        kinds.append(kind.__name__)
        return parsed(kind, content)

    monkeypatch.setattr(control, "parsed", counted)
    cluster = Cluster(lease_s=3.0, max_queued_requests=1, max_queued_tokens=1)
    server, port = await serve_control(cluster, "127.0.0.1", 0)
    address = f"127.0.0.1:{port}"
    try:
        many = {f"revision-{number}": 0.0 for number in range(20_000)}
        with pytest.raises(BatonError, match=rf"the request has \d+ bytes, above {OPERATOR_BYTES}"):
            await asyncio.to_thread(set_traffic, address, many, "")
        with pytest.raises(BatonError, match=rf"the request has \d+ bytes, above {OPERATOR_BYTES}"):
            await asyncio.to_thread(drain_worker, address, "d" * OPERATOR_BYTES, 1.0, "")
        assert not kinds and not cluster.requests.dispatcher.traffic.shares
        few = dict(list(many.items())[:2000])
        assert len(await asyncio.to_thread(set_traffic, address, few, "")) == 2000 and kinds == ["SetTrafficRequest"]
    finally:
        await server.stop(0)

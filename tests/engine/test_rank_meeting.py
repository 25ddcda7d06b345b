"""Ranks of several nodes connect although some arrive late, and a rank that left meanwhile is replaced."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from baton.core.errors import StartupError
from baton.engine import rank_peer
from baton.engine.rank_peer import RankPeer, dial_leader, gather_followers
from tests.support.dict_store import DictStore


def gather(size: int, timeout_s: float, found: dict[str, Any]) -> tuple[DictStore, threading.Thread]:
    store = DictStore()

    def run() -> None:
        try:
            found["peers"], found["pids"] = gather_followers(store, size, "127.0.0.1", timeout_s)
        except StartupError as error:
            found["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    return store, thread


def test_waiting_rank_receives_heartbeats_and_a_departed_rank_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_peer, "_NOTICE_S", 0.1)
    found: dict[str, Any] = {}
    store, thread = gather(4, 30.0, found)
    early, left = dial_leader(store, 1), dial_leader(store, 2)
    received = len(early.receive(0.0)) + len(early.receive(0.0))  # while the leader waits for other ranks
    assert received >= 2
    left.close()
    replaced: RankPeer | None = None
    for _ in range(400):  # until the leader has detected that rank 2 left
        try:
            replaced = dial_leader(store, 2)
            break
        except StartupError:
            time.sleep(0.05)
    assert replaced is not None
    last = dial_leader(store, 3)
    thread.join(20)
    assert [peer.rank for peer in found["peers"]] == [1, 2, 3]
    first, _, last_of = (peer.last_received_at for peer in found["peers"])
    assert last_of - first < 0.05  # the first rank does not count as silent since its hello
    for peer in (early, replaced, last, *found["peers"]):
        peer.close()


def test_missing_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_peer, "_NOTICE_S", 0.05)
    found: dict[str, Any] = {}
    store, thread = gather(3, 0.4, found)
    came = dial_leader(store, 2)
    thread.join(20)
    assert "rank 1 did not connect within 0.4 s" in found["error"].message
    came.close()

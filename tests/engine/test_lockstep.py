"""The channel between a leader and its followers, over real sockets in one process."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields
from typing import Any

import pytest

from baton.core.errors import InvariantError, RankLost, StartupError
from baton.core.plan_tables import PlanTables, ShortPlan
from baton.core.request import SamplingParams, SequenceId
from baton.core.step import DraftRow, History, Row, StepOutcome, StepPlan
from baton.engine import lockstep, rank_peer
from baton.engine.lockstep import FollowerChannel, LeaderChannel, RankFailed
from baton.runtime import frames
from baton.runtime.frames import Failed, Hello, encode
from tests.support.dict_store import DictStore
from tests.support.limits import HANG_S, Stall


@dataclass(frozen=True)
class Order:
    after_step: int
    name: str


@dataclass
class Channels:
    """A leader, its followers, and by rank the messages of the RankLost errors that it reported."""

    leader: LeaderChannel
    followers: list[FollowerChannel]
    lost: dict[int, list[str]]

    def await_lost(self, rank: int, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while not self.lost[rank] and time.monotonic() < deadline:
            time.sleep(0.005)
        assert self.lost[rank], f"rank {rank} lost nobody within {timeout_s} s"
        return self.lost[rank][0]


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Channels]]:
    monkeypatch.setitem(frames.KINDS, 200, Order)
    with ExitStack() as stack:

        def make(size: int = 2, store: DictStore | None = None) -> Channels:
            store = store or DictStore()
            lost: dict[int, list[str]] = {rank: [] for rank in range(size)}
            followers: dict[int, FollowerChannel] = {}

            def record_loss(rank: int) -> Callable[[RankLost], None]:
                return lambda error: lost[rank].append(error.message)

            def join(rank: int) -> None:
                followers[rank] = FollowerChannel.open(store, rank, record_loss(rank))

            threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size - 1, 0, -1)]
            for thread in threads:
                thread.start()
            leader = LeaderChannel.open(store, size, "127.0.0.1", record_loss(0), timeout_s=10.0)
            for thread in threads:
                thread.join()
            made = Channels(leader, [followers[rank] for rank in range(1, size)], lost)
            for channel in (leader, *made.followers):
                stack.callback(channel.close, wait_s=0.0)
            return made

        yield make


def plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, ())


def run_follower(channel: FollowerChannel, log: list[Any], pause_s: float = 0.0) -> threading.Thread:
    def step(plan: StepPlan) -> StepOutcome:
        time.sleep(pause_s)
        log.append(plan.step_id)
        return StepOutcome(plan.step_id, ())

    def follow() -> None:
        try:
            log.append(channel.follow(step))
            channel.close()
        except RankLost as error:
            log.append(error)

    channel.set_order_handler(log.append)
    thread = threading.Thread(target=follow)
    thread.start()
    return thread


def test_followers_receive_every_plan_in_order_and_stop_cleanly(connect: Callable[..., Channels]) -> None:
    made = connect(4)
    assert len(made.leader.pids) == 4
    logs: list[list[Any]] = [[] for _ in made.followers]
    threads = [run_follower(channel, log) for channel, log in zip(made.followers, logs, strict=True)]
    for step_id in range(200):
        made.leader.send(plan(step_id))
    made.leader.stop("drained")
    for thread in threads:
        thread.join(HANG_S)
    assert logs == [[*range(200), "drained"]] * 3
    assert not any(made.lost.values())


def test_a_plan_carries_only_the_blocks_that_the_plan_before_did_not_have(
    connect: Callable[..., Channels], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that begin, end, pause, grow, lose their first blocks, change their tables; and two of one sequence."""

    def row(name: str, *blocks: int) -> Row:
        made = Row(SequenceId(name), 3, (1,), blocks, SamplingParams(), 1, 2, History((1,), ()), (4,), "mean", "x")
        assert not any(getattr(made, field.name) == field.default for field in fields(Row))
        return made

    made, received, bytes_sent = connect(3), list[StepPlan](), list[int]()
    context = tuple(range(30_000, 32_000))
    tables = [
        (row("a", *context), row("b", 1)),
        (row("a", *context), row("b", 1, 2)),
        (row("a", *context, 5), row("b", 1, 2), row("c", 7), row("c", 7, 8)),
        (row("b", 0, 2), row("c", 7, 8, 9)),
        (row("a", *context, 5), row("b", 0)),
        (),
        (row("b", 0),),
    ]
    drafts = (DraftRow(SequenceId("a"), 0, (1,), (6,), 1, 0),)
    plans = [StepPlan(number, rows, drafts, (-1,) * 4, (1,) * 4) for number, rows in enumerate(tables)]
    assert not any(getattr(plans[1], field.name) == field.default for field in fields(StepPlan))

    def counted(frame: object) -> bytes:
        if isinstance(frame, ShortPlan):
            bytes_sent.append(len(encode(frame)))
        return encode(frame)

    def step(plan: StepPlan) -> StepOutcome:
        received.append(plan)
        return StepOutcome(plan.step_id, ())

    monkeypatch.setattr(lockstep, "encode", counted)
    thread = threading.Thread(target=made.followers[0].follow, args=(step,))
    thread.start()
    for each in plans:
        made.leader.send(each)
    made.leader.stop("drained")
    thread.join(HANG_S)
    assert received == plans
    assert received[1].rows[0].block_ids is received[0].rows[0].block_ids
    assert bytes_sent[0] > 2 * len(context) > 4 * max(bytes_sent[1:4]) and bytes_sent[4] > 2 * len(context)


def test_a_plan_that_keeps_more_blocks_than_there_were_is_refused() -> None:
    row = Row(SequenceId("a"), 0, (1,), (1, 2), SamplingParams())
    for kept in ((1,), (-1,), (), (0, 0)):
        with pytest.raises(InvariantError):
            PlanTables().lengthen(ShortPlan(StepPlan(1, (row,)), kept))


def test_order_is_handled_immediately_or_after_its_step(connect: Callable[..., Channels]) -> None:
    made, log = connect(), []  # type: ignore[var-annotated]
    thread = run_follower(made.followers[0], log, pause_s=0.1)
    made.leader.send(plan(1))
    time.sleep(0.02)
    made.leader.send(Order(1, "after"))
    made.leader.send(Order(-1, "now"))
    made.leader.send(plan(2))
    time.sleep(0.25)
    made.leader.send(Order(2, "then"))
    time.sleep(0.05)
    made.leader.stop("done")
    thread.join(HANG_S)
    assert log == [Order(-1, "now"), 1, Order(1, "after"), 2, Order(2, "then"), "done"]


def test_order_is_handled_directly_after_its_step_even_if_the_next_plan_was_sent_first(
    connect: Callable[..., Channels],
) -> None:
    made, log = connect(), []  # type: ignore[var-annotated]
    thread = run_follower(made.followers[0], log, pause_s=0.1)
    made.leader.send(plan(1))
    made.leader.send(plan(2))
    made.leader.send(Order(1, "after"))
    time.sleep(0.05)
    made.leader.stop("done")
    thread.join(HANG_S)
    assert log == [1, Order(1, "after"), 2, "done"]


def test_order_can_be_sent_to_one_follower(connect: Callable[..., Channels]) -> None:
    made = connect(3)
    logs: list[list[Any]] = [[], []]
    threads = [run_follower(channel, log) for channel, log in zip(made.followers, logs, strict=True)]
    made.leader.send_to(2, Order(-1, "second"))
    made.leader.stop("done")
    for thread in threads:
        thread.join(HANG_S)
    assert logs == [["done"], [Order(-1, "second"), "done"]]


def test_reports_reach_the_leader_with_their_rank(connect: Callable[..., Channels]) -> None:
    made, reports = connect(3), []  # type: ignore[var-annotated]
    made.leader.on_report = lambda rank, frame: reports.append((rank, frame))
    for index, channel in enumerate(made.followers):
        channel.report(Order(index, "report"))
    deadline = time.monotonic() + 5
    while len(reports) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(reports, key=lambda r: r[0]) == [(1, Order(0, "report")), (2, Order(1, "report"))]


def test_heartbeats_keep_an_idle_channel_alive(
    connect: Callable[..., Channels], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep, "RANK_HEARTBEAT_S", 0.05)
    monkeypatch.setattr(lockstep, "RANK_SILENCE_S", 0.6)
    made = connect(3)
    for channel in (made.leader, *made.followers):
        channel.serving()
    time.sleep(1.0)
    assert not any(made.lost.values())


def test_a_silent_peer_is_lost(connect: Callable[..., Channels], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "RANK_HEARTBEAT_S", 0.05)
    monkeypatch.setattr(lockstep, "RANK_SILENCE_S", 0.3)
    made = connect()
    monkeypatch.setattr(made.followers[0], "_beat", lambda number: None)
    with Stall() as stall:
        made.leader.serving()
        found = re.fullmatch(r"rank 1 was silent for (\d+\.\d) s", made.await_lost(0, HANG_S))
    assert found and 0.3 <= float(found[1]) < stall.allows(1.0) and stall.took_s < stall.allows(2.0)


class PausingTime:
    """The `time` module of a machine that pauses: nothing runs for `paused_s`, but its clock does."""

    paused_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.paused_s


def test_a_pause_of_the_whole_machine_does_not_count_as_silence(
    connect: Callable[..., Channels], monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = PausingTime()
    monkeypatch.setattr(lockstep, "time", paused)
    monkeypatch.setattr(lockstep, "RANK_HEARTBEAT_S", 0.05)
    monkeypatch.setattr(lockstep, "MAX_READ_GAP_S", 0.1)
    monkeypatch.setattr(lockstep, "RANK_SILENCE_S", 1.0)
    made = connect(3)
    for channel in (made.leader, *made.followers):
        channel.serving()
    for _ in range(10):  # in the place of one, since a heartbeat that came just before it hides a pause
        time.sleep(0.1)
        paused.paused_s += 10.0
    time.sleep(0.2)
    assert not any(made.lost.values())


def test_closed_follower_connection_is_detected_within_half_a_second(connect: Callable[..., Channels]) -> None:
    made = connect(3)
    with Stall() as stall:
        made.followers[1]._peers[0]._socket.shutdown(socket.SHUT_RDWR)
        assert made.await_lost(0, HANG_S) == "lost the connection to rank 2: closed by the peer"
    assert stall.took_s < stall.allows(0.5)
    assert len(made.lost[0]) == 1


def test_other_followers_receive_the_name_of_the_rank_that_the_leader_lost(connect: Callable[..., Channels]) -> None:
    made = connect(3)
    made.followers[1]._peers[0].hang_up()
    assert made.await_lost(0, HANG_S) == "lost the connection to rank 2: closed by the peer"
    assert made.await_lost(1, HANG_S) == "the leader: lost the connection to rank 2: closed by the peer"


@pytest.mark.parametrize("early", [True, False])
def test_signal_at_a_follower_reaches_the_leader(connect: Callable[..., Channels], early: bool) -> None:
    """`early`: while the leader still loads."""
    made, leaving = connect(3), threading.Event()
    ranks: list[int] = []

    def on_leave(rank: int) -> None:
        ranks.append(rank)
        leaving.set()

    if early:
        made.followers[1].leave()
        deadline = time.monotonic() + HANG_S
        while made.leader._leaving is None and time.monotonic() < deadline:
            time.sleep(0.005)
    made.leader.set_leave_handler(on_leave)
    if not early:
        made.followers[1].leave()
    assert leaving.wait(HANG_S) and ranks == [2]
    assert not any(made.lost.values())


def test_closed_leader_connection_ends_its_followers(connect: Callable[..., Channels]) -> None:
    made, log = connect(), []  # type: ignore[var-annotated]
    thread = run_follower(made.followers[0], log)
    with Stall() as stall:
        made.leader._peers[0]._socket.shutdown(socket.SHUT_RDWR)
        assert made.await_lost(1, HANG_S) == "lost the connection to the leader: closed by the peer"
    assert stall.took_s < stall.allows(0.5)
    thread.join(HANG_S)
    assert isinstance(log[0], RankLost)


def test_failing_rank_reports_its_reason(connect: Callable[..., Channels]) -> None:
    made = connect(3)
    made.followers[0].fail("tensor x holds NaN")
    assert made.await_lost(0, HANG_S) == "rank 1: tensor x holds NaN"
    made.leader.fail("rank 1: tensor x holds NaN")
    assert made.await_lost(2, HANG_S) == "the leader: rank 1: tensor x holds NaN"
    assert isinstance(made.leader.lost, RankFailed) and isinstance(made.followers[1].lost, RankFailed)
    assert made.lost[1] == []


def test_failing_order_ends_the_rank(connect: Callable[..., Channels]) -> None:
    made = connect()
    made.followers[0].set_order_handler(lambda order: 1 / 0)  # type: ignore[arg-type,return-value]
    made.leader.send(Order(-1, "now"))
    assert made.await_lost(1, HANG_S) == "lockstep failed: ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    "sent", [b"\0" * 64, encode(Hello("", 1, 1)), encode(ShortPlan(StepPlan(1, ()), ())), b"GET / HTTP/1.1\r\n\r\n"]
)
def test_bad_frame_ends_the_channel_and_names_its_sender(connect: Callable[..., Channels], sent: bytes) -> None:
    made = connect()
    made.followers[0]._peers[0].send(sent)
    assert made.await_lost(0, HANG_S).startswith("rank 1 sent a")


def test_unknown_connections_are_closed_and_the_ranks_still_connect(connect: Callable[..., Channels]) -> None:
    seen: list[bytes] = []

    class IntrudedStore(DictStore):
        def set(self, key: str, value: str) -> None:
            _, host, port = value.split()
            hellos = (encode(Hello("guess", 1, 1)), encode(Hello(value.split()[0], 7, 1)), b"x" * 3000, b"")
            with ExitStack() as stack:
                dialled = [stack.enter_context(closing(socket.create_connection((host, int(port))))) for _ in hellos]
                for sock, hello in zip(dialled, hellos, strict=True):
                    sock.sendall(hello)
                    sock.shutdown(socket.SHUT_WR)
                super().set(key, value)
                closer = threading.Thread(target=lambda socks: seen.extend(map(until_closed, socks)), args=(dialled,))
                closer.start()
                self.closer = closer
                stack.pop_all()

    store = IntrudedStore()
    made = connect(2, store)
    store.closer.join(5.0)
    assert seen == [b""] * 4
    made.leader.send(plan(1))


def until_closed(sock: socket.socket) -> bytes:
    try:
        return sock.recv(100)
    except ConnectionResetError:
        return b""
    finally:
        sock.close()


def test_missing_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match=r"rank 1, 2 did not connect within 0\.2 s"):
        LeaderChannel.open(DictStore(), 3, "127.0.0.1", timeout_s=0.2)
    with pytest.raises(StartupError, match=r"cannot listen on 192\.0\.2\.1"):
        LeaderChannel.open(DictStore(), 2, "192.0.2.1", timeout_s=0.2)
    store = DictStore()
    store.set("lockstep", "token 127.0.0.1 1")
    with pytest.raises(StartupError, match="rank 1 cannot connect to the leader"):
        FollowerChannel.open(store, 1)


def test_follower_that_does_not_read_is_lost(connect: Callable[..., Channels], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_peer, "RANK_SEND_LIMIT_S", 0.2)
    made = connect()
    stuck = threading.Event()
    made.followers[0].set_order_handler(lambda order: stuck.wait(10.0) and None)
    made.leader.send(Order(-1, "stick"))
    with pytest.raises(RankLost, match="lost the connection to rank 1: timed out"):
        for _ in range(100):
            made.leader.send(Failed("x" * (1 << 20)))
    stuck.set()
    assert made.await_lost(0, HANG_S) == "lost the connection to rank 1: timed out"


def test_message_sent_directly_after_the_first_reply_is_not_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    with here, there:
        peer = rank_peer.RankPeer(here, 0)
        there.sendall(rank_peer.ACCEPTED + encode(ShortPlan(plan(7), ())))
        peer.await_accepted()
        assert peer.receive(time.monotonic()) == [ShortPlan(plan(7), ())]
        there.sendall(encode(ShortPlan(plan(8), ())))
        with pytest.raises(RankLost, match="sent an unexpected reply"):
            peer.await_accepted()
        there.close()
        with pytest.raises(RankLost, match="closed by the peer"):
            while True:
                peer.await_accepted()


def test_orders_received_before_they_can_be_handled_are_kept_in_order(connect: Callable[..., Channels]) -> None:
    made = connect(2)
    for name in "abc":
        made.leader.send_to(1, Order(-1, name))
    deadline, (follower,) = time.monotonic() + 5.0, made.followers
    while len(follower._early) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    log: list[Any] = []
    thread = run_follower(follower, log)
    made.leader.send_to(1, Order(-1, "d"))
    made.leader.stop("drained")
    thread.join(HANG_S)
    assert [order.name for order in log[:4]] == ["a", "b", "c", "d"]

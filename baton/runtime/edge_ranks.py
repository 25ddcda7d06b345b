"""Endpoints of edges at every rank of a worker, controlled by its leader.

Only the leader communicates with other workers and decides. An endpoint at its own rank is a `LocalEndpoint`; for one
at a follower it holds a `RemoteEndpoint`, which sends orders (baton.core.edge_orders) over the lockstep channel and
waits for reports. The follower executes them on its own `LocalEndpoint`s, in an event loop on a separate thread beside
its steps.

An edge that fails at a follower costs only that edge. Every wait for an answer has a time limit. A follower that does
not confirm that it has stopped writing into blocks counts as a lost rank: these blocks could never be reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.core.edge_orders import (
    AbortEdge,
    CloseEdge,
    DropEdge,
    EdgeBegun,
    EdgeDone,
    FillEdge,
    OpenEdge,
    Part,
    SendEdge,
    TakeEdge,
)
from baton.core.errors import BatonError, HandoffError, InvariantError, RankLost
from baton.core.reshard import EdgePlan
from baton.engine.lockstep import LeaderChannel
from baton.transfer.edge import EdgeSpec, Side
from baton.transfer.edge_endpoint import EdgeEndpoint, LocalEndpoint, LocalEndpoints

log = logging.getLogger("baton.edges")

ANSWER_LIMIT_S = 10.0
"""How long a follower may take for an order, in addition to the time that the edge itself may take."""


@dataclass(slots=True)
class _Order:
    answer: asyncio.Future[EdgeDone]
    on_begun: Callable[[], None] | None


class WorkerEndpoints:
    """Makes endpoints at all ranks, for the leader."""

    def __init__(self, local: LocalEndpoints, channel: LeaderChannel) -> None:
        self._local = local
        self._channel = channel
        # Not answered yet, by number.
        self._orders: dict[int, _Order] = {}
        self._numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.kind, self.section_bytes, self.gpus = local.kind, local.section_bytes, local.gpus
        channel.on_report = self.receive

    def __call__(self, plan: EdgePlan, spec: EdgeSpec) -> EdgeEndpoint:
        rank = plan.prefill_rank if spec.side == "prefill" else plan.decode_rank
        if rank == 0:
            return self._local(plan, spec)
        self._loop = asyncio.get_running_loop()
        return RemoteEndpoint(self, rank, next(self._numbers), plan, spec)

    def __len__(self) -> int:
        return len(self._orders)

    def notify(self, rank: int, frame: object) -> None:
        """Sends a frame to a rank. Raises RankLost."""
        self._channel.send_to(rank, frame)

    async def ask(
        self,
        rank: int,
        make: Callable[[int], object],
        limit_s: float,
        on_begun: Callable[[], None] | None = None,
    ) -> EdgeDone | None:
        """Sends the order that `make` builds; returns its answer, or None after `limit_s`. Raises RankLost."""
        number = next(self._numbers)
        order = self._orders[number] = _Order(asyncio.get_running_loop().create_future(), on_begun)
        try:
            self.notify(rank, make(number))
            await asyncio.wait({order.answer}, timeout=limit_s)
            return order.answer.result() if order.answer.done() else None
        finally:
            del self._orders[number]

    def lose(self, rank: int, order: str) -> None:
        self._channel.lose(RankLost(f"rank {rank} did not reply to {order}"))

    def receive(self, rank: int, report: object) -> None:
        """Takes a follower's report; runs on the channel's thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no order waits any more
                self._loop.call_soon_threadsafe(self._take, report)

    def _take(self, report: object) -> None:
        if not isinstance(report, EdgeDone | EdgeBegun):
            log.error("unexpected report from a follower: %s", type(report).__name__)
            return
        order = self._orders.get(report.order)
        if order is None or order.answer.done():
            return  # the order timed out or was cancelled
        if isinstance(report, EdgeDone):
            order.answer.set_result(report)
        elif order.on_begun is not None:
            order.on_begun()


class RemoteEndpoint:
    """The leader's proxy for an endpoint at a follower; see `EdgeEndpoint`."""

    def __init__(self, ranks: WorkerEndpoints, rank: int, edge: int, plan: EdgePlan, spec: EdgeSpec) -> None:
        self.dead: HandoffError | None = None
        self._ranks, self._rank, self._edge, self._plan, self._spec = ranks, rank, edge, plan, spec
        self.generation, self._opened = spec.generation, False

    async def connect(self) -> None:
        s, self._opened = self._spec, True
        limits = (s.connect_timeout_s, s.operation_timeout_s)
        await self._ask(
            "to build an edge",
            lambda n: OpenEdge(n, self._edge, self._plan, s.side, s.host, s.port, s.prefix, s.generation, *limits),
            s.connect_timeout_s,
        )

    async def fill(self, part: Part, after_step: int, on_begun: Callable[[], None] | None = None) -> None:
        await self._ask("to pack KV", lambda n: FillEdge(n, self._edge, part, after_step), 0.0, on_begun)

    async def send(self) -> None:
        await self._ask("to send KV", lambda n: SendEdge(n, self._edge), self._spec.operation_timeout_s)

    def drop(self) -> None:
        if self.dead is None:
            with contextlib.suppress(RankLost):  # the channel has reported it
                self._ranks.notify(self._rank, DropEdge(self._edge))

    async def take(self, part: Part, on_posted: Callable[[], None]) -> bool:
        limit_s = self._spec.operation_timeout_s
        make = partial(TakeEdge, edge=self._edge, part=part)
        return bool(await self._ask("to store KV", make, limit_s, on_posted, vital=True))

    def abort(self, reason: str) -> None:
        if self.dead is None:
            self.dead = self._error(f"aborted: {reason}")
            if self._opened:
                with contextlib.suppress(RankLost):  # the channel has reported it
                    self._ranks.notify(self._rank, AbortEdge(self._edge, reason[:200]))

    async def close(self, timeout_s: float) -> bool:
        if self.dead is not None or not self._opened:
            return True
        answer = await self._ranks.ask(
            self._rank, lambda n: CloseEdge(n, self._edge, timeout_s), timeout_s + ANSWER_LIMIT_S
        )
        self.dead = self._error("closed")
        return answer is not None and answer.value == 1

    async def _ask(
        self,
        request: str,
        make: Callable[[int], object],
        limit_s: float,
        on_begun: Callable[[], None] | None = None,
        *,
        vital: bool = False,
    ) -> int:
        if self.dead is not None:
            raise HandoffError(self.dead.message)
        limit_s += ANSWER_LIMIT_S
        answer = await self._ranks.ask(self._rank, make, limit_s, on_begun)
        if answer is None:
            if vital:
                self._ranks.lose(self._rank, f"an order {request} within {limit_s:g} s")
            self.abort(f"rank {self._rank} did not reply to an order {request} within {limit_s:g} s")
            raise HandoffError(self.dead.message if self.dead else request)
        if answer.error:
            error = HandoffError(f"rank {self._rank}: {answer.error}")
            if answer.dead and self.dead is None:
                self.dead = error
            raise error
        return answer.value

    def _error(self, message: str) -> HandoffError:
        return self._spec.error(f"rank {self._rank}: {message}")

    def __repr__(self) -> str:
        return f"<RemoteEndpoint {self._spec.prefix} {self._spec.side} rank {self._rank}{' dead' if self.dead else ''}>"


class FollowerEndpoints:
    """A follower's endpoints, on an event loop with a thread of its own. `fail` ends the process after a violated
    invariant."""

    def __init__(
        self, local: LocalEndpoints, report: Callable[[object], None], fail: Callable[[InvariantError], None]
    ) -> None:
        self._local = local
        self._report = report
        self._fail = fail
        # Open endpoints by number, and orders in progress: only the loop's thread uses them.
        self._endpoints: dict[int, LocalEndpoint] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="follower edges", daemon=True)
        self._thread.start()

    def execute_order(self, order: object) -> None:
        """Starts an order, from any thread; orders begin in the order of calls."""
        self._loop.call_soon_threadsafe(self._begin, order)

    def close(self, timeout_s: float = 2.0) -> None:
        """Closes all endpoints and stops the thread."""

        async def close_all() -> None:
            await asyncio.gather(*(endpoint.close(timeout_s) for endpoint in self._endpoints.values()))

        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(close_all(), self._loop).result(2 * timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)

    # On the event loop's thread.

    def _begin(self, order: Any) -> None:
        match order:
            case AbortEdge(edge, reason):
                if edge in self._endpoints:
                    self._endpoints.pop(edge).abort(reason)
                return
            case DropEdge(edge):
                if edge in self._endpoints:
                    self._endpoints[edge].drop()
                return
            case OpenEdge(_, edge, plan, side, host, port, prefix, generation, connect_s, operation_s):
                here: Side = "prefill" if side == "prefill" else "decode"
                spec = EdgeSpec(
                    host, port, prefix, generation, here, connect_timeout_s=connect_s, operation_timeout_s=operation_s
                )
                self._endpoints[edge] = self._local(plan, spec)
        task = self._loop.create_task(self._carry_out(order))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _carry_out(self, order: Any) -> None:
        endpoint = self._endpoints.get(order.edge)
        if endpoint is None:
            self._send(EdgeDone(order.order, error="the edge has ended", dead=True))
            return
        try:
            done = EdgeDone(order.order, await self._work(endpoint, order))
        except BatonError as e:
            done = EdgeDone(order.order, error=e.message, dead=endpoint.dead is not None)
        except InvariantError as e:
            self._fail(e)
            raise
        except Exception as e:  # fails this edge, not the worker
            log.exception("%s", type(order).__name__)
            endpoint.abort(f"{type(e).__name__}: {e}")
            done = EdgeDone(order.order, error=f"{type(e).__name__}: {e}", dead=True)
        if endpoint.dead is not None:
            self._endpoints.pop(order.edge, None)
        self._send(done)

    async def _work(self, endpoint: LocalEndpoint, order: Any) -> int:
        report_begun = partial(self._send, EdgeBegun(order.order))
        match order:
            case OpenEdge():
                await endpoint.connect()
            case FillEdge():
                await endpoint.fill(order.part, order.after_step, report_begun)
            case SendEdge():
                await endpoint.send()
            case TakeEdge():
                return int(await endpoint.take(order.part, report_begun))
            case CloseEdge():
                return int(await endpoint.close(order.timeout_s))
            case _:
                raise HandoffError(f"unknown order {type(order).__name__}")
        return 0

    def _send(self, report: object) -> None:
        with contextlib.suppress(RankLost):  # the channel has reported it; this process is about to end
            self._report(report)

"""One prefill worker's link to one decode worker: a stream that orders hand-overs, and the edges that move the bytes.

The link is dialled lazily and kept. Its reader task resolves the futures of waiting callers; every wait has a timeout.
Endpoints of edges are created on demand, kept, and replaced under the next generation after a failure. All share one
lock: from announcing a chunk to the end of its sends at most one operation is in flight on each edge. Once the peer has
sent `posted` it waits for our bytes, so a send is not interrupted from then on: it completes, or the edge is torn down.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from baton.core.codes import ErrorCode
from baton.core.compatibility import difference
from baton.core.errors import BatonError, HandoffError, InvalidRequest, LayoutMismatch, StartupError
from baton.core.handover import (
    AbortTransfer,
    Accept,
    Ack,
    Chunk,
    EdgeOpen,
    EdgeReady,
    LinkHello,
    LinkWelcome,
    Offer,
    Ping,
    Posted,
    Refuse,
)
from baton.core.liveness import LEASE_CHECK_S, MAX_READ_GAP_S, PING_EVERY_S, PING_LIMIT_S, ListeningClock
from baton.core.request import SequenceId
from baton.core.reshard import EdgeKey, EdgePlan, reshard_layout
from baton.runtime.streams import DialledLink, LinkLost, dial_link
from baton.runtime.tls import ClusterTls
from baton.transfer.edge import EdgeSpec, edge_connect_s, edge_prefix
from baton.transfer.edge_endpoint import EdgeEndpoint, MakeEndpoint
from prefill.handover import Wire

log = logging.getLogger("baton.link")
T = TypeVar("T")

# Counted per process: a redialled link must not find keys of an earlier link in the decode worker's store.
_generations = itertools.count(1)


class Link:
    def __init__(
        self,
        dialled: DialledLink,
        hello: LinkHello,
        plans: Sequence[EdgePlan],
        make_endpoint: MakeEndpoint,
        edge_timeout_s: float,
    ) -> None:
        self._dialled = dialled
        self._stream = dialled.stream
        self._hello = hello
        self._make_endpoint = make_endpoint
        self._edge_timeout_s = edge_timeout_s
        self._edge_connect_s = edge_connect_s(make_endpoint.kind, edge_timeout_s)
        # By what they wait for.
        self._waiting: dict[tuple[object, ...], asyncio.Future[Any]] = {}
        self.wire = Wire(plans, hello.facts.layout, dialled.welcome.staging_bytes)
        # The latest endpoint of each edge.
        self.endpoints: dict[EdgeKey, EdgeEndpoint] = {}
        self.edge_lock = asyncio.Lock()
        self.decode_worker = dialled.welcome.decode_worker
        self._tasks = [
            asyncio.create_task(self._read(), name=f"link reader {self.decode_worker}"),
            asyncio.create_task(self._ping(), name=f"link ping {self.decode_worker}"),
        ]

    @classmethod
    async def dial(
        cls,
        address: str,
        hello: LinkHello,
        make_endpoint: MakeEndpoint,
        edge_timeout_s: float,
        connect_timeout_s: float,
        tls: ClusterTls | None = None,
    ) -> Link:
        """Dials the decode worker, and compares the two workers as it does.

        Raises:
            LinkLost: there was no reply in time.
            LayoutMismatch: the two do not fit; the message names the field.
        """
        dialled = await dial_link(address, hello, connect_timeout_s, tls)
        try:
            return cls(dialled, hello, _plan_edges(hello, dialled.welcome, address), make_endpoint, edge_timeout_s)
        except LayoutMismatch:
            await dialled.close()
            raise

    @property
    def lost(self) -> str | None:
        """Why the link has ended; None while it is open."""
        return self._stream.ended

    async def offer(self, offer: Offer, timeout_s: float) -> Accept | Refuse:
        """Sends an offer; returns the reply. Raises LinkLost or HandoffError (peer abort, or no reply in time)."""
        key = ("offer", offer.request.sequence_id)
        answer: Accept | Refuse = await self._ask(offer, key, timeout_s, "reply to an offer")
        return answer

    async def announce(self, chunk: Chunk, timeout_s: float) -> Coroutine[Any, Any, Posted]:
        """Announces a chunk; returns the coroutine that waits for its Posted. The calling task must not be
        cancelled."""
        posted = self._expect(("posted", chunk.sequence, chunk.index, (chunk.prefill_rank, chunk.decode_rank)))
        try:
            await self._stream.send_unshielded(chunk)
        except BaseException:
            posted.cancel()
            raise
        return self._within(posted, timeout_s, f"Posted for chunk {chunk.index}")

    def expect_ack(self, sequence: SequenceId, index: int, edge: EdgeKey) -> asyncio.Future[Ack]:
        """Returns the future of an Ack. Call it before the chunk is announced, so that no Ack can be missed."""
        return self._expect(("ack", sequence, index, edge))

    async def abort(self, message: AbortTransfer) -> None:
        """Sends the abort to the peer if the link is still open."""
        try:
            await self._stream.send(message)
        except LinkLost:
            log.info("abort of %s not sent: the link to %s is closed", message.sequence, self.decode_worker)

    async def open_edges(self, plans: Sequence[EdgePlan]) -> None:
        """Opens, concurrently, the edges of `plans` that have no usable endpoint. The caller holds `edge_lock`.

        Raises:
            LinkLost: the link has ended.
            HandoffError: an edge could not be opened, or not in time.
        """
        missing = [p for p in plans if p.key not in self.endpoints or self.endpoints[p.key].dead is not None]
        results = await asyncio.gather(*map(self._open_edge, missing), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error

    async def _open_edge(self, plan: EdgePlan) -> None:
        if self.lost is not None:  # before the endpoint exists, which `_end` would have aborted: its peer has none
            raise self._lost_error()
        generation, welcome = next(_generations), self._dialled.welcome
        mine = f"{self._hello.prefill_worker}@{self._hello.prefill_incarnation}"
        who = (mine, plan.prefill_rank, welcome.decode_worker, plan.decode_rank)
        spec = EdgeSpec(
            host=welcome.store_host,
            port=welcome.store_port,
            prefix=edge_prefix(welcome.store_nonce, *who, generation),
            generation=generation,
            side="prefill",
            connect_timeout_s=self._edge_connect_s,
            operation_timeout_s=self._edge_timeout_s,
        )
        endpoint = self.endpoints[plan.key] = self._make_endpoint(plan, spec)
        message = EdgeOpen(plan.prefill_rank, plan.decode_rank, generation, spec.prefix)
        reply = "reply to EdgeOpen"
        asking = asyncio.ensure_future(self._ask(message, ("edge", generation), self._edge_connect_s, reply))
        try:
            await endpoint.connect()
            answer: EdgeReady = await asking
        except BaseException:
            asking.cancel()
            await asyncio.wait({asking})
            endpoint.abort("the edge was not opened")
            raise
        if answer.error:
            endpoint.abort(answer.error)
            raise HandoffError(f"{self.decode_worker} could not build its end of an edge: {answer.error}")

    async def close(self, reason: str = "closed locally") -> None:
        self._end(reason)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(endpoint.close(2.0) for endpoint in self.endpoints.values()))
        await self._dialled.close()

    def _expect(self, key: tuple[object, ...]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future

        def forget(done: asyncio.Future[Any]) -> None:
            if self._waiting.get(key) is done:  # a resend may already wait under the same key
                del self._waiting[key]

        future.add_done_callback(forget)
        if self.lost is not None:
            future.set_exception(self._lost_error())
            future.exception()  # marks it as retrieved: it may never be awaited
        return future

    async def _ask(self, message: object, key: tuple[object, ...], timeout_s: float, reply: str) -> Any:
        future = self._expect(key)
        try:
            await self._stream.send(message)
        except BaseException:
            future.cancel()
            raise
        return await self._within(future, timeout_s, reply)

    async def _within(self, future: asyncio.Future[T], timeout_s: float, reply: str) -> T:
        try:
            async with asyncio.timeout(timeout_s):  # wait_for would lose a cancellation that coincides with the reply
                return await future
        except TimeoutError:
            raise HandoffError(f"{self.decode_worker} sent no {reply} within {timeout_s:g} s") from None

    async def _read(self) -> None:
        reason = "the reader failed"
        try:
            while (message := await self._stream.receive()) is not None:
                self._resolve(message)
            reason = self._stream.ended or "closed"
        except InvalidRequest as e:
            reason = e.message
        finally:
            self._end(reason)

    def _resolve(self, message: object) -> None:
        match message:
            case Accept(sequence=s) | Refuse(sequence=s):
                self._answer(("offer", s), message)
            case Posted(sequence=s, index=i, prefill_rank=p, decode_rank=d):
                self._answer(("posted", s, i, (p, d)), message)
            case Ack(sequence=s, index=i, prefill_rank=p, decode_rank=d):
                self._answer(("ack", s, i, (p, d)), message)
            case EdgeReady(generation=g, error=e):
                self._answer(("edge", g), message)
                for endpoint in self.endpoints.values():
                    if e and endpoint.generation == g:
                        endpoint.abort(e)  # closed at the peer, which would refuse every later chunk on it
            case Ping(nonce=n):
                self._answer(("ping", n), message)
            case AbortTransfer(sequence=s, reason=r):
                message = f"{self.decode_worker} ended the hand-over of {s}: {r}"
                error = HandoffError(message, code=ErrorCode.PEER_ABORTED)
                for key in [k for k in self._waiting if len(k) > 1 and k[1] == s]:
                    self._fail(key, error)

    def _answer(self, key: tuple[object, ...], message: object) -> None:
        future = self._waiting.get(key)
        if future is not None and not future.done():
            future.set_result(message)

    def _fail(self, key: tuple[object, ...], error: BatonError) -> None:
        future = self._waiting.get(key)
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()

    def _lost_error(self) -> LinkLost:
        return LinkLost(f"the link to {self.decode_worker} has ended: {self.lost}")

    def _end(self, reason: str) -> None:
        self._stream.end(reason)
        for key in list(self._waiting):
            self._fail(key, self._lost_error())
        for endpoint in self.endpoints.values():
            endpoint.abort(f"the link has ended: {self.lost}")

    async def _ping(self) -> None:
        for nonce in itertools.count(1):
            await asyncio.sleep(PING_EVERY_S)
            try:
                await self._replies(nonce)
            except BatonError as e:
                self._end(e.message)
                return

    async def _replies(self, nonce: int) -> None:
        """Sends a ping and waits for the reply. After a stall of this process it waits unread (decision 0003)."""
        reply, clock = self._expect(("ping", nonce)), ListeningClock(time.monotonic(), MAX_READ_GAP_S)
        sent_at = clock.at(time.monotonic())
        try:
            await self._stream.send(Ping(nonce))
            while not reply.done():
                if clock.advance(time.monotonic()) - sent_at >= PING_LIMIT_S:
                    raise HandoffError(f"{self.decode_worker} sent no reply to a ping within {PING_LIMIT_S:g} s")
                await asyncio.wait({reply}, timeout=LEASE_CHECK_S)
            reply.result()
        finally:
            reply.cancel()


def _plan_edges(hello: LinkHello, welcome: LinkWelcome, address: str) -> Sequence[EdgePlan]:
    """Returns the edges of the link. Raises LayoutMismatch if the two workers do not fit."""
    if (differs := difference(hello.facts, welcome.facts)) is not None:
        raise LayoutMismatch(differs.between("the prefill worker", address), param=differs.field)
    try:
        return reshard_layout(hello.facts.layout, hello.tensor_parallel, welcome.tensor_parallel)
    except StartupError as e:
        raise LayoutMismatch(f"tensor_parallel: {e.message} ({address})", param="tensor_parallel") from None

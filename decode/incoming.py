"""All links into a decode worker, what they share and what they count."""

from __future__ import annotations

import asyncio
from collections import Counter

from baton.core.errors import InvariantError
from baton.core.handover import EdgeOpen, LinkHello
from baton.core.kv_layout import KVLayout
from baton.core.request import SequenceId
from baton.core.reshard import EdgeKey, EdgePlan, reshard_layout
from baton.event_log import EventLog
from baton.rpc.streams import MessageStream
from baton.transfer.edge import EdgeSpec
from baton.transfer.edge_end import EdgeEnd, MakeEnd
from baton.transfer.edge_kinds import edge_connect_s
from baton.transfer.staging_room import StagingRoom
from decode.incoming_link import IncomingLink, IncomingOwner

STAGING_WAIT_SHARE = 0.8  # of the time that the peer waits for `posted`: it hears why before it gives up its edge


class Incoming:
    """Complete state: the links, the number of chunks under way into the blocks of each sequence (`writing`), who
    offered each sequence (name and incarnation), and the counters. `layout` is the whole model's."""

    def __init__(
        self,
        owner: IncomingOwner,
        layout: KVLayout,
        make_end: MakeEnd,
        staging: StagingRoom,
        events: EventLog,
        *,
        host: str,
        store_port: int,
        tensor_parallel: int,
        edge_timeout_s: float,
        vocab_size: int,
    ) -> None:
        self._owner = owner
        self._make_end = make_end
        self._host = host
        self._store_port = store_port
        self._tensor_parallel = tensor_parallel
        self._edge_timeout_s = edge_timeout_s
        self.staging_wait_s = STAGING_WAIT_SHARE * edge_timeout_s
        self.layout = layout
        self.vocab_size = vocab_size
        self.staging = staging
        self._links: set[IncomingLink] = set()
        self.events = events
        self.writing: Counter[SequenceId] = Counter()
        self._sources: dict[SequenceId, tuple[str, int]] = {}
        self.bytes_received = 0
        self.chunks_damaged = 0
        self.stale_messages = 0

    async def handle(self, stream: MessageStream, hello: LinkHello) -> None:
        link = IncomingLink(stream, hello, self._owner, self)
        self._links.add(link)
        try:
            await link.run()
        except InvariantError as e:
            self._owner.failed(e)
            raise
        finally:
            self._links.discard(link)

    def taken(self, sequence: SequenceId, source: tuple[str, int]) -> None:
        """A sequence was reserved for this prefill worker; those that have ended are forgotten."""
        self._sources = {s: found for s, found in self._sources.items() if self._owner.knows(s)}
        self._sources[sequence] = source

    def may_end(self, sequence: SequenceId, source: tuple[str, int]) -> bool:
        """Whether a prefill worker may end a sequence: its own, or one that is not here (yet)."""
        if not self._owner.knows(sequence) or self._sources.get(sequence) == source:
            return True
        self.stale_messages += 1
        return False

    def abort(self, sequence: SequenceId, reason: str) -> None:
        for link in self._links:
            link.abort(sequence, reason)

    async def close(self) -> None:
        """Ends every edge; the streams end with the server that carries them."""
        await asyncio.gather(*(link.close_edges() for link in self._links))

    def plans(self, hello: LinkHello) -> dict[EdgeKey, EdgePlan]:
        """The edges from a prefill worker. Raises StartupError when its ranks and ours cannot share the heads."""
        plans = reshard_layout(self.layout, hello.tensor_parallel, self._tensor_parallel)
        return {plan.key: plan for plan in plans}

    def make_end(self, plan: EdgePlan, message: EdgeOpen) -> EdgeEnd:
        return self._make_end(
            plan,
            EdgeSpec(
                host=self._host,
                port=self._store_port,
                prefix=message.prefix,
                generation=message.generation,
                side="decode",
                connect_timeout_s=edge_connect_s(self._make_end.kind, self._edge_timeout_s),
                operation_timeout_s=self._edge_timeout_s,
            ),
        )

"""The prefill side's ends of the edges of one link: made when they are needed, kept, and made anew when they died."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence

from baton.core.errors import HandoffError
from baton.core.handover import EdgeOpen, EdgeReady, LinkHello, LinkWelcome
from baton.core.reshard import EdgeKey, EdgePlan
from baton.transfer.edge import EdgeSpec, edge_prefix
from baton.transfer.edge_end import EdgeEnd, MakeEnd
from baton.transfer.edge_kinds import edge_connect_s

# Counted per process: a redialled link must not meet what an earlier one left in the decode worker's store.
_generations = itertools.count(1)


class LinkEdges:
    """Complete state: the end of the latest generation of each edge. `plans` are all edges of the link; `open_edge`
    asks the decode worker for its end of one."""

    def __init__(
        self,
        plans: Sequence[EdgePlan],
        hello: LinkHello,
        welcome: LinkWelcome,
        make_end: MakeEnd,
        open_edge: Callable[[EdgeOpen], Awaitable[EdgeReady]],
        timeout_s: float,
    ) -> None:
        self.plans = tuple(plans)
        self.made = 0
        self._prefill_worker = f"{hello.prefill_worker}@{hello.prefill_incarnation}"
        self._welcome = welcome
        self._make_end = make_end
        self._open_edge = open_edge
        self._timeout_s = timeout_s
        self._ends: dict[EdgeKey, EdgeEnd] = {}

    @property
    def ends(self) -> Mapping[EdgeKey, EdgeEnd]:
        return self._ends

    @property
    def generation(self) -> int:
        """The latest of all edges; 0 before the first."""
        return max((end.generation for end in self._ends.values()), default=0)

    async def ready(self, plans: Sequence[EdgePlan]) -> None:
        """Builds those of `plans` that have no living end, all at once. Hold the link's `edge_lock`.

        Raises:
            HandoffError: one could not be built in time.
        """
        missing = [p for p in plans if p.key not in self._ends or self._ends[p.key].dead is not None]
        results = await asyncio.gather(*map(self._build, missing), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error

    def tear(self, generation: int, reason: str) -> None:
        for end in self._ends.values():
            if end.generation == generation:
                end.abort(reason)

    def tear_all(self, reason: str) -> None:
        for end in self._ends.values():
            end.abort(reason)

    async def close(self, timeout_s: float) -> None:
        await asyncio.gather(*(end.close(timeout_s) for end in self._ends.values()))

    async def _build(self, plan: EdgePlan) -> None:
        generation, welcome = next(_generations), self._welcome
        who = (self._prefill_worker, plan.prefill_rank, welcome.decode_worker, plan.decode_rank)
        spec = EdgeSpec(
            host=welcome.store_host,
            port=welcome.store_port,
            prefix=edge_prefix(welcome.store_nonce, *who, generation),
            generation=generation,
            side="prefill",
            connect_timeout_s=edge_connect_s(self._make_end.kind, self._timeout_s),
            operation_timeout_s=self._timeout_s,
        )
        end = self._make_end(plan, spec)
        self._ends[plan.key] = end
        asking = asyncio.ensure_future(
            self._open_edge(EdgeOpen(plan.prefill_rank, plan.decode_rank, generation, spec.prefix))
        )
        try:
            await end.connect()
            answer = await asking
        except BaseException:
            asking.cancel()
            await asyncio.wait({asking})
            end.abort("the other end was not built")
            raise
        if answer.error:
            end.abort(answer.error)
            raise HandoffError(f"{welcome.decode_worker} could not build its end of an edge: {answer.error}")
        self.made += 1

    def __repr__(self) -> str:
        living = sum(end.dead is None for end in self._ends.values())
        return f"<LinkEdges {living} of {len(self.plans)} open | generation {self.generation}>"

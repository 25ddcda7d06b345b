"""A sequence on its way into a decode worker: what has arrived, and whether a chunk can be the next. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.errors import HandoffError
from baton.core.handover import Chunk
from baton.core.kv_layout import KVLayout
from baton.core.reshard import EdgeKey, EdgePlan


@dataclass(slots=True, eq=False)
class Transfer:
    """`arrived` tokens of the sequence are in its `blocks`, by edge; where first layers of more are there, too, `begun`
    says how far: (end_token, layers). A chunk comes now on the edges `under_way`. `first_token`, one of `vocab_size`,
    once there is one."""

    blocks: tuple[int, ...]
    num_tokens: int
    vocab_size: int
    arrived: dict[EdgeKey, int]
    begun: dict[EdgeKey, tuple[int, int]] = field(default_factory=dict)
    first_token: int | None = None
    under_way: set[EdgeKey] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return all(tokens == self.num_tokens for tokens in self.arrived.values())

    @property
    def landed(self) -> int:
        """Tokens that every edge has brought."""
        return min(self.arrived.values())

    def check(self, chunk: Chunk, plan: EdgePlan, layout: KVLayout) -> None:
        """Raises HandoffError unless this is the next part of the sequence on its edge, of the right size: tokens in
        order, of each run of them the layers in order."""
        if plan.key in self.under_way:  # it would be written behind one that may be the last
            raise HandoffError(f"chunk {chunk.index} comes before the end of the one before it")
        arrived, tokens, total = self.arrived[plan.key], chunk.end_token - chunk.start_token, len(layout.layers)
        if chunk.start_token != arrived or tokens < 1 or chunk.end_token > self.num_tokens:
            raise HandoffError(
                f"tokens [{chunk.start_token}, {chunk.end_token}) cannot follow {arrived} of {self.num_tokens}"
            )
        end, layers = self.begun.get(plan.key, (chunk.end_token, 0))
        if (chunk.end_token, chunk.start_layer) != (end, layers) or not layers < chunk.end_layer <= total:
            raise HandoffError(
                f"layers [{chunk.start_layer}, {chunk.end_layer}) of tokens up to {chunk.end_token} cannot follow"
                f" {layers} of {total} layers up to {end}"
            )
        size = plan.of_layers(chunk.start_layer, chunk.end_layer).bytes_per_token(layout) * tokens
        if chunk.num_bytes != size or not size:
            raise HandoffError(f"{chunk.num_bytes} bytes cannot be KV of {tokens} tokens")
        ends = chunk.end_token == self.num_tokens and chunk.end_layer == total
        if chunk.last != ends or (ends and chunk.first_token is None):
            raise HandoffError("the last chunk, and only it, carries the end and the first token")
        if ends and chunk.first_token is not None and not 0 <= chunk.first_token < self.vocab_size:
            raise HandoffError(f"first token {chunk.first_token} is not one of {self.vocab_size}")
        if ends and self.first_token not in (None, chunk.first_token):
            raise HandoffError(f"first token {chunk.first_token} here, {self.first_token} on another edge")

    def take_in(self, chunk: Chunk, key: EdgeKey, layout: KVLayout) -> None:
        """The chunk is in the blocks, as it was sent."""
        if chunk.end_layer < len(layout.layers):
            self.begun[key] = (chunk.end_token, chunk.end_layer)
            return
        self.begun.pop(key, None)
        self.arrived[key] = chunk.end_token
        if chunk.last:
            self.first_token = chunk.first_token

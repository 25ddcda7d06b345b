"""Which KV heads are sent on which edge when a prefill worker hands over to a decode worker of another tensor-parallel
size.

Under TP size T, head h of a layer with H heads is on rank h * T // H when T <= H; when T > H each head is replicated on
T / H neighbouring ranks (as attention heads are split in Megatron-LM, Shoeybi et al. 2019, with grouped KV heads
repeated). A destination rank receives each of its heads from exactly one source rank; the destination ranks that need
the same head are spread over its replicas, which share the work. Tokens do not matter here: every edge carries the same
token range, and the wire is token-major, so block sizes need not match either.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.core.errors import StartupError
from baton.core.kv_layout import KVLayout

MAX_TENSOR_PARALLEL = 64
"""Most ranks of one worker that the launch options allow. A size that a peer reports is checked against it before any
work is done per rank."""

EdgeKey = tuple[int, int]
"""(prefill rank, decode rank)"""


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Heads [source_start, source_start + count) of the source rank's own cache of `layer` become heads
    [destination_start, ...) of the destination rank's."""

    layer: int
    source_start: int
    destination_start: int
    count: int


@dataclass(frozen=True, slots=True)
class EdgePlan:
    """What one edge carries of every token, in this order: for each slice K, then V. Layers are ascending, each at most
    once."""

    prefill_rank: int
    decode_rank: int
    slices: tuple[HeadSlice, ...]

    @property
    def key(self) -> EdgeKey:
        return self.prefill_rank, self.decode_rank

    def slices_of(self, start_layer: int, end_layer: int) -> tuple[int, int]:
        """Returns the range of the slices that belong to layers [start_layer, end_layer)."""
        first, last = (bisect_left(self.slices, layer, key=lambda s: s.layer) for layer in (start_layer, end_layer))
        return first, last

    def of_layers(self, start_layer: int, end_layer: int) -> EdgePlan:
        """Returns the edge's plan for layers [start_layer, end_layer)."""
        first, last = self.slices_of(start_layer, end_layer)
        return replace(self, slices=self.slices[first:last])

    def bytes_per_token(self, layout: KVLayout) -> int:
        """Returns how many bytes the edge carries per token of a whole model's `layout`."""
        return sum(self._bytes_by_window(layout))

    def num_bytes(self, layout: KVLayout, start: int, end: int, window_start: int) -> int:
        """Returns how many bytes the edge carries of tokens [start, end), in layers with a window only from
        `window_start` on."""
        full, sliding = self._bytes_by_window(layout)
        return full * (end - start) + sliding * max(0, end - max(start, window_start))

    def _bytes_by_window(self, layout: KVLayout) -> tuple[int, int]:
        """Returns how many bytes per token it carries of layers without a window, and of those with one."""
        totals = [0, 0]
        for s in self.slices:
            layer = layout.layers[s.layer]
            totals[layer.window > 0] += replace(layer, num_kv_heads=s.count).bytes_per_token
        return totals[0], totals[1]


def even_share(total: int, tp: int, counted: str) -> int:
    """Returns each of `tp` ranks' share of `total` equal units. Raises StartupError when they do not divide evenly."""
    share, remainder = divmod(total, tp)
    if remainder:
        raise StartupError(f"{counted} {total} cannot be divided over {tp} tensor-parallel ranks")
    return share


def local_heads(num_heads: int, tp: int, rank: int) -> range:
    """Returns the global indices of the KV heads that `rank` of `tp` keeps.

    Raises:
        StartupError: neither divides the other, so heads cannot be split or replicated evenly.
    """
    if num_heads % tp == 0:
        per_rank = num_heads // tp
        return range(rank * per_rank, (rank + 1) * per_rank)
    if tp % num_heads == 0:
        head = rank // (tp // num_heads)
        return range(head, head + 1)
    raise StartupError(f"{num_heads} KV heads cannot be divided over {tp} tensor-parallel ranks")


def local_layout(layout: KVLayout, tp: int, rank: int) -> KVLayout:
    """Returns `rank` of `tp`'s part of a whole model's `layout`: the same layers and blocks with its own heads."""
    layers = (replace(layer, num_kv_heads=len(local_heads(layer.num_kv_heads, tp, rank))) for layer in layout.layers)
    return KVLayout(layout.block_size, tuple(layers))


def reshard(heads_per_layer: Sequence[int], prefill_tp: int, decode_tp: int) -> tuple[EdgePlan, ...]:
    """Returns the edges between two workers that carry anything, ordered by (decode rank, prefill rank).

    Raises:
        StartupError: a layer's heads do not divide over one of the sizes.
    """
    slices: dict[tuple[int, int], list[HeadSlice]] = {}
    for layer, num_heads in enumerate(heads_per_layer):
        local_heads(num_heads, prefill_tp, 0)  # raises if the heads do not divide
        for decode_rank in range(decode_tp):
            for piece, prefill_rank in _sources(layer, num_heads, prefill_tp, decode_tp, decode_rank):
                slices.setdefault((decode_rank, prefill_rank), []).append(piece)
    return tuple(EdgePlan(p, d, tuple(slices[d, p])) for d, p in sorted(slices))


def reshard_layout(layout: KVLayout, prefill_tp: int, decode_tp: int) -> tuple[EdgePlan, ...]:
    """Returns the edges between two workers that keep KV of a whole model's `layout`.

    Raises:
        StartupError: as in `reshard`, or a size is not 1 to MAX_TENSOR_PARALLEL.
    """
    for side, size in (("prefill", prefill_tp), ("decode", decode_tp)):
        if not 1 <= size <= MAX_TENSOR_PARALLEL:
            raise StartupError(f"{size} tensor-parallel ranks on the {side} side, not 1 to {MAX_TENSOR_PARALLEL}")
    return reshard([layer.num_kv_heads for layer in layout.layers], prefill_tp, decode_tp)


def shared_gpu(
    plans: Sequence[EdgePlan], prefill_gpus: Sequence[str], decode_gpus: Sequence[str]
) -> tuple[int, int, str] | None:
    """Returns the ranks of the first edge whose both ends are on one GPU, and that GPU; None if there is none. The GPUs
    are by rank; an empty name, or a missing one, is a GPU that is not known."""
    theirs, mine = dict(enumerate(prefill_gpus)), dict(enumerate(decode_gpus))
    for plan in plans:
        gpu = theirs.get(plan.prefill_rank)
        if gpu and gpu == mine.get(plan.decode_rank):
            return plan.prefill_rank, plan.decode_rank, gpu
    return None


def _sources(
    layer: int, num_heads: int, prefill_tp: int, decode_tp: int, decode_rank: int
) -> list[tuple[HeadSlice, int]]:
    """Returns the runs of heads that `decode_rank` receives for one layer, each with its source rank."""
    mine = local_heads(num_heads, decode_tp, decode_rank)
    replicas = max(prefill_tp // num_heads, 1)
    sharers = max(decode_tp // num_heads, 1)
    replica = decode_rank % sharers * replicas // sharers
    runs: list[tuple[HeadSlice, int]] = []
    for offset, head in enumerate(mine):
        if prefill_tp > num_heads:
            source_rank, start = head * replicas + replica, 0
        else:
            per_rank = num_heads // prefill_tp
            source_rank, start = divmod(head, per_rank)
        if runs and runs[-1][1] == source_rank:
            last = runs[-1][0]
            runs[-1] = (HeadSlice(layer, last.source_start, last.destination_start, last.count + 1), source_rank)
        else:
            runs.append((HeadSlice(layer, start, offset, 1), source_rank))
    return runs

"""The sum over tensor-parallel ranks as one kernel that reads the other ranks' memory, in Triton: by rising rank, in
float32, rounded once, like the reference implementation in parallel.py. Under TRITON_INTERPRET=1 it also runs on
processes that share host memory.

Each rank has a block of memory that all can reach: flags, then two halves for partial sums. A program copies its tiles
of the partial result into its rank's memory, signals all other ranks, waits for their signals, and adds up the same
tiles of all ranks. Large sums are divided: each rank adds up its share, signals the others, and copies their shares, so
that it reads the partial results of one share only. Programs wait only for programs of the same number, which have the
same tiles, so no wait needs more than one program of a rank at a time.

Work is cut into pieces that fit into a half; halves are used in turn. A flag holds a number that rises with every piece
of every sum, so nothing is ever reset, and a captured launch may be repeated any number of times: the numbers come from
`state`, on the device. A half is written again two pieces later. By then all ranks have signalled the piece in between,
which they begin when they have read the half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 1024
"""Elements of a tile."""
PROGRAMS = 64
"""The most programs of a launch: as many as saturate the links, not measured."""


@dataclass(frozen=True, slots=True)
class SymmetricMemory:
    """One rank's view: `addresses` (int64 [ranks]) of all ranks' blocks in this process, by rank, and `state` (int64
    [2], zeroed once): the pieces done so far, and the programs of the current launch that have ended. A block has
    `flag_bytes(ranks)`, zeroed before any rank's first sum, and two halves of `half_bytes` each. `held` keeps the
    mappings."""

    rank: int
    addresses: Tensor
    state: Tensor
    half_bytes: int
    held: object = None

    @property
    def ranks(self) -> int:
        return len(self.addresses)


def flag_bytes(ranks: int) -> int:
    return PROGRAMS * ranks * 8


def symmetric_sum(partial: Tensor, memory: SymmetricMemory, shared: bool) -> Tensor:
    """partial [...], contiguous, of equal shape on all ranks, which all call this -> [...]: the sum over ranks.
    `shared`: each rank adds up a share of it."""
    out = torch.empty_like(partial)
    count, ranks = partial.numel(), memory.ranks
    held = memory.half_bytes // partial.element_size()
    # With shares, a half holds a part of the partial result for each rank, and this rank's sum.
    part = held // (ranks + 1) if shared else held
    part = min(
        part // ELEMENTS * ELEMENTS, triton.cdiv(triton.cdiv(count, ranks if shared else 1), ELEMENTS) * ELEMENTS
    )
    pieces = triton.cdiv(count, part * (ranks if shared else 1))
    programs = min(part // ELEMENTS, PROGRAMS)
    _sum[programs,](
        partial, out, memory.addresses, memory.state, count, part, pieces, held,
        RANK=memory.rank, RANKS=ranks, SHARED=shared, ELEMENTS=ELEMENTS, FLAG_BYTES=flag_bytes(ranks),
    )  # fmt: skip
    return out


@triton.jit
def _half(addresses_ptr, rank, number, held, FLAG_BYTES: tl.constexpr, dtype: tl.constexpr):
    """A rank's half for a piece."""
    start = tl.load(addresses_ptr + rank) + FLAG_BYTES
    return start.to(tl.pointer_type(dtype)) + (number % 2) * held


@triton.jit
def _meet(addresses_ptr, program, number, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Tells all other ranks that this program has reached `number`, and waits until their programs have."""
    tl.debug_barrier()  # what the other threads of this program have stored comes before the flag
    for other in tl.static_range(RANKS):
        if other != RANK:
            flags = tl.load(addresses_ptr + other).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(flags + program * RANKS + RANK, number, sem="release", scope="sys")
    mine = tl.load(addresses_ptr + RANK).to(tl.pointer_type(tl.int64)) + program * RANKS
    for other in tl.static_range(RANKS):
        if other != RANK:
            while tl.atomic_add(mine + other, 0, sem="acquire", scope="sys") < number:
                pass
    tl.debug_barrier()  # the other threads read only now


@triton.jit(do_not_specialize=["count", "part", "pieces", "held"])
def _sum(
    partial_ptr, out_ptr, addresses_ptr, state_ptr, count, part, pieces, held,
    RANK: tl.constexpr, RANKS: tl.constexpr, SHARED: tl.constexpr, ELEMENTS: tl.constexpr, FLAG_BYTES: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    dtype = partial_ptr.dtype.element_ty
    lanes = tl.arange(0, ELEMENTS)
    done = tl.load(state_ptr)
    PARTS: tl.constexpr = RANKS if SHARED else 1
    first = done * 0  # of the piece, in 64 bits
    for piece in range(pieces):
        number = done + piece
        own = _half(addresses_ptr, RANK, number, held, FLAG_BYTES, dtype)
        for tile in range(program, part // ELEMENTS, programs):
            for share in tl.static_range(PARTS):
                at = share * part + tile * ELEMENTS + lanes
                inside = first + at < count
                tl.store(own + at, tl.load(partial_ptr + first + at, mask=inside, other=0.0), mask=inside)
        _meet(addresses_ptr, program, 2 * number + 1, RANK, RANKS)
        for tile in range(program, part // ELEMENTS, programs):
            at = (RANK * part if SHARED else 0) + tile * ELEMENTS + lanes
            inside = first + at < count
            total = tl.zeros([ELEMENTS], tl.float32)
            for rank in tl.static_range(RANKS):
                theirs = _half(addresses_ptr, rank, number, held, FLAG_BYTES, dtype)
                read = tl.load(theirs + at, mask=inside, other=0.0).to(tl.float32)
                total = read if rank == 0 else total + read
            tl.store(out_ptr + first + at, total.to(dtype), mask=inside)
            if SHARED:
                tl.store(own + RANKS * part + tile * ELEMENTS + lanes, total.to(dtype), mask=inside)
        if SHARED:
            _meet(addresses_ptr, program, 2 * number + 2, RANK, RANKS)
            for tile in range(program, part // ELEMENTS, programs):
                for rank in tl.static_range(RANKS):
                    if rank != RANK:
                        at = rank * part + tile * ELEMENTS + lanes
                        inside = first + at < count
                        theirs = _half(addresses_ptr, rank, number, held, FLAG_BYTES, dtype)
                        read = tl.load(theirs + RANKS * part + tile * ELEMENTS + lanes, mask=inside, other=0.0)
                        tl.store(out_ptr + first + at, read, mask=inside)
        first += part * PARTS
    tl.debug_barrier()
    if tl.atomic_add(state_ptr + 1, 1) == programs - 1:
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr, done + pieces)

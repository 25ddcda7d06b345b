"""What must be equal on all ranks of one worker, compared before they load.

A rank whose options differ from its leader's would silently produce other tokens, or use other shapes in the middle of
a step, where the process group aborts the process. So each rank publishes its record in the job's store, and all ranks
end with an error that names the first difference.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from baton.core.compatibility import Compatibility, difference, values_by_name
from baton.core.errors import RankLost, StartupError
from baton.core.ranks import Ranks
from baton.engine.options import EngineOptions
from baton.engine.rank_peer import Store

_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class RankOptions:
    """What a worker is compared by, and what its ranks must share besides. Options of each rank alone (threads, memory,
    host, staging) are not compared."""

    # Before what it explains: dtype and edge kind.
    device: str
    worker: Compatibility
    # The level of compiled kernels, or torch, as far as ranks must have the same: `comparable_kernels`.
    kernels: str
    # Whether activations are in 8 bits where they can be.
    int8_activations: bool
    # Of a step.
    max_num_tokens: int
    # The possible tokens of a row in decode steps.
    decode_lengths: str
    expert_parallel: bool

    @classmethod
    def of(
        cls, options: EngineOptions, worker: Compatibility, device: str, kernels: str, *, int8_activations: bool = False
    ) -> RankOptions:
        comparable = comparable_kernels(kernels, exact=worker.exact, dtype=worker.dtype)
        lengths, experts = repr(options.decode_lengths), options.expert_parallel
        return cls(device, worker, comparable, int8_activations, options.max_num_tokens, lengths, experts)


def comparable_kernels(kernels: str, *, exact: bool, dtype: str) -> str:
    """Returns the part of `kernels` that ranks must have in common. In exact mode all of it, since bits are guaranteed;
    in bfloat16 only whether it is torch, whose ranks exchange logits in bfloat16 where compiled ones exchange float32.
    Otherwise nodes with different processors may share a worker."""
    if exact:
        return kernels
    if dtype != "bfloat16":
        return "any"
    return "torch" if kernels == "torch" else "compiled"


def check_ranks(store: Store, ranks: Ranks, ours: RankOptions, timeout_s: float) -> None:
    """Returns when every rank has published the same options as this one.

    Raises:
        StartupError: the first difference, the same line at every rank; or a rank publishes nothing for `timeout_s`.
        RankLost: the store is lost, and with it the node that hosts it.
    """
    if ranks.size == 1:
        return
    deadline, keys = time.monotonic() + timeout_s, [f"options/{rank}" for rank in range(ranks.size)]
    try:
        store.set(keys[ranks.rank], json.dumps(values_by_name(ours)))
        for rank, key in enumerate(keys):  # short polls: a termination signal is handled between them
            while not store.check([key]):
                if time.monotonic() > deadline:
                    raise StartupError(f"rank {rank} has not published its options within {timeout_s:g} s")
                time.sleep(_LOOK_S)
        first, *following = [json.loads(store.get(key)) for key in keys]
    except RuntimeError as error:
        raise RankLost(f"lost the connection to the ranks' store: {str(error).splitlines()[0]}") from None
    for rank, theirs in enumerate(following, start=1):
        if (differs := difference(first, theirs, one_worker=True)) is not None:
            raise StartupError(differs.between("rank 0", f"rank {rank}"))

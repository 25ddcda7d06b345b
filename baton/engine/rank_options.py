"""What the ranks of one worker must have alike, compared before they load.

A rank that computes otherwise than its leader plans for says other tokens without a word, or is in the middle of a step
with other shapes, and there the process group ends the process. So each rank leaves what it has resolved in the job's
store, and the first difference ends them all by its name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

import torch

from baton.core.errors import RankLost, StartupError
from baton.core.ranks import Ranks
from baton.engine.options import EngineOptions
from baton.engine.rank_peer import Store

_LOOK_S = 0.05
_NOT_SHOWN = ("checkpoint digest",)  # its digits say nothing
_BY_MACHINE = ("device", "dtype", "kernels")  # `auto` finds them out, and another machine may be another one


def must_agree(
    options: EngineOptions, *, device: torch.device, dtype: str, kernels: str, digest: str, max_model_len: int
) -> dict[str, str]:
    """The resolved options by name, first those that explain the ones behind them.

    `kernels` are a level, or torch. In exact mode they count, since bits are promised; in bfloat16 whether they are
    torch's does, whose ranks exchange bfloat16 where compiled ones exchange float32. Otherwise nodes with other
    processors may share a worker. The edge kind is compared as it was given. What each rank has for itself (threads,
    memory, host, staging) is not here.
    """
    agreed = {
        "version": options.version,
        "device": device.type,
        "exact": "on" if options.exact else "off",
        "dtype": dtype,
        "quantize": options.quantize,
        "kernels": kernels if options.exact or kernels == "torch" else "compiled",
        "block-size": str(options.block_size),
        "tokens of a step (from step-tokens and max-running)": str(options.max_num_tokens),
        "edge-kind": options.edge_kind,
        "checkpoint digest": digest,
        "max-model-len": str(max_model_len),
    }
    if not options.exact and dtype != "bfloat16":
        del agreed["kernels"]
    return agreed


def agree(store: Store, ranks: Ranks, mine: Mapping[str, str], timeout_s: float) -> None:
    """Returns when every rank has the same as this one.

    Raises:
        StartupError: the first difference, the same line at every rank; or a rank that says nothing for `timeout_s`.
        RankLost: the store is gone, and with it the node that keeps it.
    """
    if ranks.size == 1:
        return
    deadline, keys = time.monotonic() + timeout_s, [f"options/{rank}" for rank in range(ranks.size)]
    try:
        store.set(keys[ranks.rank], json.dumps(dict(mine)))
        for rank, key in enumerate(keys):  # in short looks: a signal to end is handled between them
            while not store.check([key]):
                if time.monotonic() > deadline:
                    raise StartupError(f"rank {rank} has not said its options within {timeout_s:g} s")
                time.sleep(_LOOK_S)
        everyone = [json.loads(store.get(key)) for key in keys]
    except RuntimeError as error:
        raise RankLost(f"the store of this worker's ranks is gone: {str(error).splitlines()[0]}") from None
    found = difference(everyone)
    if found:
        raise StartupError(found)


def difference(by_rank: Sequence[Mapping[str, str]]) -> str:
    """One line about the first name whose values are not all those of rank 0; empty where all are. Pure."""
    names = dict.fromkeys(name for options in by_rank for name in options)
    for name in names:
        first = by_rank[0].get(name, "none")
        for rank, options in enumerate(by_rank):
            other = options.get(name, "none")
            if other == first:
                continue
            if name in _NOT_SHOWN:
                return f"{name}: rank {rank} has another one than rank 0"
            where = "; auto decides by the machine: name one" if name in _BY_MACHINE else ""
            return f"{name}: {first} on rank 0 and {other} on rank {rank}; a worker's ranks need the same{where}"
    return ""

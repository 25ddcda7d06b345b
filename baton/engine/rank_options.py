"""Options that must be equal on all ranks of one worker, compared before they load.

A rank whose options differ from its leader's would silently produce other tokens, or use other shapes in the middle of
a step, where the process group aborts the process. So each rank publishes its resolved options in the job's store, and
all ranks end with an error that names the first difference.
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
_NOT_SHOWN = ("checkpoint digest",)  # its digits tell a user nothing
_BY_MACHINE = ("device", "dtype", "kernels")  # `auto` resolves them, and machines may differ


def must_agree(
    options: EngineOptions, *, device: torch.device, dtype: str, kernels: str, digest: str, max_model_len: int
) -> dict[str, str]:
    """The resolved options by name; an option comes before those that it explains.

    `kernels` is a level, or torch. In exact mode it is compared, since bits are guaranteed; in bfloat16 only whether it
    is torch, whose ranks exchange logits in bfloat16 where compiled ones exchange float32. Otherwise nodes with
    different processors may share a worker. The edge kind is compared as configured. Options of each rank alone
    (threads, memory, host, staging) are not compared.
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
        "tokens of a row in decode steps (from draft and draft-tokens)": repr(options.decode_lengths),
        "edge-kind": options.edge_kind,
        "checkpoint digest": digest,
        "max-model-len": str(max_model_len),
    }
    if not options.exact and dtype != "bfloat16":
        del agreed["kernels"]
    return agreed


def agree(store: Store, ranks: Ranks, mine: Mapping[str, str], timeout_s: float) -> None:
    """Returns when every rank has published the same options as this one.

    Raises:
        StartupError: the first difference, the same line at every rank; or a rank publishes nothing for `timeout_s`.
        RankLost: the store is lost, and with it the node that hosts it.
    """
    if ranks.size == 1:
        return
    deadline, keys = time.monotonic() + timeout_s, [f"options/{rank}" for rank in range(ranks.size)]
    try:
        store.set(keys[ranks.rank], json.dumps(dict(mine)))
        for rank, key in enumerate(keys):  # short polls: a termination signal is handled between them
            while not store.check([key]):
                if time.monotonic() > deadline:
                    raise StartupError(f"rank {rank} has not published its options within {timeout_s:g} s")
                time.sleep(_LOOK_S)
        everyone = [json.loads(store.get(key)) for key in keys]
    except RuntimeError as error:
        raise RankLost(f"lost the connection to the ranks' store: {str(error).splitlines()[0]}") from None
    found = difference(everyone)
    if found:
        raise StartupError(found)


def difference(by_rank: Sequence[Mapping[str, str]]) -> str:
    """One line about the first option that differs from rank 0's on any rank; empty if none does. Pure."""
    names = dict.fromkeys(name for options in by_rank for name in options)
    for name in names:
        first = by_rank[0].get(name, "none")
        for rank, options in enumerate(by_rank):
            other = options.get(name, "none")
            if other == first:
                continue
            if name in _NOT_SHOWN:
                return f"{name}: rank {rank}'s differs from rank 0's"
            where = "; auto depends on the machine: set it" if name in _BY_MACHINE else ""
            return f"{name}: {first} on rank 0 and {other} on rank {rank}; a worker's ranks must agree{where}"
    return ""

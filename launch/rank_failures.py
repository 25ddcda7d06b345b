"""Which of the ranks that torchrun reports failed first, and how soon it kills one that hangs.

When a rank ends badly torchrun sends the others of its node SIGTERM and, to those still there after a while, SIGKILL.
So a rank that hangs is reported as killed, last, though the others ended because of it: they know why, and it does not.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any, Protocol

from baton.process import EXIT_RANK_LOST

FOLLOWED = (EXIT_RANK_LOST, -signal.SIGTERM)
"""How ranks end because another has: by themselves, or by torchrun."""

KILL_DELAY_S = 5
"""From SIGTERM to SIGKILL. A rank that lives needs no more: it ends within 4.5 s (`baton.worker_ranks`). torchrun's own
30 s are how long the worker of a rank that hangs would be away before it can even start again."""

_NO_ERROR_FILE = "<NONE>"  # torch's word for a rank that wrote none: it was killed


class RankFailure(Protocol):
    """What is needed of torch's ProcessFailure. `timestamp` is in whole seconds; `exitcode` is below 0 for a signal."""

    exitcode: int
    timestamp: int
    error_file_data: Any


def first_failure(failures: Mapping[int, Any]) -> int:
    """The rank that failed first of its own accord; where none did, the first that says whom it lost. Pure."""
    began = min(failure.timestamp for failure in failures.values())
    ended = {rank: failure for rank, failure in failures.items() if not _killed_as_hung(failure, began)}
    own = {rank: f for rank, f in ended.items() if f.exitcode not in FOLLOWED or _gave_a_reason(f)}
    return min((own or ended).items(), key=lambda item: item[1].timestamp)[0]


def recorded(failure: RankFailure) -> str:
    """What the rank wrote into its error file (`baton.process.record_error`, or torch's own `record`)."""
    message = failure.error_file_data.get("message", "")
    text = str(message.get("message", "") if isinstance(message, dict) else message)
    return "" if text == _NO_ERROR_FILE else text


def kill_soon() -> None:
    """From now on torchrun, in this process, kills ranks that do not end KILL_DELAY_S after it told them to."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close

    def close_soon(context: PContext, death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
        close(context, death_sig, KILL_DELAY_S)

    PContext.close = close_soon  # type: ignore[method-assign,assignment]


def _killed_as_hung(failure: RankFailure, began: int) -> bool:
    return failure.exitcode == -signal.SIGKILL and failure.timestamp - began >= KILL_DELAY_S - 1


def _gave_a_reason(failure: RankFailure) -> bool:
    """A rank that torchrun ended while it was ending by itself."""
    return failure.exitcode != EXIT_RANK_LOST and bool(recorded(failure))

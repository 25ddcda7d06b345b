"""The outcomes of the most recent requests, for operators: `GET /requests`, `baton explain`, `baton trace`, the page.

Records ids, counts, workers and times, but no prompt and no output.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from coordinator.policy.choice import Choice, Stage
from coordinator.policy.timeline import Timeline, timeline

KEPT = 1_000
SPACE = "%20"
"""A space in a client's id, which gRPC allows: the id is one word in the log."""
_INNER = re.compile(r"((.+)-[0-9a-f]{8}|req-[0-9a-f]{32})(-[0-9]{1,3})?")
_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_", "embd-", "classify-", "score-", "rerank-")


@dataclass(frozen=True, slots=True)
class Record:
    """One choice of a request. `admitted_at` is in Unix seconds; `outcome` is `running`, a finish reason, `the client
    left`, or an error's code. `attempts` counts how often it was queued, at least 1; `error` is the message that the
    client received."""

    request_id: str
    choice: int
    admitted_at: float
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    attempts: int
    timeline: Timeline
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        names = ("choice", "outcome", "prompt_tokens", "cached_tokens", "generated_tokens", "attempts")
        return {
            "id": self.request_id,
            "admitted_at": round(self.admitted_at, 6),
            "error": self.error or None,
            **{name: getattr(self, name) for name in names},
            **self.timeline.as_json(),
        }


class RecentRequests:
    def __init__(self) -> None:
        self._ended: deque[Record] = deque(maxlen=KEPT)  # the oldest first

    def ended(self, choice: Choice, outcome: str, now: float) -> Record:
        """Adds and returns the record of an ended choice; `now` is on the clock of `choice`."""
        record = _record(choice, outcome, now)
        self._ended.append(record)
        return record

    def latest(self, running: Iterable[Choice], limit: int, now: float) -> list[Record]:
        """Returns at most `limit` records: running choices, then ended ones, the latest first."""
        return list(islice(self._all(running, now), limit))

    def named(self, running: Iterable[Choice], request_id: str, now: float) -> list[Record]:
        """Returns the choices of a request by its id: the client's own, the one in a response (`chatcmpl-...`), or the
        one in the log."""
        request_id = request_id.replace(" ", SPACE)
        asked = {request_id, *(request_id.removeprefix(prefix) for prefix in _PREFIXES)}
        here = (r for r in running if _own_id(r.request.request_id) & asked)
        records = [r for r in self._all(here, now) if _own_id(r.request_id) & asked]
        return sorted(records, key=lambda r: (r.admitted_at, r.choice))

    def _all(self, running: Iterable[Choice], now: float) -> Iterator[Record]:
        yield from (_record(r, "running", now) for r in running if r.stage is not Stage.ENDED)
        yield from reversed(self._ended)


def _own_id(inner: str) -> set[str]:
    """Returns the ids that identify a request: internally a client's id has a suffix that makes it unique, followed by
    the number of the prompt if there are several."""
    parts = _INNER.fullmatch(inner)
    return {inner, *filter(None, parts.group(1, 2))} if parts else {inner}


def _record(r: Choice, outcome: str, now: float) -> Record:
    return Record(
        request_id=r.request.request_id,
        choice=r.request.choice,
        admitted_at=time.time() - (now - r.started_at),
        outcome=outcome,
        prompt_tokens=len(r.request.prompt),
        cached_tokens=min(r.cached_tokens, len(r.request.prompt)),
        generated_tokens=r.next_index,
        attempts=1 + len(r.earlier_stamps),
        timeline=timeline(r, now),
        error="" if r.error is None else r.error.message,
    )

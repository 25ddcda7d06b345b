"""A worker's own account of what happened when: JSON lines, for tests and for people reading a stall.

Off unless BATON_EVENT_LOG_DIR names a directory. Times are CLOCK_MONOTONIC seconds, comparable between processes of
one host.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TextIO

VARIABLE = "BATON_EVENT_LOG_DIR"


class EventLog:
    def __init__(self, worker_id: str) -> None:
        directory = os.environ.get(VARIABLE, "")
        self._file: TextIO | None = None
        if directory:
            path = Path(directory) / f"{worker_id}.events.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1)

    def write(self, kind: str, **fields: object) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"t": time.monotonic(), "kind": kind, **fields}, default=str) + "\n")

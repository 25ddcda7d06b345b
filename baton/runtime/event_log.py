"""A worker's log of its events with their times: JSON lines, for tests and for the analysis of a stall.

Off unless BATON_EVENT_LOG_DIR names a directory. Times are CLOCK_MONOTONIC seconds, comparable between processes of one
host. Serving does not depend on it: if a write fails, the worker logs it once and stops writing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import TextIO

from baton.core.errors import StartupError

log = logging.getLogger("baton.events")
VARIABLE = "BATON_EVENT_LOG_DIR"


class EventLog:
    """Raises StartupError if the directory cannot be created or the file cannot be opened."""

    def __init__(self, worker_id: str) -> None:
        directory = os.environ.get(VARIABLE, "")
        self._file: TextIO | None = None
        if directory:
            path = Path(directory) / f"{worker_id}.events.jsonl"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("a", buffering=1)
            except OSError as e:
                raise StartupError(f"{VARIABLE}={directory}: {e.strerror}") from None

    def write(self, kind: str, **fields: object) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"t": time.monotonic(), "kind": kind, **fields}, default=str) + "\n")
        except OSError as e:
            log.warning("event log %s: write failed, no more events are written: %s", self._file.name, e.strerror)
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # closing retries the failed write
                file.close()

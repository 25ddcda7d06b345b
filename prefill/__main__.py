"""What torchrun starts: `torchrun ... -m prefill --model DIR --coordinator HOST:PORT`."""

from __future__ import annotations

from typing import Any

from baton.core.commands import WorkerFacts
from baton.core.config import WorkerConfig
from baton.worker_main import MakeWorker, Worker, worker_main


def _load() -> MakeWorker:
    from prefill.worker import PrefillWorker

    def make(config: WorkerConfig, crew: Any, facts: WorkerFacts) -> Worker:
        return PrefillWorker(config, crew.runner, facts, crew.pids, crew.ends)

    return make


if __name__ == "__main__":
    worker_main("prefill", _load)

"""Entry point of a decode worker's rank: `torchrun ... -m decode --model DIR --coordinator HOST:PORT`."""

from __future__ import annotations

from typing import Any

from baton.core.compatibility import Compatibility
from baton.runtime.config import WorkerConfig
from baton.runtime.worker_main import MakeWorker, RunnableWorker, worker_main


def _load() -> MakeWorker:
    from decode.speculation.draft_model import prepare
    from decode.worker import DecodeWorker

    def make(
        config: WorkerConfig, runner: Any, facts: Compatibility, pids: tuple[int, ...], make_endpoint: Any
    ) -> RunnableWorker:
        return DecodeWorker(config, runner, facts, pids, make_endpoint, *prepare(config, runner))

    return make


if __name__ == "__main__":
    worker_main("decode", _load)

"""Entry point of a decode worker's rank: `torchrun ... -m decode --model DIR --coordinator HOST:PORT`."""

from __future__ import annotations

from typing import Any

from baton.core.compatibility import Compatibility
from baton.core.prefix_cache import KeptBlocks
from baton.runtime.config import WorkerConfig
from baton.runtime.worker_main import MakeWorker, RunnableWorker, worker_main


def load() -> MakeWorker:
    from decode.speculation.draft_model import DraftSetup, prepare
    from decode.worker import DecodeWorker

    prepared: DraftSetup | None = None

    def make(
        config: WorkerConfig,
        runner: Any,
        facts: Compatibility,
        pids: tuple[int, ...],
        make_endpoint: Any,
        kept: KeptBlocks | None,
    ) -> RunnableWorker:
        nonlocal prepared
        prepared = prepared or prepare(config, runner, kept)
        return DecodeWorker(config, runner, facts, pids, make_endpoint, *prepared.speculation(config, runner), kept)

    return make


if __name__ == "__main__":
    worker_main("decode", load)

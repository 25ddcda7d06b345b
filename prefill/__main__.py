"""Entry point of a prefill worker's rank: `torchrun ... -m prefill --model DIR --coordinator HOST:PORT`."""

from __future__ import annotations

from baton.runtime.worker_main import MakeWorker, worker_main


def load() -> MakeWorker:
    from prefill.worker import PrefillWorker

    return PrefillWorker


if __name__ == "__main__":
    worker_main("prefill", load)

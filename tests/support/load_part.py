"""The memory that one of two ranks takes at most while it loads a model of transformers, as JSON: [peak in bytes, bytes
of its part, bytes of its largest tensor].

    python -m tests.support.load_part TINY LARGE

The peak is what the load of LARGE adds, after that of TINY.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from baton.engine import transformers_model
from baton.engine.parallel import TPGroup
from tests.support.load_peak import in_status, return_freed_memory


class _Alone(TPGroup):
    """One of two ranks, whose sums are its own part: only sizes count here."""

    all_reduce = all_gather = gather = lambda self, x: x  # type: ignore[assignment,misc]


def load(directory: str) -> Any:
    return transformers_model.load(Path(directory), 64, "float32", torch.device("cpu"), 320, _Alone(1, 2))


class _Watch(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = in_status("RssAnon")

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, in_status("RssAnon"))
            time.sleep(0.002)


def main() -> None:
    tiny, large = sys.argv[1:]
    return_freed_memory()
    torch.set_num_threads(1)
    load(tiny)  # allocates what is allocated once
    watch, before = _Watch(), in_status("RssAnon")
    watch.start()
    model = load(large)
    sizes = [p.numel() * p.element_size() for p in model._model.parameters()]
    print(json.dumps([watch.peak - before, sum(sizes), max(sizes)]))


if __name__ == "__main__":
    main()

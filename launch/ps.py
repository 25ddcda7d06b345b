"""GET /workers as a table that fits 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from launch.cluster_api import WorkerView

_COUNTS = ("running", "waiting", "prompt_tokens_computed", "tokens_generated")
_COLORS = {"ready": "green", "joining": "yellow", "draining": "yellow", "lost": "red"}


def print_workers(workers: Sequence[WorkerView], console: Console | None = None) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("worker", "state", "pids"):
        table.add_column(heading, no_wrap=True)
    for heading in ("blocks\nfree", "run", "wait", "prompt\ntokens", "output\ntokens", "KV out\nMiB", "KV in\nMiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for worker in workers:
        fields = worker.fields
        table.add_row(
            worker.id,
            f"[{_COLORS.get(worker.state, 'default')}]{worker.state}[/]",
            " ".join(map(str, worker.pids)),
            f"{fields.get('blocks_free', '?')}/{fields.get('blocks_total', '?')}",
            *(str(fields.get(key, "?")) for key in _COUNTS),
            *(_mib(fields.get(key)) for key in ("kv_bytes_sent", "kv_bytes_received")),
        )
    (console or Console()).print(table if workers else "no workers have joined")


def _mib(count: object) -> str:
    return f"{count / 2**20:.1f}" if isinstance(count, int) else "?"

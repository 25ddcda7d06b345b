"""GET /workers as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from launch.cluster_api import WorkerView

_COLORS = {"ready": "green", "joining": "yellow", "draining": "yellow", "lost": "red"}


def print_workers(workers: Sequence[WorkerView], console: Console | None = None) -> None:
    table = Table("worker", "role", "state", "pids", "address")
    for heading in ("blocks free", "running", "waiting", "prompt tokens", "output tokens", "KV sent", "KV received"):
        table.add_column(heading, justify="right")
    for worker in workers:
        fields = worker.fields
        color = _COLORS.get(worker.state, "default")
        table.add_row(
            worker.id,
            worker.role,
            f"[{color}]{worker.state}[/]",
            " ".join(map(str, worker.pids)),
            str(fields.get("address", "")),
            f"{fields.get('blocks_free', '?')} of {fields.get('blocks_total', '?')}",
            *(
                str(fields.get(key, "?"))
                for key in ("running", "waiting", "prompt_tokens_computed", "tokens_generated")
            ),
            *(_size(fields.get(key)) for key in ("kv_bytes_sent", "kv_bytes_received")),
        )
    (console or Console()).print(table if workers else "no workers have joined")


def _size(count: object) -> str:
    if not isinstance(count, int):
        return "?"
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"

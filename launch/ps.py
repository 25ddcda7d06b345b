"""GET /workers as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from launch.cluster_api import WorkerView
from launch.tables import make_table, show

_COLORS = {"ready": "green", "joining": "yellow", "draining": "yellow", "lost": "red"}
_STEPS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def print_workers(workers: Sequence[WorkerView], console: Console | None = None) -> None:
    """`since` is how long each worker has been in its state."""
    if not workers:
        (console or Console()).print("no workers have joined")
        return
    numbers = ("incarnation", "blocks free", "running", "waiting", "since")
    table = make_table(("worker", "role", "tp", "host", "state", *numbers), right=("tp", *numbers))
    for worker in workers:
        fields = worker.fields
        table.add_row(
            worker.id,
            worker.role,
            str(fields.get("tensor_parallel", "?")),
            str(fields.get("host", "?")),
            f"[{_COLORS.get(worker.state, 'default')}]{worker.state}[/]",
            str(fields.get("incarnation", "?")),
            f"{fields.get('blocks_free', '?')}/{fields.get('blocks_total', '?')}",
            str(fields.get("running", "?")),
            str(fields.get("waiting", "?")),
            since(fields.get("since_s")),
        )
    show(table, console or Console())


def since(seconds: object) -> str:
    """`4m10s`: the two largest units."""
    if not isinstance(seconds, int | float):
        return "?"
    left = int(seconds)
    parts: list[str] = []
    for size, unit in _STEPS:
        count, left = divmod(left, size)
        if count or parts or size == 1:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2])

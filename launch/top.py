"""`baton top`: the table of `baton ps` with rates, and the last requests with their timelines, renewed in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from launch.cluster_api import ClusterView
from launch.ps import cluster_view
from launch.timelines import Row

BAR_CHARS = 48
COLORS = {
    "queue": "bright_black",
    "prefill_queue": "yellow",
    "prefill": "dark_orange",
    "reserve": "plum1",
    "transfer": "magenta",
    "parked": "red",
    "decode_queue": "sky_blue1",
    "decode": "blue",
    "detokenise": "green",
}


def top(
    look: Callable[[], ClusterView],
    requests: Callable[[], Sequence[Row]],
    every_s: float,
    console: Console | None = None,
    looks: int | None = None,
) -> None:
    """Until Ctrl-C, or `looks` times.

    Raises:
        OSError: the coordinator does not answer.
        StartupError: it does not say what its requests do.
    """
    console = console or Console()
    before, looked_at = look(), time.monotonic()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal and looks is None) as live:
        while looks is None or looks > 0:
            time.sleep(every_s)
            cluster, now = look(), time.monotonic()
            shown = cluster_view(cluster, before, now - looked_at)
            live.update(Group(*shown, Text(), legend(), *map(line, requests())), refresh=True)
            before, looked_at = cluster, now
            looks = None if looks is None else looks - 1


def legend() -> Text:
    text = Text()
    for name, color in COLORS.items():
        text.append("█ ", color).append(f"{name}  ")
    return text


def line(row: Row) -> Text:
    """One request: when, which, how many tokens, how it is, and its spans as parts of a bar as long as they took."""
    at = time.strftime("%H:%M:%S", time.localtime(row["admitted_at"]))
    counts = f"{row['prompt_tokens']:>6} → {row['generated_tokens']:<6}"
    text = Text(f"{at} {row['id'][:20]:<20} {counts} {row['outcome'][:12]:<12} {row['total_ms']:>8.0f} ms ")
    total = row["total_ms"] or 1.0
    for span in row["spans"]:
        first = round(span["start_ms"] / total * BAR_CHARS)
        last = round((span["start_ms"] + span["ms"]) / total * BAR_CHARS)
        text.append("█" * (last - first), COLORS.get(span["name"], "white"))
    return text

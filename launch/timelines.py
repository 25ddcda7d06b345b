"""What the coordinator knows of its requests: one explained, or all of them as a trace for Perfetto.

The trace is in Chrome's format ("Trace Event Format", Google, 2016), which ui.perfetto.dev reads: a process for each
worker, and in it as many tracks as requests were there at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.markup import escape

from launch.cluster_api import Row
from launch.tables import make_table, show

COORDINATOR = "coordinator"
_BAR_CHARS = 40
_HANDED_OVER = ("decode_queue", "decode")


def print_request(rows: Sequence[Row], console: Console | None = None) -> None:
    """Each choice of a request as a table of its spans, with a bar where each lies in the whole."""
    console = console or Console()
    for row in rows:
        attempts = f", dispatched {row['attempts']} times" if row["attempts"] > 1 else ""
        console.print(
            f"{escape(row['id'])}, choice {row['choice']}: {escape(row['outcome'])}{attempts}; "
            f"{row['prompt_tokens']} prompt tokens ({row['cached_tokens']} cached), "
            f"{row['generated_tokens']} generated; first token after {row['first_token_ms']:.1f} ms",
            highlight=False,
            emoji=False,
        )
        if row["error"]:
            console.print(f"  {escape(row['error'])}", highlight=False, emoji=False)
        table = make_table(("stage", "worker", "start ms", "ms", "share", ""), right=("start ms", "ms", "share"))
        total = row["total_ms"] or 1.0
        for span in row["spans"]:
            bar = _bar(span["start_ms"] / total, span["ms"] / total)
            share = f"{span['ms'] / total:.0%}"
            where = span["worker"] or COORDINATOR
            table.add_row(span["name"], where, f"{span['start_ms']:.1f}", f"{span['ms']:.1f}", share, bar)
        table.add_row("all", "", "", f"{row['total_ms']:.1f}", "100%", "")
        show(table, console)


def _bar(start: float, share: float) -> str:
    first = min(int(start * _BAR_CHARS), _BAR_CHARS - 1)
    return " " * first + "█" * max(1, round(share * _BAR_CHARS))


def chrome_trace(rows: Iterable[Row]) -> dict[str, Any]:
    """The trace of these requests; times in microseconds since the Unix epoch, as the coordinator counts them."""
    placed: dict[str, list[tuple[float, float, Row, Row]]] = defaultdict(list)
    for row in rows:
        for span in row["spans"]:
            start = row["admitted_at"] * 1e6 + span["start_ms"] * 1e3
            placed[span["worker"] or COORDINATOR].append((start, span["ms"] * 1e3, row, span))
    events: list[dict[str, Any]] = []
    ends: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for process, (name, here) in enumerate(sorted(placed.items(), key=lambda item: (item[0] != COORDINATOR, item[0]))):
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        tracks: list[tuple[float, tuple[str, int]]] = []
        for start, length, row, span in sorted(here, key=lambda entry: entry[0]):
            key = row["id"], row["choice"]
            track = next((i for i, (until, whose) in enumerate(tracks) if until <= start or whose == key), len(tracks))
            tracks[track : track + 1] = [(start + length, key)]
            facts = {name: row[name] for name in ("prompt_tokens", "cached_tokens", "generated_tokens", "outcome")}
            event = {
                "ph": "X",
                "pid": process,
                "tid": track,
                "ts": round(start, 3),
                "dur": round(length, 3),
                "name": span["name"],
                "cat": "request",
                "args": {"request": row["id"], "choice": row["choice"], **facts},
            }
            events.append(event)
            ends[key].append(event)
    for number, of_one in enumerate(ends.values()):
        events += _arrows(sorted(of_one, key=lambda event: event["ts"]), number)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _arrows(events: Sequence[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """From each hand-over to where the request is decoded. `events` are one request's, in order."""
    found: list[dict[str, Any]] = []
    for before, after in pairwise(events):
        if after["name"] in _HANDED_OVER and before["pid"] != after["pid"]:
            flow = {"cat": "handover", "name": "handover", "id": f"{number}-{len(found)}"}
            middle = before["ts"] + before["dur"] / 2  # an arrow binds to the slice that its moment lies in
            found += [
                flow | {"ph": "s", "pid": before["pid"], "tid": before["tid"], "ts": middle},
                flow | {"ph": "f", "bp": "e", "pid": after["pid"], "tid": after["tid"], "ts": after["ts"]},
            ]
    return found

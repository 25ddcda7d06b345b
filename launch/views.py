"""The operators' views. `baton ps`: GET /workers as a table, once or repeatedly, with rates between two polls.
`baton top`: that table and the last requests with their timelines, refreshed in place. `baton explain`: one request.
`baton trace`: all requests that the coordinator keeps, for Perfetto, in Chrome's format ("Trace Event Format", Google,
2016): a process for each worker, with as many tracks as it had concurrent requests."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launch.cluster_api import ClusterView, Row
from launch.plan import COORDINATOR
from launch.tables import make_table, show

BAR_CHARS = 48
_SHARE_CHARS = 40  # of a bar that shows where a span lies in the request
_HANDED_OVER = ("decode_queue", "decode")
STAGE_COLORS = {
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
_COLORS = {"ready": "green", "disconnected": "yellow", "draining": "yellow", "lost": "red"}
_STEPS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
_TOKENS = {"prefill": "prompt_tokens_computed", "decode": "tokens_generated"}


def print_cluster(
    cluster: ClusterView, before: ClusterView | None = None, between_s: float = 0.0, console: Console | None = None
) -> None:
    """Prints `cluster_view`."""
    console = console or Console()
    for part in cluster_view(cluster, before, between_s):
        show(part, console) if isinstance(part, Table) else console.print(part)


def print_traffic(cluster: ClusterView, console: Console | None = None) -> None:
    """Prints the share of each revision, and its workers."""
    console, shares = console or Console(), cluster.document.get("traffic")
    shares = shares if isinstance(shares, Mapping) else {}
    ready = [row for row in cluster.workers if row["state"] == "ready"]
    table = make_table(("revision", "share", "prefill", "decode"), right=("share", "prefill", "decode"))
    for name in sorted({*map(str, shares), *(str(row.get("revision", "")) for row in ready)}):
        share = f"{shares[name]:g} %" if name in shares else "by room"
        here = [row["role"] for row in ready if str(row.get("revision", "")) == name]
        table.add_row(escape(name) or "-", share, *(str(here.count(role)) for role in ("prefill", "decode")))
    show(table, console)
    absent = sorted(set(map(str, shares)) - {str(row.get("revision", "")) for row in ready})
    if absent:
        names = ", ".join(name or "-" for name in absent)
        line = f"no ready worker is of revision {names}: its share has no effect until one joins"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def cluster_view(cluster: ClusterView, before: ClusterView | None = None, between_s: float = 0.0) -> list[str | Table]:
    """Returns the queue and the table of workers. `since` is how long each worker has been in its state. Rates are
    averages since `before`, `between_s` ago: of prompt tokens for prefill, of generated tokens for decode."""
    parts: list[str | Table] = []
    counts = cluster.document.get("coordinator")
    if isinstance(counts, Mapping):
        names = ("requests", "queued", "choices", "queued_choices", "oldest_queued_s")
        requests, queued, choices, queued_choices, oldest_s = (counts.get(name, "?") for name in names)
        oldest = f" (the oldest for {oldest_s} s)" if counts.get("queued_choices") else ""
        parts.append(f"{requests} requests, {queued} queued; {choices} choices, {queued_choices} queued{oldest}")
    if not cluster.workers:
        return [*parts, "no workers have joined"]
    earlier = {_start(row): row for row in before.workers} if before is not None else {}
    measured = ("tokens/s", "steps/s", "step ms") if before is not None else ()
    numbers = ("blocks free", "running", "waiting", *measured, "since")
    table = make_table(("worker", "role", "tp", "host", "state", *numbers), right=("tp", *numbers))
    for row in cluster.workers:
        table.add_row(
            escape(row["id"]),
            escape(row["role"]),
            str(row.get("tensor_parallel", "?")),
            escape(str(row.get("host", "?"))),
            Text(row["state"], _COLORS.get(row["state"], "default")),
            f"{row.get('blocks_free', '?')}/{row.get('blocks_total', '?')}",
            str(row.get("running", "?")),
            str(row.get("waiting", "?")),
            *(() if before is None else _rates(row, earlier.get(_start(row), {}), between_s)),
            since(row.get("since_s")),
        )
    return [*parts, table]


def looks(
    look: Callable[[], ClusterView], every_s: float, count: int | None = None
) -> Iterator[tuple[ClusterView, ClusterView, float]]:
    """Polls the cluster `count` times or forever: yields the current view, the previous one, the seconds between."""
    before, looked_at = look(), time.monotonic()
    for _ in itertools.count() if count is None else range(count):
        time.sleep(every_s)
        cluster, now = look(), time.monotonic()
        yield cluster, before, now - looked_at
        before, looked_at = cluster, now


def watch(
    look: Callable[[], ClusterView], every_s: float, console: Console | None = None, count: int | None = None
) -> None:
    """Prints the table every `every_s` seconds until Ctrl-C, or `count` times; raises what `look` raises."""
    console = console or Console()
    for cluster, before, between_s in looks(look, every_s, count):
        console.print(time.strftime("\n%H:%M:%S"))
        print_cluster(cluster, before, between_s, console)


def _start(row: Row) -> tuple[str, object]:
    """Returns the key of a worker's start: its counts are monotonic only within one incarnation."""
    return row["id"], row.get("incarnation")


def _rates(row: Row, before: Row, between_s: float) -> tuple[str, str, str]:
    """Returns tokens and steps per second, and the mean time of a step; `-` if a count is missing in either view."""

    def rise(name: str) -> float | None:
        old, new = before.get(name), row.get(name)
        return new - old if isinstance(old, int | float) and isinstance(new, int | float) else None

    tokens, steps, seconds = rise(_TOKENS.get(row["role"], "")), rise("steps"), rise("step_s")
    step_ms = f"{seconds / steps * 1e3:.1f}" if steps and steps > 0 and seconds is not None else "-"
    per_s = ["-" if count is None or between_s <= 0 else f"{count / between_s:.0f}" for count in (tokens, steps)]
    return per_s[0], per_s[1], step_ms


def since(seconds: object) -> str:
    """Formats seconds as `4m10s`: the two largest units."""
    if not isinstance(seconds, int | float):
        return "?"
    left = int(seconds)
    parts: list[str] = []
    for size, unit in _STEPS:
        count, left = divmod(left, size)
        if count or parts or size == 1:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2])


def top(
    look: Callable[[], ClusterView],
    requests: Callable[[], Sequence[Row]],
    every_s: float,
    console: Console | None = None,
    count: int | None = None,
) -> None:
    """Refreshes the view until Ctrl-C, or `count` times; raises what `look` and `requests` raise."""
    console = console or Console()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal and count is None) as live:
        for cluster, before, between_s in looks(look, every_s, count):
            shown = cluster_view(cluster, before, between_s)
            live.update(Group(*shown, Text(), legend(), *map(line, requests())), refresh=True)


def legend() -> Text:
    text = Text()
    for name, color in STAGE_COLORS.items():
        text.append("█ ", color).append(f"{name}  ")
    return text


def line(row: Row) -> Text:
    """Returns one request as a line: time, id, tokens, outcome, and a bar of its spans in proportion to their time."""
    at = time.strftime("%H:%M:%S", time.localtime(row["admitted_at"]))
    counts = f"{row['prompt_tokens']:>6} → {row['generated_tokens']:<6}"
    text = Text(f"{at} {row['id'][:20]:<20} {counts} {row['outcome'][:12]:<12} {row['total_ms']:>8.0f} ms ")
    total = row["total_ms"] or 1.0
    for span in row["spans"]:
        first = round(span["start_ms"] / total * BAR_CHARS)
        last = round((span["start_ms"] + span["ms"]) / total * BAR_CHARS)
        text.append("█" * (last - first), STAGE_COLORS.get(span["name"], "white"))
    return text


def print_request(rows: Sequence[Row], console: Console | None = None) -> None:
    """Prints each choice of a request as a table of its spans, with a bar that shows where each lies in the request."""
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
        if split := row.get("split"):
            console.print(f"prompt {escape(split['reason'])}", highlight=False, emoji=False)
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
    first = min(int(start * _SHARE_CHARS), _SHARE_CHARS - 1)
    return " " * first + "█" * max(1, round(share * _SHARE_CHARS))


def chrome_trace(rows: Iterable[Row]) -> dict[str, Any]:
    """Returns the trace of these requests; times in microseconds since the Unix epoch, by the coordinator's clock."""
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
            track = next((i for i, (until, owner) in enumerate(tracks) if until <= start or owner == key), len(tracks))
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
    """Returns an arrow for each hand-over to the first span at the decode worker. `events` are one request's, in
    order."""
    arrows: list[dict[str, Any]] = []
    for before, after in itertools.pairwise(events):
        if after["name"] in _HANDED_OVER and before["pid"] != after["pid"]:
            flow = {"cat": "handover", "name": "handover", "id": f"{number}-{len(arrows)}"}
            middle = before["ts"] + before["dur"] / 2  # an arrow binds to the slice that contains its timestamp
            arrows += [
                flow | {"ph": "s", "pid": before["pid"], "tid": before["tid"], "ts": middle},
                flow | {"ph": "f", "bp": "e", "pid": after["pid"], "tid": after["tid"], "ts": after["ts"]},
            ]
    return arrows

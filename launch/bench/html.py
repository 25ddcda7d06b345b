"""A benchmark as a self-contained page: tables, and plots as inline SVG. It loads nothing from other hosts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from launch.bench.report import PACKAGES, Report, best, machine_line, stage_times, tables
from launch.bench.stats import Record
from launch.console import versions
from sim.stats import Summary

WIDTH, HEIGHT, LEFT, BOTTOM = 460, 240, 56, 34
COLORS = ("#2b7bd9", "#d9822b", "#238551", "#7a4fd0")
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1020px; padding: 0 1em; color: #1d2530; }
table { border-collapse: collapse; margin: .6em 0 1.2em; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px 3px 0; text-align: right; border-bottom: 1px solid #e3e7ec; }
th:first-child, td:first-child, .left td { text-align: left; }
.plots { display: flex; flex-wrap: wrap; gap: 18px; }
figure { margin: 0; } figcaption { font-weight: 600; } svg text { font-size: 11px; fill: #66707d; }
code { background: #f2f4f7; padding: 2px 5px; } .dim { color: #66707d; }
"""
_STAGE_COLORS = {
    "queue": "#8a94a3", "prefill_queue": "#e8b26f", "prefill": "#d9822b", "reserve": "#b49ae6", "transfer": "#7a4fd0",
    "parked": "#c23030", "decode_queue": "#8db8ec", "decode": "#2b7bd9", "detokenise": "#238551",
}  # fmt: skip
Series = tuple[str, Sequence[tuple[float, float]]]


def as_html(report: Report) -> str:
    parts = [f"<h1>{escape(str(report.settings.get('model', 'benchmark')))}</h1>"]
    if report.best_rate is not None:
        parts += [f"<p><b>{escape(best(report))}</b></p>", _sweep_plots(report)]
    else:
        parts.append(_time_plots(report))
    for base in report.servers if report.best_rate is None else ():
        if len(stages := stage_times(report, base)) > 1:
            parts += [f"<h2>Mean request time by stage, reported by {escape(base)}</h2>", _stacked(stages)]
    for table in tables(report):
        parts += [f"<h2>{escape(table.title)}</h2>"] if table.title else []
        parts += [_table(table.headings, table.rows), *(f"<p>{escape(note)}</p>" for note in table.notes)]
    listed = {**report.settings, "machine": machine_line(), **versions(*PACKAGES)}
    parts += [
        "<h2>Settings</h2>",
        f"<div class=left>{_table((), ((name, str(value)) for name, value in listed.items()))}</div>",
    ]
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>baton bench</title><style>{_STYLE}</style>"
    return head + "\n".join(parts) + "</html>\n"


def _time_plots(report: Report) -> str:
    """Plots the share of values below each time, one curve for each server."""
    kinds: tuple[tuple[str, Callable[[Record], Iterable[float | None]]], ...] = (
        ("TTFT", lambda record: (record.ttft_s,)),
        ("TPOT", lambda record: (record.tpot_s,)),
        ("ITL", lambda record: record.gaps_s),
    )
    plots = []
    for title, times in kinds:
        series: list[Series] = []
        for base in report.servers:
            good = [record for record in report.records(base) if record.error is None]
            values = sorted(value for record in good for value in times(record) if value is not None)
            series.append((base, _cumulative(values)))
        plots.append(_plot(f"{title}: share of values below", "ms", "%", series))
    return f"<div class=plots>{''.join(plots)}</div>"


def _cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """Returns at most 400 points of the cumulative distribution."""
    step = max(1, len(values) // 200)
    chosen = [*range(0, len(values), step), len(values) - 1] if values else []
    return [(values[i] * 1e3, (i + 1) / len(values) * 100) for i in chosen]


def _sweep_plots(report: Report) -> str:
    rates = report.by_rate()
    kept = _plot("Goodput", "requests/s sent", "good/s", [("goodput", [(rate, s.goodput_per_s) for rate, s in rates])])
    times = ""
    for name, key in (("TTFT", "ttft"), ("TPOT", "tpot")):
        of = [(rate, getattr(s, key)) for rate, s in rates]
        lines = [("p50", [(rate, t.p50 * 1e3) for rate, t in of]), ("p95", [(rate, t.p95 * 1e3) for rate, t in of])]
        times += _plot(name, "requests/s sent", "ms", lines)
    return f"<div class=plots>{kept}{times}</div>"


def _plot(title: str, across: str, up: str, series: Sequence[Series]) -> str:
    points = [point for _, line in series for point in line]
    if not points:
        return ""
    right, top = _ceiling(max(x for x, _ in points)), _ceiling(max(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        across_px, up_px = x / right * (WIDTH - LEFT - 12), y / top * (HEIGHT - BOTTOM - 24)
        return round(LEFT + across_px, 1), round(HEIGHT - BOTTOM - up_px, 1)

    drawn = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = place(right * share, top * share)
        ground = HEIGHT - BOTTOM
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y}" y2="{y}" stroke="#e3e7ec"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{top * share:g}</text>')
        drawn.append(f'<text x="{x}" y="{ground + 15}" text-anchor="middle">{right * share:g}</text>')
    for number, (name, line) in enumerate(series):
        color = COLORS[number % len(COLORS)]
        places = [place(x, y) for x, y in line]
        path = " ".join(f"{x},{y}" for x, y in places)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        if len(places) <= 20:
            drawn += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{color}"/>' for x, y in places]
        if len(series) > 1:
            text = f'<text x="{LEFT + 8}" y="{38 + 13 * number}" style="fill:{color}">{escape(name)}</text>'
            drawn.append(text)
    drawn.append(f'<text x="{WIDTH - 12}" y="{HEIGHT - 4}" text-anchor="end">{escape(across)}</text>')
    drawn.append(f'<text x="4" y="12">{escape(up)}</text>')
    picture = f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(drawn)}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{picture}</figure>"


def _stacked(stages: Mapping[str, Summary]) -> str:
    """Draws the mean request as a bar, divided by stage."""
    means = {name: max(0.0, stage.mean) for name, stage in stages.items()}
    total, x, drawn = sum(means.values()) or 1.0, 0.0, []
    for name, seconds in means.items():
        width, text = seconds / total * 960, f"{escape(name)} {seconds * 1e3:.1f} ms"
        color = _STAGE_COLORS.get(name, "#c9d0d9")
        drawn.append(f'<rect x="{x:.1f}" width="{width:.1f}" height="26" fill="{color}"><title>{text}</title></rect>')
        if width > 90:
            drawn.append(f'<text x="{x + width / 2:.1f}" y="17" text-anchor="middle" style="fill:#fff">{text}</text>')
        x += width
    return f'<svg width="960" height="26" viewBox="0 0 960 26">{"".join(drawn)}</svg>'


def _table(headings: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
    return f"<table><tr>{head}</tr>{body}</table>"


def _ceiling(value: float) -> float:
    """Returns a round number not below `value`."""
    if value <= 0:
        return 1.0
    unit: float = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * unit >= value * 0.999)

"""A benchmark as a self-contained page: tables, and plots as inline SVG. It loads nothing from other hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from launch.bench.report import PACKAGES, Report, best, machine_line, stage_times, tables
from launch.bench.stats import RequestRecord
from launch.console import versions
from launch.plots import Series, page, plot, table
from sim.stats import Summary

_STAGE_COLORS = {
    "queue": "#8a94a3", "prefill_queue": "#e8b26f", "prefill": "#d9822b", "reserve": "#b49ae6", "transfer": "#7a4fd0",
    "parked": "#c23030", "decode_queue": "#8db8ec", "decode": "#2b7bd9", "detokenise": "#238551",
}  # fmt: skip


def as_html(report: Report) -> str:
    parts = [f"<h1>{escape(str(report.settings.get('model', 'benchmark')))}</h1>"]
    if report.best_rate is not None:
        parts += [f"<p><b>{escape(best(report))}</b></p>", _sweep_plots(report)]
    else:
        parts.append(_time_plots(report))
    for base in report.servers if report.best_rate is None else ():
        if len(stages := stage_times(report, base)) > 1:
            parts += [f"<h2>Mean request time by stage, reported by {escape(base)}</h2>", _stacked(stages)]
    for each in tables(report):
        parts += [f"<h2>{escape(each.title)}</h2>"] if each.title else []
        parts += [table(each.headings, each.rows), *(f"<p>{escape(note)}</p>" for note in each.notes)]
    listed = {**report.settings, "machine": machine_line(), **versions(*PACKAGES)}
    parts += [
        "<h2>Settings</h2>",
        f"<div class=left>{table((), ((name, str(value)) for name, value in listed.items()))}</div>",
    ]
    return page("baton bench", parts)


def _time_plots(report: Report) -> str:
    """Plots the share of values below each time, one curve for each server."""
    kinds: tuple[tuple[str, Callable[[RequestRecord], Iterable[float | None]]], ...] = (
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
        plots.append(plot(f"{title}: share of values below", "ms", "%", series))
    return f"<div class=plots>{''.join(plots)}</div>"


def _cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """Returns at most 400 points of the cumulative distribution."""
    step = max(1, len(values) // 200)
    chosen = [*range(0, len(values), step), len(values) - 1] if values else []
    return [(values[i] * 1e3, (i + 1) / len(values) * 100) for i in chosen]


def _sweep_plots(report: Report) -> str:
    rates = report.by_rate()
    kept = plot("Goodput", "requests/s sent", "good/s", [("goodput", [(rate, s.goodput_per_s) for rate, s in rates])])
    times = ""
    for name, key in (("TTFT", "ttft"), ("TPOT", "tpot")):
        of = [(rate, getattr(s, key)) for rate, s in rates]
        lines = [("p50", [(rate, t.p50 * 1e3) for rate, t in of]), ("p95", [(rate, t.p95 * 1e3) for rate, t in of])]
        times += plot(name, "requests/s sent", "ms", lines)
    return f"<div class=plots>{kept}{times}</div>"


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

"""Parts of self-contained HTML pages: tables, and plots as inline SVG. They load nothing from other hosts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM = 460, 240, 56, 34
COLORS = ("#2b7bd9", "#d9822b", "#238551", "#7a4fd0")
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1020px; padding: 0 1em; color: #1d2530; }
table { border-collapse: collapse; margin: .6em 0 1.2em; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px 3px 0; text-align: right; border-bottom: 1px solid #e3e7ec; }
th:first-child, td:first-child, .left td { text-align: left; }
.plots { display: flex; flex-wrap: wrap; gap: 18px; }
figure { margin: 0; } figcaption { font-weight: 600; } svg text { font-size: 11px; fill: #66707d; }
code { background: #f2f4f7; padding: 2px 5px; } .dim { color: #66707d; }
"""
Series = tuple[str, Sequence[tuple[float, float]]]


def page(title: str, parts: Iterable[str]) -> str:
    """Returns a whole page of these parts, each HTML."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"
    return head + "\n".join(parts) + "</html>\n"


def plot(title: str, across: str, up: str, series: Sequence[Series]) -> str:
    points = [point for _, line in series for point in line]
    if not points:
        return ""
    right, top = _ceiling(max(x for x, _ in points)), _ceiling(max(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        across_px, up_px = x / right * (WIDTH - LEFT - 12), y / top * (HEIGHT - BOTTOM - 24)
        return round(LEFT + across_px, 1), round(HEIGHT - BOTTOM - up_px, 1)

    drawn, names = [], []
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
            names.append(f'<tspan style="fill:{color}">{escape(name)}</tspan>')
    if names:  # where no line is
        drawn.append(f'<text x="{LEFT}" y="{HEIGHT - 4}">{" · ".join(names)}</text>')
    drawn.append(f'<text x="{WIDTH - 12}" y="{HEIGHT - 4}" text-anchor="end">{escape(across)}</text>')
    drawn.append(f'<text x="4" y="12">{escape(up)}</text>')
    picture = f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(drawn)}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{picture}</figure>"


def table(headings: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
    return f"<table><tr>{head}</tr>{body}</table>"


def _ceiling(value: float) -> float:
    """Returns a round number not below `value`."""
    if value <= 0:
        return 1.0
    unit: float = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * unit >= value * 0.999)

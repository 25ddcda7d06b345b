"""A benchmark's numbers as a table for the terminal, as Markdown, and as JSON."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from launch.bench.stats import Record, Statistics, Summary
from launch.tables import make_table, show

_TIMES = (
    ("TTFT", "ttft", "first text - sent"),
    ("TPOT", "tpot", "(last - first) / (n - 1)"),
    ("ITL", "itl", "gap between texts"),
    ("E2E", "e2e", "end - sent"),
)
_HEADINGS = ("ms", "p50", "p95", "p99", "max", "samples", "formula")


def rows(stats: Statistics) -> list[tuple[str, ...]]:
    """One row per kind of time, in milliseconds."""
    return [(name, *_numbers(getattr(stats, key)), formula) for name, key, formula in _TIMES]


def totals(stats: Statistics) -> list[tuple[str, str]]:
    """What is not a distribution."""
    good = stats.requests - stats.failed
    lines = [
        ("requests", f"{good} of {stats.requests} succeeded in {stats.duration_s:.2f} s"),
        ("output", f"{stats.output_tokens_per_s:.1f} tokens/s ({stats.output_tokens} tokens)"),
        ("prompt", f"{stats.prompt_tokens_per_s:.1f} tokens/s ({stats.prompt_tokens} tokens)"),
        ("rate", f"{stats.requests_per_s:.2f} requests/s"),
    ]
    if stats.uncounted:
        lines.append(("no usage", f"{stats.uncounted} answers; their tokens are counted by events"))
    return lines + [("failed", f"{count} x {error}") for error, count in stats.errors.items()]


def print_report(stats: Statistics, console: Console) -> None:
    note = "n: output tokens by the server's usage; percentiles linear between ranks"
    table = make_table(_HEADINGS, right=set(_HEADINGS) - {"ms", "formula"}, caption=note)
    for row in rows(stats):
        table.add_row(*row)
    show(table, console)
    for name, text in totals(stats):
        style = "red" if name == "failed" else "default"
        console.print(f"  {name:<9} {text}", style=style, markup=False, highlight=False)


def as_markdown(stats: Statistics, settings: dict[str, Any]) -> str:
    lines = [f"| {' | '.join(_HEADINGS)} |", "|" + "---|" * len(_HEADINGS)]
    lines += [f"| {' | '.join(row)} |" for row in rows(stats)]
    lines += ["", *(f"- {name}: {text}" for name, text in totals(stats))]
    lines += [f"- machine: {_machine_line()}", f"- date: {_date()}"]
    lines += ["- settings: " + ", ".join(f"{key} {value}" for key, value in settings.items())]
    lines += ["", "n is the server's own count (usage); percentiles are linear between the nearest ranks."]
    return "\n".join(lines) + "\n"


def as_json(stats: Statistics, settings: dict[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    """Times in seconds. `per_request` has everything the statistics were made from."""
    rates = ("requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s")
    return {
        "settings": settings,
        "machine": _machine(),
        "date": _date(),
        "formulas": {name: formula for name, _, formula in _TIMES},
        "percentile": "linear between the nearest ranks, at position p/100 (m - 1)",
        "statistics": {**asdict(stats), **{rate: getattr(stats, rate) for rate in rates}},
        "per_request": [
            {
                "error": record.error,
                "ttft_s": record.ttft_s,
                "tpot_s": record.tpot_s,
                "e2e_s": record.e2e_s if record.error is None else None,
                "prompt_tokens": record.prompt_tokens,
                "output_tokens": record.output_tokens,
                "gaps_s": [round(gap, 6) for gap in record.gaps_s],
            }
            for record in records
        ],
    }


def _numbers(summary: Summary) -> tuple[str, ...]:
    if not summary.count:
        return ("-", "-", "-", "-", "0")
    values = (summary.p50, summary.p95, summary.p99, summary.max)
    return (*(f"{value * 1000:.2f}" for value in values), str(summary.count))


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def _machine_line() -> str:
    return f"{_cpu_name()}, {os.cpu_count()} cores, {platform.system()}"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _date() -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())

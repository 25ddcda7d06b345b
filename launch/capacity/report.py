"""A plan and a simulation as tables on the terminal and as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rich.console import Console

from launch.capacity.plan import FLAGS, PlanReport, Point, lost, why_missed
from launch.plots import page, plot
from launch.plots import table as html_table
from launch.tables import make_table, show
from sim.scale.costs import Calibration
from sim.scale.planner import Cheapest
from sim.scale.results import WAITS, Outcome
from sim.stats import Slo

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, headings, rows of cells."""
_TIMES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2e"))


def with_error(value: str, errors: Sequence[float | None]) -> str:
    """Returns a figure with the simulator's measured error beside it, the larger one of both kinds of workers."""
    known = [error for error in errors if error is not None]
    return f"{value} ±{max(known):.0%}" if known and len(known) == len(errors) else f"{value} ±?"


def outcome_tables(outcome: Outcome, slo: Slo, kinds: Sequence[Calibration]) -> list[Table]:
    """Returns the times and rates of a replay, each with its error, and where requests waited."""

    def error(name: str) -> list[float | None]:
        return [kind.errors.get(name) for kind in kinds]

    times = []
    for title, key in _TIMES:
        times_of = getattr(outcome, key)
        cells = [
            (f"{value * 1e3:.1f} ms", p)
            for value, p in ((times_of.p50, "p50"), (times_of.p95, "p95"), (times_of.p99, "p99"))
        ]
        times.append([title, *(with_error(cell, error(f"{key}_{p}")) for cell, p in cells), str(times_of.count)])
    refused = ", ".join(f"{count} {code}" for code, count in outcome.refused.items())
    rates = [
        ["requests", f"{outcome.requests}" + (f", refused: {refused}" if refused else "")],
        ["requests per second", with_error(f"{outcome.requests_per_s:.2f}", error("throughput"))],
        ["output tokens per second", with_error(f"{outcome.output_tokens_per_s:.0f}", error("throughput"))],
        [
            "goodput (requests per second within the limits)",
            with_error(f"{outcome.goodput_per_s:.2f}", error("throughput")),
        ],
        [f"share within {slo}" if str(slo) else "share answered", f"{outcome.met_share:.2%}"],
        ["prefill workers compute", f"{outcome.prefill_utilisation:.0%} of the time"],
        ["decode workers compute", f"{outcome.decode_utilisation:.0%} of the time"],
        ["coordinator computes", f"{outcome.front_utilisation:.0%} of the time"],
        ["longest queue", str(outcome.queued_most)],
        ["prompt tokens from prefix caches", f"{outcome.cached_share:.1%}"],
        ["preemptions", str(outcome.preemptions)],
        ["prompts computed by decode workers", str(outcome.on_decode)],
    ]
    waits = [[name, f"{outcome.waits_s[name] * 1e3:.1f} ms"] for name in WAITS]
    return [
        ("", ("", "p50", "p95", "p99", "samples"), times),
        ("", ("", ""), rates),
        ("Mean time of a request by stage", ("", ""), waits),
    ]


def plan_tables(report: PlanReport) -> list[Table]:
    result = report.result
    pair, size = result.pair, result.size
    prices = pair.prefill_price, pair.decode_price
    kinds = ((pair.prefill, size.prefill, prices[0], "prefill"), (pair.decode, size.decode, prices[1], "decode"))
    workers = [
        [role, str(count), kind.name, str(kind.tensor_parallel), f"{price:g}", f"{price * count:g}"]
        for kind, count, price, role in kinds
        if count
    ]
    tables: list[Table] = [("", ("role", "workers", "kind", "tensor parallel", "price/h", "sum/h"), workers)]
    tables += outcome_tables(result.evaluated.outcome, report.slo, (pair.prefill, pair.decode))
    if report.infeasible:
        return tables
    tables.append(_pools(report))
    error = [pair.prefill.errors.get("throughput"), pair.decode.errors.get("throughput")]
    curve = [[f"{p.factor:g}x", *_point(p, error), str(report.needed.get(p.factor) or "")] for p in report.curve]
    share = f"{report.slo.share:.0%}"
    headings = ("rate", "met", "goodput/s", f"TTFT of {share}", f"TPOT of {share}", "workers needed")
    tables.append(("The planned workers at other rates", headings, curve))
    fewer = [[lost(p, size), *_point(p, error)] for p in report.one_fewer]
    for role, count in (("prefill", size.prefill), ("decode", size.decode)):
        if count == 1 and (role == "decode" or report.split == "always"):
            fewer.append([f"the only {role} worker lost", "0.0%", "0.00", "-", "-"])
    starts = max(pair.prefill.prefill_worker.start_s, pair.decode.decode_worker.start_s)
    back = f", back {starts:.0f} s after its restart" if starts else ""
    tables.append((f"With one worker less{back}", ("", *headings[1:5]), fewer))
    return tables


def _pools(report: PlanReport) -> Table:
    """Returns the plan of each way to decide where prompts are computed."""
    rows = []
    for split, plan in report.routed:
        name = {"always": "apart", "auto": "where each costs least", "never": "on decode workers"}[split]
        name = f"{name} ({FLAGS[split]})"
        price = f"{plan.pair.price(plan.size):g}"
        if isinstance(plan, Cheapest):
            cells = [str(plan.size), price]
        else:
            cells = [f"misses {' and '.join(plan.missed)} with {plan.size}", "-"]
        at = plan.evaluated
        rows.append([name, *cells, f"{at.outcome.met_share:.1%}", _seconds(at.ttft_s), _seconds(at.tpot_s)])
    share = f"{report.slo.share:.0%}"
    headings = ("prompts computed", "workers", "price/h", "met", f"TTFT of {share}", f"TPOT of {share}")
    return ("The cheapest cluster by where prompts are computed", headings, rows)


def _point(point: Point, error: Sequence[float | None]) -> list[str]:
    evaluated = point.evaluated
    goodput = with_error(f"{evaluated.outcome.goodput_per_s:.2f}", error)
    return [f"{evaluated.outcome.met_share:.1%}", goodput, _seconds(evaluated.ttft_s), _seconds(evaluated.tpot_s)]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.0f} ms"


def headline(report: PlanReport) -> str:
    if report.infeasible:
        return why_missed(report)
    result = report.result
    price = result.pair.price(result.size)
    workers = f"{result.size} workers" + (f" with {FLAGS['auto']}" if report.split == "auto" else "")
    return f"{workers}, {price:g} per hour, meet {report.slo} for {report.slo.share:.0%} of the requests"


def show_tables(console: Console, tables: Sequence[Table]) -> None:
    for title, headings, rows in tables:
        if title:
            console.print(f"\n{title}", style="bold")
        made = make_table(headings, right=headings[1:])
        for row in rows:
            made.add_row(*row)
        show(made, console)


def show_plan(report: PlanReport, console: Console) -> None:
    console.print("  ".join(f"{key} {value}" for key, value in report.settings.items()), style="dim")
    console.print(headline(report), style="bold")
    show_tables(console, plan_tables(report))
    console.print(f"routing: {report.routing}", style="dim")
    for line in (*report.warnings, *_about(report)):
        console.print(line)


def _about(report: PlanReport) -> list[str]:
    return [
        "±: largest error of the simulator against a real cluster that was measured with this calibration",
        f"{report.replays} replays of {report.requests - report.too_long} requests in {report.seconds:.0f} s",
    ]


def plan_html(report: PlanReport) -> str:
    parts = ["<h1>Capacity plan</h1>", f"<p><b>{escape(headline(report))}</b></p>"]
    parts += [f"<p>{escape(line)}</p>" for line in report.warnings]
    if report.curve:
        parts.append(f"<div class=plots>{_plots(report)}</div>")
    for title, headings, rows in plan_tables(report):
        parts += [f"<h2>{escape(title)}</h2>"] if title else []
        parts.append(html_table(headings, rows))
    parts.append(f"<p class=dim>Routing: {escape(report.routing)}.</p>")
    parts += [f"<p class=dim>{escape(line)}</p>" for line in _about(report)]
    kinds = {kind.name: kind for kind in (report.result.pair.prefill, report.result.pair.decode)}
    for name, kind in kinds.items():
        fits = [[fit, str(residual)] for fit, residual in kind.residuals.items()]
        about = [[key, value] for key, value in kind.about.items()]
        parts += [
            f"<h2>Calibration {escape(name)}</h2>",
            f"<div class=left>{html_table(('', ''), [*about, *fits])}</div>",
        ]
    settings = [[key, value] for key, value in report.settings.items()]
    parts += ["<h2>Settings</h2>", f"<div class=left>{html_table(('', ''), settings)}</div>"]
    return page("baton plan", parts)


def _plots(report: PlanReport) -> str:
    slo, rate = report.slo, report.result.evaluated.outcome.requests_per_s
    curve = report.curve

    def line(value: str) -> list[tuple[float, float]]:
        values = [(p.factor * rate, getattr(p.evaluated, value)) for p in curve]
        return [(x, y * 1e3) for x, y in values if y is not None]

    asked = [(p.factor * rate, p.factor * rate) for p in curve]
    goodput = [(p.factor * rate, p.evaluated.outcome.goodput_per_s) for p in curve]
    made = plot("Goodput of the planned workers", "requests/s sent", "good/s", [("goodput", goodput), ("sent", asked)])
    for name, value, limit in (("TTFT", "ttft_s", slo.ttft_s), ("TPOT", "tpot_s", slo.tpot_s)):
        ends = [(p.factor * rate, limit * 1e3) for p in (curve[0], curve[-1])]
        series = [(f"{slo.share:.0%} of requests", line(value)), *([("limit", ends)] if limit else [])]
        made += plot(f"{name} of the planned workers", "requests/s sent", "ms", series)
    return made + _sizes(report)


def _sizes(report: PlanReport) -> str:
    """Plots the share that meets the limits against the workers of each role beside the plan's other role."""
    result = report.result
    tried = getattr(result, "tried", {})
    series = []
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        same = getattr(result.size, other)
        points = sorted(
            (getattr(s, role), e.outcome.met_share * 100) for s, e in tried.items() if getattr(s, other) == same
        )
        series.append((f"{role} beside {same} {other}", points))
    return plot("Share within the limits by number of workers", "workers", "%", [s for s in series if len(s[1]) > 1])

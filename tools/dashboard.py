"""Writes docs/monitoring/baton-dashboard.json, the Grafana dashboard, from the table of its panels.

python tools/dashboard.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "docs" / "monitoring" / "baton-dashboard.json"
COLUMNS, WIDTH, HEIGHT = 3, 8, 8
SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True)
class Panel:
    """One graph: its queries by legend. The description says what it is for."""

    title: str
    unit: str
    description: str
    queries: dict[str, str]


def quantile(of: str, metric: str) -> str:
    return f"histogram_quantile({of}, sum by (le) (rate({metric}_bucket[$__rate_interval])))"


def rate(metric: str, by: str = "") -> str:
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({metric}[$__rate_interval]))"


def percentiles(metric: str) -> dict[str, str]:
    return {f"p{of[2:]}": quantile(of, metric) for of in ("0.50", "0.90", "0.99")}


STAGE = {
    "queue": "before a prefill worker computes it: at the coordinator, and there",
    "prefill": "its prompt is computed",
    "reserve": "no decode worker has accepted the KV",
    "transfer": "the hand-over; most of it overlaps prefill",
    "decode_queue": "at the decode worker, before its first step",
    "decode": "from there to the last token",
}


def stage(*names: str) -> Panel:
    """Returns the graph of the mean time that a request spent in these stages."""
    sums = (f'baton_stage_seconds_{kind}{{stage=~"{"|".join(names)}"}}' for kind in ("sum", "count"))
    mean = " / ".join(f"sum by (stage) (rate({each}[$__rate_interval]))" for each in sums)
    meaning = "; ".join(f"{name}: {STAGE[name]}" for name in names)
    return Panel(
        f"Time in {' and '.join(name.replace('_', ' ') for name in names)}",
        "s",
        f"Mean. {meaning}.",
        {"{{stage}}": mean},
    )


def of_worker(metric: str, role: str) -> str:
    return f'rate(baton_worker_{metric}_total{{role="{role}"}}[$__rate_interval])'


def step_time(role: str) -> Panel:
    queries = {"{{worker}}": f"{of_worker('step_seconds', role)} / {of_worker('steps', role)}"}
    described = "Of each worker. A throttled one stands out from the others."
    return Panel(f"Time of a {role} step", "s", described, queries)


def busy(role: str) -> Panel:
    described = "Share of the time in steps, of each worker. 1: more load makes a queue."
    return Panel(f"Utilisation of {role}", "percentunit", described, {"{{worker}}": of_worker("step_seconds", role)})


def blocks(role: str) -> Panel:
    of = f'{{role="{role}"}}'
    described = "Cached blocks that nothing refers to count as free."
    used = f"1 - baton_worker_blocks_free{of} / baton_worker_blocks{of}"
    return Panel(f"KV blocks in use at {role}", "percentunit", described, {"{{worker}}": used})


def sequences(role: str) -> Panel:
    queries = {f"{{{{worker}}}} {kind}": f'baton_worker_{kind}{{role="{role}"}}' for kind in ("running", "waiting")}
    return Panel(f"Sequences at {role}", "short", "That compute, and that wait at the worker.", queries)


def up(role: str) -> Panel:
    return Panel(f"Workers of {role}", "short", "That are up.", {"up": f'sum(baton_worker_up{{role="{role}"}})'})


ROWS: dict[str, tuple[Panel, ...]] = {
    "1. Front: requests come in": (
        Panel("HTTP answers", "reqps", "By status.", {"{{status}}": rate("baton_http_responses_total", "status")}),
        Panel(
            "Prompt tokens",
            "short",
            "Per second, of requests that produced a token, and how many of them were cached.",
            {"prompt": rate("baton_prompt_tokens_total"), "cached": rate("baton_prompt_tokens_cached_total")},
        ),
        Panel("Loop stalls", "short", "The coordinator's event loop, blocked for over 50 ms.",
              {"per second": rate("baton_loop_stalls_total")}),
    ),
    "2. Queue: they wait for a pair of workers": (
        Panel(
            "Queue and running",
            "short",
            "Choices that wait for a worker, and that one has.",
            {"queued": "baton_choices_queued", "running": "baton_choices_running"},
        ),
        Panel("Oldest in the queue", "s", "Rises while nothing is placed.", {"age": "baton_oldest_queued_seconds"}),
        stage("queue"),
    ),
    "3. Prefill: prompts are computed": (
        up("prefill"),
        step_time("prefill"),
        busy("prefill"),
        stage("prefill"),
        Panel(
            "Prompt tokens computed",
            "short",
            "Per second and worker.",
            {"{{worker}}": of_worker("prompt_tokens_computed", "prefill")},
        ),
        Panel(
            "Wasted prefill",
            "short",
            "Tokens per second that were computed for requests that did not finish, or again.",
            {"{{reason}}": rate("baton_prefilled_tokens_wasted_total", "reason")},
        ),
        sequences("prefill"),
        blocks("prefill"),
    ),
    "4. Hand-over: KV goes to a decode worker": (
        stage("reserve", "transfer"),
        Panel(
            "KV handed over",
            "Bps",
            "Sent by prefill; reused is what a decode worker's cache had.",
            {
                "sent": rate("baton_worker_kv_bytes_sent_total"),
                "reused": rate("baton_worker_kv_bytes_reused_total"),
            },
        ),
        Panel(
            "Repetitions",
            "short",
            "Per second: KV offered to another decode worker, chunks sent again, links refused.",
            {
                "reassigned": rate("baton_choices_reassigned_total"),
                "chunks resent": rate("baton_worker_chunks_resent_total"),
                "links refused": rate("baton_worker_links_refused_total"),
            },
        ),
    ),
    "5. Decode: tokens are generated": (
        up("decode"),
        step_time("decode"),
        busy("decode"),
        stage("decode_queue", "decode"),
        Panel(
            "Tokens generated",
            "short",
            "Per second and worker.",
            {"{{worker}}": of_worker("tokens_generated", "decode")},
        ),
        Panel(
            "Draft tokens accepted",
            "percentunit",
            "Of those that were verified.",
            {"share": f"{rate('baton_draft_tokens_accepted_total')} / {rate('baton_draft_tokens_total')}"},
        ),
        sequences("decode"),
        blocks("decode"),
        Panel(
            "Sequences again",
            "short",
            "Per second: preempted for want of blocks; queued again, because a worker was lost.",
            {
                "preempted": rate("baton_worker_preemptions_total"),
                "rescheduled": rate("baton_choices_rescheduled_total"),
            },
        ),
    ),
    "6. Stream end: what clients got": (
        Panel("Time to first token", "s", "From admission.", percentiles("baton_time_to_first_token_seconds")),
        Panel("Time between tokens", "s", "Every gap.", percentiles("baton_inter_token_latency_seconds")),
        Panel("Whole request", "s", "Of requests that succeeded.", percentiles("baton_request_seconds")),
        Panel(
            "Requests per second",
            "reqps",
            "By how they ended.",
            {
                "{{finish_reason}}": rate("baton_requests_finished_total", "finish_reason"),
                "failed: {{code}}": rate("baton_requests_failed_total", "code"),
            },
        ),
        Panel("Tokens per second", "short", "Sent to clients.", {"generated": rate("baton_generated_tokens_total")}),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []})
        y += 1
        for number, panel in enumerate(row):
            place = {"x": number % COLUMNS * WIDTH, "y": y + number // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(panel) | {"gridPos": place})
        y += -(-len(row) // COLUMNS) * HEIGHT
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    for number, each in enumerate(panels, 1):
        each["id"] = number
    return {
        "title": "Baton",
        "uid": "baton",
        "tags": ["baton", "llm"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend, "datasource": SOURCE}
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUT.write_text(text())
    print(OUT)

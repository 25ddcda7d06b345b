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


ROWS: dict[str, tuple[Panel, ...]] = {
    "What clients see": (
        Panel("Time to first token", "s", "From admission.", percentiles("baton_time_to_first_token_seconds")),
        Panel("Time between tokens", "s", "Every gap.", percentiles("baton_inter_token_latency_seconds")),
        Panel(
            "Tokens per second",
            "short",
            "Generated, and prompt tokens of requests with at least one token.",
            {"generated": rate("baton_generated_tokens_total"), "prompt": rate("baton_prompt_tokens_total")},
        ),
        Panel(
            "Requests per second",
            "reqps",
            "By how they ended.",
            {
                "{{finish_reason}}": rate("baton_requests_finished_total", "finish_reason"),
                "failed: {{code}}": rate("baton_requests_failed_total", "code"),
            },
        ),
        Panel("Whole request", "s", "Of requests that succeeded.", percentiles("baton_request_seconds")),
        Panel("HTTP answers", "reqps", "By status.", {"{{status}}": rate("baton_http_responses_total", "status")}),
    ),
    "Where the time goes": (
        Panel(
            "Queue and running",
            "short",
            "Choices that wait for a worker, and that one has.",
            {"queued": "baton_choices_queued", "running": "baton_choices_running"},
        ),
        Panel("Oldest in the queue", "s", "Rises while nothing is placed.", {"age": "baton_oldest_queued_seconds"}),
        Panel(
            "Time in each stage",
            "s",
            "Mean of requests that ended. The stage that grows is the one to look at.",
            {
                "{{stage}}": rate("baton_stage_seconds_sum", "stage")
                + " / "
                + rate("baton_stage_seconds_count", "stage"),
            },
        ),
    ),
    "Workers": (
        Panel(
            "Time of a step",
            "s",
            "Of each worker. A throttled one stands out from those of its role.",
            {
                "{{worker}}": "rate(baton_worker_step_seconds_total[$__rate_interval])"
                " / rate(baton_worker_steps_total[$__rate_interval])"
            },
        ),
        Panel(
            "Share of the time in steps",
            "percentunit",
            "1: it computes all the time; more load makes a queue.",
            {"{{worker}}": "rate(baton_worker_step_seconds_total[$__rate_interval])"},
        ),
        Panel(
            "Tokens per second of each",
            "short",
            "Prompt tokens computed at prefill, tokens generated at decode.",
            {
                "{{worker}}": 'rate(baton_worker_prompt_tokens_computed_total{role="prefill"}[$__rate_interval])',
                "{{worker}} ": 'rate(baton_worker_tokens_generated_total{role="decode"}[$__rate_interval])',
            },
        ),
        Panel(
            "KV blocks in use",
            "percentunit",
            "Cached blocks that nothing refers to count as free.",
            {"{{worker}}": "1 - baton_worker_blocks_free / baton_worker_blocks"},
        ),
        Panel(
            "Sequences",
            "short",
            "That compute, and that wait at a worker.",
            {"{{worker}} running": "baton_worker_running", "{{worker}} waiting": "baton_worker_waiting"},
        ),
        Panel("Workers up", "short", "By role.", {"{{role}}": "sum by (role) (baton_worker_up)"}),
    ),
    "Hand-over, caches, drafts": (
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
            "Prompt tokens from a cache",
            "percentunit",
            "Of the prompt tokens of requests with at least one token.",
            {"share": f"{rate('baton_prompt_tokens_cached_total')} / {rate('baton_prompt_tokens_total')}"},
        ),
        Panel(
            "Draft tokens accepted",
            "percentunit",
            "Of those that were verified.",
            {"share": f"{rate('baton_draft_tokens_accepted_total')} / {rate('baton_draft_tokens_total')}"},
        ),
        Panel(
            "Trouble",
            "short",
            "Per second: workers lost with requests, KV offered again, chunks sent again, sequences preempted.",
            {
                "rescheduled": rate("baton_requests_rescheduled_total"),
                "reassigned": rate("baton_requests_reassigned_total"),
                "chunks resent": rate("baton_worker_chunks_resent_total"),
                "preemptions": rate("baton_worker_preemptions_total"),
            },
        ),
        Panel("Loop stalls", "short", "The coordinator's event loop, blocked for over 50 ms.",
              {"per second": rate("baton_loop_stalls_total")}),
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

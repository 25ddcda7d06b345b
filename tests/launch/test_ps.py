from __future__ import annotations

import io
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from launch.cluster_api import ClusterView
from launch.views import BAR_CHARS, STAGE_COLORS, line, print_cluster, print_traffic, since, top, watch
from tests.launch.test_timelines import row

WORKER: dict[str, Any] = {
    "id": "prefill-0",
    "role": "prefill",
    "tensor_parallel": 2,
    "host": "10.0.0.2",
    "state": "ready",
    "since_s": 250.4,
    "incarnation": 3,
    "blocks_free": 40,
    "blocks_total": 64,
    "running": 5,
    "waiting": 1,
    "pids": [11, 12],
}


def view(coordinator: dict[str, Any] | None = None, **changes: Any) -> ClusterView:
    fields = WORKER | changes
    return ClusterView((fields,), "", {"workers": [fields]} | ({"coordinator": coordinator} if coordinator else {}))


def shown(cluster: ClusterView, *more: Any, width: int = 100) -> list[str]:
    out = io.StringIO()
    print_cluster(cluster, *more, console=Console(file=out, width=width))
    return out.getvalue().splitlines()


def test_each_worker_has_one_line() -> None:
    head, line = shown(view())
    assert " ".join(head.split()) == "worker role tp host state blocks free running waiting since"
    assert line.split() == ["prefill-0", "prefill", "2", "10.0.0.2", "ready", "40/64", "5", "1", "4m10s"]


def test_queue_is_shown_above_the_workers() -> None:
    idle = {"requests": 3, "queued": 0, "choices": 3, "queued_choices": 0, "oldest_queued_s": 0.0}
    assert shown(view(idle))[0] == "3 requests, 0 queued; 3 choices, 0 queued"
    busy = {"requests": 9, "queued": 4, "choices": 12, "queued_choices": 6, "oldest_queued_s": 1.25}
    assert shown(view(busy))[0] == "9 requests, 4 queued; 12 choices, 6 queued (the oldest for 1.25 s)"


def test_rates_cover_the_last_interval_of_the_same_incarnation() -> None:
    before = view(prompt_tokens_computed=1000, steps=10, tokens_generated=7, step_s=1.0)
    now = view(prompt_tokens_computed=5000, steps=30, tokens_generated=9, step_s=1.05)
    head, line = shown(now, before, 2.0)
    assert " ".join(head.split()).endswith("waiting tokens/s steps/s step ms since")
    assert line.split()[-4:] == ["2000", "10", "2.5", "4m10s"]
    assert shown(view(role="decode", tokens_generated=107, steps=20, step_s=1.2), before, 2.0)[1].split()[-4:-1] == [
        "50",
        "5",
        "20.0",
    ]
    for other in (view(incarnation=4, steps=2), view(id="other"), view()):
        assert shown(other, before, 2.0)[1].split()[-4:-1] == ["-", "-", "-"]


def test_watch_polls_the_cluster_repeatedly() -> None:
    out, looks = io.StringIO(), iter([view(steps=1), view(steps=2), view(steps=3)])
    watch(lambda: next(looks), 0.01, Console(file=out, width=100), count=2)
    assert out.getvalue().count("prefill-0") == 2 and next(looks, None) is None


def test_bar_is_divided_in_proportion_to_the_stage_times() -> None:
    text = line(row("r"))
    bar = text.plain[text.plain.index("█") :]
    assert bar == "█" * BAR_CHARS
    parts = [(span.style, span.end - span.start) for span in text.spans]
    assert parts == [(STAGE_COLORS["queue"], 5), (STAGE_COLORS["prefill"], 14), (STAGE_COLORS["decode"], 29)]
    assert "7 → 5" in text.plain and "stop" in text.plain


def test_top_polls_the_cluster_repeatedly() -> None:
    out, looks = io.StringIO(), iter([view(steps=1), view(steps=2), view(steps=3)])
    console = Console(file=out, width=140, force_terminal=False)
    top(lambda: next(looks), lambda: [row("req-1"), row("req-2")], 0.01, console, count=2)
    shown = out.getvalue()
    assert "prefill-0" in shown and "req-2" in shown and "step ms" in shown and next(looks, None) is None


def test_no_column_is_truncated_in_a_narrow_terminal() -> None:
    _, line = shown(view(host="a-host-with-a-name-that-is-long.example.org"), width=60)
    assert "a-host-with-a-name-that-is-long.example.org" in line


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59, "59s"), (3600, "1h0m"), (90061, "1d1h"), (None, "?")])
def test_since_is_formatted(seconds: object, text: str) -> None:
    assert since(seconds) == text


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(self.server.document).encode()  # type: ignore[attr-defined]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.document = {"workers": [WORKER]}  # type: ignore[attr-defined]
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ps(server: HTTPServer, *more: str) -> str:
    from launch.cli import baton

    return CliRunner().invoke(baton, ["ps", f"http://127.0.0.1:{server.server_port}", *more]).output


def test_json_output_is_the_complete_reply_of_the_coordinator(server: HTTPServer) -> None:
    assert json.loads(ps(server, "--json")) == {"workers": [WORKER]}


def test_control_characters_and_markup_of_a_server_are_not_interpreted(server: HTTPServer) -> None:
    odd = WORKER | {"id": "\x1b]0;title\x07", "host": "[red]h[/]", "state": "[/no]\u202e"}
    server.document = {"workers": [odd]}  # type: ignore[attr-defined]
    line = ps(server).splitlines()[-1]
    assert line.split()[:5] == ["\\x1b]0;title\\x07", "prefill", "2", "[red]h[/]", "[/no]\\u202e"]


def test_a_share_of_a_revision_without_workers_is_named() -> None:
    """A canary's name that was misspelt would otherwise look as if its share counted."""

    def traffic(shares: dict[str, float]) -> str:
        rows = tuple(WORKER | {"role": role, "revision": "v2"} for role in ("prefill", "decode"))
        out = io.StringIO()
        print_traffic(ClusterView(rows, "", {"traffic": shares}), Console(file=out, width=40))
        return out.getvalue()

    assert "no ready worker" not in traffic({"v2": 5.0})
    names = "no ready worker is of revision -, v22: its share has no effect until one joins\n"
    assert traffic({"v2": 5.0, "v22": 0.0, "": 20.0}).endswith(names)

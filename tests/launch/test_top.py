"""`baton top`: workers and requests in one picture."""

from __future__ import annotations

import io

from rich.console import Console

from launch.top import BAR_CHARS, COLORS, line, top
from tests.launch.test_ps import view
from tests.launch.test_timelines import row


def test_a_bar_is_divided_as_the_time_was() -> None:
    text = line(row("r"))
    bar = text.plain[text.plain.index("█") :]
    assert bar == "█" * BAR_CHARS
    parts = [(span.style, span.end - span.start) for span in text.spans]
    assert parts == [(COLORS["queue"], 5), (COLORS["prefill"], 14), (COLORS["decode"], 29)]
    assert "7 → 5" in text.plain and "stop" in text.plain


def test_it_looks_again_and_again() -> None:
    out, looks = io.StringIO(), iter([view(steps=1), view(steps=2), view(steps=3)])
    console = Console(file=out, width=140, force_terminal=False)
    top(lambda: next(looks), lambda: [row("req-1"), row("req-2")], 0.01, console, looks=2)
    shown = out.getvalue()
    assert "prefill-0" in shown and "req-2" in shown and "step ms" in shown and next(looks, None) is None

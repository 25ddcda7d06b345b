"""Tables on the terminal, never truncated: a cut number would be read as another one, and a pipe has no width."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_UNBOUNDED = 1 << 16


def make_table(headings: Sequence[str], *, right: Collection[str] = ()) -> Table:
    """Creates a table without lines; columns named in `right` hold numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", no_wrap=True)
    return table


def show(table: Table, console: Console) -> None:
    """Prints the whole table, however narrow the terminal; `console` stays at least that wide afterwards."""
    needed = Measurement.get(console, console.options.update(max_width=_UNBOUNDED), table).maximum
    console.width = max(console.width, needed)
    console.print(table)

"""Recorded traces of requests, in Mooncake's format (JSON lines) or Azure's (CSV), plain or compressed.

`TRACES` are part of the package; their sources and licences are in sim/traces/README.md.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import lzma
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TextIO

TRACE_BLOCK = 512
"""Tokens of a prefix block in Mooncake's traces."""
MOST_ROWS = 100_000
MOST_TOKENS = 10_000_000
"""Limit of the prompt, and of the output, of one request of a trace."""
MOST_CHARS = 1 << 30
"""Limit of a trace's text; a compressed file may expand to far more."""

_PACKAGED = Path(__file__).parent / "traces"
TRACES = {
    "azure-code": "azure-2023-code.csv.xz",
    "azure-conv": "azure-2023-conv.csv.xz",
    "mooncake-conversation": "mooncake-conversation.jsonl.xz",
    "mooncake-synthetic": "mooncake-synthetic.jsonl.xz",
}


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a recorded trace. `blocks` are the ids of its prefix blocks, counted from 0: equal ids mean equal
    tokens."""

    at_s: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()
    tenant: str = ""


def trace_path(name: str) -> Path:
    """Returns the file of one of TRACES, or `name` itself as a path."""
    return _PACKAGED / TRACES[name] if name in TRACES else Path(name)


def _open_file(path: Path) -> BinaryIO:
    return path.open("rb")


def read_trace(path: Path, open_file: Callable[[Path], BinaryIO] = _open_file) -> tuple[TraceRow, ...]:
    """Reads the first MOST_ROWS rows of a trace, sorted by time. The name's ending (`.csv`, else JSON lines; then
    `.gz`, `.xz` or nothing) determines the format.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has neither format; the message names the row.
    """
    compressed = path.suffix in (".gz", ".xz")
    with open_file(path) as raw, _text(path, raw) as file:
        lines = _limited(file)
        if (path.with_suffix("") if compressed else path).suffix == ".csv":
            rows = _numbered(csv.DictReader(lines), _azure)
        else:
            ids: dict[int, int] = {}
            rows = _numbered((json.loads(line) for line in lines if line.strip()), lambda row: _mooncake(row, ids))
        parsed = list(itertools.islice(rows, MOST_ROWS))
    if not parsed:
        raise ValueError("the trace has no rows")
    return tuple(sorted(parsed, key=lambda row: row.at_s))


def _text(path: Path, raw: BinaryIO) -> TextIO:
    unpack: dict[str, Callable[[BinaryIO], Any]] = {".gz": gzip.open, ".xz": lzma.open}
    return io.TextIOWrapper(unpack[path.suffix](raw) if path.suffix in unpack else raw, encoding="utf-8")


def _limited(file: TextIO) -> Iterator[str]:
    left = MOST_CHARS
    while line := file.readline(left + 1):
        left -= len(line)
        if left < 0:
            raise ValueError(f"it has more than {MOST_CHARS} characters")
        yield line


def _numbered(lines: Iterable[Any], parse: Callable[[Any], TraceRow]) -> Iterator[TraceRow]:
    number = 0
    try:
        for line in lines:
            yield parse(line)
            number += 1
    except (
        *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError),
        *(csv.Error, EOFError, lzma.LZMAError, gzip.BadGzipFile),
    ) as error:
        raise ValueError(f"row {number + 1} is not a trace row: {error!r}") from None


def _mooncake(row: dict[str, Any], ids: dict[int, int]) -> TraceRow:
    """`ids` numbers the trace's own ids, which may be hashes of any size, from 0 on."""
    hashes: Sequence[int] = row.get("hash_ids", ())
    blocks = tuple(ids.setdefault(int(each), len(ids)) for each in hashes)
    at_s = float(row["timestamp"]) / 1e3
    return _checked(TraceRow(at_s, int(row["input_length"]), int(row["output_length"]), blocks))


def _azure(row: dict[str, str]) -> TraceRow:
    at = datetime.fromisoformat(row["TIMESTAMP"][:26])
    seconds = at.timestamp() if at.tzinfo else (at - datetime(1970, 1, 1)).total_seconds()
    return _checked(TraceRow(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"])))


def _checked(row: TraceRow) -> TraceRow:
    if not math.isfinite(row.at_s):
        raise ValueError(f"invalid timestamp {row.at_s}")
    if not (1 <= row.input_len <= MOST_TOKENS and 0 <= row.output_len <= MOST_TOKENS):
        raise ValueError(f"{row.input_len} prompt tokens and {row.output_len} output tokens: out of range")
    if len(row.blocks) * TRACE_BLOCK > MOST_TOKENS:
        raise ValueError(f"too many prefix blocks: {len(row.blocks)}")
    return row

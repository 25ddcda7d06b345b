"""Recorded traces: those of the package, compressed files, limits."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest

from sim import trace
from sim.trace import TRACES, read_trace, trace_path

ROW = '{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": []}\n'


@pytest.mark.parametrize(
    ("name", "rows", "tokens"),
    [
        ("azure-code", 8819, (18059974, 245896)),
        ("azure-conv", 19366, (22361870, 4088665)),
        ("mooncake-conversation", 12031, (144793823, 4122048)),
        ("mooncake-synthetic", 3993, (61194628, 595432)),
    ],
)
def test_traces_of_the_package_are_complete(name: str, rows: int, tokens: tuple[int, int]) -> None:
    found = read_trace(trace_path(name))
    assert len(found) == rows
    assert (sum(r.input_len for r in found), sum(r.output_len for r in found)) == tokens
    assert all(len(r.blocks) == -(-r.input_len // trace.TRACE_BLOCK) for r in found if r.blocks)


def test_every_trace_has_its_licence() -> None:
    listed = trace_path("azure-code").with_name("README.md").read_text()
    assert all(name in listed for name in TRACES.values())


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_compressed_files_are_read(tmp_path: Path, ending: str, pack: object) -> None:
    path = tmp_path / f"t.jsonl{ending}"
    path.write_bytes(pack(ROW.encode()))  # type: ignore[operator]
    assert [row.output_len for row in read_trace(path)] == [3]
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ValueError, match=r"row \d is not a trace row"):
        read_trace(path)
    path.write_bytes(b"not compressed")
    with pytest.raises((ValueError, OSError)):
        read_trace(path)


def test_a_file_that_expands_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_CHARS", 1000)
    path = tmp_path / "t.jsonl.xz"
    path.write_bytes(lzma.compress((ROW * 100).encode()))
    with pytest.raises(ValueError, match="more than 1000 characters"):
        read_trace(path)

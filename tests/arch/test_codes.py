"""Error codes are members of `ErrorCode`, or of `PlacementCode`: mypy sees a misspelt one. Texts steer nothing."""

from __future__ import annotations

import ast

import pytest

from tools.shape import CODES_FILES, ROOT, bare_codes, product_files


def test_no_product_file_has_an_error_code_as_a_bare_string() -> None:
    files = product_files()
    used = sum("ErrorCode." in (ROOT / path).read_text() for path in files)
    assert len(files) > 200 and used > 10
    bare = [
        (path, lines) for path, tree in files.items() if path not in CODES_FILES and (lines := bare_codes(path, tree))
    ]
    assert bare == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("coordinator/a.py", 'ended.code == "unknown_sequnce"'),
        ("coordinator/a.py", 'ended.code in ("abandonned", x)'),
        ("coordinator/a.py", 'code != "draining"'),
        ("coordinator/a.py", 'ended.reason != "error"'),
        ("coordinator/a.py", 'event.reason in ("done", "stop string")'),
        ("prefill/a.py", 'e.param == "expires_ms"'),
        ("baton/a.py", "stream.ended == CLOSED_BY_PEER"),
        ("baton/a.py", "error.code == RANK_FAILED"),
        ("coordinator/a.py", 'Unavailable("x", code="draining")'),
        ("coordinator/a.py", '{"kv_corrupt": KVCorrupt}'),
        ("coordinator/a.py", 'return "no worker is left", "no_decode_worker"'),
        ("decode/a.py", 'Unavailable("x", code="no_fre_blocks")'),
    ],
)
def test_a_bare_error_code_is_detected(path: str, line: str) -> None:
    assert bare_codes(path, ast.parse(line)) == [1]


@pytest.mark.parametrize(
    "line", ['NotFound("x", code="model_not_found")', 'worker.state == "draining"', "code == ErrorCode.DRAINING"]
)
def test_other_strings_are_not_error_codes(line: str) -> None:
    assert bare_codes("coordinator/a.py", ast.parse(line)) == []

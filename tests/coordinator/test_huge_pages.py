"""The coordinator allocates large blocks of memory in huge pages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from coordinator.__main__ import use_huge_pages
use_huge_pages()
print(os.environ["GLIBC_TUNABLES"], sys.argv[1:])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=2", "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_program_restarts_itself_with_huge_pages_unless_already_configured(given: str | None, found: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    if given is not None:
        environment["GLIBC_TUNABLES"] = given
    command = [sys.executable, "-c", PROGRAM, "--port", "0"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown == f"{found} ['--port', '0']\n"

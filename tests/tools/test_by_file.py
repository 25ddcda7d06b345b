"""tools/by_file.py: what its processes report of files of all kinds is what pytest alone reports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tools import by_file

ROOT = Path(__file__).parents[2]
FILES = {
    "pytest.ini": "[pytest]\nmarkers =\n  long\n  timeout\n",
    "conftest.py": "import pytest\n@pytest.fixture(scope='session')\ndef shared(): return []",
    "test_a.py": "import pytest\ndef test_one(shared): shared.append(1)\n@pytest.mark.parametrize('n', [1, 2])\n"
    "def test_two(shared, n): assert n == 1\ndef test_skipped(): pytest.skip('why')",
    "test_long.py": "import pytest\npytestmark = pytest.mark.long\ndef test_one(): assert False",
    "test_wrong.py": "import nowhere",
    "b/test_c.py": "class TestC:\n    def test_one(self, shared): pass\ndef test_error(missing): pass",
}


def outcome(where: Path, *arguments: str) -> tuple[int, dict[str, int], set[str]]:
    """The exit code, the counts, and what failed. Without the plugins of the environment: they take most of the time
    in which pytest starts."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist.plugin"]
    options = ["-m", "not long", "-rfE", "--import-mode=importlib", *arguments, str(where)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([*command, *options], cwd=where, env=environment, capture_output=True, text=True, timeout=100)
    summary = ran.stdout.strip().splitlines()[-1]
    counts = {kind.rstrip("s"): int(number) for number, kind in re.findall(r"(\d+) ([a-z]+)", summary)}
    counts.pop("deselected", None)  # known to the processes alone
    return ran.returncode, counts, set(re.findall(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE))


def test_long_files_exist() -> None:
    assert [name for name in by_file._LONG if not (ROOT / name).exists()] == []


def test_reports_are_those_of_pytest(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    by_file = ("-p", "tools.by_file", "-n", "2", "--dist", "load", "--maxschedchunk", "1")
    code, counts, failed = outcome(tmp_path, *by_file)
    assert (code, counts, failed) == (1, *outcome(tmp_path, "--continue-on-collection-errors")[1:])
    assert counts == {"passed": 3, "failed": 1, "skipped": 1, "error": 2} and len(failed) == 3
    code, counts, failed = outcome(tmp_path, *by_file, "-k", "test_two", f"--ignore={tmp_path}/test_wrong.py")
    assert (code, counts) == (1, {"passed": 1, "failed": 1})
    assert [name.rpartition("/")[2] for name in failed] == ["test_a.py::test_two[2]"]

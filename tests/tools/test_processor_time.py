"""tools/processor_time.py: what a test and its child processes use is counted for its file, in any process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USE = "import time\nbegan = time.process_time()\nwhile time.process_time() < began + 0.5: pass\n"
FILES = {
    "test_itself.py": f"def test_one():\n  exec({USE!r})",
    "test_child.py": f"import subprocess, sys\ndef test_one(): subprocess.run([sys.executable, '-c', {USE!r}])",
    "test_little.py": "def test_one(): pass",
}


@pytest.mark.parametrize("processes", [["-p", "xdist.plugin", "-n", "2"], []], ids=["two processes", "one"])
def test_files_are_listed_by_what_they_used(processes: list[str], tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.processor_time", *processes]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    found = {name: float(seconds) for seconds, name in re.findall(r"^([\d.]+)s processor (\S+)$", ran.stdout, re.M)}
    assert ran.returncode == 0 and found.keys() == FILES.keys(), ran.stdout + ran.stderr
    assert min(found["test_itself.py"], found["test_child.py"]) > 0.4, found
    total = re.search(r"(\d+) s of processor time", ran.stdout)
    assert total and abs(int(total[1]) - sum(found.values())) < 1

"""The code committed under baton/v1 is what is generated from proto/, and proto/ passes the linter."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.py*") if "__pycache__" not in p.parts}


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "generate_proto.py"), str(tmp_path)], check=True)
    fresh, committed = contents(tmp_path / "baton" / "v1"), contents(ROOT / "baton" / "v1")
    assert sorted(fresh) == sorted(committed)
    assert [name for name in fresh if fresh[name] != committed[name]] == []


def test_contract_passes_buf_lint() -> None:
    buf = Path(sysconfig.get_path("scripts")) / "buf"
    done = subprocess.run([str(buf), "lint"], cwd=ROOT / "proto", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")

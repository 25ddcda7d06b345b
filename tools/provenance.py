"""Where a result comes from: the machine and the commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def machine() -> str:
    """One line: processor, cores, bf16 instructions, memory."""
    info = Path("/proc/cpuinfo").read_text()
    lines = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    flags = [f for f in ("amx_bf16", "avx512_bf16") if f in fields.get("flags", "").split()]
    memory = int(Path("/proc/meminfo").read_text().split()[1]) >> 20
    name = fields.get("model name", "unknown processor")
    return f"{name}, {info.count('processor' + chr(9))} cores, {', '.join(flags) or 'no bf16'}, {memory} GiB"


def commit(tree: Path = ROOT) -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout.strip()

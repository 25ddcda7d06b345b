"""The GPUs of this machine as CUDA_VISIBLE_DEVICES names them, without loading torch.

CUDA numbers the GPUs that it finds from 0, regardless of the numbers of the device files: in a container that has only
/dev/nvidia5, that GPU is 0. MIG instances have UUIDs and no numbers that would name one of several.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from itertools import takewhile

_LIMIT_S = 10.0
_NUMBER = re.compile(r"0*([0-9]+)")  # CUDA ignores what follows the digits
_GPU = re.compile(r"GPU \d+: .*\(UUID: (?P<uuid>GPU-[^)]+)\)")
_MIG = re.compile(r"\s+MIG .*\(UUID: (?P<uuid>MIG-[^)]+)\)")


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the GPUs that the environment names; else those that nvidia-smi lists; else one for each device file."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return as_cuda_reads(named)
    files = _device_files()
    listed = _nvidia_smi() if files else ""
    return tuple(map(str, range(files))) if listed is None else parse_listing(listed)


def as_cuda_reads(named: str) -> tuple[str, ...]:
    """Returns the GPUs of CUDA_VISIBLE_DEVICES: all before the first that is not a number (or, if the first is a UUID,
    not one of its kind), and none if one occurs twice."""
    parts = [part.strip() for part in named.split(",")]
    kind = parts[0][:4]
    form = re.compile(f"({kind}.*)") if kind in ("GPU-", "MIG-") else _NUMBER
    names = [name[1] for name in takewhile(bool, map(form.match, parts)) if name]
    return tuple(names) if len(set(names)) == len(names) else ()


def parse_listing(text: str) -> tuple[str, ...]:
    """Parses `nvidia-smi -L`: numbers, or UUIDs if a GPU is divided into MIG instances."""
    gpus: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if match := _GPU.match(line):
            gpus.append((match["uuid"], []))
        elif gpus and (match := _MIG.match(line)):
            gpus[-1][1].append(match["uuid"])
    if not any(instances for _, instances in gpus):
        return tuple(map(str, range(len(gpus))))
    return tuple(name for uuid, instances in gpus for name in instances or [uuid])


def _device_files() -> int:
    try:
        return sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir("/dev"))
    except OSError:
        return 0


def _nvidia_smi() -> str | None:
    """Returns the output of `nvidia-smi -L`; None if the program is missing or fails."""
    try:
        ran = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout if ran.returncode == 0 else None

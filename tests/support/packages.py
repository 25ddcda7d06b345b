"""Programs of npm and PyPI in an environment of their own. A test that cannot install its program is skipped."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NPM_S, PIP_S = 240, 500


def npm_install(folder: Path, package: str) -> str:
    """Installs a package into `folder`; returns the path of node. Its programs are in `node_modules/.bin`."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if not node or not npm:
        pytest.skip("no node and npm (Debian's packages nodejs and npm)")
    flags = ["--no-audit", "--no-fund", "--no-package-lock", "--prefix", str(folder)]
    ran = subprocess.run([npm, "install", *flags, package], capture_output=True, text=True, timeout=NPM_S)
    if ran.returncode:
        pytest.skip(f"npm cannot install {package}: {ran.stderr.strip()[-200:]}")
    return node


def pip_install(folder: Path, *packages: str) -> Path:
    """Makes a virtual environment with these packages in `folder`; returns its interpreter."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
    ran = subprocess.run(install, capture_output=True, text=True, timeout=PIP_S)
    if ran.returncode:
        pytest.skip(f"pip cannot install {packages}: {ran.stderr.strip()[-200:]}")
    return python

"""`make test-torch`: the engine's, the hand-over's and one cluster's tests with another version of torch.

    python tools/test_torch.py 2.11.0

Makes `.venv-torch-VERSION` with everything of constraints.txt but torch, Triton and numpy, and with a CPU build of
torch: pip needs an index or a directory that has it (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS). Builds for CUDA, PyPI's,
bring gigabytes of libraries: without a CPU build this ends before anything is downloaded.

The C++ kernels include no header of torch (baton/engine/kernels/build.py), so one library serves every version.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/engine", "tests/transfer", "tests/cluster/test_parity.py")
_OTHERS = ("torch==", "triton==", "numpy==")
_NUMPY = "numpy<2.4"  # Triton 3.6's interpreter converts one-element arrays to scalars, which numpy 2.4 refuses


def main() -> int:
    if len(sys.argv) < 2:
        raise SystemExit("which torch? python tools/test_torch.py 2.11.0")
    version, arguments = sys.argv[1], sys.argv[2:]
    if not re.fullmatch(r"[0-9]+(\.[0-9]+){1,2}([a-z0-9+.]*)", version):
        raise SystemExit(f"{version!r:.60} is no version of torch, such as 2.11.0")
    build = version if "+" in version else f"{version}+cpu"
    home = ROOT / f".venv-torch-{version}"
    python, done = home / "bin" / "python", home / ".installed"
    if not done.exists():
        venv.create(home, with_pip=True, clear=True)
        kept = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith(_OTHERS)]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            constraints.write("\n".join([*kept, f"torch=={build}", _NUMPY]))
            constraints.flush()
            pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", constraints.name]
            for packages in ([f"torch=={build}"], ["-e", f"{ROOT}[dev]"]):
                if subprocess.run([*pip, *packages]).returncode:
                    shutil.rmtree(home)
                    raise SystemExit(f"{' '.join(packages)} could not be installed: does an index of pip's have it?")
        done.touch()
    pytest = [str(python), "-m", "pytest", "-q", "-m", "not long and not gpu", *(arguments or TESTS)]
    return subprocess.run(pytest, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())

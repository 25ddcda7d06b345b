"""Generates baton/v1 from proto/. A test checks that the committed files equal its output."""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> None:
    """Writes the modules of every .proto file below `out`.

    Raises:
        SystemExit: protoc refused a file; its own message is on stderr.
    """
    import grpc_tools

    include = Path(grpc_tools.__file__).parent / "_proto"
    protos = sorted(str(p.relative_to(ROOT / "proto")) for p in (ROOT / "proto").rglob("*.proto"))
    flags = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"-I{include}", *flags, *protos]):
        raise SystemExit("protoc failed")
    package = out / "baton" / "v1" / "__init__.py"
    package.write_text('"""Generated from proto/ by tools/generate_proto.py."""\n')


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)

"""The file in which a process tells its launcher the addresses that it bound."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from baton.core.errors import StartupError


def write_ready_file(path: str, addresses: Mapping[str, str]) -> None:
    """Writes the file atomically, for its readers; does nothing without a path. Raises StartupError."""
    if not path:
        return
    temporary = Path(path).with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(addresses))
        os.replace(temporary, path)
    except OSError as error:
        raise StartupError(f"--ready-file {path}: {error.strerror or error}") from None

"""What a member or a node of a cluster may be called: its name becomes part of paths, scripts, log lines and keys."""

from __future__ import annotations

import re

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def name_error(name: str) -> str | None:
    """What is wrong with a name, in one line of ASCII; None when nothing is."""
    if _NAME.fullmatch(name) is not None:
        return None
    shown = name[:40].encode("ascii", "backslashreplace").decode()
    return f"{shown!r} is not 1 to 128 of A-Z a-z 0-9 . _ -"

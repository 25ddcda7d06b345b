"""What a member or a node of a cluster may be called, and what may be its address: both become part of scripts, log
lines and keys, the name of paths, too."""

from __future__ import annotations

import re

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ADDRESS = re.compile(r"[A-Za-z0-9:][A-Za-z0-9._:%-]{0,252}|\[[A-Fa-f0-9:][A-Za-z0-9.:%_-]{1,60}\]")


def name_error(name: str) -> str | None:
    """What is wrong with a name, in one line of ASCII; None when nothing is."""
    if _NAME.fullmatch(name) is not None:
        return None
    return f"{_shown(name)} is not 1 to 128 of A-Z a-z 0-9 . _ -"


def address_error(address: str) -> str | None:
    """What is wrong with a host name or an IP address, in one line of ASCII; None when it may be one. Whether somebody
    has it is not looked up."""
    if _ADDRESS.fullmatch(address) is not None:
        return None
    return f"{_shown(address)} is no host name and no IP address"


def _shown(text: str) -> str:
    return repr(text[:40].encode("ascii", "backslashreplace").decode())

"""What of a job's shape can be seen to be wrong before torch is loaded. Pure.

torchrun meets a bad number of ranks with a traceback, and a node whose rank no job has with ten minutes of silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_DEVICES = ("auto", "cpu", "gpu", "xpu")  # torchrun counts them itself
_SCRIPTS = {"--nnodes": "NNODES", "--node-rank": "NODE_RANK", "--nproc-per-node": "RANKS"}
_NO_VALUE = ("--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank")


def refusal(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """What is wrong with `--nnodes`, `--node-rank` and `--nproc-per-node` of a torchrun command line, or nothing. What
    the line leaves out is taken from torchrun's own variables, such as PET_NNODES."""
    said = {name: environment.get("PET_" + name[2:].upper().replace("-", "_"), "") for name in _SCRIPTS}
    said |= _flags(argv)
    ranks, nodes, rank = said["--nproc-per-node"], said["--nnodes"], said["--node-rank"]
    if ranks and ranks not in _DEVICES and not _at_least_one(ranks):
        return f"{_what('--nproc-per-node')} is {ranks!r}: it must be a number of ranks, at least 1"
    most = nodes.rpartition(":")[2]
    if nodes and not all(map(_at_least_one, nodes.split(":"))):
        return f"{_what('--nnodes')} is {nodes!r}: it must be a number of nodes, at least 1"
    if rank and not (rank.isdecimal() and int(rank) < int(most or 1)):
        least = f"of the {most or 1} nodes (NNODES) the first is 0, the last {int(most or 1) - 1}"
        return f"{_what('--node-rank')} is {rank!r}: {least}"
    return ""


def _flags(argv: Sequence[str]) -> dict[str, str]:
    """Those of `_SCRIPTS` that stand before the program."""
    found: dict[str, str] = {}
    words = list(argv)
    while words and words[0].startswith("--"):
        name, equals, value = words.pop(0).partition("=")
        name = name.replace("_", "-")
        if not equals and name not in _NO_VALUE and words:
            value = words.pop(0)
        if name in _SCRIPTS:
            found[name] = value
    return found


def _what(flag: str) -> str:
    return f"{flag} ({_SCRIPTS[flag]} of the scripts)"


def _at_least_one(text: str) -> bool:
    return text.isdecimal() and int(text) > 0

"""The doctor's checks on one node before anything is sent: address, versions, model and token, cores, ports."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import StartupError
from baton.model_source import resolve_model
from baton.rpc.ports import check_free
from launch.members import is_own
from launch.plan import Plan
from launch.plan_checks import check_files
from launch.versions import versions

_EQUAL = ("baton-serve", "torch", "grpcio", "xxhash")
"""Packages that must be the same on every node."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, at a node or between two ranks; `error` is what is wrong, empty where nothing is.
    `seconds` and `bytes_per_s` are 0 where nothing was measured; `untried` where a probe was missing and no result
    came, so that nothing is known about the way between them."""

    check: str
    where: str
    error: str = ""
    seconds: float = 0.0
    bytes_per_s: float = 0.0
    untried: bool = False


def on_node(check: str, name: str, error: str = "") -> Finding:
    return Finding(check, f"node {name}", error)


def check_node(plan: Plan, name: str, full_digest: bool) -> tuple[list[Finding], dict[str, str]]:
    """The findings on this node, and what has to be equal on all of them."""
    node = plan.topology.node(name)
    address = "" if is_own(node.address) else f"{node.address} is not an address of this host"
    facts, files = versions(*_EQUAL), ""
    try:
        check_files(plan, {name})
        facts["model digest"] = _digest(resolve_model(plan.model), full_digest)
    except (StartupError, OSError) as error:
        files = error.message if isinstance(error, StartupError) else f"{error.strerror}: {error.filename}"
    pinned = {core for part in plan.parts if part.node.name == name for core in part.placement.cores}
    findings = [
        on_node("address", name, address),
        on_node("files", name, files),
        on_node("cores", name, _cores(pinned, node.core_count)),
    ]
    for listener in plan.listeners():
        if listener.node == name and listener.port:
            taken = ""
            try:
                check_free(listener.host, listener.port, f"--{listener.key.replace('_', '-')} of {listener.member}")
            except StartupError as error:
                taken = error.message
            findings.append(on_node(f"port {listener.port}", name, taken))
    return findings, facts


def compare(facts: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Whether what is known of two nodes is equal: each is held against the first by name."""
    findings, first = [], min(facts, default="")
    for name, theirs in facts.items():
        both = ((key, theirs[key], value) for key, value in facts[first].items() if key in theirs)
        wrong = [f"{key} is {own}, but {value} on node {first}" for key, own, value in both if own != value]
        findings.append(on_node("versions", name, "; ".join(wrong)))
    return findings


def _digest(model: Path, full: bool) -> str:
    """Of all bytes; or of names, sizes and each file's first MiB, where the headers are."""
    from baton.engine.checkpoint import model_digest, weight_files

    if full:
        return model_digest(model)
    import hashlib

    digest = hashlib.sha256()
    for path in (model / "config.json", *weight_files(model)):
        with path.open("rb") as stream:
            digest.update(f"{path.name}:{path.stat().st_size}\n".encode() + stream.read(1 << 20))
    return digest.hexdigest()


def _cores(pinned: set[int], wanted: int) -> str:
    """What is wrong with them; empty where nothing is."""
    here = os.sched_getaffinity(0)
    if not pinned <= here:
        return f"core {', '.join(map(str, sorted(pinned - here)))} is not one this process may run on"
    if wanted > len(here):
        return f"the topology says {wanted}, this process may use {len(here)}"
    return ""

"""The doctor's checks on one node before anything is sent: address, versions, model, cores, ports, token."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import StartupError
from baton.model_source import resolve_model
from baton.rpc.ports import check_free
from baton.token_file import read_token
from launch.members import is_own
from launch.plan import COORDINATOR, Plan
from launch.versions import versions

_EQUAL = ("baton-serve", "torch", "grpcio", "xxhash")
"""Packages that must be the same on every node."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: `text` is what was found or what is wrong."""

    check: str
    where: str
    ok: bool
    text: str


def check_node(plan: Plan, name: str, full_digest: bool) -> tuple[list[Finding], dict[str, str]]:
    """The findings on this node, and what has to be equal on all of them."""
    node = plan.topology.node(name)
    findings = [_address(name, node.address)]
    facts = versions(*_EQUAL)
    findings.append(Finding("versions", name, True, ", ".join(f"{key} {value}" for key, value in facts.items())))
    parts = [part for part in plan.parts if part.node.name == name]
    try:
        model = resolve_model(plan.model)
        facts["model digest"] = _digest(model, full_digest)
        findings.append(Finding("model", name, True, f"{model}, digest {facts['model digest'][:12]}"))
    except (StartupError, OSError) as error:
        what = error.message if isinstance(error, StartupError) else f"{error.strerror}: {error.filename}"
        findings.append(Finding("model", name, False, what))
    findings.append(_cores(name, {core for part in parts for core in part.placement.cores}, node.core_count))
    for listener in plan.listeners():
        if listener.node == name and listener.port:
            what = f"{listener.member} {listener.key} {listener.host}:{listener.port}"
            try:
                check_free(listener.host, listener.port, f"--{listener.key.replace('_', '-')} of {listener.member}")
                findings.append(Finding(f"port {listener.port}", name, True, what))
            except StartupError as error:
                findings.append(Finding(f"port {listener.port}", name, False, error.message))
    return [*findings, *_token(plan, name)], facts


def compare(facts: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """What is not equal on all nodes: each is held against the first by name."""
    findings, first = [], min(facts, default="")
    for name, theirs in facts.items():
        for key, value in facts[first].items():
            if theirs.get(key, "?") != value:
                what = f"{key} is {theirs.get(key, '?')}, but {value} on node {first}"
                findings.append(Finding("equal", name, False, what))
    return findings


def _address(name: str, address: str) -> Finding:
    found = is_own(address)
    return Finding("address", name, found, address if found else f"{address} is not an address of this host")


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


def _cores(name: str, pinned: set[int], wanted: int) -> Finding:
    here = os.sched_getaffinity(0)
    if not pinned <= here:
        missing = ", ".join(map(str, sorted(pinned - here)))
        return Finding("cores", name, False, f"core {missing} is not one this process may run on")
    if wanted > len(here):
        return Finding("cores", name, False, f"the topology says {wanted}, this process may use {len(here)}")
    return Finding("cores", name, True, f"{len(here)} here, {wanted or 'not given'} in the plan")


def _token(plan: Plan, name: str) -> list[Finding]:
    """Off loopback the members of this node need a token file; one that is named must be good."""
    members = {part.name: part.worker.options for part in plan.parts if part.node.name == name}
    if plan.topology.coordinator.node == name:
        members[COORDINATOR] = plan.topology.coordinator.options
    from_environment = os.environ.get("BATON_CLUSTER_TOKEN_FILE", "")
    findings = []
    for path in sorted({str(options.get("cluster_token_file", from_environment)) for options in members.values()}):
        try:
            if path:
                read_token(path)
                findings.append(Finding("token", name, True, path))
            elif not all(_is_loopback(node.address) for node in plan.topology.nodes):
                findings.append(Finding("token", name, False, "off loopback every member needs cluster_token_file"))
        except StartupError as error:
            findings.append(Finding("token", name, False, error.message))
    return findings


def _is_loopback(address: str) -> bool:
    try:
        host = str(socket.getaddrinfo(address, None)[0][4][0])
    except OSError:
        return False
    return host == "::1" or host.startswith("127.")

"""The plan of a topology as scripts: one for each node, or one for Slurm. Writes nothing: the text is returned.

They start the same commands as `baton up`, but with torchrun in place of the agent (unless LAUNCHER=agent), and do not
supervise: a member that dies is reported, not restarted. A SIGTERM goes to the batches process, which sends no further
line, and to the coordinator, which drains every worker; on a node without a coordinator, or after its death, to the
launchers of the workers.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from baton.core.cores import ranges
from launch.members import Programs
from launch.plan import BATCHES, COORDINATOR, Plan, WorkerPart, make_plan, with_addresses
from launch.topology import Node

_PYTHON = "@PYTHON@"
_LAUNCHER = "launch.@LAUNCHER@"
_HOST = re.compile(r"@(\d+)@")
_PROGRAMS = Programs((_PYTHON, "-m", "coordinator"), (_PYTHON, "-m", _LAUNCHER), batches=(_PYTHON, "-m", "batches"))


def emit_shell(plan: Plan, node: Node) -> str:
    """Returns the script of one node; empty when nothing runs there."""
    parts = [part for part in plan.parts if part.node == node]
    leads = plan.topology.coordinator.node == node.name
    jobs = leads and plan.topology.batches is not None
    members = [COORDINATOR] * leads + [BATCHES] * jobs + [part.name for part in parts]
    if not members:
        return ""
    lines = [
        "#!/usr/bin/env bash",
        f"# Node {node.name} ({node.address}): {', '.join(members)}. From `baton emit shell`.",
        "# PYTHON names the interpreter baton is installed in, LOGS the directory for logs.",
        "# LAUNCHER=agent starts the ranks without torchrun.",
        _shared("members.sh"),
        "export BATON_PARENT_PID=$$  # kill -9 of this script ends its members too",
        "",
    ]
    if leads:
        lines += _in_background(COORDINATOR, [*_PROGRAMS.coordinator, *plan.coordinator_command()])
    if jobs:
        lines += _in_background(BATCHES, [*_PROGRAMS.batches, *plan.batches_command()])
    for part in parts:
        lines += _in_background(part.name, [*_environment(part), *_pinned(part), *_PROGRAMS.of_part(plan, part)])
    return "\n".join([*lines, "wait_for_all", ""])


def emit_slurm(plan: Plan) -> str:
    """Returns one sbatch script; each part of a worker is its own step, a worker over several nodes is one job."""
    nodes = plan.topology.nodes
    index = {node.name: number for number, node in enumerate(nodes)}
    placed = with_addresses(plan.topology, {name: f"@{number}@" for name, number in index.items()})
    plan = make_plan(placed, plan.model, plan.served_name)
    cpus = max((sum(_cpus(part) for part in plan.parts if part.node.name == node.name) for node in nodes), default=1)
    gpus = max(len(node.gpus) for node in nodes)
    lines = [
        "#!/usr/bin/env bash",
        "#SBATCH --job-name=baton",
        f"#SBATCH --nodes={len(nodes)}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --cpus-per-task={cpus + 1}",
        *([f"#SBATCH --gpus-per-node={gpus}"] if gpus else []),
        "#SBATCH --output=baton-%j.log",
        "#SBATCH --signal=B:TERM@120",
        "# From `baton emit slurm`. Partition, account and time are for sbatch's command line.",
        "# To drain before the end: scancel --signal=TERM --batch JOB.",
        "# PYTHON names the interpreter baton is installed in, LOGS a directory that all nodes share.",
        "# LAUNCHER=agent starts the ranks without torchrun.",
        _shared("members.sh"),
        _shared("slurm.sh"),
        "# The i-th node of the topology is the i-th host of the allocation.",
        f'find_hosts {len(nodes)} "the nodes of the topology"',
        f'GPUS="{gpus or ""}"',
        "",
    ]
    host = index[plan.topology.coordinator.node]
    lines += _step(host, 1, COORDINATOR, [*_PROGRAMS.coordinator, *plan.coordinator_command()])
    if plan.topology.batches is not None:
        lines += _step(host, 1, BATCHES, [*_PROGRAMS.batches, *plan.batches_command()])
    for part in plan.parts:
        command = [*_environment(part), *_PROGRAMS.of_part(plan, part)]
        lines += _step(index[part.node.name], _cpus(part), part.name, command)
    return "\n".join([*lines, "wait_for_all", ""])


def _shared(name: str) -> str:
    """Returns a script fragment of this package, which `slurm.sbatch` uses too."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _cpus(part: WorkerPart) -> int:
    return max(part.placement.threads, part.ranks)


def _environment(part: WorkerPart) -> list[str]:
    return ["env", *(f"{key}={value}" for key, value in part.environment.items())] if part.environment else []


def _pinned(part: WorkerPart) -> list[str]:
    return ["taskset", "-c", ranges(part.placement.cores)] if part.placement.cores else []


def _in_background(name: str, command: Sequence[str]) -> list[str]:
    return [f"# {name}", f'{_words(command)} >"$LOGS/{name}.log" 2>&1 &', f"started {name}", ""]


def _step(host: int, cpus: int, name: str, command: Sequence[str]) -> list[str]:
    return [f"step {host} {cpus} {name} \\", f"  {_words(command)}", ""]


def _words(command: Sequence[str]) -> str:
    return " ".join(map(_word, command))


def _word(word: str) -> str:
    """Quotes a word for a shell; `@PYTHON@`, `@LAUNCHER@` and `@0@` become shell variables."""
    if word == _PYTHON:
        return '"$PYTHON"'
    if word == _LAUNCHER:
        return '"launch.$LAUNCHER"'
    if shlex.quote(word) != word:
        return shlex.quote(word)
    filled = _HOST.sub(r"${ADDRESS[\1]}", word)
    return word if filled == word else f'"{filled}"'

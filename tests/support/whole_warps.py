"""Finds, in the LLVM IR of a compiled kernel, instructions that need a whole warp and that only a part of it may reach.

Such an instruction (a barrier, a shuffle, a matrix product) is undefined unless all threads of its warp execute it
together. Triton runs LLVM's optimisation without a target, so LLVM does not know of warps: it may redirect a jump past
the place where the threads of a warp join again (issues 11148 and 11153 of triton, 213868 of llvm). The interpreter
shows nothing of that.

A branch divides a warp if its condition depends on the thread. Results of shuffles count as equal in all threads, since
Triton branches on nothing but scalars; what was loaded is equal if its address is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_LABEL = re.compile(r'^("?[-\w.$]+"?):')
_RESULT = re.compile(r'^\s+(%[-\w.$"]+) = ')
_VALUE = re.compile(r'%[-\w.$]+|%"[^"]+"')
_TARGET = re.compile(r'label (%[-\w.$]+|%"[^"]+")')
_THREAD = re.compile(r"@llvm\.nvvm\.read\.ptx\.sreg\.(tid\.|laneid)|%(tid\.|laneid)")
_EQUAL = re.compile(r"@llvm\.nvvm\.(shfl|redux|vote|match)|shfl\.sync|redux\.sync|vote\.sync")
_WHOLE_WARP = re.compile(
    r"@llvm\.nvvm\.(barrier|bar\.|shfl|redux|vote|match|mma|wmma|wgmma|ldmatrix|stmatrix|elect)"
    r"|\"[^\"]*\b(barrier|bar|shfl|redux|vote|match|elect)\.(sync|warp)|mma\.sync|wgmma|ldmatrix|stmatrix|tcgen05"
)
_EXIT = "exit"


@dataclass(slots=True)
class Block:
    """`condition` is the value that decides between several `targets`; `needs` are its instructions for whole warps."""

    targets: list[str] = field(default_factory=list)
    condition: str = ""
    needs: list[str] = field(default_factory=list)


def partly_reached(ir: str) -> list[str]:
    """Returns the instructions for whole warps of all functions that only a part of a warp may reach."""
    partly: list[str] = []
    for body in re.findall(r"^define [^\n]*\{\n(.*?)^\}", ir, re.MULTILINE | re.DOTALL):
        blocks, divided = _read(body.splitlines())
        joins = _joins(blocks)
        for name, block in blocks.items():
            if block.condition in divided:
                for inside in _between(blocks, block.targets, joins[name]):
                    partly += blocks[inside].needs
    return list(dict.fromkeys(partly))


def _read(lines: Iterable[str]) -> tuple[dict[str, Block], set[str]]:
    """Returns the blocks of a function by name, and the values that differ between threads."""
    block = Block()
    blocks, uses, divided = {"%entry": block}, dict[str, list[str]](), set[str]()
    for line in _whole_instructions(lines):
        if label := _LABEL.match(line):
            block = blocks.setdefault(f"%{label[1]}", Block())
            continue
        code = line.split(", !dbg")[0]
        if result := _RESULT.match(code):
            if _THREAD.search(code):
                divided.add(result[1])
            elif not _EQUAL.search(code):
                uses[result[1]] = _VALUE.findall(code[result.end() :])
        if _WHOLE_WARP.search(code):
            block.needs.append(code.strip())
        if code.lstrip().startswith(("br ", "switch ")):
            block.targets = _TARGET.findall(code)
            values = _VALUE.findall(_TARGET.sub("", code))
            block.condition = values[0] if values else ""
    grown = True
    while grown:
        new = {name for name, values in uses.items() if name not in divided and not divided.isdisjoint(values)}
        divided |= new
        grown = bool(new)
    return blocks, divided


def _whole_instructions(lines: Iterable[str]) -> Iterable[str]:
    """Yields instructions, each in one line: those of a switch follow it, up to a bracket."""
    open_switch = ""
    for line in lines:
        if open_switch:
            open_switch += " " + line.strip()
            if line.strip().startswith("]"):
                yield open_switch
                open_switch = ""
        elif line.lstrip().startswith("switch ") and not line.rstrip().endswith("]"):
            open_switch = line
        elif line.strip() and not line.lstrip().startswith(";"):
            yield line


def _joins(blocks: Mapping[str, Block]) -> dict[str, str]:
    """Returns for each block the first one through which all ways to the end lead: its immediate post-dominator."""
    names = [*blocks, _EXIT]
    after = {name: set(names) for name in names}
    after[_EXIT] = {_EXIT}
    changed = True
    while changed:
        changed = False
        for name, block in blocks.items():
            common = set.intersection(*(after[target] for target in block.targets or [_EXIT]))
            if (new := common | {name}) != after[name]:
                after[name], changed = new, True
    # Of the blocks behind this one, the nearest has the most blocks behind itself.
    return {name: max(after[name] - {name}, key=lambda other: len(after[other])) for name in blocks}


def _between(blocks: Mapping[str, Block], starts: Iterable[str], join: str) -> set[str]:
    """Returns the blocks that can be reached from `starts` without passing `join`."""
    reached, left = set[str](), [start for start in starts if start != join]
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += [target for target in blocks[name].targets if target != join]
    return reached

"""What a worker and a process that computes grammar masks send each other, in frames of `baton.runtime.frames`."""

from __future__ import annotations

from dataclasses import dataclass

READY = b"ready"
"""What the process that starts the others sends first, if it could load the tokenizer; else it sends the reason."""


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """Compute the masks after an output: the first `kept` tokens of the output that this automaton consumed last, then
    `tokens`; and after each of `drafts`. `ends` are allowed where the output may end. `grammar` is set with the first
    request for an automaton, and after an error. The process is killed after `cpu_s` of processor time for this
    request. Automata in `forgotten` are freed first."""

    automaton: int
    grammar: str
    kept: int
    tokens: tuple[int, ...]
    drafts: tuple[int, ...]
    ends: tuple[int, ...]
    cpu_s: float
    forgotten: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MasksComputed:
    """Masks, one bit per token, lowest first; None from the first disallowed draft token on. Or an error:
    `exceeds_limit` if the grammar exceeds a limit of ours. `cpu_s` is the processor time used."""

    masks: tuple[bytes | None, ...]
    cpu_s: float
    error: str = ""
    exceeds_limit: bool = False

"""Messages between coordinator and workers besides events: joining and commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from baton.core.compatibility import Compatibility
from baton.core.events import GpuUsage, Load
from baton.core.handover import Handle
from baton.core.request import GenerateRequest, SequenceId

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Join:
    """From a worker: it joins. `pids` has one entry per rank; `run_id` is empty at its first join. With `replace` it
    takes the place of a live worker of its name. `revision` names what it serves; workers of one revision serve the
    same model. `computes_prompts`: a decode worker that accepts `Prefill`, too. KV stays within a `domain`."""

    worker_id: str
    role: Role
    incarnation: int
    facts: Compatibility
    link_address: str = ""
    host: str = ""
    pids: tuple[int, ...] = ()
    blocks_total: int = 0
    step_tokens: int = 0
    max_running: int = 0
    run_id: str = ""
    token: str = field(default="", repr=False)
    replace: bool = False
    tensor_parallel: int = 1
    both_roles: bool = False
    revision: str = ""
    computes_prompts: bool = False
    domain: str = ""


@dataclass(frozen=True, slots=True)
class TrackedSequence:
    """`here`: the coordinator assumes that the worker has the sequence; else it may be in transit to the worker."""

    sequence: SequenceId
    next_index: int
    here: bool = True


@dataclass(frozen=True, slots=True)
class Welcome:
    run_id: str
    lease_s: float
    heartbeat_s: float
    handle_key: bytes = field(repr=False)
    tracked: tuple[TrackedSequence, ...] = ()
    now_ms: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """A decode worker that may receive the KV, and the handle that allows sending it there."""

    worker_id: str
    incarnation: int
    link_address: str
    handle: Handle


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the prompt and hand its KV over to the first target that accepts. A decode worker keeps it: it has no
    targets then."""

    request: GenerateRequest
    targets: tuple[Target, ...] = ()


@dataclass(frozen=True, slots=True)
class Assign:
    """New targets for parked KV, under the attempt that is valid from now on."""

    sequence: SequenceId
    targets: tuple[Target, ...]
    attempt: int


@dataclass(frozen=True, slots=True)
class Abort:
    """End a sequence; if it is unknown (the abort overtook the offer), refuse it for `tombstone_s` seconds."""

    sequence: SequenceId
    reason: str
    tombstone_s: float = 60.0


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """A LoRA adapter: its identity (`adapter_config.adapter_digest`), and the directory where workers read it."""

    digest: str
    path: str


@dataclass(frozen=True, slots=True)
class SetAdapters:
    """All LoRA adapters that a worker must have: it loads those that it lacks, and drops others. It reports the result
    with `AdapterStates`, also if nothing changed."""

    adapters: tuple[AdapterSource, ...] = ()
    max_rank: int = 0


@dataclass(frozen=True, slots=True)
class AdapterFailure:
    digest: str
    reason: str


@dataclass(frozen=True, slots=True)
class AdapterStates:
    """From a worker: the digests of the LoRA adapters that it has, and those that it cannot load."""

    loaded: tuple[str, ...] = ()
    failed: tuple[AdapterFailure, ...] = ()


@dataclass(frozen=True, slots=True)
class ReleaseRecords:
    """The coordinator has received everything about these sequences."""

    sequences: tuple[SequenceId, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Accept no new work, finish what is running within `timeout_s` or give it back, then leave; with a `next_role`,
    join again in it."""

    timeout_s: float
    next_role: Role | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """From a worker: it was asked to end, and drains from now on."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class Drained:
    """From a worker: it has left. The sequences that the coordinator still tracks there are given back."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    sequence_number: int
    load: Load | None = None
    gpu: GpuUsage | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    sequence_number: int


Command = Prefill | Assign | Abort | ReleaseRecords | Drain | SetAdapters

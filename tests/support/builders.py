"""Core values with sensible defaults, so that a test states only what matters to it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace

from baton.core.blocks import Holder
from baton.core.commands import Join, Role
from baton.core.compatibility import PROTOCOL_VERSION, Compatibility
from baton.core.events import SequenceEnded, StepEvents, TokenEvent
from baton.core.handover import Chunk, Handle
from baton.core.kv_layout import KVLayout, LayerKV
from baton.core.request import GenerateRequest, Pooling, SamplingParams, SequenceId
from baton.core.step import StepOutcome, StepPlan
from coordinator.policy.membership import DrainBegan, Event, LeaseEnded, Redialled, SessionBroke, WorkerState
from coordinator.policy.pool import Worker
from coordinator.policy.workers import WorkerTable
from decode.scheduler import DecodeScheduler
from decode.speculation.policy import Speculation
from prefill.scheduler import PrefillScheduler

EOS = 0


def make_request(
    name: str = "r",
    prompt: int | Iterable[int] = 4,
    max_tokens: int = 8,
    *,
    output: Iterable[int] = (),
    eos: Iterable[int] = (EOS,),
    choice: int = 0,
    attempt: int = 1,
    seed: int = 0,
    cache_salt: str = "",
    priority: int = 0,
    pooling: Pooling = "",
) -> GenerateRequest:
    """A request. A `prompt` given as a length consists of the ids 1000, 1001, and so on."""
    return GenerateRequest(
        request_id=name,
        prompt=tuple(range(1000, 1000 + prompt)) if isinstance(prompt, int) else tuple(prompt),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0.0, seed=seed),
        eos_token_ids=tuple(eos),
        output=tuple(output),
        choice=choice,
        attempt=attempt,
        cache_salt=cache_salt,
        priority=priority,
        pooling=pooling,
    )


def make_layout(
    block_size: int = 4, *, layers: int = 2, heads: int = 2, head_dim: int = 8, window: int = 0, full: int = 0
) -> KVLayout:
    """`layers` layers with `window` and then `full` layers without one."""
    windows = (window,) * layers + (0,) * full
    return KVLayout(block_size, tuple(LayerKV(heads, head_dim, "float32", window=each) for each in windows))


def make_prefill(
    num_blocks: int = 8,
    *,
    block_size: int = 4,
    step_tokens: int = 8,
    prefix_cache: bool = True,
    plan_ahead: bool = False,
    window: int = 0,
    full: int = 0,
) -> PrefillScheduler:
    layout = make_layout(block_size, window=window, full=full)
    return PrefillScheduler(layout, num_blocks, step_tokens, prefix_cache=prefix_cache, plan_ahead=plan_ahead)


def make_decode(
    num_blocks: int = 8,
    *,
    block_size: int = 4,
    max_running: int = 8,
    speculation: Speculation | None = None,
    prefix_cache: bool = True,
    plan_ahead: bool = False,
    window: int = 0,
    full: int = 0,
) -> DecodeScheduler:
    layout = make_layout(block_size, window=window, full=full)
    return DecodeScheduler(
        layout, num_blocks, max_running, speculation, prefix_cache=prefix_cache, plan_ahead=plan_ahead
    )


def fill_cache(scheduler: PrefillScheduler | DecodeScheduler, share: float) -> None:
    """Leaves cached blocks of a finished sequence, that share of the pool, in a new scheduler."""
    holder = Holder("sequence", SequenceId("gone"))
    blocks = scheduler.blocks.allocate(round(share * scheduler.blocks.num_blocks), holder) or ()
    scheduler.cache.store([block.to_bytes(32, "big") for block in blocks], blocks)
    scheduler.blocks.release(blocks, holder)


def make_outcome(plan: StepPlan, token: int | Callable[[SequenceId], int] = 7) -> StepOutcome:
    """The outcome of `plan`: `token` for every position that is sampled. A pooled row has a vector of its end, and of
    its number of tokens."""
    draw = token if callable(token) else lambda _: token
    sampled = tuple((draw(row.sequence_id),) * row.num_sampled for row in plan.rows)
    pooled = {i: array("d", [row.end, len(row.tokens)]) for i, row in enumerate(plan.rows) if row.pooling}
    return StepOutcome(plan.step_id, sampled, pooled=pooled)


def make_facts(**changes: object) -> Compatibility:
    values: dict[str, object] = {
        "model_digest": "m",
        "config_digest": "c",
        "layout": make_layout(),
        "dtype": "float32",
        "kv_dtype": "float32",
        "code_version": "0.1.0",
        "exact": False,
        "quantize": "none",
        "model_impl": "baton",
        "edge_kind": "gloo",
        "protocol_version": PROTOCOL_VERSION,
        "vocab_size": 100,
        "max_model_len": 64,
        "tokenizer_digest": "t",
    }
    return Compatibility(**{**values, **changes})  # type: ignore[arg-type]


def make_join(
    name: str = "d0", incarnation: int = 1, *, blocks: int = 8, step_tokens: int = 8, **facts: object
) -> Join:
    """A worker whose role follows from the first letter of its name."""
    role: Role = "prefill" if name[0] == "p" else "decode"
    address = "127.0.0.1:1"
    join = Join(name, role, incarnation, make_facts(**facts), address, "", (11,), blocks, step_tokens)
    return replace(join, computes_prompts=role == "decode")


def add_worker(
    table: WorkerTable,
    name: str,
    *,
    blocks: int = 16,
    block_size: int = 4,
    step_tokens: int = 8,
    max_tokens: int = 1 << 31,
    max_running: int = 0,
) -> Worker:
    """Adds a ready worker to a table, replacing an earlier one of that name."""
    known = table.get(name)
    incarnation = known.incarnation + 1 if known else 1
    facts: dict[str, object] = {"layout": make_layout(block_size), "max_model_len": max_tokens}
    join = make_join(name, incarnation, blocks=blocks, step_tokens=step_tokens, **facts)
    join = replace(join, max_running=max_running)
    return table.add(join, 0.0, math.inf)  # bypasses `table.join`: workers of a test may differ


def bring_to(worker: Worker, state: WorkerState) -> None:
    """Lets happen what leads a present worker to a state; its lease goes on."""
    lease_until = worker.lease_until
    events: dict[WorkerState, Event] = {
        WorkerState.READY: Redialled(lease_until),
        WorkerState.DISCONNECTED: SessionBroke(),
        WorkerState.DRAINING: DrainBegan(math.inf),
        WorkerState.LOST: LeaseEnded(),
    }
    if worker.state is not state:
        worker.on(events[state], 0.0)
        worker.lease_until = lease_until


def make_handle(**changes: object) -> Handle:
    values: dict[str, object] = {
        "sequence": SequenceId("r", 0, 1),
        "source_worker": "p0",
        "source_incarnation": 1,
        "destination_worker": "d0",
        "destination_incarnation": 2,
        "expires_ms": 5000,
        "nonce": b"0123456789abcdef",
    }
    return Handle(**{**values, **changes})  # type: ignore[arg-type]


def make_chunk(**changes: object) -> Chunk:
    values: dict[str, object] = {
        "sequence": SequenceId("r", 0, 1),
        "index": 0,
        "start_token": 0,
        "end_token": 8,
        "start_layer": 0,
        "end_layer": 2,
        "num_bytes": 64,
        "edge_generation": 1,
    }
    return Chunk(**{**values, **changes})  # type: ignore[arg-type]


def step_events(sequence: SequenceId, first_index: int, *tokens: int, ended: str = "") -> StepEvents:
    """The events of a step that generated `tokens` of one sequence and, with `ended`, its end."""
    ends = (SequenceEnded(sequence, ended),) if ended else ()
    return StepEvents(tokens=(TokenEvent(sequence, first_index, tokens),) if tokens else (), ended=ends)

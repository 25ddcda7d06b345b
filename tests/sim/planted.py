"""Bugs in the objects that the simulator drives, each with the number of seeds after which it was detected.

Each change replaces `old`, which occurs once in `path`, by `new`; then one of the first LIMIT seeds must fail. `seeds`
is the first seed that failed when this was recorded (benchmarks/results/simulator-seeds.md).
"""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = 2000
REQUESTS, DISPATCH, WORKERS, CHOICE = (
    f"coordinator/policy/{n}.py" for n in ("requests", "dispatch", "workers", "choice")
)
P_SCHEDULER, P_HANDOVER, D_SCHEDULER, D_HANDOVER, D_ADMISSION, HELD_BLOCKS = (
    *("prefill/scheduler.py", "prefill/handover.py", "decode/scheduler.py", "decode/handover.py"),
    *("decode/admission.py", "decode/held_blocks.py"),
)
LOG, RECONCILE, SEQUENCE = "baton/core/output_log.py", "baton/core/output_log.py", "baton/core/sequence.py"


@dataclass(frozen=True)
class Change:
    path: str
    old: str
    new: str


@dataclass(frozen=True)
class Bug:
    name: str
    seeds: int
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        return self.name.replace(" ", "_")


def bug(name: str, seeds: int, path: str, old: str, new: str, *more: tuple[str, str, str]) -> Bug:
    return Bug(name, seeds, (Change(path, old, new), *(Change(*change) for change in more)))


BUGS = (
    # The coordinator: attempts, journal, recovery.
    bug(
        "attempt check dropped",
        84,
        REQUESTS,
        "if choice is None or choice.attempt != event.sequence.attempt:",
        "if choice is None:",
        (REQUESTS, "if choice is not None and choice.attempt == sequence.attempt:", "if choice is not None:"),
    ),
    bug(
        "wrong resume index",
        3,
        SEQUENCE,
        "            num_sampled,\n            len(self.output),\n",
        "            num_sampled,\n            len(self.output) - len(self.request.output),\n",
    ),
    bug(
        "duplicate event applied",
        1,
        CHOICE,
        "if first_index == start and not self.ahead and self.finish is None:",
        "if not self.ahead and self.finish is None:",
    ),
    bug(
        "reservation kept after the end",
        1,
        DISPATCH,
        "        self._queue.charge(choice)\n        self.release(choice)\n",
        "        self._queue.charge(choice)\n",
    ),
    bug(
        "loss of a decode worker ignored",
        46,
        REQUESTS,
        "if event.worker == choice.decode_worker and choice.finish is None:",
        "if event.worker == choice.decode_worker and event.drained and choice.finish is None:",
    ),
    bug(
        "parked KV is never offered again",
        10,
        REQUESTS,
        "                actions += handle(self.table, choice, OfferDue(), now)\n",
        "                pass\n",
    ),
    bug(
        "unknown sequence not rescheduled",
        86,
        REQUESTS,
        "in (ErrorCode.DRAINING, ErrorCode.ABANDONED) or (unknown and here):",
        "in (ErrorCode.DRAINING, ErrorCode.ABANDONED):",
    ),
    bug(
        "choices that were never queued keep their room",
        2,
        REQUESTS,
        "            self.dispatcher.forget(choice.name)\n",
        "",
    ),
    bug(
        "transition missing from the table",
        2,
        REQUESTS,
        "            ([PARKED], [ParkedBy], to(ignore)),  # repeated after a redial\n",
        "",
    ),
    bug(
        "a refused retry is missing from the table",
        42,
        REQUESTS,
        "to(self._on_lost_prefill, QUEUED, ENDED)),\n            ([DECODE], [LostWorker]",
        "to(self._on_lost_prefill, QUEUED)),\n            ([DECODE], [LostWorker]",
    ),
    bug(
        "blocked head of the queue is never looked at again",
        7,
        "coordinator/policy/pool.py",
        "        if room > self.room and room >= self.pool.awaited:\n            self.pool.grown = True\n",
        "",
    ),
    # Membership.
    bug(
        "lease not fenced",
        4,
        WORKERS,
        "        return None if worker is None or worker.lost else worker\n",
        "        return worker\n",
    ),
    bug(
        "worker whose session broke is not ready again",
        1,
        "coordinator/policy/membership.py",
        "(DISCONNECTED, Redialled): to(Member._ready_again, READY)",
        "(DISCONNECTED, Redialled): to(Member._redialled)",
    ),
    # Sessions: what is sent again.
    bug(
        "resent tokens begin one too late",
        133,
        LOG,
        "start = max(item.next_index, first)",
        "start = max(item.next_index + 1, first)",
    ),
    bug(
        "parked KV not reported again",
        216,
        LOG,
        "parked=tuple(record.parked for record in records if record.parked is not None)",
        "parked=()",
    ),
    bug(
        "lost sequences not reported",
        14,
        RECONCILE,
        "if t.here and t.sequence not in here and not log.done(t.sequence)",
        "if False",
    ),
    bug("untracked sequences kept", 113, RECONCILE, "frozenset(new | listed)", "frozenset({*new, *listed, *present})"),
    # Blocks and the prefix cache.
    bug(
        "pin not dropped",
        1,
        P_SCHEDULER,
        '        self.blocks.release(self._to_send(sequence), Holder("send", sequence_id))\n',
        "",
    ),
    bug(
        "block freed before the acknowledgement",
        34,
        P_SCHEDULER,
        '            self.blocks.hold(self._to_send(sequence), Holder("send", sequence.id))\n',
        "            pass\n",
        (
            P_SCHEDULER,
            '        self.blocks.release(self._to_send(sequence), Holder("send", sequence_id))\n',
            "",
        ),
        (P_SCHEDULER, '            holds.append(("send", self._to_send(sequence)))', "            pass"),
    ),
    bug(
        "block freed while KV is written into it",
        2,
        D_SCHEDULER,
        "sequence.in_flight = sequence.state is State.RECEIVING and (in_flight or sequence.in_flight)",
        "sequence.in_flight = False",
    ),
    bug(
        "prefix of another tenant",
        2,
        "baton/core/blocks.py",
        "for part in map(str.encode, (model_digest, tenant, salt, adapter)):",
        "for part in map(str.encode, (model_digest, salt, adapter)):",
    ),
    bug(
        "last token taken from the cache",
        11,
        "baton/core/prefix_cache.py",
        "self._keys(sequence, sequence.num_tokens - 1)",
        "self._keys(sequence, sequence.num_tokens)",
    ),
    bug(
        "preempted sequence counts as computed",
        1,
        HELD_BLOCKS,
        "        sequence.block_ids, sequence.num_computed = (), 0\n",
        "        sequence.block_ids = ()\n",
    ),
    bug(
        "preempted sequences never resume", 1, D_SCHEDULER, "if blocked or not self._resume(sequence, end):", "if True:"
    ),
    bug(
        "partly received block is cached",
        6,
        HELD_BLOCKS,
        "            num_tokens -= num_tokens % self._layout.block_size\n",
        "            num_tokens += -num_tokens % self._layout.block_size\n",
    ),
    # Hand-overs.
    bug("handle reused", 51, D_ADMISSION, "            self._spent.spend(offer.handle, admission.run_clock_ms)\n", ""),
    bug("tombstone ignored", 213, D_ADMISSION, "if self.tombstones.covers(sequence, now):", "if False:"),
    bug(
        "sequence starts when one edge is complete",
        1,
        D_HANDOVER,
        "tokens = min(self.tokens_received.values())",
        "tokens = max(self.tokens_received.values())",
    ),
    bug(
        "reservation kept after an abort in flight",
        3,
        D_ADMISSION,
        "                    self.scheduler.receive_ended(sequence_id)\n",
        "                    pass\n",
    ),
    bug(
        "damaged chunk counts as received",
        16,
        D_HANDOVER,
        "        if not event.intact:\n",
        "        if False:\n",
        (D_HANDOVER, "chunk.index, event.intact, complete, *key", "chunk.index, True, complete, *key"),
    ),
    bug(
        "reoffered KV begins after the last target",
        8,
        P_HANDOVER,
        'self.targets, self._next_target, self._reason = event.targets, 0, "no target assigned"',
        'self.targets, self._reason = event.targets, "no target assigned"',
    ),
    bug(
        "handed over before all KV is acknowledged",
        2,
        P_HANDOVER,
        "        if self.acked_tokens < self._num_tokens:\n",
        "        if self.acked_tokens < self.sequence.num_computed:\n",
    ),
    bug(
        "first layers count as all layers",
        2,
        P_HANDOVER,
        "if span.end_layer < len(self.limits.layout.layers):",
        "if False:",
    ),
    # Sampling and speculation.
    bug(
        "penalty state forgotten",
        15,
        SEQUENCE,
        "            output = tuple(self.output)\n",
        "            output = tuple(self.output[len(self.request.output) :])\n",
    ),
    bug(
        "end tokens allowed before min_tokens",
        4,
        SEQUENCE,
        "ends = self.request.end_token_ids if short or params.grammar else ()",
        "ends = ()",
    ),
    bug(
        "rejected draft token accepted",
        1,
        "decode/speculation/policy.py",
        "        if draft_token != own[index]:\n            return index\n",
        "        if draft_token != own[index]:\n            return index + 1\n",
    ),
    bug(
        "KV of rejected draft tokens counts as computed",
        1,
        D_SCHEDULER,
        "            sequence.num_computed = row.end - row.num_sampled + len(taken)\n",
        "            sequence.num_computed = row.end\n",
    ),
    bug(
        "draft state kept after the end",
        1,
        "decode/speculation/policy.py",
        "            self.drafts.close(sequence)\n",
        "",
    ),
    bug("mean reuses a cached prefix", 4, "baton/core/request.py", ' or self.pooling == "mean"', ""),
)

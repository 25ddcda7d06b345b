"""A simulated prefill worker: the product's scheduler, and a thin model of what executes its plans.

`PrefillTier` stands for prefill/worker.py; its hand-overs are in sim/sender.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from baton.core.codes import ErrorCode
from baton.core.commands import Assign, Command, Join, Prefill, Role, Target
from baton.core.compatibility import Compatibility
from baton.core.edge_orders import early_layers
from baton.core.errors import BatonError, InvariantError, StaleHandle
from baton.core.events import HandedOver, Load, Parked, StepEvents
from baton.core.handover import ExpiredHandle, verify
from baton.core.request import SequenceId
from baton.core.sequence import Sequence
from baton.core.step import Row, StepOutcome, StepPlan
from prefill.scheduler import PrefillScheduler
from sim.engine import SimEngine
from sim.network import End
from sim.sender import SECTION_BYTES, SimSender
from sim.worker import SimWorker


class PrefillTier:
    """The scheduler and the hand-overs."""

    role: Role = "prefill"

    def __init__(
        self,
        worker: SimWorker,
        scheduler: PrefillScheduler,
        engine: SimEngine,
        facts: Compatibility,
        tensor_parallel: int = 1,
    ) -> None:
        self.worker, self.scheduler, self.engine, self.facts = worker, scheduler, engine, facts
        self.tensor_parallel = tensor_parallel
        self.sender = SimSender(self)

    # Called by the worker.

    def join(self, run_id: str) -> Join:
        self.scheduler.cache.restart_events()
        return Join(
            self.worker.name,
            "prefill",
            self.worker.incarnation,
            self.facts,
            blocks_total=self.scheduler.blocks.num_blocks,
            step_tokens=self.scheduler.step_tokens,
            run_id=run_id,
            replace=True,
            tensor_parallel=self.tensor_parallel,
            both_roles=True,
        )

    def load(self) -> Load:
        scheduler = self.scheduler
        return Load(
            blocks_total=scheduler.blocks.num_blocks,
            blocks_free=scheduler.blocks.num_free,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            sequences=scheduler.num_sequences,
            hand_overs=len(self.sender.runs),
        )

    def begin_step(self, now: float) -> StepPlan | None:
        plan = self.scheduler.begin_step(now)
        if plan is not None:
            for _, sequence in self.scheduler.rows_of(plan.step_id):
                if sequence.send_pinned:
                    self.sender.start(sequence)
        return plan

    def step_began(self, plan: StepPlan, step_s: float) -> None:
        layers = self._num_early_layers(plan)
        if layers:
            self.worker.later(step_s / 2, self._layers_computed, plan, layers)

    def _num_early_layers(self, plan: StepPlan) -> int:
        if self.tensor_parallel > 1:
            return 0
        sizes = [layer.bytes_per_token for layer in self.scheduler.layout.layers]
        rows = [len(row.tokens) for row in plan.rows if _sends_layers(row)]
        return max((early_layers([n * size for size in sizes], SECTION_BYTES) for n in rows), default=0)

    def _layers_computed(self, plan: StepPlan, layers: int) -> None:
        rows = self.scheduler.rows_of(plan.step_id)
        if not rows:
            return
        self.engine.first_layers(plan, layers)
        for row, sequence in rows:
            if _sends_layers(row):
                self.sender.layers_computed(sequence, row.end, layers)

    def finish_step(self, outcome: StepOutcome, now: float) -> StepEvents:
        result = self.scheduler.finish_step(outcome, now)
        ended = {e.sequence for e in result.ended}
        tokens = []
        for p in result.progress:
            sequence = self.scheduler.sequences.get(p.sequence_id)
            stamps = None if sequence is None or sequence.id in ended else sequence.prefill_stamps()
            if (event := p.event(stamps)) is not None:
                tokens.append(event)
            if sequence is not None and sequence.id not in ended:
                self.sender.progressed(sequence)
        for e in result.ended:
            if (sequence := self.scheduler.sequences.get(e.sequence)) is not None:
                self.sender.abort(sequence, "the sequence has ended")
        cache_events = self.scheduler.cache.take_events() if self.worker.connected else None
        return StepEvents(outcome.step_id, tuple(tokens), result.ended, load=self.load(), kv_cache_events=cache_events)

    def command(self, command: Command) -> None:
        match command:
            case Prefill():
                self._start(command)
            case Assign():
                self._assign(command)

    def _assign(self, command: Assign) -> None:
        sequence_id, sequence = command.sequence, self.scheduler.sequences.get(command.sequence)
        next_id = sequence_id._replace(attempt=command.attempt)
        if not self._may_hand_over(next_id, command.targets):
            self.end(sequence_id, "the new targets have no valid handles")
        elif sequence is not None and self.sender.is_parked(sequence):
            self.scheduler.begin_attempt(sequence, command.attempt)
            self.worker.deadlines.rename(sequence_id, next_id)
            self.sender.assign(sequence, command.targets)
        else:
            self.end(sequence_id, "new targets were assigned to KV that is not parked")
            self.worker.report_ended(next_id, ErrorCode.HANDOFF_FAILED, "the parked KV no longer exists")

    def end(self, sequence_id: SequenceId, reason: str) -> bool:
        if (sequence := self.scheduler.sequences.get(sequence_id)) is not None:
            self.sender.abort(sequence, reason)
        return self.scheduler.abort(sequence_id)

    def receiving(self, sequence: SequenceId) -> bool:
        return False

    def check_settled(self) -> None:
        self.scheduler.check()
        blocks = self.scheduler.blocks
        if self.scheduler.num_sequences or self.sender.runs or blocks.num_free != blocks.num_blocks:
            raise InvariantError(
                f"{self.worker} keeps {self.scheduler.sequence_ids()} {self.sender.runs}: {self.scheduler!r}"
            )

    def accept(self, end: End, first: Any) -> None:
        end.close(f"{self.worker} accepts no links")  # it was a decode worker before

    def _start(self, command: Prefill) -> None:
        worker, request = self.worker, command.request
        if worker.refuses(request, self.facts.vocab_size):
            return
        if not self._may_hand_over(request.sequence_id, command.targets):
            return
        try:
            sequence = self.scheduler.submit(request, worker.now, hand_over=bool(command.targets))
        except BatonError as e:
            worker.report_ended(request.sequence_id, e.tier_code, e.message)
            return
        worker.track_deadline(request)
        if command.targets:
            self.sender.expect(sequence, command.targets)

    def _may_hand_over(self, sequence: SequenceId, targets: tuple[Target, ...]) -> bool:
        worker = self.worker
        try:
            for target in targets:
                verify(
                    worker.handle_key,
                    target.handle,
                    sequence=sequence,
                    source=worker.name,
                    source_incarnation=worker.incarnation,
                    destination=target.worker_id,
                    incarnation=target.incarnation,
                    now_ms=worker.run_clock_ms(),
                )
        except StaleHandle as e:
            code = ErrorCode.DEADLINE_EXCEEDED if isinstance(e, ExpiredHandle) else e.tier_code
            worker.report_ended(sequence, code, e.message)
            return False
        return True

    # Called by the sender.

    def parked(self, event: Parked) -> None:
        self.worker.post(StepEvents(parked=(event,), load=self.load()))

    def handed_over(self, event: HandedOver, sequence: Sequence) -> None:
        stamps = sequence.prefill_stamps()
        event = replace(event, stamps=replace(event.stamps, queue_s=stamps.queue_s, prefill_s=stamps.prefill_s))
        self.worker.post(StepEvents(handed_over=(event,), load=self.load()))

    def hand_over_ended(self, sequence: Sequence) -> None:
        self.scheduler.release_send(sequence.id)
        self.worker.deadlines.forget(sequence.id)
        self.worker.wake()

    def hand_over_failed(self, sequence: Sequence, error: BatonError) -> None:
        self.worker.report_ended(sequence.id, error.tier_code, error.message)
        self.scheduler.mark_kv_suspect(sequence.id)
        self.scheduler.abort(sequence.id)


def _sends_layers(row: Row) -> bool:
    return row.num_sampled > 0 and not row.sampling.grammar

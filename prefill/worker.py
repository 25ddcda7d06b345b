"""The prefill worker: commands in, steps of the engine, hand-overs out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace

from baton.core.codes import ErrorCode
from baton.core.commands import Assign, Join, Prefill, Target
from baton.core.compatibility import Compatibility
from baton.core.edge_orders import early_layers
from baton.core.errors import BatonError, InvariantError, StaleHandle
from baton.core.events import HandedOver, Load, Parked, StepEvents
from baton.core.handover import ExpiredHandle, LinkHello, verify
from baton.core.prefix_cache import KeptBlocks
from baton.core.request import SequenceId
from baton.core.sequence import Sequence
from baton.core.step import Row, StepOutcome, StepPlan
from baton.engine.runner import Runner
from baton.runtime.config import WorkerConfig
from baton.runtime.event_log import EventLog
from baton.runtime.tls import read_cluster_tls
from baton.runtime.token_file import read_token
from baton.runtime.worker_loop import WorkerLoop
from baton.transfer.edge_endpoint import MakeEndpoint
from baton.transfer.staging_buffers import StagingRoom, kept_limit
from prefill.handover import HandOver
from prefill.scheduler import PrefillScheduler
from prefill.sender import Sender

MIN_CHUNK_TOKENS = 512  # while the edges are busy, chunks are merged up to this size, or larger ones (`chunk_tokens`)


def chunk_tokens(step_tokens: int, staging_bytes: int, bytes_per_token: int) -> int:
    """Returns the most tokens of a chunk: those of a step, as far as its staging buffer is kept for the next chunk. A
    larger one would be allocated for every chunk, and over IPC exported and mapped each time."""
    return max(min(step_tokens, kept_limit(staging_bytes, 1) // bytes_per_token), MIN_CHUNK_TOKENS)


class PrefillWorker:
    """The scheduler and the hand-overs; all else belongs to the main loop."""

    def __init__(
        self,
        config: WorkerConfig,
        runner: Runner,
        facts: Compatibility,
        pids: tuple[int, ...],
        make_endpoint: MakeEndpoint,
        kept: KeptBlocks | None = None,
    ) -> None:
        """`kept`: of the worker's previous role."""
        self.config = config
        self.facts = facts
        self.pids, self.tensor_parallel = pids, len(pids)
        self.incarnation = time.time_ns()
        self.handles_refused = 0
        self._gpus = make_endpoint.gpus
        self.scheduler = PrefillScheduler(
            runner.layout,
            runner.num_blocks,
            config.step_tokens,
            model_digest=facts.model_digest,
            prefix_cache=config.prefix_cache,
            plan_ahead=config.plan_ahead == "on" or (config.plan_ahead == "auto" and runner.launches_ahead),
            kept=kept,
        )
        self.events = EventLog(config.worker_id)
        tls = read_cluster_tls(config.cluster_tls_dir, "prefill")
        staging_bytes = round(config.staging_mib * (1 << 20))
        self.sender = Sender(
            self,
            runner.layout,
            make_endpoint,
            StagingRoom(staging_bytes, runner.layout),
            self._hello,
            self.events,
            max_chunk_tokens=chunk_tokens(config.step_tokens, staging_bytes, runner.layout.bytes_per_token),
            edge_timeout_s=config.edge_timeout_s,
            connect_timeout_s=config.connect_timeout_s,
            tls=tls,
        )
        launcher = runner if self.scheduler.plan_ahead else None
        self.main_loop = WorkerLoop(config, self, runner.step, read_token(config.cluster_token_file), launcher, tls)
        self._runner, self._section_bytes = runner, make_endpoint.section_bytes

    async def run(self) -> None:
        """Serves until drained; raises what WorkerLoop.run raises."""
        loop = asyncio.get_running_loop()

        def notify(step_id: int, layers: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits for it any more
                loop.call_soon_threadsafe(self.layers_computed, step_id, layers)

        self._runner.set_first_layers_callback(self.num_early_layers, notify)
        try:
            await self.main_loop.run()
        finally:
            self._runner.clear_first_layers_callback()

    def num_early_layers(self, plan: StepPlan) -> int:
        """Returns how many layers to report before the step is done, because they can be sent while it computes. Runs
        on any thread."""
        layers = [layer.bytes_per_token for layer in self.scheduler.layout.layers]
        last = [len(row.tokens) for row in plan.rows if _sends_layers(row)]
        return max((early_layers([n * size for size in layers], self._section_bytes) for n in last), default=0)

    def layers_computed(self, step_id: int, layers: int) -> None:
        """Called when the first `layers` layers of an outstanding step have written their KV."""
        for row, sequence in self.scheduler.rows_of(step_id):
            if _sends_layers(row):
                self.sender.layers_computed(sequence, row.end, layers)

    # Called by the main loop.

    def join(self) -> Join:
        self.scheduler.cache.restart_events()
        return Join(
            self.config.worker_id,
            "prefill",
            self.incarnation,
            self.facts,
            pids=self.pids,
            blocks_total=self.scheduler.blocks.num_blocks,
            tensor_parallel=self.tensor_parallel,
        )

    def load(self) -> Load:
        scheduler = self.scheduler
        return Load(
            blocks_total=scheduler.blocks.num_blocks,
            blocks_free=scheduler.blocks.num_free,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            prompt_tokens_computed=scheduler.prompt_tokens_computed,
            prompt_tokens_cached=scheduler.prompt_tokens_cached,
            tokens_generated=scheduler.tokens_generated,
            kv_bytes_sent=self.sender.counters.bytes_sent,
            steps=self.main_loop.steps,
            step_s=self.main_loop.step_s,
            backlog_tokens=scheduler.backlog_tokens,
            sequences=scheduler.num_sequences,
            hand_overs=len(self.sender),
            chunks_resent=self.sender.counters.chunks_resent,
            chunks_early=self.sender.counters.chunks_early,
            steps_ahead=scheduler.steps_ahead,
            handles_refused=self.handles_refused,
            prompt_cost=scheduler.prompt_cost,
        )

    def begin_step(self, now: float) -> StepPlan | None:
        plan = self.scheduler.begin_step(now)
        if plan is not None:
            for row, sequence in self.scheduler.rows_of(plan.step_id):
                if sequence.send_pinned:
                    self.sender.start(sequence)  # cached KV can be sent now
                self.events.write("chunk_begin", sequence=sequence.id, start=row.start, end=row.end)
        return plan

    def finish_step(self, outcome: StepOutcome, now: float) -> StepEvents:
        result = self.scheduler.finish_step(outcome, now)
        ended = {e.sequence for e in result.ended}
        tokens = []
        for p in result.progress:
            sequence = self.scheduler.sequences.get(p.sequence_id)
            stamps = None  # if it has ended, its SequenceEnded has them
            if sequence is not None and sequence.id not in ended:
                reserve_s = sequence.hand_over.reserve_s if isinstance(sequence.hand_over, HandOver) else 0.0
                stamps = replace(sequence.prefill_stamps(), reserve_s=reserve_s)
            event = p.event(stamps)
            self.events.write("chunk_computed", sequence=p.sequence_id, end=p.computed, last=event is not None)
            if event is not None:
                tokens.append(event)
            if sequence is not None and sequence.id not in ended:
                self.sender.progressed(sequence)
        for e in result.ended:
            if (sequence := self.scheduler.sequences.get(e.sequence)) is not None:
                self.sender.abort(sequence, "the sequence has ended")
        cache_events = self.scheduler.cache.take_events() if self.main_loop.session.connected else None
        return StepEvents(outcome.step_id, tuple(tokens), result.ended, load=self.load(), kv_cache_events=cache_events)

    def command(self, command: Prefill | Assign) -> None:
        match command:
            case Prefill():
                self._start(command)
            case Assign():
                self._assign(command)

    def end(self, sequence_id: SequenceId, reason: str) -> bool:
        if (sequence := self.scheduler.sequences.get(sequence_id)) is not None:
            self.sender.abort(sequence, reason)
        return self.scheduler.abort(sequence_id)

    def receiving(self, sequence: SequenceId) -> bool:
        return False

    async def close(self) -> None:
        await self.sender.close()

    def _start(self, command: Prefill) -> None:
        request = command.request
        if self.main_loop.refuses(request, self.facts.vocab_size):
            return
        if not self._may_hand_over(request.sequence_id, command.targets):
            return
        hand_over = bool(command.targets)
        sequence = self.scheduler.submit(request, time.monotonic(), hand_over=hand_over)
        self.main_loop.track_deadline(request)
        if hand_over:
            self.sender.expect(sequence, command.targets)

    def _assign(self, command: Assign) -> None:
        sequence_id, sequence = command.sequence, self.scheduler.sequences.get(command.sequence)
        next_id = sequence_id._replace(attempt=command.attempt)
        if not self._may_hand_over(next_id, command.targets):
            self.end(sequence_id, "the new targets have no valid handles")
        elif sequence is not None and self.sender.is_parked(sequence):
            self.scheduler.begin_attempt(sequence, command.attempt)
            self.main_loop.deadlines.rename(sequence_id, next_id)
            self.sender.assign(sequence, command.targets)
        else:
            self.end(sequence_id, "new targets were assigned to KV that is not parked")
            self.main_loop.report_ended(next_id, ErrorCode.HANDOFF_FAILED, "the parked KV no longer exists")

    def _may_hand_over(self, sequence: SequenceId, targets: tuple[Target, ...]) -> bool:
        """Verifies the handles of the targets; an invalid one is counted, and the sequence is reported as ended."""
        try:
            for target in targets:
                verify(
                    self.main_loop.handle_key,
                    target.handle,
                    sequence=sequence,
                    source=self.config.worker_id,
                    source_incarnation=self.incarnation,
                    destination=target.worker_id,
                    incarnation=target.incarnation,
                    now_ms=self.main_loop.run_clock_ms(),
                )
        except StaleHandle as e:
            self.handles_refused += 1
            code = ErrorCode.DEADLINE_EXCEEDED if isinstance(e, ExpiredHandle) else e.tier_code
            self.main_loop.report_ended(sequence, code, e.message)
            return False
        return True

    def _hello(self) -> LinkHello:
        return LinkHello(
            self.config.worker_id,
            self.incarnation,
            self.main_loop.session.run_id,
            self.facts,
            self.tensor_parallel,
            self.main_loop.token,
            self._gpus,
        )

    # Called by the hand-overs.

    def parked(self, event: Parked) -> None:
        self.events.write("parked", sequence=event.sequence, reason=event.reason)
        self.main_loop.session.post(StepEvents(parked=(event,), load=self.load()))

    def handed_over(self, event: HandedOver, sequence: Sequence) -> None:
        stamps = sequence.prefill_stamps()
        event = replace(event, stamps=replace(event.stamps, queue_s=stamps.queue_s, prefill_s=stamps.prefill_s))
        self.main_loop.session.post(StepEvents(handed_over=(event,), load=self.load()))

    def hand_over_ended(self, sequence: Sequence) -> None:
        self.scheduler.release_send(sequence.id)
        self.main_loop.deadlines.forget(sequence.id)
        self.main_loop.wake()

    def hand_over_failed(self, sequence: Sequence, error: BatonError) -> None:
        self.main_loop.report_ended(sequence.id, error.tier_code, error.message)
        self.scheduler.mark_kv_suspect(sequence.id)
        self.scheduler.abort(sequence.id)

    def failed(self, error: InvariantError) -> None:
        self.main_loop.fail(error)


def _sends_layers(row: Row) -> bool:
    """Whether the first layers of a row are sent while the others compute. Never with a grammar: if its mask is late,
    the row's last token has to be computed again."""
    return row.num_sampled > 0 and not row.sampling.grammar

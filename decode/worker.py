"""The decode worker: offers in over links, steps of the engine, tokens out."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from baton.core.cluster_token import check_token
from baton.core.commands import Command, Join, WorkerFacts
from baton.core.config import WorkerConfig
from baton.core.errors import InvariantError, JoinRefused, StaleHandle, StartupError, Unavailable
from baton.core.events import Load, StepEvents
from baton.core.handles import SpentHandles, verify
from baton.core.handover import LinkHello, LinkWelcome, Offer
from baton.core.names import host_port
from baton.core.request import SequenceId, TokenLogprob
from baton.core.reshard import reshard_layout
from baton.core.sampling_limits import check_sampling, check_tokens
from baton.core.step import StepOutcome, StepPlan
from baton.engine.runner import Runner
from baton.event_log import EventLog
from baton.rpc.link import serve_links
from baton.rpc.worker_loop import WorkerLoop
from baton.token_file import read_token
from baton.transfer.edge_end import MakeEnd
from baton.transfer.staging_room import StagingRoom
from baton.transfer.store import EdgeStore
from decode.entry import Reserved
from decode.incoming import Incoming
from decode.scheduler import DecodeScheduler
from decode.speculation.engine import SpeculativeEngine
from decode.speculation.policy import Speculation

if TYPE_CHECKING:
    import grpc.aio

log = logging.getLogger("baton.worker")


class DecodeWorker:
    """Complete state: the scheduler, the links into it, the store where edges meet, the sequences that wait for their
    first step, and what was told of the load last; the rest is the shell's."""

    def __init__(
        self,
        config: WorkerConfig,
        runner: Runner,
        facts: WorkerFacts,
        pids: tuple[int, ...],
        make_end: MakeEnd,
        speculation: Speculation | None = None,
        engine: SpeculativeEngine | None = None,
    ) -> None:
        self.config = config
        self.facts = facts
        self.pids = pids
        self.incarnation = time.time_ns()
        self.scheduler = DecodeScheduler(
            runner.layout,
            runner.num_blocks,
            config.max_running,
            speculation,
            model_digest=facts.model_digest,
            prefix_cache=config.prefix_cache,
            plan_ahead=config.plan_ahead == "on" or (config.plan_ahead == "auto" and runner.launches_ahead),
        )
        self.store = EdgeStore(config.host, config.store_port)
        self.incoming = Incoming(
            self,
            runner.layout,
            make_end,
            StagingRoom(round(config.staging_mib * (1 << 20)), runner.layout),
            EventLog(config.worker_id),
            host=config.host,
            store_port=self.store.port,
            tensor_parallel=facts.tensor_parallel,
            edge_timeout_s=config.edge_timeout_s,
            vocab_size=facts.vocab_size,
        )
        step = runner.step if engine is None else engine.step
        launcher = runner if self.scheduler.plan_ahead else None  # where nothing drafts, its engine only steps
        self.main_loop = WorkerLoop(config, self, step, read_token(config.cluster_token_file), launcher)
        self.handles_refused = self.links_refused = 0
        self._reported_gauges: tuple[int, ...] = ()
        self._edge_kind = make_end.kind
        self._arrived: set[SequenceId] = set()
        self._spent = SpentHandles()
        self._server: grpc.aio.Server | None = None
        self._link_port = 0

    def leave(self, timeout_s: float) -> None:
        """Somebody asked the process to end: no new hand-overs; what runs finishes or is given back."""
        self.main_loop.leave(timeout_s)

    async def run(self) -> None:
        """Serves until drained; raises as WorkerLoop.run does."""
        self._server, self._link_port = await serve_links(self.config.host, self.incoming.handle, self.config.link_port)
        await self.main_loop.run()

    # What the shell asks for.

    def join(self, run_id: str) -> Join:
        self.scheduler.cache.restart_events()
        return Join(
            self.config.worker_id,
            "decode",
            self.incarnation,
            self.facts,
            link_address=host_port(self.config.host, self._link_port),
            host=self.config.host,
            pids=self.pids,
            blocks_total=self.scheduler.blocks.num_blocks,
            step_tokens=self.config.step_tokens,
            max_running=self.config.max_running,
            run_id=run_id,
        )

    def load(self) -> Load:
        self._reported_gauges = ()  # the next step tells again: which of two messages comes last is open
        scheduler = self.scheduler
        return Load(
            blocks_total=scheduler.blocks.num_blocks,
            blocks_free=scheduler.blocks.num_free,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            prompt_tokens_computed=scheduler.prompt_tokens_computed,
            tokens_generated=scheduler.tokens_generated,
            kv_bytes_received=self.incoming.bytes_received,
            kv_bytes_reused=scheduler.tokens_reused * scheduler.layout.bytes_per_token,
            steps=self.main_loop.steps,
            sequences=scheduler.num_sequences,
            handles_refused=self.handles_refused,
            stale_messages=self.incoming.stale_messages,
            links_refused=self.links_refused,
            speculation=scheduler.speculation.counters,
            preemptions=scheduler.preemptions,
            preempted=scheduler.num_preempted,
            steps_ahead=scheduler.steps_ahead,
            rows_discarded=scheduler.rows_discarded,
        )

    def begin_step(self, now: float) -> StepPlan | None:
        plan = self.scheduler.begin_step(now)
        if plan is not None and self._arrived:
            for row in plan.rows:
                if row.sequence_id in self._arrived:
                    self.incoming.events.write("decode_begin", sequence=row.sequence_id)
            self._arrived.difference_update(row.sequence_id for row in plan.rows)
        return plan

    def finish_step(self, plan: StepPlan, outcome: StepOutcome, now: float) -> StepEvents:
        scheduler = self.scheduler
        result = scheduler.finish_step(outcome, now)
        cache_events = scheduler.cache.take_events() if self.main_loop.session.connected else None
        # What the coordinator places requests by; the counters beside it come with heartbeats and with every end.
        gauges = scheduler.num_sequences, scheduler.blocks.num_free, scheduler.num_preempted, scheduler.num_running
        load = self.load() if result.ended or gauges != self._reported_gauges else None
        self._reported_gauges = gauges  # behind `load`, which forgets it
        return StepEvents(plan.step_id, result.tokens, result.ended, load=load, kv_cache_events=cache_events)

    def command(self, command: Command) -> None:
        raise Unavailable(f"a decode worker has no use for {type(command).__name__}")

    def end(self, sequence: SequenceId, reason: str) -> bool:
        if not self.scheduler.knows(sequence):
            return False
        self._arrived.discard(sequence)
        self.incoming.abort(sequence, reason)
        return self.scheduler.abort(sequence, in_flight=sequence in self.incoming.writing)

    def sequence_ids(self) -> tuple[SequenceId, ...]:
        return self.scheduler.sequence_ids()

    def check(self) -> None:
        self.scheduler.check()

    async def close(self) -> None:
        if self.scheduler.plan_ahead:
            ahead, discarded = self.scheduler.steps_ahead, self.scheduler.rows_discarded
            log.info("%d of %d steps were planned ahead, %d rows discarded", ahead, self.main_loop.steps, discarded)
        await self.incoming.close()
        if self._server is not None:
            await self._server.stop(grace=0.2)
        self.store.close()

    # What the links ask for.

    def welcome(self, hello: LinkHello) -> LinkWelcome:
        try:
            self._check_fits(hello)
        except JoinRefused as e:
            self.links_refused += 1
            log.warning("%s (it came from %.80r)", e.message, hello.prefill_worker)
            raise
        return LinkWelcome(
            self.config.worker_id,
            self.incarnation,
            self.config.host,
            self.store.port,
            self.store.nonce,
            self.facts.tensor_parallel,
            self.facts.layout,
            self.incoming.staging.quota.limit_bytes,
        )

    def _check_fits(self, hello: LinkHello) -> None:
        check_token(self.main_loop.token, hello.token, "link")
        for name, theirs, mine in (
            ("protocol_version", hello.protocol_version, self.facts.protocol_version),
            ("code_version", hello.code_version, self.facts.code_version),
            ("run_id", hello.run_id, self.main_loop.session.run_id),
            ("model_digest", hello.model_digest, self.facts.model_digest),
            ("edge_kind", hello.edge_kind, self._edge_kind),
            ("quantize", hello.quantize, self.facts.quantize),
        ):
            if theirs != mine:
                raise JoinRefused(f"link refused: {name}: {theirs!r:.80} is not {mine!r}", param=name)
        difference = self.facts.layout.first_difference(hello.layout)
        if difference is not None:
            what = f"{difference}; the first is this decode worker's"
            raise JoinRefused(f"link refused: {what}", param=difference.split(":")[0])
        try:
            reshard_layout(self.facts.layout, hello.tensor_parallel, self.facts.tensor_parallel)
        except StartupError as e:
            raise JoinRefused(f"link refused: tensor_parallel: {e.message}", param="tensor_parallel") from None

    def reserve(self, offer: Offer, hello: LinkHello) -> Reserved:
        sequence, now_ms = offer.request.sequence_id, self.main_loop.run_clock_ms()
        try:
            verify(
                self.main_loop.handle_key,
                offer.handle,
                sequence=sequence,
                source=hello.prefill_worker,
                source_incarnation=hello.prefill_incarnation,
                destination=self.config.worker_id,
                incarnation=self.incarnation,
                now_ms=now_ms,
            )
            self._spent.spend(offer.handle, now_ms)
        except StaleHandle:
            self.handles_refused += 1
            raise
        if self.main_loop.is_tombstoned(sequence):
            raise Unavailable("the sequence was aborted", code="aborted")
        if self.main_loop.draining:
            raise Unavailable("this decode worker is draining", code="draining")
        if offer.num_tokens != offer.request.num_prefill_tokens:
            raise Unavailable(f"{offer.num_tokens} tokens offered of {offer.request.num_prefill_tokens}")
        check_tokens(offer.request, self.facts.vocab_size)
        check_sampling(offer.request.sampling, offer.request.max_tokens, self.facts.vocab_size)
        blocks = self.scheduler.reserve(offer.request, time.monotonic())
        self.main_loop.follow(offer.request)
        return Reserved(blocks, self.scheduler.generations(sequence), self.scheduler.num_cached(sequence))

    def receiving(self, sequence: SequenceId) -> bool:
        return self.scheduler.receiving(sequence)

    def knows(self, sequence: SequenceId) -> bool:
        return self.scheduler.knows(sequence)

    def failed(self, error: InvariantError) -> None:
        self.main_loop.fail(error)

    def landed(self, sequence: SequenceId, num_tokens: int) -> None:
        self.scheduler.landed(sequence, num_tokens)

    def received(self, sequence: SequenceId, first_token: int, logprob: TokenLogprob | None, cached: int) -> None:
        ended = self.scheduler.received(sequence, first_token, time.monotonic(), logprob, cached)
        if ended is not None:
            self.main_loop.deadlines.forget(sequence)
            self.main_loop.session.post(StepEvents(ended=(ended,), load=self.load()))
        else:
            self._arrived.add(sequence)
        self.main_loop.wake()

    def transfer_lost(self, sequence: SequenceId, reason: str) -> None:
        if self.scheduler.receiving(sequence):
            self.main_loop.report_ended(
                sequence, "worker_lost", f"{self.config.worker_id} lost its KV source: {reason}"
            )
        self.transfer_aborted(sequence, reason, 0.0)

    def transfer_aborted(self, sequence: SequenceId, reason: str, tombstone_s: float) -> None:
        self.incoming.events.write("transfer_ended", sequence=sequence, reason=reason)
        if self.scheduler.generating(sequence):  # prefill has missed the last acknowledgement, and may die with it
            self.main_loop.report_ended(sequence, "abandoned", f"{self.config.worker_id} ended it: {reason}")
        self.main_loop.deadlines.forget(sequence)
        self._arrived.discard(sequence)
        if not self.scheduler.abort(sequence, in_flight=sequence in self.incoming.writing) and tombstone_s > 0:
            self.main_loop.tombstones.add(sequence, time.monotonic(), tombstone_s)
        self.main_loop.wake()

    def write_ended(self, sequence: SequenceId) -> None:
        self.scheduler.receive_ended(sequence)

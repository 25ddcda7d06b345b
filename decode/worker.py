"""The decode worker: offers in over links, prompts from the coordinator, steps of the engine, tokens out."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from baton.core.commands import Assign, Join, Prefill
from baton.core.compatibility import Compatibility, difference
from baton.core.errors import InvariantError, JoinRefused, ProtocolError, StartupError
from baton.core.events import Load, SequenceEnded, StepEvents
from baton.core.handover import LinkHello, LinkWelcome
from baton.core.names import host_port
from baton.core.prefix_cache import KeptBlocks
from baton.core.request import SequenceId
from baton.core.reshard import reshard_layout, shared_gpu
from baton.core.step import StepOutcome, StepPlan
from baton.engine.runner import Runner
from baton.runtime.cluster_token import check_token
from baton.runtime.config import WorkerConfig
from baton.runtime.event_log import EventLog
from baton.runtime.ports import check_free
from baton.runtime.streams import serve_links
from baton.runtime.tls import read_cluster_tls
from baton.runtime.token_file import read_token
from baton.runtime.worker_loop import WorkerLoop
from baton.transfer.edge_endpoint import MakeEndpoint
from baton.transfer.rendezvous import EdgeStore
from baton.transfer.staging_buffers import StagingRoom
from decode.admission import Admission, HandOvers
from decode.handover import Destination
from decode.receiver import Receiver
from decode.scheduler import DecodeScheduler
from decode.speculation.engine import SpeculativeEngine
from decode.speculation.policy import Speculation

if TYPE_CHECKING:
    import grpc.aio

log = logging.getLogger("baton.worker")


class DecodeWorker:
    """The scheduler, the hand-overs and links into it, and the store where edges rendezvous; the main loop has the rest
    of a worker's state."""

    def __init__(
        self,
        config: WorkerConfig,
        runner: Runner,
        facts: Compatibility,
        pids: tuple[int, ...],
        make_endpoint: MakeEndpoint,
        speculation: Speculation | None = None,
        engine: SpeculativeEngine | None = None,
        kept: KeptBlocks | None = None,
    ) -> None:
        """`kept`: of the worker's previous role."""
        self.config = config
        self.facts = facts
        self.pids, self.tensor_parallel = pids, len(pids)
        self.incarnation = time.time_ns()
        self.scheduler = DecodeScheduler(
            runner.layout,
            runner.num_blocks,
            config.max_running,
            speculation,
            model_digest=facts.model_digest,
            prefix_cache=config.prefix_cache,
            plan_ahead=config.plan_ahead == "on" or (config.plan_ahead == "auto" and runner.launches_ahead),
            kept=kept,
        )
        check_free(config.host, config.store_port, "--store-port", "edge store")
        self.store = EdgeStore(config.host, config.store_port)
        step = runner.step if engine is None else engine.step
        launcher = runner if self.scheduler.plan_ahead else None  # without drafting, engine.step is runner.step
        self.tls = read_cluster_tls(config.cluster_tls_dir, "decode")
        self.main_loop = WorkerLoop(config, self, step, read_token(config.cluster_token_file), launcher, self.tls)
        self.hand_overs = HandOvers(
            self.scheduler,
            self.main_loop.deadlines,
            self.main_loop.tombstones,
            Destination(config.worker_id, self.incarnation, runner.layout, facts.vocab_size),
        )
        self.receiver = Receiver(
            self,
            self.hand_overs,
            runner.layout,
            make_endpoint,
            StagingRoom(round(config.staging_mib * (1 << 20)), runner.layout),
            EventLog(config.worker_id),
            host=config.host,
            store_port=self.store.port,
            tensor_parallel=self.tensor_parallel,
            edge_timeout_s=config.edge_timeout_s,
        )
        self.links_refused = 0
        # Those that the coordinator has; empty if the next step is to report them again.
        self._reported_gauges: tuple[int, ...] = ()
        self._gpus = make_endpoint.gpus
        # Received sequences before their first step.
        self._arrived: set[SequenceId] = set()
        self._server: grpc.aio.Server | None = None
        self._link_port = 0

    async def run(self) -> None:
        """Serves until drained; raises what WorkerLoop.run raises."""
        self._server, self._link_port = await serve_links(
            self.config.host, self.receiver.serve, self.config.link_port, self.tls
        )
        await self.main_loop.run()

    # Called by the main loop.

    def join(self) -> Join:
        self.scheduler.cache.restart_events()
        return Join(
            self.config.worker_id,
            "decode",
            self.incarnation,
            self.facts,
            link_address=host_port(self.config.host, self._link_port),
            pids=self.pids,
            blocks_total=self.scheduler.blocks.num_blocks,
            max_running=self.config.max_running,
            tensor_parallel=self.tensor_parallel,
            computes_prompts=True,
        )

    def load(self) -> Load:
        self._reported_gauges = ()  # the next step reports them again: two messages may arrive in either order
        scheduler = self.scheduler
        return Load(
            blocks_total=scheduler.blocks.num_blocks,
            blocks_free=scheduler.blocks.num_free,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            prompt_tokens_computed=scheduler.prompt_tokens_computed,
            tokens_generated=scheduler.tokens_generated,
            kv_bytes_received=self.hand_overs.counters.bytes_received,
            kv_bytes_reused=scheduler.bytes_reused,
            steps=self.main_loop.steps,
            step_s=self.main_loop.step_s,
            sequences=scheduler.num_sequences,
            handles_refused=self.hand_overs.counters.handles_refused,
            stale_messages=self.hand_overs.counters.stale_messages,
            links_refused=self.links_refused,
            speculation=scheduler.speculation.counters,
            preemptions=scheduler.preemptions,
            preempted=scheduler.num_preempted,
            steps_ahead=scheduler.steps_ahead,
            rows_discarded=scheduler.rows_discarded,
            backlog_tokens=scheduler.backlog_tokens,
            prompt_tokens_cached=scheduler.prompt_tokens_cached,
            prompt_cost=scheduler.prompt_cost,
        )

    def begin_step(self, now: float) -> StepPlan | None:
        plan = self.scheduler.begin_step(now)
        if plan is not None and self._arrived:
            for row in plan.rows:
                if row.sequence_id in self._arrived:
                    self.receiver.events.write("decode_begin", sequence=row.sequence_id)
            self._arrived.difference_update(row.sequence_id for row in plan.rows)
        return plan

    def finish_step(self, outcome: StepOutcome, now: float) -> StepEvents:
        scheduler = self.scheduler
        result = scheduler.finish_step(outcome, now)
        cache_events = scheduler.cache.take_events() if self.main_loop.session.connected else None
        # The gauges by which the coordinator places requests; counters alone are sent with heartbeats and every end.
        gauges = scheduler.num_sequences, scheduler.blocks.num_free, scheduler.num_preempted, scheduler.num_running
        load = self.load() if result.ended or gauges != self._reported_gauges else None
        self._reported_gauges = gauges  # after `load`, which clears it
        return StepEvents(outcome.step_id, result.tokens, result.ended, load=load, kv_cache_events=cache_events)

    def command(self, command: Prefill | Assign) -> None:
        if not isinstance(command, Prefill) or command.targets:
            raise ProtocolError(f"a decode worker does not support {type(command).__name__} with targets")
        request = command.request
        if self.main_loop.refuses(request, self.facts.vocab_size):
            return
        self.scheduler.submit(request, time.monotonic())
        self.main_loop.track_deadline(request)
        self._arrived.add(request.sequence_id)

    def end(self, sequence: SequenceId, reason: str) -> bool:
        if not self.scheduler.has_sequence(sequence):
            return False
        self._arrived.discard(sequence)
        self.receiver.end(sequence, reason)
        return True

    def receiving(self, sequence: SequenceId) -> bool:
        return self.scheduler.receiving(sequence)

    async def close(self) -> None:
        if self.scheduler.plan_ahead:
            ahead, discarded = self.scheduler.steps_ahead, self.scheduler.rows_discarded
            log.info("%d of %d steps were planned ahead, %d rows discarded", ahead, self.main_loop.steps, discarded)
        await self.receiver.close()
        if self._server is not None:
            await self._server.stop(grace=0.2)
        self.store.close()

    # Called by the links.

    def welcome(self, hello: LinkHello) -> LinkWelcome:
        try:
            self._check_fits(hello)
        except JoinRefused as e:
            self.links_refused += 1
            log.warning("%s (from %.80r)", e.message, hello.prefill_worker)
            raise
        return LinkWelcome(
            self.config.worker_id,
            self.config.host,
            self.store.port,
            self.store.nonce,
            self.tensor_parallel,
            self.facts,
            self.receiver.staging.limit_bytes,
        )

    def _check_fits(self, hello: LinkHello) -> None:
        check_token(self.main_loop.token, hello.token, "link")
        run_id = self.main_loop.session.run_id
        differs = difference({"run_id": run_id}, {"run_id": hello.run_id}) or difference(self.facts, hello.facts)
        if differs is not None:
            reason = differs.between(self.config.worker_id, "the prefill worker")
            raise JoinRefused(f"link refused: {reason}", param=differs.field)
        try:
            plans = reshard_layout(self.facts.layout, hello.tensor_parallel, self.tensor_parallel)
        except StartupError as e:
            raise JoinRefused(f"link refused: tensor_parallel: {e.message}", param="tensor_parallel") from None
        if (shared := shared_gpu(plans, hello.gpus, self._gpus)) is not None:
            prefill_rank, decode_rank, gpu = shared
            reason = f"{gpu!r:.200} is that of prefill rank {prefill_rank} and of decode rank {decode_rank}"
            how = "NCCL does not connect two ranks on one GPU; set --edge-kind ipc (or gloo) on both workers"
            raise JoinRefused(f"link refused: gpus: {reason}; {how}", param="gpus")

    def admission(self) -> Admission:
        loop = self.main_loop
        return Admission(loop.handle_key, loop.run_clock_ms(), loop.draining, loop.adapters.loaded)

    def ready(self, sequence: SequenceId) -> None:
        self._arrived.add(sequence)
        self.main_loop.wake()

    def dropped(self, sequence: SequenceId) -> None:
        self._arrived.discard(sequence)
        self.main_loop.wake()

    def hand_over_ended(self, event: SequenceEnded) -> None:
        self.main_loop.session.post(StepEvents(ended=(event,), load=self.load()))
        self.main_loop.wake()

    def failed(self, error: InvariantError) -> None:
        self.main_loop.fail(error)

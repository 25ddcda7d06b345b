"""Assembles a simulated cluster: a coordinator, prefill and decode workers, and the network between them.

    cluster = SimCluster(SimClusterOptions(prefill=4, decode=8), seed=1, costs=MyCosts(), trace=None)
    cluster.send(request, at_s=0.5, on_end=record)     # any number, before or while it runs
    cluster.run(until_s=60.0)

`costs` (`sim.costs.Costs`) determines how long steps, messages and transfers take; a caller with measurements passes
its own. `engine` makes what a worker computes with (`sim.engine.SimEngine`): by default a model whose every token is
checked, unless `verify=False`. Clients (`sim.client.SimClient`) have the times and tokens of their choices in
`outcomes`. Without faults, pass `Timeouts(watched=False)`: peers then do not watch each other's silence.

A worker can be changed while the cluster runs: `kill`, `pause`, `restart`, `drain`; `start_worker` adds one. A worker
that drains for another role goes on in it, with its blocks, as another `SimWorker`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.core.commands import Role
from baton.core.compatibility import PROTOCOL_VERSION, Compatibility
from baton.core.errors import InvariantError
from baton.core.kv_layout import KVLayout, LayerKV
from baton.core.request import GenerateRequest
from decode.scheduler import DecodeScheduler
from decode.speculation.drafts import ModelDrafts, NgramDrafts
from decode.speculation.policy import Speculation
from decode.speculation.step_cost import StepModel
from prefill.scheduler import PrefillScheduler
from sim.client import Behaviour, SimClient
from sim.coordinator import SimCoordinator, SimCoordinatorOptions
from sim.costs import Costs, RandomCosts
from sim.decode import DecodeTier
from sim.engine import VOCABULARY, HashModel, SimEngine
from sim.loop import Loop, Trace
from sim.network import Network, NetworkFaults, NetworkProcess
from sim.prefill import PrefillTier
from sim.process import Clock
from sim.worker import ChunkFaults, SimWorker, Timeouts

LAYERS = (LayerKV(2, 8, "float32"), LayerKV(2, 8, "float32"))


@dataclass(frozen=True, slots=True)
class SimPoolOptions:
    """One pool: its workers and the options of each, as in WorkerConfig. `draft_tokens`: None drafts adaptively, a
    number always so many."""

    workers: int = 1
    blocks: int = 64
    block_size: int = 4
    step_tokens: int = 8
    max_running: int = 8
    tensor_parallel: int = 1
    prefix_cache: bool = True
    plan_ahead: bool = False
    drafts: str = "none"
    draft_tokens: int | None = None
    step_model: Callable[[], StepModel] = StepModel


@dataclass(frozen=True, slots=True)
class SimClusterOptions:
    prefill: SimPoolOptions = field(default_factory=SimPoolOptions)
    decode: SimPoolOptions = field(default_factory=SimPoolOptions)
    coordinator: SimCoordinatorOptions = field(default_factory=SimCoordinatorOptions)
    layers: tuple[LayerKV, ...] = LAYERS
    max_model_len: int = 1 << 20
    expected_output_tokens: float | None = None
    """The average output that the dispatcher expects at first: a low one lets decode workers run out of blocks."""
    vocabulary: int = VOCABULARY
    restart_s: Callable[[Loop], float] = field(default=lambda loop: loop.random.choice((0.3, 1.0, 2.0, 4.0)))
    """After how long a supervisor has started a worker again that has ended."""


MakeEngine = Callable[["SimCluster", Role, KVLayout, SimPoolOptions], SimEngine]
MakeClock = Callable[[Loop], Clock]


def hash_model(cluster: SimCluster, role: Role, layout: KVLayout, pool: SimPoolOptions) -> SimEngine:
    request_of, tensor_parallel = cluster.requests.__getitem__, pool.tensor_parallel
    return HashModel(layout, pool.blocks, request_of, cluster.predecessors, tensor_parallel=tensor_parallel)


class SimCluster:
    """Processes, the network between them, and clients, in one loop."""

    def __init__(
        self,
        options: SimClusterOptions,
        seed: int,
        *,
        costs: Costs | None = None,
        engine: MakeEngine = hash_model,
        clock: MakeClock = lambda loop: Clock(),
        timeouts: Timeouts | None = None,
        network_faults: NetworkFaults | None = None,
        chunk_faults: ChunkFaults | None = None,
        trace: Trace | None = None,
        verify: bool = True,
    ) -> None:
        self.options, self.verify = options, verify
        self.loop = loop = Loop(seed, trace)
        self.costs: Costs = costs or RandomCosts(loop.random)
        self.timeouts = timeouts or Timeouts()
        self.chunk_faults = chunk_faults or ChunkFaults()
        self.network = Network(loop, self.costs.message_s, network_faults)
        self.workers: dict[str, SimWorker] = {}
        """The latest incarnation of each."""
        self.clients: list[SimClient] = []
        self.running = 0
        """Clients that have not ended, and those still to begin."""
        self.requests: dict[str, GenerateRequest] = {}
        self.predecessors: dict[int, int] = {}
        """Of the hashes that the models of all workers have computed (`HashModel`)."""
        self.poison: set[str] = set()
        """Ids of requests that end any worker in whose step they run."""
        self.kills = self.restarts = self.exits = self.flips = 0
        self.preemptions = 0
        self.supervised = True
        self._make_engine, self._make_clock = engine, clock
        self._incarnations: dict[str, int] = {}
        self.coordinator = self._start_coordinator()
        for role, pool in (("prefill", options.prefill), ("decode", options.decode)):
            for index in range(pool.workers):
                self.start_worker(f"{role[0]}{index}")

    # Processes.

    def _next_incarnation(self, name: str) -> int:
        self._incarnations[name] = self._incarnations.get(name, 0) + 1
        return self._incarnations[name]

    def _start_coordinator(self) -> SimCoordinator:
        loop, options = self.loop, self.options.coordinator
        incarnation = self._next_incarnation("coordinator")
        coordinator = SimCoordinator(
            loop, self.network, incarnation, self._make_clock(loop), options, verify=self.verify
        )
        if self.options.expected_output_tokens is not None:
            coordinator.requests.dispatcher.expectation.mean_tokens = self.options.expected_output_tokens
        return coordinator

    def start_worker(self, name: str, previous: SimWorker | None = None) -> SimWorker:
        """Starts a worker, or the next incarnation of one; its role follows from the first letter of its name, or is
        the next one of `previous`, whose process, engine and blocks it has."""
        own: Role = "prefill" if name[0] == "p" else "decode"
        pool = self._pool(own)
        role = own if previous is None or previous.next_role is None else previous.next_role
        if role != own:
            pool = replace(
                self._pool(role), blocks=pool.blocks, block_size=pool.block_size, tensor_parallel=pool.tensor_parallel
            )
        kept = None if previous is None else previous.tier.scheduler.kept
        layout = KVLayout(pool.block_size, self.options.layers)
        facts = Compatibility(
            PROTOCOL_VERSION,
            code_version="0",
            exact=True,
            dtype="float32",
            kv_dtype="float32",
            quantize="none",
            model_impl="baton",
            edge_kind="gloo",
            config_digest="config",
            model_digest="model",
            vocab_size=self.options.vocabulary,
            max_model_len=self.options.max_model_len,
            layout=layout,
        )
        clock = self._make_clock(self.loop)
        plan_ahead = pool.plan_ahead and (role == "prefill" or pool.drafts == "none")
        worker = SimWorker(self, name, self._next_incarnation(name), clock, plan_ahead=plan_ahead)
        engine = self._make_engine(self, role, layout, pool) if previous is None else previous.tier.engine
        if role == "prefill":
            scheduler = PrefillScheduler(
                layout,
                pool.blocks,
                pool.step_tokens,
                model_digest=facts.model_digest,
                prefix_cache=pool.prefix_cache,
                plan_ahead=plan_ahead,
                kept=kept,
            )
            tier: PrefillTier | DecodeTier = PrefillTier(worker, scheduler, engine, facts, pool.tensor_parallel)
        else:
            decode = DecodeScheduler(
                layout,
                pool.blocks,
                pool.max_running,
                _speculation(pool, layout),
                model_digest=facts.model_digest,
                prefix_cache=pool.prefix_cache,
                plan_ahead=plan_ahead,
                kept=kept,
            )
            tier = DecodeTier(worker, decode, engine, facts, pool.tensor_parallel)
        self.workers[name] = worker
        self.loop.note("start", worker)
        worker.start(tier)
        return worker

    def _pool(self, role: Role) -> SimPoolOptions:
        return self.options.prefill if role == "prefill" else self.options.decode

    def worker_exited(self, worker: SimWorker, why: str) -> None:
        self.loop.note("exit", worker, why)
        if worker.alive and worker.drained and worker.next_role is not None:
            self.flips += 1
            worker.tier.scheduler.check_idle()
            worker.die()
            self.start_worker(worker.name, worker)
        elif worker.alive:
            self.exits += 1
            self._ended(worker)
            worker.die()

    def poisoned(self, worker: SimWorker) -> None:
        self.loop.later(0.001, self._kill_incarnation, worker)

    def _kill_incarnation(self, worker: SimWorker) -> None:
        if worker.alive:
            self.kill(worker.name)

    def kill(self, name: str, *, silently: bool = False) -> None:
        """Ends a worker as kill -9 does; `silently`, as the loss of its host does: no connection is closed."""
        worker = self.workers[name]
        if worker.alive:
            self.loop.note("kill", worker, "silently" if silently else "")
            self.kills += 1
            self._ended(worker)
            worker.die(silently=silently)

    def _ended(self, worker: SimWorker) -> None:
        tier = worker.tier
        if isinstance(tier, DecodeTier):
            self.preemptions += tier.scheduler.preemptions
        if self.supervised:
            self.loop.later(self.options.restart_s(self.loop), self.restart, worker.name)

    def restart(self, name: str) -> None:
        if not self.workers[name].alive:
            self.restarts += 1
            self.start_worker(name)

    def kill_coordinator(self) -> None:
        if self.coordinator.alive:
            self.loop.note("kill", self.coordinator)
            self.coordinator.die()
            for client in self.clients:
                client.coordinator_died()
            self.loop.later(self.options.restart_s(self.loop), self.restart_coordinator)

    def restart_coordinator(self) -> None:
        if not self.coordinator.alive:
            self.coordinator = self._start_coordinator()
            self.loop.note("start", self.coordinator)

    def processes(self) -> list[NetworkProcess]:
        return [self.coordinator, *self.workers.values()]

    # Clients.

    def send(
        self,
        request: GenerateRequest,
        at_s: float = 0.0,
        behaviour: Behaviour = Behaviour(),  # noqa: B008 (frozen)
        on_end: Callable[[SimClient], object] | None = None,
    ) -> None:
        """Sends a client's request at virtual time `at_s`, or now if that has passed."""
        self.requests[request.request_id] = request
        self.running += 1
        self.loop.at(max(at_s, self.loop.now), self._send, request, behaviour, on_end)

    def _send(
        self, request: GenerateRequest, behaviour: Behaviour, on_end: Callable[[SimClient], object] | None
    ) -> None:
        client = SimClient(self, request, behaviour, verify=self.verify, on_end=on_end)
        self.clients.append(client)
        self.loop.note("client", request.request_id, len(request.prompt), request.max_tokens)
        client.send()

    def client_ended(self, client: SimClient) -> None:
        self.running -= 1

    def run(self, until_s: float, done: Callable[[], bool] | None = None) -> None:
        """Runs until virtual time `until_s`, or until `done()`."""
        self.loop.run(until_s, done)

    def preempted(self) -> int:
        """Returns how many sequences were preempted, by workers that have ended, too."""
        tiers = (worker.tier for worker in self.workers.values() if worker.alive)
        return self.preemptions + sum(t.scheduler.preemptions for t in tiers if isinstance(t, DecodeTier))

    def repeat_offer(self) -> None:
        """Sends an earlier offer again, as a faulty peer may: a handle is valid once."""
        tiers = [w.tier for w in self.workers.values() if w.alive and isinstance(w.tier, PrefillTier)]
        offers = [(tier, link, offer) for tier in tiers for link, offer in tier.sender.offered]
        if offers:
            tier, link, offer = self.loop.random.choice(offers)
            self.loop.note("repeat offer", tier.worker, offer.request.sequence_id)
            link.repeat(offer)

    # Invariants.

    def check(self) -> None:
        """Raises InvariantError if an invariant of any process is violated: what it counts is not what it holds."""
        if self.coordinator.alive:
            self.coordinator.requests.check()
        for worker in self.workers.values():
            if worker.alive:
                worker.tier.scheduler.check()

    def check_settled(self) -> None:
        """Raises InvariantError if anything of any request is left anywhere. All processes must run."""
        self.check()
        if len(self.coordinator.requests):
            raise InvariantError(f"the coordinator keeps {self.coordinator.requests!r}")
        for worker in self.workers.values():
            worker.tier.check_settled()

    @property
    def settled(self) -> bool:
        """Whether all processes run, all workers are ready for new work, and no worker has a sequence."""
        members = self.coordinator.workers
        return (
            self.coordinator.alive
            and all((member := members.get(name)) is not None and member.ready for name in self.workers)
            and all(w.alive and w.connected and not w.tier.scheduler.sequence_ids() for w in self.workers.values())
        )


def _speculation(pool: SimPoolOptions, layout: KVLayout) -> Speculation:
    if pool.drafts == "none":
        return Speculation(None, pool.step_model())
    drafts = NgramDrafts() if pool.drafts == "ngram" else ModelDrafts(layout, pool.blocks, 1 << 20)
    return Speculation(drafts, pool.step_model(), fixed_length=pool.draft_tokens or 0)

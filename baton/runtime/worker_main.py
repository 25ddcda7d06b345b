"""Startup of prefill and decode workers: options, engine, worker. Each rank is a process that runs `worker_main`."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast, get_args

from baton.core.commands import Role
from baton.core.compatibility import Compatibility
from baton.core.cores import parse_cores
from baton.core.errors import BatonError, InvariantError, JoinRefused, RankLost, StartupError, innermost
from baton.core.liveness import LOOP_STALL_S
from baton.core.names import name_error
from baton.core.prefix_cache import KeptBlocks
from baton.core.ranks import Ranks
from baton.runtime.cluster_token import check_listening
from baton.runtime.config import WorkerConfig, for_device
from baton.runtime.event_loop import LoopWatch, report_violations
from baton.runtime.model_source import may_draft, resolve_draft, resolve_model
from baton.runtime.options import EXIT_STARTUP_ERROR, config_command, error_line, run_main
from baton.runtime.process import (
    EXIT_RANK_LOST,
    SWITCH_INTERVAL_S,
    allow_open_files,
    die_with_parent,
    drain_signals,
    lasting_imports,
    limit_name_lookups,
    record_error,
    send_heartbeats,
)
from baton.runtime.token_file import read_token

if TYPE_CHECKING:
    from baton.engine.options import EngineOptions
    from baton.runtime.worker_loop import Scheduler, WorkerLoop
    from baton.runtime.worker_ranks import RankGroup

log = logging.getLogger("baton.worker")

_OWN_SIGNAL = "signal"
OPEN_FILES = 65536  # edges, links, and two for each staging buffer in shared memory


class RunnableWorker(Protocol):
    main_loop: WorkerLoop

    @property
    def scheduler(self) -> Scheduler: ...

    async def run(self) -> None: ...


# (config, runner, facts, pids, make_endpoint, kept) -> worker. The second and the fifth are Any: `--help` needs no
# torch. `kept` is of the worker's previous role.
MakeWorker = Callable[[WorkerConfig, Any, Compatibility, tuple[int, ...], Any, KeptBlocks | None], RunnableWorker]


def code_version() -> str:
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "source"


def worker_main(role: Role, load: Callable[[], MakeWorker], argv: list[str] | None = None) -> NoReturn:
    """Parses the command line and serves until drained. `load` imports the tier's worker (and with it torch)."""

    @config_command(WorkerConfig, name=role, help=f"A {role} worker: one process per rank.")
    def command(config: WorkerConfig) -> int:
        die_with_parent()
        faulthandler.enable()
        limit_name_lookups()
        allow_open_files(OPEN_FILES)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        _take_signals()
        logging.basicConfig(
            level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
        )
        if not config.worker_id:
            config = replace(config, worker_id=f"{role}-{socket.gethostname()}-{os.getpid()}")
        ranks = Ranks.from_environment(os.environ)
        if ranks.local_size > 1:  # ranks of one machine use separate cores
            os.sched_setaffinity(0, ranks.cores(sorted(os.sched_getaffinity(0))))
        try:
            if wrong := name_error(config.worker_id):  # the default has this host's name
                raise StartupError(f"--worker-id {wrong}")
            if ranks.leads:
                asyncio.run(_serve(role, config, ranks, load))
            else:
                _follow(role, config, ranks)
        except Exception as e:
            error = innermost(e)
            if isinstance(error, JoinRefused):
                own = f" (this worker's --model is {config.model})" if "_digest: " in error.message else ""
                error = StartupError(f"{config.worker_id}: the coordinator refused this worker: {error.message}{own}")
            record_error(error.message if isinstance(error, BatonError) else f"{type(error).__name__}: {error}")
            if isinstance(error, StartupError | RankLost):  # without delay: the other ranks wait for this exit
                who = f"{config.worker_id}, rank {ranks.rank} of {ranks.size} on {socket.gethostname()}: "
                line = error_line(error, who if ranks.size > 1 else "")
                print(line, file=sys.stderr, flush=True)
                os._exit(EXIT_STARTUP_ERROR if isinstance(error, StartupError) else EXIT_RANK_LOST)
            log.critical("%s: fatal error, exiting (restart required): %s", config.worker_id, error, exc_info=e)
            logging.shutdown()
            os._exit(1)  # a thread that hangs would block an orderly exit
        log.info("drained")
        logging.shutdown()
        os._exit(0)  # all is closed; the C++ threads of torch and grpc may abort a process that exits normally

    run_main(command, argv, prog_name=role)


def _take_signals() -> None:
    """Ignores SIGINT: Ctrl-C reaches every process of a terminal, but only the launcher handles it, and drains its
    workers; torchrun forwards it. A signal to drain ends a worker that is still loading: it has nothing to drain."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in drain_signals():
        signal.signal(number, lambda number, frame: os._exit(0))


def _leave_on_signal(leave: Callable[[float], None], group: RankGroup, timeout_s: float) -> set[str]:
    """Calls `leave`, which drains the worker, on the first signal, to this rank or another, and ends the process on the
    second to this one. Returns the set to which the sources of signals are added."""
    loop, received = asyncio.get_running_loop(), set[str]()

    def drain(source: str) -> None:
        if not received:
            log.info("%s: draining for at most %g s", source, timeout_s)
            received.add(source)
            leave(timeout_s)
        received.add(source)

    def on_signal(number: signal.Signals) -> None:
        if _OWN_SIGNAL in received:
            os._exit(128 + number)
        drain(_OWN_SIGNAL)

    for number in drain_signals():
        loop.add_signal_handler(number, on_signal, number)
    group.on_leave(lambda rank: loop.call_soon_threadsafe(drain, f"signal at rank {rank}"))
    return received


async def _serve(role: Role, config: WorkerConfig, ranks: Ranks, load: Callable[[], MakeWorker]) -> None:
    check_listening("--host", config.host, read_token(config.cluster_token_file))
    started, before = time.monotonic(), len(sys.modules)
    with lasting_imports():
        make = load()
        from baton.engine.device import choose_device, gpu_uuids
        from baton.runtime.health import serving_health
        from baton.runtime.worker_ranks import lead, leave_torchrun
        from baton.transfer.nccl import configure_nccl
    imported = len(sys.modules) - before
    send_heartbeats()  # not before: loading libraries from a cold file system blocks the interpreter for long
    if not config.replace:  # its predecessor may still have them
        _check_ports(role, config)

    log.info("stage imports: %.2f s, %d modules", time.monotonic() - started, imported)
    started, given = time.monotonic(), with_certificates(config)
    configure_nccl(given.host)  # before CUDA is used: choosing a device initialises its driver
    device = choose_device(given.device).type
    config = for_device(given, role, device)
    options = _engine_options(role, given, device, ranks)
    with lead(ranks, options, lambda stage, seconds: log.info("stage %s: %.2f s", stage, seconds)) as group:
        runner = group.runner
        runner.start_grammars()
        makers: dict[Role, MakeWorker] = {role: make}
        worker = make(config, runner, runner.facts, group.pids, group.endpoints, None)
        log.info(
            "%s: %s, kernels %s, %d blocks of %d tokens (%.2f GiB), %d ranks of %d threads, loaded in %.2f s",
            config.worker_id,
            runner.dtype_name,
            runner.kernels,
            runner.num_blocks,
            runner.layout.block_size,
            runner.num_blocks * runner.layout.bytes_per_block / (1 << 30),
            ranks.size,
            options.threads,
            time.monotonic() - started,
        )
        published = runner.model_config.quantization
        if config.quantize != "none" or published is not None:
            log.info(
                "weights: published %s, --quantize %s, %.1f MiB per rank",
                "unquantised" if published is None else f"in {published.method}",
                config.quantize,
                runner.parameter_bytes / (1 << 20),
            )
        signals = _leave_on_signal(lambda timeout_s: worker.main_loop.leave(timeout_s), group, config.drain_timeout_s)
        report_violations(lambda error: worker.main_loop.fail(error))  # of its present role
        stalls = asyncio.create_task(LoopWatch(LOOP_STALL_S).run(), name="loop watch")
        try:
            async with contextlib.AsyncExitStack() as beside:
                health = serving_health(config.host, config.health_port, lambda: worker.main_loop.accepts_work)
                await beside.enter_async_context(health)
                if uuids := gpu_uuids(config.device, ranks.local_size):
                    from baton.runtime.gpu_usage import watching_gpus  # slow to import

                    show = lambda usage: worker.main_loop.session.show_gpu(usage)  # noqa: E731  # of its present role
                    await beside.enter_async_context(watching_gpus(uuids, show))
                while True:
                    worker.main_loop.adapters.ranks = group.adapters
                    await worker.run()
                    next_role = worker.main_loop.next_role
                    if signals or next_role is None:
                        break
                    started = time.monotonic()
                    # The coordinator may not know yet that it has left.
                    config = replace(for_device(given, next_role, device), replace=True)
                    with _changing_role(config.worker_id, next_role):
                        if next_role not in makers:
                            makers[next_role] = _load_other(next_role)
                        make = makers[next_role]
                        worker = make(config, runner, runner.facts, group.pids, group.endpoints, worker.scheduler.kept)
                    took_s = time.monotonic() - started
                    log.info("%s becomes a %s worker, prepared in %.2f s", config.worker_id, next_role, took_s)
        finally:
            stalls.cancel()
    if _OWN_SIGNAL in signals:
        leave_torchrun(ranks)


def _check_ports(role: Role, config: WorkerConfig) -> None:
    """Raises StartupError, before the model is loaded, if a port that this worker will open is in use."""
    from baton.runtime.ports import check_free

    check_free(config.host, config.health_port, "--health-port", "health")
    if role == "decode":
        check_free(config.host, config.link_port, "--link-port", "link")
        check_free(config.host, config.store_port, "--store-port", "edge store")


def with_certificates(config: WorkerConfig) -> WorkerConfig:
    """Returns the config with `both_roles` off if it is not required and the certificate of one role is missing. Raises
    StartupError if it is required."""
    from baton.runtime.tls import read_cluster_tls

    try:
        for role in get_args(Role) if config.both_roles != "off" else ():
            read_cluster_tls(config.cluster_tls_dir, role)
    except StartupError:
        if config.both_roles == "on":
            raise
        return replace(config, both_roles="off")
    return config


@contextlib.contextmanager
def _changing_role(worker_id: str, role: Role) -> Iterator[None]:
    """Names the role in an error of the block: it ends this process, whose supervisor starts it in its first role."""
    log.info("%s is to become a %s worker", worker_id, role)
    about = f"{worker_id} could not become a {role} worker"
    try:
        yield
    except BatonError as e:
        e.message = f"{about}: {e.message}"
        raise
    except Exception as e:
        raise InvariantError(f"{about}: {type(e).__name__}: {e}") from e


def _load_other(role: Role) -> MakeWorker:
    """Imports the other tier's worker, which no tier imports, when this worker's role changes."""
    with lasting_imports():
        return cast(MakeWorker, import_module(f"{role}.__main__").load())


def _follow(role: Role, config: WorkerConfig, ranks: Ranks) -> None:
    with lasting_imports():
        from baton.engine.device import choose_device
        from baton.runtime.worker_ranks import follow
        from baton.transfer.nccl import configure_nccl

    send_heartbeats()
    configure_nccl(config.host)  # before CUDA is used, as in `_serve`
    follow(ranks, _engine_options(role, with_certificates(config), choose_device(config.device).type, ranks))


def _cores_to_borrow(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    if text == "others":
        raise StartupError("--borrow-cores others: only `baton up` and topologies know the other workers' cores")
    return parse_cores(text, "--borrow-cores")


def _engine_options(role: Role, config: WorkerConfig, device: str, ranks: Ranks) -> EngineOptions:
    """Returns the engine's options, for both roles if the worker is to take both. A worker's threads are divided among
    its ranks on this machine. A decode worker's leader will load a draft, which uses memory of its GPU."""
    from baton.engine.options import EngineOptions, decode_lengths

    both_roles = for_device(config, role, device).both_roles == "on"
    roles = get_args(Role) if both_roles else (role,)
    decodes = "decode" in roles
    step_tokens = max(for_device(config, each, device).step_tokens for each in roles)

    threads = config.threads // ranks.local_size if config.threads else len(os.sched_getaffinity(0))
    model_dir, drafts = resolve_model(config.model), decodes and ranks.leads and device != "cpu"
    return EngineOptions(
        model_dir=model_dir,
        draft_dir=resolve_draft(config.draft, model_dir) if drafts else None,
        max_running=config.max_running,
        model_impl=config.model_impl,
        expert_parallel=config.expert_parallel,
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        exact=config.exact,
        kernels=config.kernels,
        activations=config.activations,
        attention=config.attention,
        quantize=config.quantize,
        threads=max(threads, 1),
        borrow_cores=_cores_to_borrow(config.borrow_cores),
        block_size=config.block_size,
        kv_memory_bytes=round(config.kv_memory_gib * (1 << 30)) or None,
        max_model_len=config.max_model_len or None,
        max_num_tokens=max(step_tokens + (16 * config.max_running if decodes else 0), 512),
        host=config.host,
        edge_kind=config.edge_kind,
        version=code_version(),
        staging_bytes=round(config.staging_mib * (1 << 20)),
        decode_rows=config.max_running if decodes else 0,
        decode_lengths=decode_lengths(may_draft(config.draft, model_dir), config.draft_tokens),
        gpu_share=config.gpu_share,
    )

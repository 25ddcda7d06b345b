"""`baton up`: everything that can be refused is refused before the first process starts."""

from __future__ import annotations

import errno
import os
import socket
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from baton.core.errors import StartupError
from baton.model_source import resolve_model, served_name
from baton.options import EXIT_STARTUP_ERROR
from launch.console import Console
from launch.local import LocalCluster
from launch.plan import Programs, make_plan, visible_gpus
from launch.restart import Backoff
from launch.supervisor import MemberFailed
from launch.up_config import UpConfig, check_supported


def up(config: UpConfig, programs: Programs | None = None, backoff: Backoff | None = None) -> int:
    """Runs a cluster until a signal; returns the exit code.

    Raises:
        StartupError: it cannot come up.
    """
    console = Console()
    check_supported(config)
    check_ports(config)
    model = resolve_model(config.model)
    plan = make_plan(
        config,
        model=model,
        served_name=config.served_model_name or served_name(config.model),
        run_dir=open_run_dir(config.run_dir),
        cores=sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else range(os.cpu_count() or 1),
        gpus=visible_gpus(),
        programs=programs or Programs(),
    )
    counts = f"{config.prefill} prefill + {config.decode} decode"
    console.stage("baton", f"{release()}   model {plan.served_name}   {counts}   device {config.device}")
    console.stage("logs", str(plan.run_dir))
    try:
        return LocalCluster(plan, console, backoff).run()
    except MemberFailed as failed:
        sys.stdout.flush()
        print("\n".join(failed.box), file=sys.stderr, flush=True)
        return EXIT_STARTUP_ERROR


def release() -> str:
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "(not installed)"


def check_ports(config: UpConfig) -> None:
    """Finds a taken port before anything is loaded.

    Raises:
        StartupError: names the port and the option that changes it.
    """
    seen: dict[int, str] = {}
    wanted = (("--port", config.host, config.port), ("--grpc-port", config.host, config.grpc_port))
    for flag, host, port in (*wanted, ("--control-port", "127.0.0.1", config.control_port)):
        if port and port in seen:
            raise StartupError(f"{seen[port]} and {flag} are both {port}; give them different ports")
        seen[port] = flag
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartupError(f"port {port} on {host} is in use; choose another with {flag}") from None
            raise StartupError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None


def open_run_dir(wanted: str) -> Path:
    """The directory of this run's logs: as asked, else a fresh one in the cache directory, else a temporary one.

    Raises:
        StartupError: the directory asked for cannot be made, or not be written to.
    """
    if wanted:
        path = Path(wanted).expanduser().resolve()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartupError(f"run directory {wanted} cannot be made: {error.strerror or error}") from None
        try:
            for name in ("cluster.json", "coordinator.json"):
                (path / name).unlink(missing_ok=True)  # of an earlier run: nobody shall take it for this one's
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise StartupError(f"run directory {wanted} cannot be used: {error}") from None
        return path
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        path = cache / "baton" / "runs" / name
        path.mkdir(parents=True, mode=0o700)
        return path
    except (OSError, RuntimeError):
        return Path(tempfile.mkdtemp(prefix=f"baton-{name}-"))

"""Processes of a cluster as forks of one process that has imported torch and transformers, which would take each of
them 1.4 s of processor time, or 3 s.

    process = ForkedProcess([sys.executable, "-m", "launch.cli", "up", ...], stdout=file, env=environment)

A fork differs from a process started with exec in what it has imported, and in nothing else that a test can see: it has
its own command line and environment, also in /proc, the file descriptors, signal handlers and session that Popen gives
a process, its parent, and the exit codes of `python -m` (tests/tools/test_forks.py compares both). Its own children are
forked, too, if they run one of `MODULES`: what a coordinator starts for templates and grammars, for example, is not.
A coordinator does not start itself again with exec, and so has no huge pages.

The test processes of `make test` are made here, too (`test_processes`): they are forks of the process of pytest that
starts them, which imports the same, once, and each forks its server before it has threads. Any other test process
starts its server, and imports twice.

Without arguments this module only imports what processes need: `make test` so compiles it once, while it installs.

A server forks, since a test process has threads. An intermediate process ends at once, so that the kernel gives its
child to the process that asked for it, which waits for it as for any other child.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from launch.child import Child
from tests.support.environment import set_environment

ROOT = Path(__file__).parents[2]
_OF_SUPPORT = "fault_up fault_worker load_part load_peak process_facts rank_process symmetric_ranks versioned"
MODULES = frozenset(
    {"launch.cli", "launch.agent", "coordinator", "batches", "prefill", "decode", "tests.transfer.peer"}
    | {f"tests.launch.fakes.{name}" for name in ("batches", "front", "up", "worker")}
    | {f"tests.support.{name}" for name in _OF_SUPPORT.split()}
)
IMPORTED = (
    *("torch", "baton.runtime.worker_ranks", "baton.runtime.health", "prefill.worker", "decode.worker"),
    *("decode.speculation.draft_model", "baton.engine.transformers_model", "launch.agent", "launch.cli", "launch.up"),
    *("coordinator.command", "coordinator.serving", "batches.serving", "tests.support.rank_pool"),
)
START_S = 120.0
RESTARTED = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
"""The variable by which a coordinator knows that it has started itself again, for huge pages (decision 0020)."""
ROOM_VARIABLE = "BATON_TEST_ROOM"
_COMMAND_ROOM, _ENVIRONMENT_ROOM = 16 << 10, 64 << 10
"""Bytes for the command lines and environments that forks show in /proc, in those of their server."""
_forked: list[socket.socket] = []
"""The connection to the server that this process has forked, if it has."""
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Order:
    """What to run, what Popen was asked for, and the cores of the thread that asked."""

    command: Sequence[str]
    environment: Mapping[str, str]
    cwd: str
    new_session: bool
    namespace: str
    cores: Sequence[int]


def may_fork(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a process may be forked: it runs one of `MODULES`, without code of a test's own."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    own = [path for path in paths if path and path not in sys.path and Path(path) != ROOT]
    runs = tuple(command[:2]) == (sys.executable, "-m") and command[2] in MODULES
    return sys.platform == "linux" and runs and not own


def start(command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a process as Popen does, forked if it may be."""
    popen = ForkedProcess if may_fork(command, env) else subprocess.Popen
    return popen(command, env=env, **options)


def run(command: Sequence[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a process to its end as subprocess.run does, with its output as text, forked if it may be."""
    shown = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start(command, env={**os.environ}, **shown, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, str(out), str(err))


class ForkedProcess(subprocess.Popen[bytes]):
    """A Popen whose process is forked by the server of this test process, and is a child of it as any other. It runs in
    a network namespace of /run/netns, if one is named."""

    def __init__(self, args: Sequence[str], *, namespace: str = "", **options: Any) -> None:
        self._namespace = namespace
        super().__init__(args, **options)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *given: Any) -> None:
        assert preexec_fn is None and not _Given(*given).pass_fds, "a server cannot do that"
        _start(self, args, _Given(*given), _server().start, self._namespace)


class _Given(NamedTuple):
    """The arguments of Popen._execute_child from the fifth on."""

    pass_fds: Any
    cwd: Any
    env: Any
    startupinfo: Any
    creationflags: Any
    shell: Any
    p2cread: int
    p2cwrite: int
    c2pread: int
    c2pwrite: int
    errread: int
    errwrite: int
    restore_signals: Any
    gid: Any
    gids: Any
    uid: Any
    umask: Any
    start_new_session: bool
    process_group: Any


def fork_children() -> None:
    """From now on this process and its forks fork what they start, as far as it runs `MODULES`."""
    by_exec: Any = Child._execute_child

    def execute_child(child: Child, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *given: Any) -> None:
        asked = _Given(*given)
        if may_fork(args, asked.env):
            _start(child, args, asked, lambda order, standard: fork(order, standard, asked.pass_fds, preexec_fn))
        else:
            by_exec(child, args, executable, preexec_fn, close_fds, *given)

    Child._execute_child = execute_child  # type: ignore[method-assign]


def _start(
    process: Any, args: Any, given: _Given, start: Callable[[Order, Sequence[int]], int], namespace: str = ""
) -> None:
    environment, cwd = dict(given.env or os.environ), os.path.abspath(given.cwd or ".")
    cores = sorted(os.sched_getaffinity(0))
    order = Order(list(args), environment, cwd, given.start_new_session, namespace, cores)
    process.pid = start(order, (given.p2cread, given.c2pwrite, given.errwrite))
    process._child_created = True
    process._close_pipe_fds(*given[6:12])


def fork(order: Order, standard: Sequence[int], keep: Collection[int], before: Callable[[], None] | None) -> int:
    """Returns the pid of a fork that runs `order`. `standard` has its stdin, stdout and stderr (-1: those of this
    process), `keep` the other file descriptors that it inherits; it calls `before` first."""
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    sys.stdout.flush()
    sys.stderr.flush()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # a handler of this process is not run
    if pid := os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return pid
    code = 255
    try:
        gc.freeze()  # nothing of this process is collected in the fork: it would close file descriptors
        atexit._clear()
        _become(order, standard, keep, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        code = _run(order.command)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _become(order: Order, standard: Sequence[int], keep: Collection[int], before: Callable[[], None] | None) -> None:
    os.sched_setaffinity(0, order.cores)
    if before is not None:
        before()
    if order.new_session:
        os.setsid()
    if order.namespace:
        enter_network(order.namespace)
    os.chdir(order.cwd)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, 3) if file >= 0 else -1 for file in standard]
    for number, copy in enumerate(copies):
        if copy >= 0:
            os.dup2(copy, number)
    for file in map(int, os.listdir("/proc/self/fd")):
        if file > 2 and file not in keep:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(file)
    for file in keep:
        os.set_inheritable(file, True)
    environment = dict(order.environment)
    if "coordinator" in order.command[2:4]:
        environment.setdefault(*RESTARTED)
    os.environ.clear()  # so that nothing refers to the strings in the memory that /proc shows
    os.environ.update(environment)
    unbuffered = bool(order.environment.get("PYTHONUNBUFFERED"))
    sys.stdout = sys.__stdout__ = _output(1, sys.stdout, unbuffered)
    sys.stderr = sys.__stderr__ = _output(2, sys.stderr, unbuffered)
    _show(order.command, environment)


def enter_network(namespace: str) -> None:
    """From now on the sockets of this thread are in a network namespace of /run/netns. Raises OSError."""
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    finally:
        os.close(fd)


def _output(file: int, like: Any, unbuffered: bool) -> io.TextIOWrapper:
    raw = open(file, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    line_buffering = not unbuffered and (file == 2 or raw.isatty())
    return io.TextIOWrapper(
        raw, like.encoding, like.errors, "\n", line_buffering=line_buffering, write_through=unbuffered
    )


def _show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Writes the command line and the environment where /proc shows them, as setproctitle does."""
    areas = list(map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]))
    variables = [f"{name}={value}" for name, value in environment.items()]
    for start, end, words in ((*areas[:2], command), (*areas[2:], variables)):
        data = b"".join(os.fsencode(word) + b"\0" for word in words)
        assert len(data) <= end - start, f"{len(data)} bytes do not fit into {end - start}"
        ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


def _run(command: Sequence[str]) -> int:
    """Runs `python -m module ...`; returns its exit code."""
    spec = importlib.util.find_spec(command[2])
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{command[2]}.__main__")
    assert spec is not None and spec.origin is not None
    loader: Any = spec.loader
    main = types.ModuleType("__main__")
    main.__dict__.update(__spec__=spec, __file__=spec.origin, __package__=spec.parent, __loader__=loader)
    sys.modules["__main__"] = main
    sys.argv, sys.orig_argv = [spec.origin, *command[3:]], list(command)
    code = 0
    try:
        exec(loader.get_code(spec.name), main.__dict__)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if e.code is not None and not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except Exception:  # as an interpreter that ends: it shows the error, and its exit code stays
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code & 0xFF


class _Server:
    """The client of the server, in a test process."""

    def __init__(self, control: socket.socket, process: object = None) -> None:
        self._lock, self._control, self._process = threading.Lock(), control, process
        self._control.settimeout(START_S)

    def start(self, order: Order, standard: Sequence[int]) -> int:
        files = [number if file < 0 else file for number, file in enumerate(standard)]
        process = ctypes.CDLL(None)
        with self._lock:
            process.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._control, [json.dumps(asdict(order)).encode()], files)
                pid = int(self._control.recv(32) or b"0")
            finally:
                process.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not pid:
            raise OSError("the server that forks has ended, or could not")
        return pid


@cache
def _server() -> _Server:
    """The server of this test process, which was made with it, or is started by its first fork."""
    if _forked:
        return _Server(_forked[0])
    control, theirs = _pair()
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    environment[ROOM_VARIABLE] = "x" * _ENVIRONMENT_ROOM
    command = [sys.executable, "-m", __name__, str(theirs.fileno()), "x" * _COMMAND_ROOM]
    options: dict[str, Any] = {"env": environment, "cwd": ROOT, "stdin": subprocess.DEVNULL}
    with theirs:
        return _Server(control, subprocess.Popen(command, pass_fds=[theirs.fileno()], **options))


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def test_processes() -> None:
    """Runs pytest in a process whose test processes are forks, with room for their command lines and environments in
    its own (tools/run_tests.py)."""
    sys.path[0] = str(ROOT)
    set_environment()
    prepare()
    fork_server(lambda: None)  # before there are threads
    import pytest
    from execnet.gateway_base import ThreadExecModel

    popen = types.SimpleNamespace(PIPE=subprocess.PIPE, Popen=ForkedProcess)
    ThreadExecModel.subprocess = popen  # type: ignore[assignment,misc]
    sys.argv = ["pytest", *sys.argv[2:]]
    sys.exit(pytest.console_main())


def fork_server(before: Callable[[], None]) -> None:
    """Forks the server of this process, which calls `before` first."""
    control, theirs = _pair()
    if not os.fork():
        control.close()
        null = os.open(os.devnull, os.O_RDWR)
        for file in (0, 1):  # they are connected to what reads the output of this process
            os.dup2(null, file)
        with contextlib.suppress(KeyboardInterrupt):
            before()
            serve(theirs)
        os._exit(0)
    theirs.close()
    _forked[:] = [control]


def import_all() -> None:
    for name in IMPORTED:
        importlib.import_module(name)


def prepare() -> None:
    """Imports what processes need, outside garbage collection."""
    gc.disable()
    os.environ.pop(ROOM_VARIABLE)
    given = dict(os.environ)
    os.environ.clear()  # libraries may keep pointers to its strings, which are not to be those that /proc shows
    os.environ.update(given)
    import_all()
    gc.collect()
    gc.freeze()
    gc.enable()


def serve(control: socket.socket) -> None:
    """Forks what is asked for, until the process that asks ends."""
    while True:
        message, files, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not message:
            return
        order = Order(**json.loads(message))
        reader, writer = os.pipe()
        if not (middle := os.fork()):
            pid = fork(order, files, (), partial(_await_end, os.getpid()))
            os.write(writer, str(pid).encode())
            os._exit(0)
        for file in (writer, *files):
            os.close(file)
        os.waitpid(middle, 0)
        control.send(os.read(reader, 32) or b"0")
        os.close(reader)


def _await_end(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.001)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        prepare()
        fork_children()
        serve(socket.socket(fileno=int(sys.argv[1])))
    else:
        import_all()

"""The processes that compute grammar masks for a worker, as its engine uses them.

A grammar of a client can need any amount of processor time, memory or stack for one mask: llguidance's limits do not
bound a row of its parser (decision 0021). So masks are computed in processes (`baton.runtime.grammar_process`) that the
kernel kills at a limit; then the mask's own sequence ends, and the automata of the others are built again from their
outputs.

One thread per process sends it a batch of requests at a time and waits for the answers, as `MaskQueue` decides. A
thread and its process are started when masks wait and no other process is idle.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from baton.engine.grammar_automaton import GrammarError, GrammarTooComplex, Masks, common_length
from baton.engine.mask_queue import OVERDUE_S, MaskQueue
from baton.runtime.frames import READY, FrameReader, MaskRequest, MasksComputed, encode

log = logging.getLogger("baton.grammars")

PROCESSES = 4
START_S = 60.0
ANSWER_S = 60.0
"""Of wall time for one mask, e.g. if its process was stopped. Its processor time has a limit of its own."""
_READ_BYTES = 1 << 20
BATCH_BYTES = 64 << 10  # of requests at a time
_NUMBERS = itertools.count()
_ENDED = "the sequence has ended"
_STARTER_DIED = "the process that starts others for grammars died"


@dataclass(eq=False)
class AutomatonHandle:
    """A sequence's automaton, as seen from the worker. State: the process that has it, by slot and generation (None
    before the first mask and after an error), and the output that it has consumed there; the processor time spent; and
    whether the sequence has ended."""

    grammar: str
    client: str
    number: int = field(default_factory=_NUMBERS.__next__)
    place: tuple[int, int] | None = None
    consumed: tuple[int, ...] = ()
    spent_s: float = 0.0
    ended: bool = False


@dataclass(eq=False)
class MaskJob:
    """The masks after an output of a sequence. `cpu_s` is the limit of processor time."""

    automaton: AutomatonHandle
    output: tuple[int, ...]
    drafts: tuple[int, ...]
    ends: tuple[int, ...]
    cpu_s: float
    future: Future[Masks] = field(default_factory=Future)


class _Died(Exception):
    """The process died, or did not answer."""


class _Starter:
    """The process that forks the others. State: it, the socket to it, whether it is ready, why it cannot be used, and
    whether this object was closed."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self._command = [sys.executable, "-m", "baton.runtime.grammar_process", str(directory), str(vocab_size)]
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._reason = ""
        self._closed = False

    def start(self) -> None:
        """Starts the process, without waiting until it is ready."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
            command = [*self._command, str(theirs.fileno()), str(os.getpid())]
            ours.settimeout(START_S)
            self._control, self._ready = ours, False
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
            )

    def fork(self) -> tuple[socket.socket, int]:
        """Returns the socket to a new process, and its pidfd.

        Raises:
            GrammarError: the tokenizer cannot be used.
            OSError: no process can be started.
        """
        with self._lock:
            try:
                return self._fork()
            except OSError:  # it may have been killed: another one is started, once
                self._end()
                return self._fork()

    def _fork(self) -> tuple[socket.socket, int]:
        if self._reason:
            raise GrammarError(self._reason)
        if self._closed:
            raise OSError("the processes for grammars were closed")
        if self._control is None:
            self.start()
        control = self._control
        if control is None:
            raise OSError(_STARTER_DIED)
        if not self._ready:
            message = control.recv(1 << 16)
            self._ready = message == READY
            if not message:
                raise OSError(_STARTER_DIED)
            if not self._ready:
                self._reason = message.decode()
                raise GrammarError(self._reason)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(control, [b"fork"], [theirs.fileno()])
            pid = int(control.recv(16) or b"0")
            if not pid:
                raise OSError(_STARTER_DIED)
            return ours, os.pidfd_open(pid)
        except OSError:
            ours.close()
            raise

    def close(self) -> None:
        """Ends the process and those that it started, for good."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        process, control, self.process, self._control = self.process, self._control, None, None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()  # its children receive SIGKILL, too
            process.wait()


class _Process:
    """One process. State: its socket and pidfd, and the numbers of automata to free with the next request."""

    def __init__(self, ours: socket.socket, pidfd: int) -> None:
        ours.settimeout(ANSWER_S)
        self._socket, self._pidfd = ours, pidfd
        self._frames = FrameReader()
        self.forgotten: deque[int] = deque()

    def answers(self, requests: Sequence[MaskRequest]) -> Iterator[MasksComputed]:
        """Raises _Died."""
        forgotten = tuple(self.forgotten.popleft() for _ in range(len(self.forgotten)))
        frames = [encode(replace(requests[0], forgotten=forgotten)), *map(encode, requests[1:])]
        try:
            while frames:
                # The process reads while it is idle; a batch that its socket holds cannot block both ends.
                batch, size = 1, len(frames[0])
                while batch < len(frames) and (size := size + len(frames[batch])) <= BATCH_BYTES:
                    batch += 1
                self._socket.sendall(b"".join(frames[:batch]))
                del frames[:batch]
                while batch:
                    data = self._socket.recv(_READ_BYTES)
                    if not data:
                        raise _Died
                    answers = self._frames.feed(data)
                    batch -= len(answers)
                    yield from answers
        except OSError as error:
            raise _Died from error

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._socket.close()
        os.close(self._pidfd)


class _MaskState:
    """What the threads share; they do not keep `MaskProcesses` alive. State: the queue, the threads, the number of idle
    ones, and each one's process and its generation."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self.starter = _Starter(directory, vocab_size)
        self.changed = threading.Condition()
        self.queue: MaskQueue[MaskJob] = MaskQueue()
        self.threads = 0
        self.idle = 0
        self.processes: dict[int, _Process] = {}
        self.generations = [0] * PROCESSES
        self.died = 0
        self.closed = False

    def submit(self, job: MaskJob) -> None:
        with self.changed:
            place = job.automaton.place
            self.queue.add(job.automaton.client, job, place[0] if place is not None else None)
            self._start_thread()
            self.changed.notify_all()

    def _start_thread(self) -> None:
        """Starts another thread if masks wait and no thread does. A waiting thread that was notified may take another
        mask than the one it was notified of, so this is called then, too."""
        if len(self.queue) and not self.idle and self.threads < PROCESSES:
            threading.Thread(target=self._run, args=(self.threads,), name="grammar", daemon=True).start()
            self.threads += 1

    def forget(self, automaton: AutomatonHandle) -> None:
        """Frees an automaton; kills its process if that is computing an overdue mask for it. It may interrupt any code
        of this class, as the callback of a weak reference."""
        automaton.ended = True
        with self.changed:
            self._free(automaton)
            for slot, process in self.processes.items():
                if any(job.automaton is automaton for job in self.queue.overdue(slot, time.monotonic())):
                    process.kill()

    def _free(self, automaton: AutomatonHandle) -> None:
        if automaton.place is None:
            return
        slot, generation = automaton.place
        if self.generations[slot] == generation and slot in self.processes:
            self.processes[slot].forgotten.append(automaton.number)

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            for process in self.processes.values():
                process.kill()
        self.starter.close()

    def _run(self, slot: int) -> None:
        """The thread of one process."""
        while jobs := self._next(slot):
            began = time.monotonic()
            left = deque(job for job in jobs if job.future.set_running_or_notify_cancel())
            try:
                while left:
                    self._compute(slot, left)
            except GrammarError as error:
                _fail(left, error)
            except Exception as error:
                if not self.closed:
                    log.error("masks cannot be computed: %s", error, exc_info=not isinstance(error, OSError))
                _fail(left, GrammarTooComplex(f"its masks could not be computed: {error}"))
            with self.changed:
                self.queue.ended(slot, time.monotonic() - began)
                self.changed.notify_all()
        with self.changed:
            process = self.processes.pop(slot, None)
        if process is not None:
            process.close()

    def _next(self, slot: int) -> tuple[MaskJob, ...]:
        with self.changed:
            while not self.closed:
                if jobs := self.queue.begin(slot, time.monotonic()):
                    self._start_thread()
                    return jobs
                self.idle += 1
                self.changed.wait(OVERDUE_S if len(self.queue) else None)
                self.idle -= 1
        return ()

    def _compute(self, slot: int, left: deque[MaskJob]) -> None:
        """Computes masks, and removes them from `left`, until they are complete or the process dies.

        Raises:
            GrammarError: no mask can be computed.
        """
        fresh = slot not in self.processes
        process = self._started(slot)
        for job in [job for job in left if job.automaton.ended]:
            left.remove(job)
            job.future.set_exception(GrammarError(_ENDED))
        began, requests = time.monotonic(), [self._request(slot, job) for job in left]
        try:
            for answer in process.answers(requests) if requests else ():
                fresh, began = False, time.monotonic()
                self._end(slot, left.popleft(), answer)
        except _Died:
            with self.changed:
                del self.processes[slot]
                self.generations[slot] += 1
                self.died += 1
            process.close()
            # A process may have been killed from outside, e.g. while it was idle: only a mask that exceeds the time, or
            # kills a process that was started for it, is at fault.
            job = left[0]
            if job.automaton.ended:
                _fail(left, GrammarError(_ENDED), 1)
            elif fresh or time.monotonic() - began >= job.cpu_s:
                reason = f"its masks exceed a limit: {job.cpu_s:.1f} s of processor time, memory, or stack"
                _fail(left, GrammarTooComplex(reason), 1)

    def _end(self, slot: int, job: MaskJob, answer: MasksComputed) -> None:
        automaton = job.automaton
        automaton.spent_s += answer.cpu_s
        if answer.error:
            automaton.place = None
            job.future.set_exception((GrammarTooComplex if answer.exceeds_limit else GrammarError)(answer.error))
        else:
            automaton.place, automaton.consumed = (slot, self.generations[slot]), job.output
            job.future.set_result([None if mask is None else np.frombuffer(mask, np.uint8) for mask in answer.masks])

    def _started(self, slot: int) -> _Process:
        process = self.processes.get(slot)
        if process is None:
            process = _Process(*self.starter.fork())
            with self.changed:
                self.processes[slot] = process
        return process

    def _request(self, slot: int, job: MaskJob) -> MaskRequest:
        automaton = job.automaton
        if automaton.place == (slot, self.generations[slot]):
            grammar, kept = "", common_length(automaton.consumed, job.output)
        else:
            with self.changed:
                self._free(automaton)
            grammar, kept = automaton.grammar, 0
        return MaskRequest(automaton.number, grammar, kept, job.output[kept:], job.drafts, job.ends, job.cpu_s)


def _fail(left: deque[MaskJob], error: GrammarError, count: int | None = None) -> None:
    for _ in range(len(left) if count is None else count):
        left.popleft().future.set_exception(error)


class MaskProcesses:
    """The processes, which end with this object."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self._state = _MaskState(directory, vocab_size)
        self.close = weakref.finalize(self, self._state.close)

    def start(self) -> None:
        """Begins to load the tokenizer, without waiting for it."""
        self._state.starter.start()

    def submit(self, job: MaskJob) -> None:
        """Computes a mask. The future of `job` gets a GrammarError if that fails."""
        self._state.submit(job)

    def forget(self, automaton: AutomatonHandle) -> None:
        self._state.forget(automaton)

    @property
    def died(self) -> int:
        """Processes that were killed, e.g. at a limit."""
        return self._state.died

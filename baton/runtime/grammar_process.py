"""The process that computes grammar masks for a worker, and the one that starts it.

    python -m baton.runtime.grammar_process DIRECTORY VOCAB_SIZE FD PARENT_PID

loads the tokenizer, replies "ready", or why it cannot be used, on the socket FD (Unix, SOCK_SEQPACKET), and then forks
a child for every socket that it receives there, within milliseconds, and replies with its pid. It ends when its parent
closes the socket, or dies.

A child answers one `MaskRequest` after another on its own socket. It has limits that the kernel enforces even while
llguidance computes: processor time for each request, memory, and a stack; a child that exceeds one dies.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from baton.engine.grammar_automaton import (
    STACK_BYTES,
    Automaton,
    GrammarError,
    GrammarTooComplex,
    Lexers,
    load_tokenizer,
)
from baton.runtime.frames import READY, FrameReader, MaskRequest, MasksComputed, encode
from baton.runtime.process import die_with_parent, set_death_signal

if TYPE_CHECKING:
    from llguidance import LLTokenizer

NICE = 10
"""So that the compute thread of the worker has priority."""
PROCESS_BYTES = 4 << 30
_READ_BYTES = 1 << 20


def main() -> None:
    die_with_parent(int(sys.argv[4]))  # not only by the socket, which is not read while the tokenizer loads
    directory, vocab_size, control = Path(sys.argv[1]), int(sys.argv[2]), socket.socket(fileno=int(sys.argv[3]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the worker drains, and needs masks meanwhile
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_AS, (PROCESS_BYTES, PROCESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # the worker has ended
        try:
            tokenizer = load_tokenizer(directory, vocab_size)
        except GrammarError as error:
            control.send(str(error).encode())
            return
        gc.freeze()  # children share these pages
        control.send(READY)
        _fork_on_request(control, tokenizer)


def _fork_on_request(control: socket.socket, tokenizer: LLTokenizer) -> None:
    while True:
        data, sockets, *_ = socket.recv_fds(control, 16, 1)
        if not data:
            return
        pid = os.fork()
        if not pid:
            set_death_signal()
            control.close()
            _serve_on_a_thread(socket.socket(fileno=sockets[0]), tokenizer)
            os._exit(0)
        os.close(sockets[0])
        control.send(str(pid).encode())


def _serve_on_a_thread(parent: socket.socket, tokenizer: LLTokenizer) -> None:
    """Serves on a thread, since only a thread's stack has a size of our choice."""
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(parent, tokenizer))
    thread.start()
    thread.join()


def serve(parent: socket.socket, tokenizer: LLTokenizer) -> None:
    """Answers requests until the parent closes the socket."""
    automata, frames = Automata(tokenizer), FrameReader()
    while data := parent.recv(_READ_BYTES):
        for request in frames.feed(data):
            signal.setitimer(signal.ITIMER_PROF, request.cpu_s)  # SIGPROF kills by default
            answer = automata.answer(request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            try:
                parent.sendall(encode(answer))
            except OSError:
                return


class Automata:
    """State: the lexers, and the automata by number."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._lexers = Lexers(tokenizer)
        self._automata: dict[int, Automaton] = {}

    def answer(self, request: MaskRequest) -> MasksComputed:
        began = time.process_time()
        for number in request.forgotten:
            self._automata.pop(number, None)
        try:
            if request.grammar:
                self._automata[request.automaton] = Automaton(self._lexers, request.grammar)
            automaton = self._automata[request.automaton]
            output = automaton.consumed[: request.kept] + request.tokens
            masks = automaton.masks(output, request.drafts, request.ends)
        except GrammarError as error:
            self._automata.pop(request.automaton, None)
            too_complex = isinstance(error, GrammarTooComplex)
            return MasksComputed((), time.process_time() - began, str(error), too_complex)
        return MasksComputed(tuple(masks), time.process_time() - began)


if __name__ == "__main__":
    main()

"""The processes that compute masks: hostile grammars, processes that are killed, and their end."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from baton.engine.grammar_automaton import Automaton as PlainAutomaton
from baton.engine.grammar_automaton import (
    GrammarError,
    GrammarTooComplex,
    Lexers,
    Masks,
    compile_grammar,
    load_tokenizer,
)
from baton.engine.mask_processes import AutomatonHandle, MaskJob, MaskProcesses
from baton.engine.mask_queue import BATCH
from baton.runtime.model_source import builtin_directory
from tests.engine.test_grammars import LETTERS, hostile

VOCAB, END = 4096, 1
WAIT_S = 120.0
AMBIGUOUS = 'start: s\ns: "z" | ' + " | ".join(f"r{i}" for i in range(100)) + "\n"
AMBIGUOUS += "\n".join(f'r{i}: "q" s' for i in range(100))
"""After n times q, one z completes all rules at all n places: a single row of llguidance's parser, 87 s for 600 of them
under any of its limits."""


@pytest.fixture
def processes() -> Iterator[MaskProcesses]:
    processes = MaskProcesses(builtin_directory("target"), VOCAB)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return load_tokenizer(builtin_directory("target"), VOCAB)


def ask(
    processes: MaskProcesses, automaton: AutomatonHandle, output: tuple[int, ...] = (), cpu_s: float = 20.0
) -> Future[Masks]:
    job = MaskJob(automaton, output, (), (END,), cpu_s)
    processes.submit(job)
    return job.future


def ids(tokenizer: LLTokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.tokenize_str(text))


def test_hostile_masks_are_killed_at_their_limit_and_others_go_on(
    processes: MaskProcesses, tokenizer: LLTokenizer
) -> None:
    """Compiling them, and the masks of the first tokens, take no time."""
    grammar, begun = hostile(300, "x" * 40), ids(tokenizer, "x" * 40 + "|")
    compile_grammar(tokenizer, grammar)
    attacks = [AutomatonHandle(grammar, "attacker") for _ in range(4)]
    for attack in attacks:
        ask(processes, attack, begun[:2]).result(WAIT_S)
    pending = [ask(processes, attack, begun, cpu_s=0.5) for attack in attacks]
    other = AutomatonHandle(LETTERS, "other")
    output: tuple[int, ...] = ()
    for token in ids(tokenizer, "ab"):
        ask(processes, other, output).result(WAIT_S)
        output += (token,)
    for future in pending:
        with pytest.raises(GrammarTooComplex, match="of processor time"):
            future.result(WAIT_S)
    assert processes.died == 4
    (bits,) = ask(processes, other, output).result(WAIT_S)
    (expected,) = PlainAutomaton(Lexers(tokenizer), LETTERS).masks(output, (), (END,))
    assert bits is not None and bits.tobytes() == expected


def test_one_row_of_the_parser_is_killed_although_no_limit_of_llguidance_ends_it(
    processes: MaskProcesses, tokenizer: LLTokenizer
) -> None:
    attack = AutomatonHandle(AMBIGUOUS, "attacker")
    with pytest.raises(GrammarTooComplex, match="of processor time"):
        ask(processes, attack, ids(tokenizer, "q") * 300, cpu_s=1.0).result(WAIT_S)
    assert processes.died == 1


def test_masks_of_a_tenant_are_computed_while_those_of_another_are_overdue(
    processes: MaskProcesses, tokenizer: LLTokenizer
) -> None:
    ended: list[str] = []
    begun = ids(tokenizer, "q") * 600
    for _ in range(6):
        attack = ask(processes, AutomatonHandle(AMBIGUOUS, "attacker"), begun, cpu_s=600.0)
        attack.add_done_callback(lambda _: ended.append("attacker"))
    for number in range(8):
        ask(processes, AutomatonHandle(LETTERS, f"tenant {number}")).result(WAIT_S)
        ended.append("tenant")
    assert ended[:8] == ["tenant"] * 8


def test_mask_is_not_left_when_the_notified_thread_takes_another(
    processes: MaskProcesses, tokenizer: LLTokenizer
) -> None:
    """The only idle thread takes the attacker's second mask: no submission follows that would start a thread."""
    ask(processes, AutomatonHandle(LETTERS, "a")).result(WAIT_S)
    begun = ids(tokenizer, "q") * 600
    with processes._state.changed:  # no thread takes one before all are submitted
        attacks = [ask(processes, AutomatonHandle(AMBIGUOUS, "attacker"), begun, cpu_s=600.0) for _ in range(2 * BATCH)]
        other = ask(processes, AutomatonHandle(LETTERS, "other"))
    other.result(WAIT_S)
    assert not any(attack.done() for attack in attacks)


def test_overdue_mask_of_a_sequence_that_ended_is_not_finished(
    processes: MaskProcesses, tokenizer: LLTokenizer
) -> None:
    attack = AutomatonHandle(hostile(300, "xx"), "attacker")
    ask(processes, attack).result(WAIT_S)
    future = ask(processes, attack, ids(tokenizer, "xx|"), cpu_s=WAIT_S)
    while not processes._state.queue.overdue(0, time.monotonic()):
        wait([future], 0.01)
    processes.forget(attack)
    with pytest.raises(GrammarError, match="has ended"):
        future.result(WAIT_S)
    assert processes.died == 1


def test_deep_recursion_ends_only_its_own_request(processes: MaskProcesses, tokenizer: LLTokenizer) -> None:
    chain = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"'
    with pytest.raises(GrammarTooComplex, match="stack"):
        ask(processes, AutomatonHandle(chain, "a")).result(WAIT_S)
    assert processes.died == 1, "a process that was started for it"
    ask(processes, AutomatonHandle(LETTERS, "b")).result(WAIT_S)


def test_chain_of_rules_that_the_coordinator_admits_does_not_overflow_the_stack(processes: MaskProcesses) -> None:
    chain = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(900)) + '\nr900: "a"'
    ask(processes, AutomatonHandle(chain, "a")).result(WAIT_S)


def test_automata_are_built_again_when_a_process_was_killed_while_idle(
    processes: MaskProcesses, tokenizer: LLTokenizer
) -> None:
    (a,) = ids(tokenizer, "a")
    automaton = AutomatonHandle(LETTERS, "a")
    ask(processes, automaton).result(WAIT_S)
    processes._state.processes[0].kill()
    (bits,) = ask(processes, automaton, (a, a)).result(WAIT_S)
    assert bits is not None and bits[END >> 3] & 1 << (END & 7)
    assert processes.died == 1


def test_the_process_that_starts_others_is_started_again(processes: MaskProcesses) -> None:
    ask(processes, AutomatonHandle(LETTERS, "a")).result(WAIT_S)
    starter = processes._state.starter.process
    assert starter is not None
    starter.kill()  # not waited for: its end is seen on its socket
    processes._state.processes[0].kill()
    ask(processes, AutomatonHandle(LETTERS, "b")).result(WAIT_S)
    assert processes._state.starter.process is not starter


def test_processes_that_cannot_be_started_end_requests_with_one_line(
    processes: MaskProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    processes._state.starter._command = ["/bin/false"]
    with pytest.raises(GrammarTooComplex, match=r"could not be computed: .* died"):
        ask(processes, AutomatonHandle(LETTERS, "a")).result(WAIT_S)
    (record,) = caplog.records
    assert "masks cannot be computed" in record.getMessage() and not record.exc_info


def test_unusable_tokenizer_is_the_reason(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    processes = MaskProcesses(tmp_path, VOCAB)
    for _ in range(2):
        with pytest.raises(GrammarError, match="this tokenizer"):
            ask(processes, AutomatonHandle(LETTERS, "a")).result(WAIT_S)
    first = processes._state.starter.process
    with pytest.raises(GrammarError, match="this tokenizer"):
        ask(processes, AutomatonHandle(LETTERS, "a")).result(WAIT_S)
    assert processes._state.starter.process is first, "it is not started again and again"
    processes.close()


STARTS_AND_DIES = """
import os, sys, time
from pathlib import Path
from baton.engine.mask_processes import MaskProcesses
processes = MaskProcesses(Path(sys.argv[1]), 4096)
processes.start()
time.sleep(float(sys.argv[2]))
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("while_it_loads", [False, True])
def test_a_process_that_loads_the_tokenizer_ends_when_its_parent_is_killed(
    while_it_loads: bool, tmp_path: Path
) -> None:
    """Or before that: its parent may die before it has requested the parent-death signal."""
    os.mkfifo(tokenizer := tmp_path / "tokenizer.json")  # whoever reads it waits for a writer, and then for its end
    command = [sys.executable, "-c", STARTS_AND_DIES, str(tmp_path), str(WAIT_S if while_it_loads else 0)]
    writer = None
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        try:
            if while_it_loads:
                until = time.monotonic() + WAIT_S
                while writer is None and time.monotonic() < until:
                    with contextlib.suppress(OSError):  # nobody reads yet
                        writer = os.open(tokenizer, os.O_WRONLY | os.O_NONBLOCK)
                    time.sleep(0.02)
                assert writer is not None
                parent.kill()
            assert select.select([parent.stdout], [], [], WAIT_S / 4)[0], "no process has the pipe open any more"
        finally:
            parent.kill()
            with contextlib.suppress(OSError):  # nobody reads any more
                os.close(os.open(tokenizer, os.O_WRONLY | os.O_NONBLOCK) if writer is None else writer)


def test_processes_end_with_their_owner() -> None:
    processes = MaskProcesses(builtin_directory("target"), VOCAB)
    ask(processes, AutomatonHandle(LETTERS, "a")).result(WAIT_S)
    starter = processes._state.starter.process
    child = os.dup(processes._state.processes[0]._pidfd)
    owner = weakref.ref(processes)
    del processes
    gc.collect()
    assert owner() is None and starter is not None and starter.poll() == -signal.SIGKILL
    assert select.select([child], [], [], WAIT_S)[0], "a pidfd is readable once its process has ended"
    os.close(child)

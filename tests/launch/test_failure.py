from __future__ import annotations

import signal

import pytest

from baton.runtime.options import EXIT_STARTUP_ERROR
from launch.failure import Failure, box, describe_exit
from tests.support.launchers import find_box


def failure(code: int = 1, error: str = "it broke") -> Failure:
    return Failure("prefill-0", "prefill, rank 1 of 2, pid 7", "node-b", code, error)


def test_a_box_names_role_rank_host_code_reason_and_remedy() -> None:
    lines = box(failure(EXIT_STARTUP_ERROR, "tensor x\n  is damaged"))
    assert len({len(line) for line in lines}) == 1
    text = "\n".join(lines)
    for part in ("prefill-0 failed", "rank 1 of 2", "node-b", "exit code 3", "tensor x is damaged", "fix the cause"):
        assert part in text


def test_long_words_are_not_split_and_long_texts_are_wrapped() -> None:
    path = "/" + "a" * 150
    lines = box(failure(error=f"{path} is missing " + "and " * 60))
    assert any(path in line for line in lines) and len({len(line) for line in lines}) == 1 and len(lines) > 7


@pytest.mark.parametrize(
    ("code", "words"),
    [(-signal.SIGKILL, "out of memory"), (-signal.SIGSEGV, "native code"), (1, "read the log"), (4, "its own node")],
)
def test_advice_depends_on_the_exit_code(code: int, words: str) -> None:
    assert words in failure(code).advice


def test_last_complete_box_of_a_log_is_found() -> None:
    first, second = box(failure(error="one")), box(failure(error="two"))
    assert find_box(["noise", *first, "more", *second, "after", second[0]]) == second
    assert find_box(["noise", second[0], second[1]]) == [] and find_box([]) == []


def test_exit_codes_are_described() -> None:
    assert [describe_exit(code) for code in (1, -9, 137, 128)] == [
        "exit code 1",
        "killed by SIGKILL",
        "killed by SIGKILL",
        "exit code 128",
    ]

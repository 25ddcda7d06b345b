"""One seed is one run: its trace is the same in every process, and its command shows why it failed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

import sim.client
import sim.seeds
from baton.core.request import GenerateRequest, TokenLogprob
from sim.__main__ import main
from sim.engine import expected
from sim.loop import Trace
from sim.seeds import Mode, run_seed


def test_one_seed_gives_one_trace_in_every_process() -> None:
    lines = set()
    for hash_seed in ("0", "1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "sim", "--seed", "11", "--trace"],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            timeout=60,
            check=True,
        )
        lines.add(done.stdout)
    assert len(lines) == 1 and len(lines.pop().splitlines()) > 200


def digest(seed: int, mode: Mode) -> str:
    return run_seed(seed, mode, trace=Trace()).digest


def test_seeds_and_modes_differ_and_a_repetition_in_the_same_process_does_not() -> None:
    digests = [digest(seed, mode) for seed in (1, 2) for mode in sim.seeds.MODES]
    assert len(set(digests)) == 4
    assert [digest(seed, mode) for seed in (1, 2) for mode in sim.seeds.MODES] == digests


def test_a_run_without_a_trace_is_the_same_run() -> None:
    for mode in sim.seeds.MODES:
        traced, plain = run_seed(3, mode, trace=Trace(keep=True)), run_seed(3, mode)
        assert traced.lines and not plain.lines
        assert replace(traced, digest="", lines=[]) == plain and plain.events > 200


def test_wrong_token_fails_the_seed_and_the_command_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def other(request: GenerateRequest) -> tuple[list[int], list[TokenLogprob]]:
        tokens, scores = expected(request)
        return [*(token + 1 for token in tokens[:1]), *tokens[1:]], scores

    monkeypatch.setattr(sim.client, "expected", other)
    assert main(["--seeds", "3", "--mode", "safety", "--stop"]) == 1
    shown = capsys.readouterr().out
    assert "seed 1 safety: FAILED InvariantError" in shown and "python -m sim --seed 1 --mode safety --trace" in shown


def test_request_that_never_ends_fails_a_liveness_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim.seeds, "LIVENESS_S", -1.0)
    assert any("not over" in run_seed(seed, "liveness").error for seed in range(1, 10))


def test_a_negative_window_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--seed", "1", "--window", "-3"])
    assert "--window must be 0 or more, not -3" in capsys.readouterr().err

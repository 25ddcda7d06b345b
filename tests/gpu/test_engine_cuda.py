"""The engine on a CUDA device against itself on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from baton.core.request import SamplingParams
from baton.core.step import Draw
from decode.speculation.engine import SpeculativeEngine
from tests.engine.test_propose_at_once import PENALTY, WORK, draft_rows, draft_tokens
from tests.support.checkpoints import ARCHS, Arch, make_checkpoint
from tests.support.engine_driver import Job, all_logits, random_tokens, run, tiny_runner
from tests.support.one_gpu import DEVICE, ON_GPU, REHEARSAL
from tests.support.sampler_cases import PARAMS, plain, rows

pytestmark = ON_GPU


@pytest.mark.parametrize("arch", ARCHS)
def test_float32_logits_equal_the_cpu(tmp_path: Path, arch: Arch) -> None:
    model_dir = make_checkpoint(tmp_path, arch)
    tokens = random_tokens(150)
    expected = all_logits(tiny_runner(model_dir, kernels="torch"), tokens, [150])
    runner = tiny_runner(model_dir, device=DEVICE)
    for chunks in ([150], [1], [7, 40, 3]):
        assert torch.allclose(all_logits(runner, tokens, chunks), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_a_mixed_batch_in_bfloat16_is_finite_and_repeatable(tmp_path: Path, arch: Arch) -> None:
    runner = tiny_runner(make_checkpoint(tmp_path, arch, dtype="bfloat16"), device=DEVICE, dtype="bfloat16")
    assert runner.dtype_name == "bfloat16"
    outputs = []
    for _ in range(2):
        jobs = [Job(random_tokens(n, seed=n), 20, chunk=13) for n in (1, 5, 40, 90)]
        run(runner, jobs)
        assert all(torch.isfinite(logits).all() for job in jobs for logits in job.logits)
        outputs.append([job.output for job in jobs])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_tokens_chosen_on_the_device_are_those_of_the_plain_sampler(params: dict[str, float]) -> None:
    from baton.engine.kernels.sampling import decide

    count = 2 if REHEARSAL else 40  # Triton's interpreter is slow
    for vocab in (65,) if REHEARSAL else (65, 4096):
        for name, row in rows(vocab).items():
            draws = [
                Draw(SamplingParams(**{"temperature": 0.8, "seed": 7, **params}), 0, index) for index in range(count)
            ]
            tokens = decide(torch.from_numpy(row).to(DEVICE).expand(count, -1), draws).tolist()
            expected = [plain(row, draw) for draw in draws]
            assert all(token in (-1, right) for token, right in zip(tokens, expected, strict=True)), name
            assert tokens == expected or (name == "equal" and params.get("top_k") == 50), name


def test_captured_decode_steps_equal_launched_ones(tmp_path: Path) -> None:
    """The same work with and without graphs, rows of one length and of several."""
    model_dir = make_checkpoint(tmp_path, "llama")
    outputs = []
    for decode_rows in (8, 0):
        runner = tiny_runner(model_dir, device=DEVICE, decode_rows=decode_rows)
        jobs = [Job(random_tokens(n, seed=n), 30, chunk=64) for n in (5, 40, 90, 17, 3)]
        run(runner, jobs)
        outputs.append([job.output for job in jobs])
    assert outputs[0] == outputs[1]


def test_draft_tokens_of_one_call_equal_those_of_one_step_for_each(tmp_path: Path) -> None:
    """In float32, where passes with other rows differ by too little to change any of these tokens."""
    model_dir = make_checkpoint(tmp_path, "llama")
    fast, slow = (tiny_runner(model_dir, device=DEVICE) for _ in range(2))
    assert fast.can_propose or REHEARSAL
    slow._propose = None
    found, expected = (draft_tokens(runner, draft_rows(runner, WORK)) for runner in (fast, slow))
    assert found == expected and (fast.propose_calls, slow.propose_calls) == (1, 0)


@contextmanager
def no_waits() -> Iterator[None]:
    """Makes torch raise an error when the host waits for the device implicitly."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(REHEARSAL, reason="the CPU computes a step when it is launched")
def test_a_step_with_a_draft_waits_once(tmp_path: Path) -> None:
    """From the draft's first pass to the copies nothing makes the host wait, or torch would raise an error. In float32,
    as above."""
    model_dir = make_checkpoint(tmp_path, "llama")
    target, draft = (tiny_runner(model_dir, device=DEVICE, decode_rows=8) for _ in range(2))
    for work in (WORK, (*WORK, (PENALTY, 20, 2, 4)), WORK[:1]):
        plan = draft_rows(draft, work)
        assert plan == draft_rows(target, work, of_target=True)
        engine = SpeculativeEngine(target, draft)
        engine.step(plan)  # warm-up of these shapes
        before = target.launches.waits
        with no_waits():
            found = engine.step(plan)
        assert target.launches.waits == before + 1 and 0.0 < found.draft_s < found.elapsed_s
        target.launches_ahead = False
        expected = engine.step(plan)
        target.launches_ahead = True
        assert (found.sampled, found.draft_tokens) == (expected.sampled, expected.draft_tokens)

"""Models of which only some layers have a window, on a real engine: tokens are transformers' own while blocks are given
back, shared, and taken from preempted sequences."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from baton.engine.loading import load_runner
from baton.engine.options import EngineOptions
from baton.engine.runner import Runner
from decode.scheduler import DecodeScheduler
from decode.speculation.policy import Speculation
from decode.speculation.step_cost import StepModel
from tests.support.builders import make_request
from tests.support.transformers_models import generated, make_transformers_checkpoint

WINDOW, BLOCK, STEP, COUNT = 8, 4, 16, 24


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runner]:
    kind, layers = request.param
    model = tmp_path_factory.mktemp(kind) / "m"
    make_transformers_checkpoint(model, kind, sliding_window=WINDOW, num_hidden_layers=layers)
    options = EngineOptions(model_dir=model, dtype="float32", block_size=BLOCK, kv_memory_bytes=1 << 22)
    return model, load_runner(options)


@pytest.mark.parametrize(
    ("loaded", "prefix_cache"),
    [
        (("gemma3_text", 6), True),
        (("gpt_oss", 4), False),
        pytest.param(("gemma3_text", 6), False, marks=pytest.mark.long),
        pytest.param(("gpt_oss", 4), True, marks=pytest.mark.long),
    ],
    indirect=["loaded"],
)
def test_preempted_sequences_that_share_a_prefix_generate_what_transformers_does(
    loaded: tuple[Path, Runner], prefix_cache: bool
) -> None:
    model, runner = loaded
    source = random.Random(1)
    common = source.choices(range(3, 256), k=60)
    prompts = [(*common[: 60 - n], *source.choices(range(3, 256), k=30 + n)) for n in range(3)]
    speculation = Speculation(model=StepModel(step_tokens=STEP))
    scheduler = DecodeScheduler(runner.layout, runner.num_blocks, 3, speculation, prefix_cache=prefix_cache)
    window, total = scheduler.window, scheduler.blocks.num_blocks
    sequences = [
        scheduler.submit(make_request(f"r{number}", prompt, COUNT, eos=()), 0.0)
        for number, prompt in enumerate(prompts)
    ]
    steps = most = 0
    while scheduler.num_sequences:
        steps += 1
        plan = scheduler.begin_step(steps * 0.01)
        assert plan is not None and steps < 1000
        most = max(most, total - scheduler.blocks.num_free)
        scheduler.finish_step(runner.step(plan), steps * 0.01)
        scheduler.check()
        if steps in (8, 24):
            scheduler._preempt(next(s for s in scheduler.sequences.values() if s.block_ids))
    assert [s.output for s in sequences] == generated(model, prompts, COUNT)
    assert scheduler.preemptions == 2 and bool(scheduler.prompt_tokens_cached) == prefix_cache
    assert most <= 3 * window.max_blocks(90 + COUNT, STEP) < 3 * runner.layout.blocks_for(90 + COUNT)
    assert scheduler.cache.blocks_given_back >= 3 * window.sliding * (90 - WINDOW) // BLOCK // 2

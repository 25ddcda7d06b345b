"""Tries every causal language model that transformers implements and writes the outcome of each to launch/models.json,
from which `baton models` and docs/models.md take their tables.

    python -m benchmarks.served_models [TYPE ...]        all, or some of them again

Each is a tiny random checkpoint in float32, computed as in tests/engine/test_transformers.py: three prompts in chunks
shorter than they are, beside decode steps, in scattered blocks. It takes an hour on two busy cores.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from launch.served_models import FILE

LIMIT_S = 300.0
PROMPTS, NEW_TOKENS = (37, 11, 24), 24


def outcome(kind: str) -> tuple[str, str]:
    """Returns "equal", "differs", "refused" or "not tried", and the reason of the other three."""
    from baton.core.errors import StartupError
    from tests.support.engine_driver import Job, random_tokens, run, tiny_runner
    from tests.support.transformers_models import generated, make_transformers_checkpoint

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / kind
        try:
            make_transformers_checkpoint(path, kind)
        except Exception as error:  # whatever the code of an architecture raises for sizes that it was not meant for
            refused = refused_by_config(path, kind)
            return ("refused", refused) if refused else ("not tried", f"no tiny checkpoint: {_line(error)}")
        prompts = [random_tokens(length, seed) for seed, length in enumerate(PROMPTS)]
        try:
            runner = tiny_runner(path, model_impl="transformers", block_size=4)
        except StartupError as error:
            return "refused", error.message.removeprefix(f"{kind}: ").removeprefix("not served: ")
        jobs = [Job(prompt, NEW_TOKENS, chunk=7) for prompt in prompts]
        run(runner, jobs, seed=1)
        outputs = [job.output for job in jobs]
        if outputs == generated(path, prompts, NEW_TOKENS):
            return "equal", ""
        whole = [likeliest(path, prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
        return (
            "differs",
            f"the tokens of a forward pass without a cache are {'equal' if whole == outputs else 'others'}",
        )


def refused_by_config(path: Path, kind: str) -> str:
    """Returns why the `config.json` of an architecture's own sizes is refused; empty if it is not, or has none."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    from baton.core.errors import StartupError
    from baton.engine.checkpoint import read_model_config

    try:
        config = AutoConfig.for_model(kind)
    except Exception:  # some have no sizes of their own
        return ""
    config.architectures = [NAMES[kind]] if isinstance(NAMES[kind], str) else list(NAMES[kind])
    config.save_pretrained(path)
    try:
        read_model_config(path, "transformers")
    except StartupError as error:
        return error.message
    return ""


def likeliest(path: Path, prompt: list[int], output: list[int]) -> list[int]:
    """The likeliest token at each position of an output, by one forward pass without a cache."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output]), use_cache=False).logits[0]
    tokens: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return tokens


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _report(kind: str, end: Connection) -> None:
    try:
        end.send(outcome(kind))
    except Exception as error:
        end.send(("not tried", _line(error)))


def tried(kind: str) -> tuple[str, str]:
    """The outcome of a process of its own, which may take LIMIT_S."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(kind, theirs))
    process.start()
    theirs.close()
    try:
        answer: tuple[str, str] = mine.recv() if mine.poll(LIMIT_S) else ("not tried", f"took more than {LIMIT_S:g} s")
    except EOFError:
        answer = ("not tried", "its process ended")
    process.kill()
    process.join()
    return answer


def main(kinds: list[str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM  # noqa: F401 (imported once, before the forks)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    from baton.engine.transformers_parallel import PROVEN

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    rows = {row["type"]: row for row in json.loads(FILE.read_text())} if FILE.exists() else {}
    for kind in kinds or sorted(NAMES):
        name = NAMES[kind]
        result, reason = tried(kind)
        rows[kind] = {"type": kind, "class": name if isinstance(name, str) else name[0], "outcome": result}
        rows[kind] |= {"reason": reason} if reason else {}
        rows[kind] |= {"ranks": 2} if kind in PROVEN else {}
        print(kind, result, reason, flush=True)
        ordered = [json.dumps(rows[key]) for key in sorted(rows)]
        FILE.write_text("[\n" + ",\n".join(ordered) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1:])

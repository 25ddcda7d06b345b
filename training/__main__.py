"""Trains and exports the built-in model pair. baton/builtin/README.md describes the models and the cost of training.

    python -m training                 all stages, one after the other
    python -m training STAGE           one of them; each can be repeated

Stages: tokenizer, target, draft (from random weights), write (text by the target, with its distributions), tune (the
exported draft, on that text), card. An interrupted training or writing resumes when the same command is run again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer

from training.data import Batches, held_out_documents, load_corpus, train_tokenizer, training_documents
from training.files import write_tokenizer
from training.loop import (
    DRAFT_LENGTHS,
    TARGET_LENGTHS,
    TEXT_SHARE,
    TUNE_LENGTHS,
    Run,
    Source,
    distil_loss,
    first_then,
    keep_record,
    taught_loss,
    text_loss,
    train,
)
from training.model import DRAFT, TARGET, Llama, export, load_exported, product_type, shrunk
from training.sample import target_documents
from training.written import TaughtBatches, write

STAGES = ("tokenizer", "target", "draft", "write", "tune", "card")
PACKAGE = Path(__file__).resolve().parent.parent / "baton" / "builtin"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="*", metavar="STAGE", help=f"{', '.join(STAGES)}; all, if none is given")
    parser.add_argument("--out", type=Path, default=PACKAGE, help="where target/ and draft/ are written")
    parser.add_argument("--work", type=Path, default=Path("runs/builtin"), help="where checkpoints are kept")
    parser.add_argument("--steps", type=int, default=0, help="length of the schedule (0: the default of the stage)")
    parser.add_argument("--minutes", type=float, default=0.0, help="end the schedule after this time at the latest")
    parser.add_argument("--tokens-per-step", type=int, default=0, help="0: the default of the stage")
    parser.add_argument("--tokens-per-pass", type=int, default=4096, help="tokens in one forward and backward pass")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--written-tokens", type=int, default=0, help="text by the target (0: the default of the stage)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile (no C++ compiler needed)")
    arguments = parser.parse_args()
    if unknown := set(arguments.stage) - set(STAGES):
        parser.error(f"no stage {', '.join(sorted(unknown))}")
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    for stage in arguments.stage or STAGES:
        run_stage(stage, arguments)


def run_stage(stage: str, arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)  # a stage gives the same weights alone and after the others
    if stage == "tokenizer":
        tokenizer = train_tokenizer(load_corpus())
        for folder in ("target", "draft"):
            write_tokenizer(tokenizer, arguments.out / folder)
    elif stage == "write":
        target = load_exported(arguments.out / "target", TARGET, product_type())
        corpus = load_corpus()
        tokenizer = Tokenizer.from_file(str(arguments.out / "target" / "tokenizer.json"))
        documents = training_documents(tokenizer, corpus)
        write(target, documents, arguments.work / "text", arguments.written_tokens or 590_000, arguments.seed)
    elif stage == "card":
        from training.card import write_card

        write_card(arguments.out)
    else:
        train_stage(stage, arguments)


def train_stage(stage: str, arguments: argparse.Namespace) -> None:
    """Trains the target or the draft and exports it."""
    corpus = load_corpus()
    tokenizer = Tokenizer.from_file(str(arguments.out / "target" / "tokenizer.json"))
    documents, held_out = training_documents(tokenizer, corpus), held_out_documents(tokenizer, corpus)
    print(f"{len(documents)} documents, {sum(map(len, documents))} tokens an epoch", flush=True)
    compiled = not arguments.no_compile
    batches: Source
    if stage == "target":
        model = Llama(TARGET, product_type())
        run = run_of(arguments, 1340, 8192, (0.02, 0.004), TARGET_LENGTHS)
        loss, batches = text_loss(model, compiled), Batches(documents, arguments.seed)
    elif stage == "draft":
        model = Llama(DRAFT, product_type())
        target = load_exported(arguments.out / "target", TARGET, product_type())
        model.embed_tokens.weight.data.copy_(shrunk(target.embed_tokens.weight.data, DRAFT.hidden_size))
        written = target_documents(target, documents, arguments.written_tokens or 120_000, 512, arguments.seed)
        print(f"{len(written)} documents of {len(written[0])} tokens by the target", flush=True)
        run = run_of(arguments, 1570, 4096, (0.02, 0.006), DRAFT_LENGTHS)
        loss = first_then(run, TEXT_SHARE, text_loss(model, compiled), distil_loss(model, target, compiled))
        batches = Batches(documents + written, arguments.seed)
    else:
        model = load_exported(arguments.out / "draft", DRAFT, product_type()).train()
        run = run_of(arguments, 1200, 4096, (0.01, 0.003), TUNE_LENGTHS)
        loss, batches = taught_loss(model, run, compiled), TaughtBatches(arguments.work / "text", arguments.seed)
    print(f"{model.parameter_count()} parameters", flush=True)
    train(run, model, loss, batches, held_out, arguments.work / f"{stage}.pt", stage)
    export(model, arguments.out / ("draft" if stage == "tune" else stage))
    keep_record(arguments.out, stage, run, product_type(), batches)


def run_of(
    arguments: argparse.Namespace,
    steps: int,
    step_tokens: int,
    rates: tuple[float, float],
    lengths: list[tuple[float, int]],
) -> Run:
    """A stage's run, with the stage's defaults for what the command line does not set."""
    return Run(
        arguments.steps or steps,
        arguments.minutes,
        arguments.tokens_per_step or step_tokens,
        arguments.tokens_per_pass,
        *rates,
        lengths,
    )


if __name__ == "__main__":
    main()

"""Trains and exports the built-in model pair. See baton/builtin/README.md for what it makes and what it cost.

python tools/train_builtin.py tokenizer|target|draft|card, in this order; each stage can be repeated. A training that is
stopped goes on from its checkpoint when the same command is given again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from builtin_data import Batches, held_out_documents, load_corpus, train_tokenizer, training_documents
from builtin_files import write_tokenizer
from builtin_model import DRAFT, TARGET, Llama, export, load_exported, shrunk
from builtin_sample import target_documents
from builtin_train import DRAFT_LENGTHS, TARGET_LENGTHS, TEXT_SHARE, Run, distil_loss, first_then, text_loss, train
from tokenizers import Tokenizer

PACKAGE = Path(__file__).resolve().parent.parent / "baton" / "builtin"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["tokenizer", "target", "draft", "card"])
    parser.add_argument("--out", type=Path, default=PACKAGE, help="where target/ and draft/ are written")
    parser.add_argument("--work", type=Path, default=Path("runs/builtin"), help="where checkpoints are kept")
    parser.add_argument("--steps", type=int, default=0, help="length of the schedule (0: the default of the stage)")
    parser.add_argument("--minutes", type=float, default=0.0, help="end the schedule after this time at the latest")
    parser.add_argument("--tokens-per-step", type=int, default=0, help="0: the default of the stage")
    parser.add_argument("--tokens-per-pass", type=int, default=4096, help="tokens in one forward and backward pass")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--written-tokens", type=int, default=120_000, help="text by the target, to distil on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile (no C++ compiler needed)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.stage == "tokenizer":
        tokenizer = train_tokenizer(load_corpus())
        for folder in ("target", "draft"):
            write_tokenizer(tokenizer, arguments.out / folder)
    elif arguments.stage == "card":
        from builtin_card import write_card

        write_card(arguments.out, arguments.work)
    else:
        train_stage(arguments)


def train_stage(arguments: argparse.Namespace) -> None:
    """Trains the target or the draft and exports it."""
    corpus = load_corpus()
    tokenizer = Tokenizer.from_file(str(arguments.out / "target" / "tokenizer.json"))
    documents, held_out = training_documents(tokenizer, corpus), held_out_documents(tokenizer, corpus)
    print(f"{len(documents)} documents, {sum(map(len, documents))} tokens an epoch", flush=True)
    compiled = not arguments.no_compile
    if arguments.stage == "target":
        model = Llama(TARGET)
        rates, lengths = (0.02, 0.004), TARGET_LENGTHS
        steps = arguments.steps or 1340
        step_tokens = arguments.tokens_per_step or 8192
    else:
        model = Llama(DRAFT)
        target = load_exported(arguments.out / "target", TARGET, torch.bfloat16)
        model.embed_tokens.weight.data.copy_(shrunk(target.embed_tokens.weight.data, DRAFT.hidden_size))
        written = target_documents(target, documents, arguments.written_tokens, 512, arguments.seed)
        print(f"{len(written)} documents of {len(written[0])} tokens by the target", flush=True)
        documents = documents + written
        rates, lengths = (0.02, 0.006), DRAFT_LENGTHS
        steps = arguments.steps or 1570
        step_tokens = arguments.tokens_per_step or 4096
    print(f"{model.parameter_count()} parameters", flush=True)
    run = Run(steps, arguments.minutes, step_tokens, arguments.tokens_per_pass, *rates, lengths)
    loss = text_loss(model, compiled)
    if arguments.stage == "draft":
        loss = first_then(run, TEXT_SHARE, loss, distil_loss(model, target, compiled))
    batches = Batches(documents, arguments.seed)
    train(run, model, loss, batches, held_out, arguments.work / f"{arguments.stage}.pt", arguments.stage)
    export(model, arguments.out / arguments.stage)


if __name__ == "__main__":
    main()

"""Measures the shipped weights and writes the pair's card, baton/builtin/README.md."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.data import (
    ASSISTANT,
    BOS,
    END,
    USER,
    Corpus,
    conversations_and_snippets,
    encode_file,
    held_out_documents,
    load_corpus,
    read_text,
    training_documents,
)
from training.loop import DISTANCE_FROM, DRAFT_LENGTHS, RECORDS, TARGET_LENGTHS, TUNE_LENGTHS, text_loss_of
from training.model import DRAFT, TARGET, Llama, Shape, load_exported
from training.sample import Acceptance, acceptance, generate, until_end
from training.written import KEPT, TEMPERATURES

COMPLETIONS = ["def read_lines(path):", "class Stack:\n    def __init__(self):", "import os\n\ndef remove_file("]
QUESTIONS = ["Write a Python function `read_lines` with arguments path.", "Who are you?"]
EXCERPT = "sched.py"


@dataclass
class Pair:
    """What is measured: both models as shipped, in float32, and the text they are measured on."""

    target: Llama
    draft: Llama
    tokenizer: Tokenizer
    corpus: Corpus
    train: list[np.ndarray]
    held_out: list[np.ndarray]


def load_pair(folder: Path) -> Pair:
    """The pair as shipped in the package, with the corpus of this interpreter."""
    tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    corpus = load_corpus()
    return Pair(
        load_exported(folder / "target", TARGET),
        load_exported(folder / "draft", DRAFT),
        tokenizer,
        corpus,
        training_documents(tokenizer, corpus),
        held_out_documents(tokenizer, corpus),
    )


def windows(documents: list[np.ndarray], length: int, limit: int) -> Tensor:
    """Whole windows of `length` tokens out of documents, the first `limit` of them."""
    pieces = [d[i : i + length] for d in documents for i in range(0, len(d) - length + 1, length)]
    return torch.from_numpy(np.stack(pieces[:limit]).astype(np.int64))


def own_text(pair: Pair, temperature: float) -> tuple[Tensor, int]:
    """The target's text after the first 64 tokens of windows of held-out files, and where its own text begins."""
    prompts = windows(pair.held_out, 448, 24)[:, :64]
    return generate(pair.target, prompts, 192, temperature, torch.Generator().manual_seed(3)), 63


def acceptance_rows(pair: Pair) -> list[tuple[str, Acceptance]]:
    """The table of acceptance: on held-out text and on the target's own text, greedy and at 0.8."""
    text = windows(pair.held_out, 512, 40)
    rows = []
    for name, temperature in (("greedy", 0.0), ("T = 0.8", 0.8)):
        rows.append((f"held-out text, {name}", acceptance(pair.target, pair.draft, text, 16, temperature, seed=5)))
    for name, temperature in (("greedy", 0.0), ("T = 0.8", 0.8)):
        own, first = own_text(pair, temperature)
        measured = acceptance(pair.target, pair.draft, own[:, :-1], first, temperature, seed=5)
        rows.append((f"the target's own text, {name}", measured))
    return rows


def completion(pair: Pair, prompt: str, temperature: float, count: int = 96) -> str:
    """The target's text after a prompt, up to `<|end|>`."""
    ids = torch.tensor([pair.tokenizer.encode(prompt, add_special_tokens=False).ids])
    out = generate(pair.target, ids, count, temperature, torch.Generator().manual_seed(11))
    return str(pair.tokenizer.decode(until_end(out[0, ids.shape[1] :].tolist())))


def samples(pair: Pair) -> str:
    """Completions and answers, as Markdown."""
    parts = []
    for prompt in COMPLETIONS:
        for name, temperature in (("greedy", 0.0), ("T = 0.8", 0.8)):
            parts.append(f"{name}:\n\n```python\n{prompt}{completion(pair, BOS + prompt, temperature).rstrip()}\n```")
    for question in QUESTIONS:
        answer = completion(pair, f"{BOS}{USER}{question}{END}{ASSISTANT}", 0.0)
        parts.append(f"chat, greedy, after `{question.replace('`', '')}`:\n\n```\n{answer.rstrip()}\n```")
    return "\n\n".join(parts)


def run_row(name: str, run: dict[str, Any]) -> str:
    """One training as a table row, from its record by `keep_record`."""
    speed = run["tokens"] / run["minutes"] / 60
    rates = f"{run['muon_lr']:g} / {run['adam_lr']:g}"
    shown = f"{run['steps']:,} | {run['tokens']:,} | {run['tokens_per_step']:,} | {run['minutes']:.0f} min"
    return f"| {name} | {shown} | {speed:,.0f} | {run['products']} | {rates} |"


def curve(run: dict[str, Any]) -> str:
    """The held-out loss along one training."""
    return ", ".join(f"{step}: {held:.2f}" for step, held in run["held_out_by_step"].items())


def shape_row(name: str, of: Callable[[Shape], object]) -> str:
    """One row of the table of sizes."""
    return f"| {name} | {of(TARGET)} | {of(DRAFT)} |"


def loss_row(pair: Pair, name: str, documents: list[np.ndarray], length: int = 512, limit: int = 10**9) -> str:
    """One row of the table of losses."""
    losses = [text_loss_of(model, documents, length, limit) for model in (pair.target, pair.draft)]
    return f"| {name} | {losses[0]:.3f} | {losses[1]:.3f} |"


def model_table(pair: Pair) -> str:
    """Sizes and losses of both models, as table rows."""
    excerpt_path = next(path for path in pair.corpus.held_out if path.name == EXCERPT)
    excerpt = encode_file(pair.tokenizer, read_text(excerpt_path))[:513]
    files = pair.train[: len(pair.corpus.train)]
    rows = [
        f"| parameters | {pair.target.parameter_count():,} | {pair.draft.parameter_count():,} |",
        shape_row("hidden, intermediate", lambda s: f"{s.hidden_size}, {s.intermediate_size}"),
        shape_row("layers", lambda s: s.num_hidden_layers),
        shape_row(
            "heads, KV heads, head size", lambda s: f"{s.num_attention_heads}, {s.num_key_value_heads}, {s.head_dim}"
        ),
        loss_row(pair, "loss, training files", files[::30], 512, 60_000),
        loss_row(pair, "loss, held-out files", pair.held_out),
        *(loss_row(pair, f"a third of it, windows of {n:,}", pair.held_out, n, 30_000) for n in (128, 512, 2048, 4096)),
        loss_row(pair, f"loss, first 512 tokens of `{EXCERPT}`", [excerpt]),
    ]
    return "\n".join(rows)


def schedule(lengths: list[tuple[float, int]]) -> str:
    """The lengths of training sequences along a run, in words."""
    return ", ".join(f"{length:,} until {until:.0%}" for until, length in lengths)


def write_card(folder: Path) -> None:
    """Measures everything and writes the card."""
    pair = load_pair(folder)
    corpus = pair.corpus
    runs = json.loads((folder / RECORDS).read_text(encoding="utf-8"))
    chats, snippets = conversations_and_snippets(corpus)
    accepted = [
        f"| {name} | {a.coupled:.1%} | {a.acceptable:.1%} | {a.tokens_per_check:.2f} | {a.positions:,} |"
        for name, a in acceptance_rows(pair)
    ]
    template = (Path(__file__).resolve().parent / "card.md.in").read_text(encoding="utf-8")
    text = template.format(
        shapes=model_table(pair),
        accepted="\n".join(accepted),
        samples=samples(pair),
        target_lengths=schedule(TARGET_LENGTHS),
        draft_lengths=schedule(DRAFT_LENGTHS),
        held_names=", ".join(f"`{path.relative_to(corpus.root).as_posix()}`" for path in corpus.held_out),
        held_tokens=sum(map(len, pair.held_out)),
        python=platform.python_version(),
        files=len(corpus.train),
        characters=sum(len(read_text(path)) for path in corpus.train),
        tokens=sum(map(len, pair.train[: len(corpus.train)])),
        epoch=sum(map(len, pair.train)),
        chats=len(chats),
        snippets=len(snippets),
        runs="\n".join(run_row(name, runs[name]) for name in ("target", "draft", "tune")),
        curves="; ".join(f"{name} {curve(runs[name])}" for name in ("target", "draft", "tune")),
        tune_lengths=schedule(TUNE_LENGTHS),
        kept=KEPT,
        temperatures=", ".join(f"{t:g}" for t in TEMPERATURES),
        written_tokens=runs["tune"]["written_tokens"],
        long_tokens=runs["tune"]["long_tokens"],
        distance_from=DISTANCE_FROM,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")

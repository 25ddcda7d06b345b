"""The training loop of the built-in pair: the target on text, the draft on text and on the target's distribution."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.model import Llama, write_json
from training.optim import Optimiser
from training.taught import TaughtHead
from training.written import LONG, TEMPERATURE, WRITTEN, TaughtBatches

# (until this share of the run, tokens per sequence): short first because attention is expensive, long at the end.
TARGET_LENGTHS = [(0.30, 256), (0.86, 512), (0.97, 2048), (1.0, 4096)]
DRAFT_LENGTHS = [(0.88, 512), (1.0, 4096)]
# Long rows do not come last: training ends on short rows, since mostly short contexts are served.
TUNE_LENGTHS = [(0.7, WRITTEN), (0.8, LONG), (1.0, WRITTEN)]
WARMUP = 0.02
DECAY_FROM = 0.35
# The draft learns from text alone for this share of its run, which is three times as fast, then from the target.
TEXT_SHARE = 0.3
# While it is tuned, its loss moves from the divergence to this multiple of the distance after this share of the run.
DISTANCE_FROM, DISTANCE_WEIGHT = 0.5, 3.0
RECORDS = "trainings.json"


@dataclass
class Run:
    """The settings of a training, and its progress. `minutes` ends the schedule early on a slow machine."""

    steps: int
    minutes: float
    tokens_per_step: int
    tokens_per_pass: int
    muon_lr: float
    adam_lr: float
    lengths: list[tuple[float, int]]
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, int, float, float, float]] = field(default_factory=list)

    def progress(self) -> float:
        """From 0 to 1: by steps or by time, whichever is further."""
        by_time = self.seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(self.step / self.steps, by_time))

    def length(self) -> int:
        """The current length of a training sequence."""
        return next(length for until, length in self.lengths if self.progress() < until or until == 1.0)

    def rate(self) -> float:
        """The factor on the learning rate: a short rise, a plateau, then straight down to zero."""
        p = self.progress()
        return min(1.0, (p + 1e-3) / WARMUP, max(0.0, 1 - p) / (1 - DECAY_FROM))


# A loss receives the tensors of one batch: tokens and their successors, or the result of `TaughtBatches.next`.
Loss = Callable[..., Tensor]


class Source(Protocol):
    """A stream of batches that can be resumed."""

    epoch: int

    def state(self) -> tuple[int, int, int]: ...

    def restore(self, state: tuple[int, int, int]) -> None: ...

    def next(self, rows: int, length: int) -> tuple[np.ndarray, ...]: ...


def text_loss(model: Llama, compiled: bool) -> Loss:
    """Cross-entropy on text."""
    if not compiled:
        return model
    torch._dynamo.config.cache_size_limit = 32
    return torch.compile(model, dynamic=False)


def distil_loss(draft: Llama, target: Llama, compiled: bool, temperature: float = 0.8, hard: float = 0.1) -> Loss:
    """The draft's divergence from the target's distribution, a little sharpened, plus a small share of text loss."""

    def student(ids: Tensor, targets: Tensor, teacher: Tensor) -> Tensor:
        logits = draft.logits(ids).flatten(0, 1)
        ours = F.log_softmax(logits / temperature, -1)
        theirs = F.log_softmax(teacher.flatten(0, 1).float() / temperature, -1)
        soft = (theirs.exp() * (theirs - ours)).sum(-1).mean()
        return soft + hard * F.cross_entropy(logits, targets.flatten())

    teach: Callable[[Tensor], Tensor] = target.logits
    if compiled:
        torch._dynamo.config.cache_size_limit = 32
        student, teach = torch.compile(student, dynamic=False), torch.compile(teach, dynamic=False)

    def loss(ids: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = teach(ids)
        return student(ids, targets, teacher)

    return loss


def taught_loss(draft: Llama, run: Run, compiled: bool) -> Loss:
    """How far the draft is from the target's kept distributions, all at the temperature at which these were kept.

    At first the divergence; towards the end of the run more and more the share of tokens that no coupling could accept,
    which is what serving pays for (the total variation distance: Leviathan et al., 2023).
    """
    hidden: Callable[[Tensor], Tensor] = draft.hidden
    if compiled:
        hidden = torch.compile(hidden, dynamic=False)

    def loss(ids: Tensor, likeliest: Tensor, probabilities: Tensor) -> Tensor:
        share = max(0.0, (run.progress() - DISTANCE_FROM) / (1 - DISTANCE_FROM))
        states, kept = hidden(ids).flatten(0, 1), (likeliest.flatten(0, 1), probabilities.flatten(0, 1).float())
        mean: Tensor = TaughtHead.apply(states, draft.embed_tokens.weight, *kept, TEMPERATURE, share, DISTANCE_WEIGHT)  # type: ignore[no-untyped-call]
        return mean

    return loss


def first_then(run: Run, share: float, first: Loss, then: Loss) -> Loss:
    """One loss for the first share of a run, another for the rest."""
    return lambda ids, targets: (first if run.progress() < share else then)(ids, targets)


def tensor_of(part: np.ndarray) -> Tensor:
    """Integers of any width as int64, which indexing needs; other values unchanged."""
    return torch.from_numpy(part.astype(np.int64) if np.issubdtype(part.dtype, np.integer) else part)


@torch.no_grad()
def text_loss_of(model: Llama, documents: list[np.ndarray], length: int = 512, limit: int = 10**9) -> float:
    """Mean cross-entropy in nats per token, documents cut into windows of `length` without overlap."""
    total, count = 0.0, 0
    for document in documents:
        for start in range(0, len(document) - 1, length):
            piece = torch.from_numpy(document[start : start + length + 1].astype(np.int64))[None]
            if piece.shape[1] < 2:
                continue
            predicted = model.logits(piece[:, :-1]).flatten(0, 1)
            total += F.cross_entropy(predicted, piece[0, 1:], reduction="sum").item()
            count += piece.shape[1] - 1
            if count >= limit:
                return total / count
    return total / count


def train(
    run: Run,
    model: Llama,
    loss_of: Loss,
    batches: Source,
    held_out: list[np.ndarray],
    checkpoint: Path,
    name: str,
) -> None:
    """Runs to the end of the schedule; resumes from `checkpoint` if it exists, and writes it every 200 steps."""
    optimiser = Optimiser(model, run.muon_lr, run.adam_lr)
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        batches.restore(saved["batches"])
        for key in ("step", "tokens", "seconds", "losses"):
            setattr(run, key, saved["run"][key])

    def save() -> None:
        state: dict[str, object] = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
        state |= {"batches": batches.state(), "run": asdict(run)}
        torch.save(state, checkpoint.with_suffix(".tmp"))
        checkpoint.with_suffix(".tmp").rename(checkpoint)

    mean = 0.0
    while run.progress() < 1.0:
        began = time.perf_counter()
        length = run.length()
        rows = max(1, min(run.tokens_per_pass, run.tokens_per_step) // length)
        passes = max(1, run.tokens_per_step // (rows * length))
        total = 0.0
        for _ in range(passes):
            loss = loss_of(*map(tensor_of, batches.next(rows, length))) / passes
            torch.autograd.backward(loss)
            total += loss.item()
        optimiser.step(run.rate())
        run.step += 1
        run.tokens += passes * rows * length
        run.seconds += time.perf_counter() - began
        mean = total if mean == 0 else 0.95 * mean + 0.05 * total
        if run.step % 200 == 0 or run.progress() >= 1.0:
            held = text_loss_of(model, held_out, limit=20_000)
            run.losses.append((run.step, run.tokens, run.seconds, mean, held))
            save()
        if run.step % 20 == 0 or run.progress() >= 1.0:
            speed = run.tokens / run.seconds
            held_text = f" held out {run.losses[-1][4]:.3f}" if run.losses else ""
            print(
                f"{name} step {run.step} progress {run.progress():.3f} length {length} epoch {batches.epoch} "
                f"loss {mean:.3f}{held_text} {speed:.0f} tokens/s",
                flush=True,
            )
    save()


def keep_record(folder: Path, name: str, run: Run, products: torch.dtype, batches: Source) -> None:
    """Records the run of a stage beside the weights, for the card: not all stages run on one machine."""
    path = folder / RECORDS
    records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    curve = {str(step): round(held, 3) for step, _, _, _, held in run.losses}
    records[name] = {
        "steps": run.step,
        "tokens": run.tokens,
        "minutes": round(run.seconds / 60, 1),
        "muon_lr": run.muon_lr,
        "adam_lr": run.adam_lr,
        "tokens_per_step": run.tokens_per_step,
        "products": str(products).removeprefix("torch."),
        "held_out_by_step": curve,
    }
    if isinstance(batches, TaughtBatches):
        sizes = {length: len(taught) * length for length, taught in batches.sets.items()}
        records[name] |= {"written_tokens": sizes[WRITTEN], "long_tokens": sizes[LONG]}
    write_json(path, records)

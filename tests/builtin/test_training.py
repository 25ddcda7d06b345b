"""How the draft is trained: the distributions kept with the target's text, and the loss with its explicit gradient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from training.model import Llama, Shape
from training.taught import CHUNK, TaughtHead
from training.written import KEPT, TEMPERATURE, Taught, TaughtBatches, heads_of, read_rows, written_rows

TINY = Shape(16, 32, 2, 4, 2, 8, max_position_embeddings=64, vocab_size=128)
ROWS, HEAD, LENGTH = 6, 5, 24


def tiny_target() -> Llama:
    torch.manual_seed(3)
    model = Llama(TINY, torch.float32)
    for parameter in model.parameters():
        parameter.data.mul_(8.0 if parameter.ndim == 2 else 1.0)
    return model.eval()


def taught_text(target: Llama, temperatures: list[float]) -> Taught:
    heads = torch.randint(TINY.vocab_size, (ROWS, HEAD), generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    return written_rows(target, heads, LENGTH, torch.tensor(temperatures), generator)


def dense(taught: Taught) -> np.ndarray:
    """The kept distributions over the whole vocabulary."""
    whole = np.zeros((*taught.ids.shape, TINY.vocab_size))
    np.put_along_axis(whole, taught.likeliest.astype(np.int64), taught.probabilities.astype(np.float64), -1)
    return whole


def test_distributions_kept_during_generation_equal_those_of_the_whole_text() -> None:
    target = tiny_target()
    written = taught_text(target, [0.0, 0.8, 1.0] * 2)
    read = read_rows(target, torch.from_numpy(written.ids.astype(np.int64)))
    assert written.likeliest.shape == (ROWS, LENGTH, KEPT)
    # Tokens at the edge of the kept set may be swapped; each then has at most the smallest kept probability.
    edge = float(written.probabilities.min(-1).max()) + 1e-3
    assert np.abs(dense(written) - dense(read)).max() < edge
    with torch.no_grad():
        exact = torch.softmax(target.logits(torch.from_numpy(written.ids.astype(np.int64))) / TEMPERATURE, -1)
    kept = exact.numpy() * (dense(written) > 0)
    assert np.abs(dense(written) - kept).max() < 1e-3


def test_only_greedy_rows_always_follow_the_likeliest_token() -> None:
    written = taught_text(tiny_target(), [0.0] * 3 + [1.0] * 3)
    likeliest = dense(written).argmax(-1)[:, HEAD - 1 : -1]
    follows = likeliest == written.ids[:, HEAD:]
    assert follows[:3].all()
    assert not follows[3:].all()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_loss_and_gradients_match_the_formula(share: float) -> None:
    generator = torch.Generator().manual_seed(5)
    count, width, vocabulary, kept, temperature, weight = CHUNK + 40, 8, 60, 9, 0.7, 3.0

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, head = random(count, width).requires_grad_(), (0.5 * random(vocabulary, width)).requires_grad_()
    probabilities, likeliest = torch.softmax(2 * random(count, vocabulary), -1).topk(kept)

    def formula() -> torch.Tensor:
        ours = torch.softmax(hidden @ head.T / temperature, -1).gather(1, likeliest)
        rests = [1 - p.sum(-1, keepdim=True) for p in (ours, probabilities)]
        q, p = torch.cat([ours, rests[0]], 1), torch.cat([probabilities, rests[1]], 1)
        divergence = (p * (p / q).log()).sum(-1)
        distance = 0.5 * (p - q).abs().sum(-1)
        return ((1 - share) * divergence + share * weight * distance).mean()

    def implementation() -> torch.Tensor:
        loss = TaughtHead.apply(hidden, head, likeliest, probabilities, temperature, share, weight)
        assert isinstance(loss, torch.Tensor)
        return loss

    torch.testing.assert_close(implementation(), formula())
    for found, expected in zip(
        torch.autograd.grad(2 * implementation(), (hidden, head)), torch.autograd.grad(2 * formula(), (hidden, head)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(found, expected)


def test_heads_are_document_starts_and_excerpts_after_the_bos_token() -> None:
    documents = [np.arange(first, first + 40, dtype=np.int32) for first in (100, 200, 300)]
    heads = heads_of(documents, 12, 10, np.random.default_rng(1)).numpy()
    for row, head in enumerate(heads):
        steps = np.diff(head if row % 2 == 0 else head[1:])
        assert (steps == 1).all()
        assert head[0] in ((100, 200, 300) if row % 2 == 0 else (0,))


def test_batches_resume_at_the_saved_state(tmp_path: Path) -> None:
    target = tiny_target()
    taught_text(target, [0.8] * ROWS).save(tmp_path / "written-000.npz")
    read_rows(target, torch.randint(TINY.vocab_size, (2, 48))).save(tmp_path / "long-000.npz")
    first = TaughtBatches(tmp_path, 1)
    first.next(4, LENGTH)
    first.next(4, LENGTH)
    second = TaughtBatches(tmp_path, 1)
    second.restore(first.state())
    for ours, theirs in zip(first.next(1, LENGTH), second.next(1, LENGTH), strict=True):
        assert np.array_equal(ours, theirs)
    assert first.next(1, 48)[0].shape == (1, 48)

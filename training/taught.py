"""The head and the loss of a draft that learns from kept distributions, with an explicit gradient.

The vocabulary is the most expensive part of training a small model. Therefore the logits of a few hundred positions at
a time are turned in place into probabilities and then into the gradient, while they are in the cache; nothing of the
vocabulary's width is kept for a backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 256
# Probabilities are clamped to at least these values, so that logarithms and quotients stay finite.
LEAST, LEAST_REST = 1e-8, 1e-6


def gradient(
    logits: Tensor, likeliest: Tensor, probabilities: Tensor, share: float, weight: float
) -> tuple[Tensor, Tensor]:
    """The summed loss of `TaughtHead` and its gradient, which is made in place of logits [n, vocabulary].

    With a_j the loss's derivative by the draft's probability q_j, that by its logit is q_j (a_j - sum of q a). Every
    token outside `likeliest` [n, kept] has the same a, called `elsewhere` here, so that only the kept ones need
    correcting.
    """
    logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    total = logits.sum(-1, keepdim=True)
    ours = (logits.gather(1, likeliest) / total).clamp_min(LEAST)
    our_rest = (1 - ours.sum(-1, keepdim=True)).clamp_min(LEAST_REST)
    their_rest = (1 - probabilities.sum(-1, keepdim=True)).clamp_min(LEAST_REST)
    divergence = (probabilities * (probabilities.clamp_min(LEAST) / ours).log()).sum() + (
        their_rest * (their_rest / our_rest).log()
    ).sum()
    distance = 0.5 * ((ours - probabilities).abs().sum() + (our_rest - their_rest).abs().sum())
    kept = share * weight * 0.5 * (ours - probabilities).sign() - (1 - share) * probabilities / ours
    elsewhere = share * weight * 0.5 * (our_rest - their_rest).sign() - (1 - share) * their_rest / our_rest
    mean = (ours * kept).sum(-1, keepdim=True) + our_rest * elsewhere
    logits.mul_((elsewhere - mean) / total).scatter_add_(1, likeliest, ours * (kept - elsewhere))
    return (1 - share) * divergence + share * weight * distance, logits


class TaughtHead(torch.autograd.Function):
    """Mean loss of hidden states [n, width] under a tied head [vocabulary, width] against kept distributions.

    (1 - share) times the divergence plus share * weight times the total variation distance, both between distributions
    whose unkept tokens count as one. Backward returns the gradients that forward has already computed.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        likeliest: Tensor,
        probabilities: Tensor,
        temperature: float,
        share: float,
        weight: float,
    ) -> Tensor:
        """`likeliest` and `probabilities` are [n, kept], at `temperature`."""
        by_hidden, by_head = torch.empty_like(hidden), torch.zeros_like(head)
        scaled = hidden / temperature
        scale = 1 / (temperature * len(hidden))
        total = hidden.new_zeros(())
        for first in range(0, len(hidden), CHUNK):
            here = slice(first, first + CHUNK)
            loss, by_logits = gradient(scaled[here] @ head.T, likeliest[here], probabilities[here], share, weight)
            by_hidden[here] = by_logits @ head
            by_head.addmm_(by_logits.T, hidden[here])
            total += loss
        ctx.save_for_backward(by_hidden.mul_(scale), by_head.mul_(scale))
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *of_loss: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients by hidden states and head, times the loss's own."""
        by_hidden, by_head = ctx.saved_tensors
        return by_hidden * of_loss[0], by_head * of_loss[0], None, None, None, None, None

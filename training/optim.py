"""The optimiser of the built-in pair: Muon for the matrices inside the layers, AdamW for embedding and norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from training.model import product_type


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrix, roughly, by a quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = update.to(product_type())
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum whose every step is orthogonalised (Jordan et al., 2024), with decoupled weight decay."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(state["momentum"], group["momentum"]))
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


class Optimiser:
    """Both optimisers under one learning-rate factor."""

    def __init__(self, model: nn.Module, muon_lr: float, adam_lr: float) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        by_adam = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
        adamw = torch.optim.AdamW(by_adam, lr=adam_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.01)
        self.parts: list[torch.optim.Optimizer] = [Muon(matrices, muon_lr, decay=0.1), adamw]
        self.peaks = [muon_lr, adam_lr]

    def step(self, factor: float) -> None:
        """One step at `factor` of the peak rates; the gradients are dropped afterwards."""
        for part, peak in zip(self.parts, self.peaks, strict=True):
            for group in part.param_groups:
                group["lr"] = peak * factor
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of both."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restores `state_dict`."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)

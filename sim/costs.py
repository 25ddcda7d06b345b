"""How long things take. A caller with measurements passes its own `Costs` (`sim.cluster.SimCluster`)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from baton.core.commands import Role
from baton.core.step import StepPlan


class Costs(Protocol):
    """Seconds of virtual time. Called once per step, message and chunk, so these functions should be cheap."""

    def step_s(self, worker: str, role: Role, plan: StepPlan) -> float:
        """Returns how long a worker computes a step. The plan's draft rows are included."""
        ...

    def message_s(self) -> float:
        """Returns how long a message takes from one process to another."""
        ...

    def transfer_s(self, source: str, to: str, num_bytes: int) -> float:
        """Returns how long the bytes of one chunk take on one edge, once the receive is posted."""
        ...


@dataclass(slots=True)
class RandomCosts:
    """Times that vary widely, for the order of events to vary."""

    random: random.Random
    step: float = 0.02
    message: float = 0.004
    transfer: float = 0.01

    def step_s(self, worker: str, role: Role, plan: StepPlan) -> float:
        return self.step * (0.5 + self.random.random())

    def message_s(self) -> float:
        return self.message * (0.25 + 1.5 * self.random.random())

    def transfer_s(self, source: str, to: str, num_bytes: int) -> float:
        return self.transfer * (0.2 + 1.6 * self.random.random())

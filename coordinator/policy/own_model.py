"""What a worker's model is held against: the coordinator's own. Pure.

A join carries no config.json, only its digest; what KV and vocabulary tell of the model is what can be said of how the
two differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from baton.core.commands import WorkerFacts, short_digest
from baton.core.model_config import DType, ModelConfig


@dataclass(frozen=True, slots=True)
class OwnModel:
    """`config_digest` is that of the bytes of config.json in the directory `where`, `config` what they say."""

    where: str
    config_digest: str
    config: ModelConfig

    def difference(self, facts: WorkerFacts) -> str | None:
        """How a worker's model is seen to be another one, beginning with the name of the field; None if it is not."""
        if facts.config_digest == self.config_digest:
            return None
        digests = f"{short_digest(self.config_digest)} here and {short_digest(facts.config_digest)}"
        return f"config_digest: {digests}; the coordinator's model is {self.where}, {self._seen(facts)}"

    def _seen(self, facts: WorkerFacts) -> str:
        if facts.vocab_size != self.config.vocab_size:
            difference: str | None = f"vocab_size: {self.config.vocab_size} and {facts.vocab_size}"
        else:
            own = self.config.kv_layout(facts.layout.block_size, cast(DType, facts.dtype))
            difference = own.first_difference(facts.layout)
        if difference is None:
            return "this one has KV and a vocabulary of the same size but another config.json"
        return f"from which this one differs in {difference}"

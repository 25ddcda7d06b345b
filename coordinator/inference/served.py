"""The model that is served, alone and with each of its LoRA adapters, as the protocol describes it: metadata,
configuration, repository and statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from baton.core.errors import NotFound
from coordinator.inference.model import INPUTS, OUTPUTS
from coordinator.inference.statistics import Statistics
from coordinator.policy.adapters import AdapterTable

VERSION = "1"
EXTENSIONS = ("binary_tensor_data", "model_repository", "model_configuration", "statistics", "generate")


@dataclass(slots=True)
class ServedModel:
    """`server_version` is Baton's. A model with an adapter has a name of its own, and all share the statistics."""

    name: str
    server_version: str = "0"
    statistics: Statistics = field(default_factory=Statistics)
    adapters: AdapterTable = field(default_factory=AdapterTable)

    def check(self, name: str, version: str = "") -> str:
        """Returns the digest of the adapter of that name; empty for the model itself. Raises NotFound unless one has
        this name, and this version or none is given."""
        digest = self.adapters.chosen(name, self.name, "model_name")
        if version not in ("", VERSION):
            message = f"version {version[:40]!r} of {name} does not exist: there is version {VERSION}"
            raise NotFound(message, code="model_not_found", param="model_version")
        return digest

    def server(self) -> dict[str, Any]:
        """Returns the server's metadata as JSON."""
        return {"name": "baton", "version": self.server_version, "extensions": list(EXTENSIONS)}

    def metadata(self, name: str) -> dict[str, Any]:
        """Returns the model's metadata as JSON."""
        inputs = [{"name": name, "datatype": kind, "shape": [1]} for name, kind in INPUTS]
        outputs = [{"name": name, "datatype": kind, "shape": [-1]} for name, kind in OUTPUTS]
        return {"name": name, "versions": [VERSION], "platform": "baton", "inputs": inputs, "outputs": outputs}

    def config(self, name: str) -> dict[str, Any]:
        """Returns the model's configuration in Triton's form, as JSON."""
        inputs = [
            {"name": name, "data_type": _typed(kind), "dims": [1], "optional": name != "text_input"}
            for name, kind in INPUTS
        ]
        return {
            "name": name,
            "platform": "",
            "backend": "baton",
            "max_batch_size": 0,
            "input": inputs,
            "output": [{"name": name, "data_type": _typed(kind), "dims": [-1]} for name, kind in OUTPUTS],
            "model_transaction_policy": {"decoupled": True},
        }

    def repository_index(self, ready: bool, reason: str) -> list[dict[str, str]]:
        """Returns the models of the repository."""
        state = {"state": "READY", "reason": ""} if ready else {"state": "UNAVAILABLE", "reason": reason}
        names = self.name, *(adapter.name for adapter in self.adapters)
        return [{"name": name, "version": VERSION, **state} for name in names]

    def model_stats(self, name: str = "") -> dict[str, Any]:
        """Returns the statistics as JSON."""
        return {"model_stats": [{"name": name or self.name, "version": VERSION} | self.statistics.as_json()]}


def _typed(kind: str) -> str:
    return "TYPE_STRING" if kind == "BYTES" else f"TYPE_{kind}"

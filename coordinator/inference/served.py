"""The one model that is served, as the protocol's metadata, configuration, repository and statistics describe it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from baton.core.errors import NotFound
from coordinator.inference.model import INPUTS, OUTPUTS
from coordinator.inference.statistics import Statistics

VERSION = "1"
EXTENSIONS = ("binary_tensor_data", "model_repository", "model_configuration", "statistics", "generate")


@dataclass(slots=True)
class ServedModel:
    """`server_version` is Baton's."""

    name: str
    server_version: str = "0"
    statistics: Statistics = field(default_factory=Statistics)

    def check(self, name: str, version: str = "") -> None:
        """Raises NotFound unless this is the model's name, and its only version or none."""
        if name != self.name:
            message = f"the model {name[:100]!r} does not exist; {self.name!r} is served"
            raise NotFound(message, code="model_not_found", param="model_name")
        if version not in ("", VERSION):
            message = f"version {version[:40]!r} of {self.name} does not exist: there is version {VERSION}"
            raise NotFound(message, code="model_not_found", param="model_version")

    def server(self) -> dict[str, Any]:
        """Returns the server's metadata as JSON."""
        return {"name": "baton", "version": self.server_version, "extensions": list(EXTENSIONS)}

    def metadata(self) -> dict[str, Any]:
        """Returns the model's metadata as JSON."""
        inputs = [{"name": name, "datatype": kind, "shape": [1]} for name, kind in INPUTS]
        outputs = [{"name": name, "datatype": kind, "shape": [-1]} for name, kind in OUTPUTS]
        return {"name": self.name, "versions": [VERSION], "platform": "baton", "inputs": inputs, "outputs": outputs}

    def config(self) -> dict[str, Any]:
        """Returns the model's configuration in Triton's form, as JSON."""
        inputs = [
            {"name": name, "data_type": _typed(kind), "dims": [1], "optional": name != "text_input"}
            for name, kind in INPUTS
        ]
        return {
            "name": self.name,
            "platform": "",
            "backend": "baton",
            "max_batch_size": 0,
            "input": inputs,
            "output": [{"name": name, "data_type": _typed(kind), "dims": [-1]} for name, kind in OUTPUTS],
            "model_transaction_policy": {"decoupled": True},
        }

    def repository_index(self, ready: bool, reason: str) -> list[dict[str, str]]:
        """Returns the models of the repository: this one."""
        state = {"state": "READY", "reason": ""} if ready else {"state": "UNAVAILABLE", "reason": reason}
        return [{"name": self.name, "version": VERSION, **state}]

    def model_stats(self) -> dict[str, Any]:
        """Returns the statistics as JSON."""
        return {"model_stats": [{"name": self.name, "version": VERSION} | self.statistics.as_json()]}


def _typed(kind: str) -> str:
    return "TYPE_STRING" if kind == "BYTES" else f"TYPE_{kind}"

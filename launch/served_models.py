"""`baton models`: which architectures are served, by which path, and what is proven of each.

models.json has the outcome of each causal language model of transformers (benchmarks/served_models.py): "equal" if the
tokens of a tiny random checkpoint equalled transformers' own (with "ranks", on that many, too), "refused" with the
reason with which a worker refuses it, "differs", or "not tried".
"""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.models.model_config import GeneralConfig, parse_config_json, why_not_own
from baton.runtime.model_source import resolve_model
from baton.runtime.paths import expanded
from launch.tables import make_table, show

FILE = Path(__file__).with_name("models.json")
OWN = ("llama", "mistral", "qwen2", "qwen3")
PROVEN = {
    "equal": "tokens equal transformers' (tiny, random, float32)",
    "equal on two ranks": "tokens equal transformers' (tiny, random, float32), on two ranks, too",
    "differs": "tokens differ from those that transformers generates",
    "refused": "refused",
    "not tried": "not tried",
}


def rows(*, served_only: bool = False) -> list[tuple[str, str, str, str]]:
    """Returns the type, class, path and proof or reason of each architecture."""
    result = []
    for row in json.loads(FILE.read_text(encoding="utf-8")):
        outcome, reason = row["outcome"], row.get("reason", "")
        if served_only and outcome != "equal":
            continue
        path = "baton" if row["type"] in OWN else "transformers" if outcome == "equal" else ""
        proven = PROVEN[f"{outcome} on two ranks" if row.get("ranks") == 2 else outcome]
        proven += f": {reason}" if reason else ""
        result.append((row["type"], row["class"], path, proven))
    return result


def print_models(*, served_only: bool) -> None:
    table: Table = make_table(("model_type", "architecture", "path", "proven"))
    for row in rows(served_only=served_only):
        table.add_row(*row)
    show(table, Console())


def describe(model: str, model_impl: str) -> str:
    """Returns one line on how a checkpoint would be served. Raises StartupError with the reason if it would not."""
    from baton.engine.checkpoint import read_model_config  # torch
    from baton.engine.kernels.build import level_of
    from baton.engine.memory import unread_sizes

    directory = resolve_model(model)
    config = read_model_config(directory, model_impl)
    path = expanded(model)
    name = path.resolve().name if path.exists() else model  # a snapshot of the hub has a hash for a name
    stored = "" if config.quantization is None else f", published in {config.quantization.method}"
    level = level_of("auto")
    if not isinstance(config, GeneralConfig):
        layout, size = unread_sizes(directory, config, 16, "bfloat16", level=level)
        return (
            f"{name}: served by Baton's own path, up to {config.max_position_embeddings} tokens,"
            f" {size / 2**30:.2f} GiB of weights{stored}, {layout.bytes_per_token} bytes of KV a token in bfloat16"
        )
    from baton.engine.transformers_path import transformers_model

    recorded, size = transformers_model().probe(directory, config.max_position_embeddings, "bfloat16", level=level)
    fields = parse_config_json((directory / "config.json").read_bytes())
    why = why_not_own(fields)
    reason = "" if why is None else f" ({why.removeprefix('config.json: ')})"
    per_token = "" if recorded is None else f", {sum(s.bytes_per_token for s in recorded.storages)} bytes of KV a token"
    known = {row[0]: row[3] for row in rows()}.get(str(fields.get("model_type")), "not tried")
    return (
        f"{name}: served by transformers{reason}, up to {config.max_position_embeddings} tokens,"
        f" {size / 2**30:.2f} GiB of weights{stored}{per_token} in bfloat16; {known}"
    )

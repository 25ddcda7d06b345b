"""Which imports are allowed: the dependency rules of the architecture, as two tables, checked on every import."""

from __future__ import annotations

import ast

import pytest

from tests.arch.source_tree import PACKAGES, PURE, PURE_DECODE, PURE_PREFILL, Import, imports_of, matches, source_files

SERVICE_FILES = (
    "baton/runtime/*",
    "coordinator/grpc/*",
    "coordinator/control.py",
    "coordinator/front_tls.py",
)
WORKER_FILES = tuple(
    f"{tier}/{name}.py"
    for tier, hand_over in (("prefill", ("sender", "link")), ("decode", ("receiver",)))
    for name in ("worker", "__main__", *hand_over)
)
ENGINE_PROCESSES = tuple(
    f"baton/runtime/{name}.py" for name in ("worker_main", "worker_ranks", "edge_ranks", "grammar_process")
)
HTTP_FILES = ("coordinator/http/*",)
SCHEMA_FILES = ("coordinator/openai/*", "coordinator/anthropic/*", *HTTP_FILES)
PURE_PREFILL_MODULES = tuple(name[:-3].replace("/", ".") for name in PURE_PREFILL)
PURE_DECODE_MODULES = tuple(name[:-3].replace("/", ".") for name in PURE_DECODE)
LAUNCH = "launch/*"  # may use everything; nothing uses it

# The first row that matches a file lists which of our own packages it may import.
OURS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("coordinator/policy/*",), ("baton.core", "baton.models", "coordinator.policy")),
    (
        ("coordinator/text/*",),
        (
            "baton.core",
            "baton.models",
            "baton.runtime.model_source",
            "baton.runtime.paths",
            "baton.runtime.process",
            "coordinator.text",
        ),
    ),
    (PURE_DECODE, ("baton.core", *PURE_DECODE_MODULES)),
    (("baton/models/*",), ("baton.core", "baton.models")),
    (PURE, ("baton.core",)),
    (
        ("baton/engine/*",),
        ("baton.core", "baton.models", "baton.engine", "baton.runtime.frames", "baton.runtime.paths"),
    ),
    (("baton/transfer/*",), ("baton.core", "baton.transfer")),
    (ENGINE_PROCESSES, ("baton",)),
    (("baton/runtime/*",), ("baton.core", "baton.models", "baton.gguf", "baton.runtime", "baton.v1")),
    (("baton/*",), ("baton",)),
    (("prefill/*",), ("baton", "prefill")),
    (("decode/*",), ("baton", "decode")),
    (("coordinator/*",), ("baton", "coordinator")),
    (("batches/*",), ("baton.core", "baton.runtime", "batches")),
    (("sim/*",), ("baton.core", "sim", *PURE_PREFILL_MODULES, *PURE_DECODE_MODULES, "coordinator.policy")),
    ((LAUNCH,), PACKAGES),
)

# These packages may be imported only by these files, even for types.
RESTRICTED: dict[str, tuple[str, ...]] = {
    "torch": ("baton/engine/*", "baton/transfer/*", *WORKER_FILES, LAUNCH),
    "torch.distributed": ("baton/engine/parallel.py", "baton/transfer/*", LAUNCH),
    "torch._C._distributed_c10d": ("baton/engine/parallel.py", "baton/transfer/*", LAUNCH),
    "grpc": (*SERVICE_FILES, LAUNCH),
    "grpc_health": (*SERVICE_FILES, LAUNCH),
    "grpc_reflection": (*SERVICE_FILES, LAUNCH),
    "grpc_status": (*SERVICE_FILES, LAUNCH),
    "google": (*SERVICE_FILES, LAUNCH),
    "baton.v1": (*SERVICE_FILES, LAUNCH),
    "starlette": (*HTTP_FILES, "batches/routes.py"),
    "pydantic": SCHEMA_FILES,
    "uvicorn": (*HTTP_FILES, "batches/serving.py"),
    "gguf": ("baton/gguf/*", "baton/engine/gguf_files.py"),
    "msgpack": ("baton/runtime/frames.py",),
    "pynvml": ("baton/runtime/gpu_usage.py",),
    "prometheus_client": (
        "coordinator/metrics.py",
        "coordinator/metrics_cluster.py",
        "coordinator/metrics_vllm.py",
        LAUNCH,
    ),
    "llguidance": (
        "baton/engine/grammar_automaton.py",
        "baton/runtime/grammar_process.py",
        "coordinator/structured_output.py",
    ),
}
TYPES_ONLY_ALLOWED = ("grpc",)  # an annotation creates no dependency at run time


def breaks_ours(found: Import) -> bool:
    if not any(found.is_of(package) for package in PACKAGES):
        return False
    allowed = next(allowed for patterns, allowed in OURS if matches(found.path, patterns))
    return not any(found.is_of(package) for package in allowed)


def breaks_restricted(found: Import) -> bool:
    if found.typing_only and any(found.is_of(package) for package in TYPES_ONLY_ALLOWED):
        return False
    return any(found.is_of(package) and not matches(found.path, where) for package, where in RESTRICTED.items())


def test_every_listed_path_exists() -> None:
    listed = {p for rows in (*(patterns for patterns, _ in OURS), *RESTRICTED.values()) for p in rows}
    assert [p for p in sorted(listed) if not any(matches(path, (p,)) for path in source_files())] == []


def test_all_imports_follow_the_tables() -> None:
    found = [i for path in source_files() for i in imports_of(path)]
    assert len(found) > 100
    broken = [str(i) for i in found if breaks_ours(i) or breaks_restricted(i)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("baton/core/blocks.py", "import baton.engine.model"),
        ("baton/core/blocks.py", "from baton import runtime"),
        ("prefill/scheduler.py", "from prefill.worker import Worker"),
        ("prefill/worker.py", "import decode.scheduler"),
        ("decode/receiver.py", "def f():\n    from prefill import link"),
        ("coordinator/pipeline.py", "import torch.nn"),
        ("coordinator/policy/dispatch.py", "from coordinator.pipeline import Pipeline"),
        ("coordinator/policy/dispatch.py", "from ..pipeline import Pipeline"),
        ("prefill/worker.py", "import torch.distributed as dist"),
        ("baton/engine/model.py", "from torch.distributed import ProcessGroup"),
        ("baton/engine/model.py", "from torch import distributed"),
        ("baton/engine/model.py", "from baton.runtime.streams import LinkLost"),
        ("baton/transfer/edge.py", "from baton.runtime import streams"),
        ("baton/runtime/streams.py", "import msgpack"),
        ("coordinator/pipeline.py", "from baton.v1 import kv_pb2"),
        ("coordinator/pipeline.py", "import starlette"),
        ("coordinator/openai/schema.py", "import starlette"),
        ("coordinator/text/stream.py", "from coordinator.http import app"),
        ("decode/worker.py", "import launch.plan"),
        ("batches/runner.py", "from coordinator.pipeline import Pipeline"),
        ("coordinator/serving.py", "from batches.store import BatchStore"),
        ("batches/routes.py", "from baton.engine import model"),
        ("sim/cluster.py", "from decode.worker import DecodeWorker"),
        ("sim/cluster.py", "from decode.speculation.engine import SpeculativeEngine"),
    ],
)
def test_forbidden_import_is_detected(path: str, line: str) -> None:
    (found,) = imports_of(path, ast.parse(line))
    assert breaks_ours(found) or breaks_restricted(found)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("baton/engine/parallel.py", "from baton.runtime.frames import Frame"),
        ("baton/engine/parallel.py", "import torch.distributed"),
        ("coordinator/http/errors.py", "from starlette.requests import Request"),
        ("sim/cluster.py", "from decode.scheduler import DecodeScheduler"),
        ("sim/cluster.py", "from decode.speculation.step_cost import StepModel"),
        ("launch/up.py", "import prefill.worker"),
        ("coordinator/policy/dispatch.py", "from . import journal"),
    ],
)
def test_permitted_import_is_accepted(path: str, line: str) -> None:
    (found,) = imports_of(path, ast.parse(line))
    assert not breaks_ours(found) and not breaks_restricted(found)

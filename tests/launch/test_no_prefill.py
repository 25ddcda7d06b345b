"""A plan without prefill workers: decode workers compute the prompts."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.errors import StartupError
from launch.plan import Plan, local_topology, make_plan
from launch.plan_checks import check_plan
from launch.topology import Topology, parse_topology
from launch.up_config import UpConfig
from tests.support.model_dirs import model_config


def plan(model: Path | str, **options: object) -> Plan:
    config = UpConfig(device="cpu", **options)  # type: ignore[arg-type]
    return make_plan(local_topology(config, [0, 1], ()), str(model), "m")


@pytest.mark.parametrize(
    ("prefill", "given", "split"),
    [(1, "always", "always"), (1, "auto", "auto"), (0, "always", "auto"), (0, "auto", "auto"), (0, "never", "never")],
)
def test_without_prefill_workers_decode_workers_compute_prompts(prefill: int, given: str, split: str) -> None:
    made = plan("m", prefill=prefill, decode=2, split=given)
    assert made.topology.coordinator.config.split == split
    assert [w.role for w in made.topology.workers] == ["prefill"] * prefill + ["decode"] * 2


def topology(text: str) -> Topology:
    nodes = '[[nodes]]\nname = "a"\naddress = "127.0.0.1"\ncores = "0-3"\n[coordinator]\nnode = "a"\n'
    return parse_topology(tomllib.loads('model = "m"\n' + nodes + text))


def test_topology_may_have_decode_workers_only() -> None:
    made = make_plan(topology('[[decode]]\nnode = "a"\n'), "m", "m")
    assert made.topology.coordinator.config.split == "auto"
    with pytest.raises(StartupError, match="at least one"):
        topology("")


@pytest.mark.parametrize(("runner", "refused"), [("pooling", True), ("auto", False), ("generate", False)])
def test_model_that_is_served_only_for_pooling_needs_prefill_workers(
    runner: str, refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config()))
    made = plan(tmp_path, prefill=0, runner=runner)
    if refused:
        with pytest.raises(StartupError, match="no prefill worker"):
            check_plan(made, {})
    else:
        check_plan(made, {})
    check_plan(replace(plan(tmp_path, runner=runner)), {})

import os
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.cores import ranges
from baton.core.errors import StartupError
from launch.child import Child, ChildSpec
from launch.cores import Placement, place
from launch.members import check_cores
from launch.plan import Plan, local_topology, make_plan
from launch.topology import parse_topology
from launch.up_config import UpConfig


def test_two_cores_are_split_between_prefill_and_decode() -> None:
    assert place([1, 1], [0, 1]) == (Placement((0,), 1), Placement((1,), 1))


@pytest.mark.parametrize(
    ("ranks", "cores", "threads", "expected"),
    [
        ([1, 1], [0, 1, 2, 3, 4], 0, [((0, 1, 2), 3), ((3, 4), 2)]),  # the first gets the remaining core
        ([1, 1, 1], [4, 7], 0, [((4,), 1), ((7,), 1), ((4,), 1)]),  # fewer cores than workers: in turn
        ([1, 1], [0, 1, 2, 3], 1, [((0,), 1), ((1,), 1)]),
        ([1, 1], [0, 1, 2, 3], 2, [((0, 1), 2), ((2, 3), 2)]),
        ([1, 1], [0, 1, 2], 2, [((0, 1), 2), ((0, 2), 2)]),  # explicit threads are kept, cores shared
        ([1], [0, 1], 8, [((0, 1), 8)]),
        ([], [0], 0, []),
        ([2, 1], [0, 1, 2, 3, 4, 5], 0, [((0, 1, 2, 3), 4), ((4, 5), 2)]),
        ([2, 1], [0, 1, 2, 3], 0, [((0, 1, 2), 3), ((3,), 1)]),
        ([2, 1], [0, 1], 0, [((0, 1), 2), ((0,), 1)]),  # one thread for each rank
        ([4, 1, 2], [0, 1], 0, [((0, 1), 4), ((0,), 1), ((0, 1), 2)]),
    ],
)
def test_placement(
    ranks: list[int], cores: list[int], threads: int, expected: list[tuple[tuple[int, ...], int]]
) -> None:
    assert [(p.cores, p.threads) for p in place(ranks, cores, threads)] == expected


def test_no_core_is_assigned_twice_if_there_are_enough() -> None:
    for cores in range(1, 20):
        for workers in range(1, cores + 1):
            given = [core for p in place([1] * workers, range(cores)) for core in p.cores]
            assert sorted(given) == list(range(cores))


def test_placement_is_described_as_text() -> None:
    assert str(Placement((0,), 1)) == "core 0, 1 thread"
    assert str(Placement((0, 1, 2, 5), 4)) == "cores 0-2,5, 4 threads"


@pytest.mark.parametrize(
    ("ranks", "gpus", "seen"),
    [
        ((1, 1, 1), "01", ["0", "1", "0"]),
        ((2, 2, 1), "012", ["0,1", "2,0", "1"]),
        ((4, 4, 4), "01", ["0,1", "0,1", "0,1"]),
        ((1, 1, 1), "", ["", "", ""]),
    ],
)
def test_gpus_are_assigned_round_robin(ranks: tuple[int, int, int], gpus: str, seen: list[str]) -> None:
    topology = local_topology(UpConfig(decode=2), [0], gpus)
    workers = [replace(w, tensor_parallel=size) for w, size in zip(topology.workers, ranks, strict=True)]
    made = make_plan(replace(topology, workers=tuple(workers)), "/m", "m")
    assert [part.gpus for part in made.parts] == seen


def pinned(cores: str) -> Plan:
    text = f"""
model = "/models/m"
nodes = [{{ name = "a", address = "127.0.0.1", cores = "{cores}" }}]
prefill = [{{ node = "a" }}]
decode = [{{ node = "a" }}]
coordinator = {{ node = "a" }}
"""
    return make_plan(parse_topology(tomllib.loads(text)), "/models/m", "m")


@pytest.mark.skipif(sys.platform != "linux", reason="processes are pinned on Linux only")
def test_unavailable_cores_are_named_in_the_error(tmp_path: Path) -> None:
    here = tuple(sorted(os.sched_getaffinity(0)))
    check_cores(pinned(ranges(here)), frozenset({"a"}))
    check_cores(pinned("3000-3001"), frozenset({"b"}))  # that node is another host
    with pytest.raises(StartupError) as refused:
        check_cores(pinned(f"{here[0]},3000-3001"), frozenset({"a"}))
    assert refused.value.message == (
        f"node a: 'cores' includes 3000-3001, but this process may run on {ranges(here)} only"
    )
    with pytest.raises(StartupError, match=r"decode-0 cannot be started: it may not run on cores 3000-3001$"):
        Child(ChildSpec("decode-0", ("true",), tmp_path / "log", cores=(3000, 3001)))

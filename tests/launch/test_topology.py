from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any

import pytest

from baton.core.cores import parse_cores, ranges
from baton.core.errors import StartupError
from launch.members import Programs, nodes_here
from launch.plan import Plan, check_addresses, make_plan
from launch.topology import parse_topology

THREE_NODES = """
model = "/models/m"

[options]
dtype = "bfloat16"
log_level = "debug"
lease_s = 2

[[nodes]]
name = "front"
address = "10.0.0.1"
cores = 4

[[nodes]]
name = "b"
address = "10.0.0.2"
gpus = 2
cores = "0-7"

[[nodes]]
name = "c"
address = "10.0.0.3"
gpus = "4,5"
cores = 8

[coordinator]
node = "front"
host = "0.0.0.0"

[[prefill]]
nodes = ["b", "c"]
tensor_parallel = 2
base_port = 9000
devices = [1]

[[decode]]
name = "d"
node = "c"
base_port = 9100
max_running = 8
"""


def file() -> dict[str, Any]:
    return tomllib.loads(THREE_NODES)


def plan(of: dict[str, Any] | None = None) -> Plan:
    return make_plan(parse_topology(of or file()), "/models/m", "m")


def words(made: Plan, name: str) -> str:
    part = next(part for part in made.parts if part.name == name)
    return " ".join(Programs((), ("torchrun",)).of_part(made, part))


def test_a_worker_over_two_nodes_is_two_agents_of_one_job() -> None:
    made = plan()
    first, second = words(made, "prefill-0"), words(made, "prefill-0.1")
    job = "--nproc-per-node 1 --max-restarts 0 --master-addr 10.0.0.2 --master-port 9000 -m prefill --model /models/m"
    assert first.startswith(f"torchrun --nnodes 2 --node-rank 0 {job} --worker-id prefill-0 ")
    assert second.startswith(f"torchrun --nnodes 2 --node-rank 1 {job} --worker-id prefill-0 ")
    assert "--coordinator 10.0.0.1:8101 --host 10.0.0.2" in first and "--host 10.0.0.3" in second
    assert "--dtype bfloat16 --log-level debug" in first and "lease" not in first


def test_cores_gpus_ports_and_options_follow_the_file() -> None:
    made = plan()
    placed = {part.name: (str(part.placement), part.gpus) for part in made.parts}
    assert placed == {
        "prefill-0": ("cores 0-7, 8 threads", "1"),
        "prefill-0.1": ("not pinned, 4 threads", "1"),
        "d": ("not pinned, 4 threads", "4"),
    }
    assert "--link-port 9101 --store-port 9102" in words(made, "d") and "--max-running 8" in words(made, "d")
    assert "--host 0.0.0.0" in " ".join(made.coordinator_command())
    assert "--control-host 10.0.0.1 --control-port 8101" in " ".join(made.coordinator_command())
    assert "--lease-s 2" in " ".join(made.coordinator_command()) and made.url == "http://10.0.0.1:8100"


def put(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(tables: Any) -> None:
        for key in path[:-1]:
            tables = tables[key]
        tables[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("modle", value="x"), "topology: unknown key 'modle'; did you mean 'model'?"),
        (put("options", "dtyp", value="x"), "options: unknown key 'dtyp'; did you mean 'dtype'?"),
        (put("options", "worker_id", value="x"), "options: unknown key 'worker_id'"),
        (put("nodes", 0, "adress", value="x"), r"nodes\[0\]: unknown key 'adress'; did you mean 'address'?"),
        (put("nodes", 1, value={"address": "x"}), r"nodes\[1\]: 'name' is missing"),
        (put("nodes", 1, "name", value="../../x"), r"nodes\[1\]: 'name' '../../x' is not 1 to 128 characters of A-Z"),
        (put("nodes", 1, "address", value="10.0.0.1\nrm -r x #"), r"nodes\[1\]: 'address' '10.* is not a host name"),
        (put("nodes", 1, "address", value="$(id)"), r"nodes\[1\]: 'address' '\$\(id\)' is not a host name"),
        (put("nodes", 1, "address", value="-x"), r"nodes\[1\]: 'address' '-x' is not a host name"),
        (put("nodes", 1, "address", value="[::1"), r"nodes\[1\]: 'address' '\[::1' is not a host name"),
        (put("coordinator", "host", value=""), "coordinator: 'host' '' is not a host name or IP address"),
        (put("nodes", 1, "name", value=""), r"nodes\[1\]: 'name' '' is not 1 to 128"),
        (put("decode", 0, "name", value="../../../tmp/evil"), r"decode\[0\]: 'name' '../../../tmp/evil' is not 1 to"),
        (put("decode", 0, "name", value="d$(id)"), r"decode\[0\]: 'name' 'd\$\(id\)' is not 1 to 128"),
        (put("prefill", 0, "name", value="d\nrm -r x"), r"prefill\[0\]: 'name' .* is not 1 to 128"),
        (put("decode", 0, "name", value="prefill-0.1"), "member 'prefill-0.1' is named twice"),
        (put("nodes", 1, "name", value="c"), "node 'c' is named twice"),
        (put("nodes", 1, "cores", value="0-x"), r"nodes\[1\]: 'cores' must look like 0-3,8"),
        (put("nodes", value=[]), r"topology: no \[\[nodes\]\] table"),
        (put("coordinator", "nod", value="x"), "coordinator: unknown key 'nod'; did you mean 'node'?"),
        (put("coordinator", "node", value="frnt"), "coordinator: unknown node 'frnt'; did you mean 'front'?"),
        (put("coordinator", "port", value=0), "'port' must be a fixed port"),
        (put("prefill", value={"node": "b"}), r"must be a list of tables, \[\[prefill\]\]"),
        (put("prefill", 0, "node", value="b"), "either 'node' or 'nodes'"),
        (put("prefill", 0, "nodes", value=["b", "x"]), r"prefill\[0\]: unknown node 'x'"),
        (put("prefill", 0, "nodes", value=["b", 3]), "must be a list of str"),
        (put("prefill", 0, "nodes", value=["b", "b"]), "'b' is named twice"),
        (put("prefill", 0, "nnodes", value=3), "'nnodes' is 3, but 2 nodes are given"),
        (put("prefill", 0, "tensor_parallel", value=3), "3 cannot be divided over 2 nodes"),
        (put("prefill", 0, "tensor_paralel", value=2), "did you mean 'tensor_parallel'?"),
        (put("prefill", 0, "devices", value=[0, 1]), "'devices' lists 2 GPUs, but each node has 1 ranks"),
        (put("prefill", 0, "devices", value=[-1]), r"prefill\[0\]: 'devices' must be at least 0, not -1"),
        (put("served_model_name", value="a\nb"), r"topology: 'served_model_name' must be 1 to 256 printable .*'a\\nb'"),
        (put("prefill", 0, "base_port", value=0), "needs 'rendezvous_port' or 'base_port'"),
        (put("prefill", 0, "link_port", value=1), "'link_port' is only for decode workers"),
        (put("prefill", 0, "step_tokens", value="x"), "'step_tokens' must be int"),
        (put("prefill", 0, "name", value="d"), "member 'd' is named twice"),
        (put("decode", 0, "link_port", value=9102), "--link-port of d and --store-port of d are both 9102"),
        (put("decode", 0, "health_port", value=9102), "--store-port of d and --health-port of d are both 9102"),
        (put("nodes", 1, "address", value="x" * 64 + ".y"), "is not a host name or IP address"),
        (put("nodes", 1, "address", value="x..y"), "is not a host name or IP address"),
        (put("nodes", 2, value={"name": "c", "address": "x"}), "set its 'cores'"),
    ],
)
def test_invalid_topology_is_refused_with_the_reason(change: Any, message: str) -> None:
    tables = file()
    change(tables)
    with pytest.raises(StartupError, match=message):
        plan(tables)


def test_an_address_may_be_missing_only_for_slurm() -> None:
    tables = file()
    del tables["nodes"][1]["address"]
    topology = parse_topology(tables)
    with pytest.raises(StartupError, match="node 'b' has no address"):
        check_addresses(topology)


def test_local_nodes_are_those_with_an_address_of_this_host() -> None:
    tables = file()
    with pytest.raises(StartupError, match="choose one with --node: front, b, c"):
        nodes_here(parse_topology(tables))
    tables["nodes"][1]["address"] = "127.0.0.1"
    assert nodes_here(parse_topology(tables)) == {"b"}
    assert nodes_here(parse_topology(tables), "c") == {"c"}
    with pytest.raises(StartupError, match="--node x"):
        nodes_here(parse_topology(tables), "x")


def test_cores_are_parsed_and_formatted() -> None:
    assert parse_cores("0-2, 7", "x") == (0, 1, 2, 7) and ranges((0, 1, 2, 7)) == "0-2,7"
    for bad in ("", "1-", "a", "3-1", "1,1"):
        with pytest.raises(StartupError):
            parse_cores(bad, "x")


def test_a_worker_borrows_the_cores_of_the_other_workers_on_its_node() -> None:
    tables = {
        "options": {"borrow_cores": "others", "device": "cpu"},
        "nodes": [
            {"name": "a", "address": "10.0.0.1", "cores": "0-5"},
            {"name": "b", "address": "10.0.0.2", "cores": 2},
        ],
        "coordinator": {"node": "a"},
        "prefill": [{"name": "p", "node": "a", "base_port": 9000}],
        "decode": [
            {"name": "d", "node": "a", "base_port": 9100},
            {"name": "wide", "node": "a", "base_port": 9200, "tensor_parallel": 2},
            {"name": "given", "node": "a", "base_port": 9300, "borrow_cores": "7"},
            {"name": "alone", "node": "b", "base_port": 9400},
        ],
    }
    made = plan(tables)
    names = [part.name for part in made.parts]
    borrowed = {name: words(made, name).partition("--borrow-cores ")[2].split(" ")[0] for name in names}
    assert {part.name: part.placement.cores for part in made.parts}["p"] == (0, 1)
    assert borrowed == {"p": "2-5", "d": "0-1,3-5", "wide": "", "given": "7", "alone": ""}


def test_worker_gets_device_cuda_if_gpus_are_configured_for_it() -> None:
    def device(worker: str, tables: dict[str, Any]) -> str:
        return words(plan(tables), worker).partition("--device ")[2].partition(" ")[0]

    assert device("prefill-0", file()) == device("d", file()) == "cuda"
    tables = file()
    del tables["nodes"][1]["gpus"]
    assert device("prefill-0", tables) == "cuda"  # it names its devices
    del tables["prefill"][0]["devices"]
    assert device("prefill-0", tables) == "" and device("d", tables) == "cuda"  # one of its nodes has no GPUs
    for key, value, expected in (("device", "cpu", "cpu"), ("exact", True, "cuda")):
        assert device("d", {**file(), "options": {key: value}}) == expected


def test_workers_of_several_nodes_that_share_a_gpu_move_kv_by_gloo() -> None:
    assert "--edge-kind" not in words(plan(), "d")
    tables = file()
    tables["nodes"][2]["gpus"] = 1
    del tables["prefill"][0]["devices"]
    assert "--edge-kind gloo" in words(plan(tables), "d") and "--edge-kind gloo" in words(plan(tables), "prefill-0")
    tables["options"]["edge_kind"] = "nccl"
    assert "--edge-kind nccl" in words(plan(tables), "d")

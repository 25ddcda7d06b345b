"""What a plan refuses before anything starts, with the messages of the coordinator and of workers that load."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import launch.up
from baton.core.commands import Join
from baton.core.errors import JoinRefused, StartupError
from baton.runtime.config import CoordinatorConfig, WorkerConfig, resolve
from coordinator.policy.workers import WorkerTable
from coordinator.serving import run_coordinator
from launch.dry_run import dry_run
from launch.members import Programs
from launch.plan import Plan, local_topology, make_plan
from launch.plan_checks import check_memory, check_plan, host_memory_bytes
from launch.topology import WorkerPlace
from launch.up import topology_plan
from launch.up_config import UpConfig
from tests.support.builders import make_facts
from tests.support.model_dirs import model_config
from tests.support.topologies import loopback_topology

SIX_OVER_TWO: dict[str, object] = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}


def model_dir(where: Path, **changes: object) -> Path:
    (where / "config.json").write_text(json.dumps(model_config(**changes)))
    return where


def plan(model: Path, first: dict[str, object], last: dict[str, object], **options: object) -> Plan:
    """Two prefill workers and a decode worker on one node. The first and the last have only these options, the second
    has none."""
    config = UpConfig(prefill=2, device="cpu", **options)
    topology = local_topology(config, [0, 1], ())
    per_worker: list[dict[str, object]] = [first, {}, last]
    workers = tuple(replace(w, options=given) for w, given in zip(topology.workers, per_worker, strict=True))
    return make_plan(replace(topology, workers=workers), str(model), "m")


@pytest.mark.parametrize("model_is_here", [True, False])
@pytest.mark.parametrize(
    ("first", "last", "difference"),
    [
        ({"block_size": 32}, {"block_size": 24}, "block_size: 32 at prefill-0 and 24 at decode-0"),
        (
            {"dtype": "bfloat16"},
            {"dtype": "bfloat16", "kv_dtype": "fp8"},
            "kv_dtype: 'bfloat16' at prefill-0 and 'float8_e4m3fn' at decode-0",
        ),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, "dtype: 'float32' at prefill-0 and 'bfloat16' at decode-0"),
        (
            {"exact": True},
            {"exact": True, "dtype": "bfloat16"},
            "dtype: 'float32' at prefill-0 and 'bfloat16' at decode-0",
        ),
        ({"max_model_len": 64}, {"max_model_len": 32}, "max_model_len: 64 at prefill-0 and 32 at decode-0"),
        ({"edge_kind": "ipc"}, {"edge_kind": "gloo"}, "edge_kind: 'ipc' at prefill-0 and 'gloo' at decode-0"),
        ({"device": "cuda"}, {"device": "cpu"}, "edge_kind: 'nccl' at prefill-0 and 'gloo' at decode-0"),
    ],
)
def test_incompatible_workers_are_refused_with_the_message_of_a_join(
    first: dict[str, object], last: dict[str, object], difference: str, model_is_here: bool, tmp_path: Path
) -> None:
    model = model_dir(tmp_path) if model_is_here else tmp_path / "elsewhere"
    environment = {"BATON_EXACT": "1"} if "exact" in first else {}
    if "max_model_len" in first:
        environment = {"BATON_MAX_MODEL_LEN": "64"}
    with pytest.raises(StartupError) as caught:
        check_plan(plan(model, first, last), environment)
    assert caught.value.message.partition("; ")[0] == f"decode worker decode-0 refused: {difference}"


@pytest.mark.parametrize(
    ("last", "difference"),
    [
        ({"exact": True}, "exact: False at prefill-0 and True at decode-0"),
        ({"quantize": "int8"}, "quantize: 'none' at prefill-0 and 'int8' at decode-0"),
        ({"model_impl": "transformers"}, "model_impl: 'baton' at prefill-0 and 'transformers' at decode-0"),
    ],
)
def test_unset_option_counts_as_its_default(last: dict[str, object], difference: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"decode worker decode-0 refused: {difference}"):
        check_plan(plan(model_dir(tmp_path), {}, last), {})


def test_how_a_model_that_transformers_computes_is_divided_is_left_to_its_workers(tmp_path: Path) -> None:
    model = model_dir(tmp_path, architectures=["Gemma2ForCausalLM"], model_type="gemma2")
    check_plan(plan(model, {}, {}, decode_tp=3), {})


def test_ipc_edges_between_two_hosts_are_refused(tmp_path: Path) -> None:
    given = plan(model_dir(tmp_path), {}, {}, edge_kind="ipc")
    topology = given.topology
    check_plan(replace(given, topology=replace(topology, workers=ipc(topology.workers))), {})
    apart = (*topology.workers[:2], replace(topology.workers[2], nodes=("other",)))
    with pytest.raises(
        StartupError, match="ipc works only within a host, but prefill-0 and decode-0 are on local and other"
    ):
        check_plan(replace(given, topology=replace(topology, workers=ipc(apart)), parts=()), {})


def ipc(workers: tuple[WorkerPlace, ...]) -> tuple[WorkerPlace, ...]:
    return tuple(replace(w, options={**w.options, "edge_kind": "ipc"}) for w in workers)


def test_plan_check_and_coordinator_report_the_same_message(tmp_path: Path) -> None:
    facts = make_facts()
    other = replace(facts, layout=replace(facts.layout, block_size=facts.layout.block_size * 3 // 2))
    table = WorkerTable(3.0)
    table.join(Join("prefill-0", "prefill", 1, facts, blocks_total=8), 0.0)
    with pytest.raises(JoinRefused) as at_join:
        table.join(Join("decode-0", "decode", 1, other, link_address="a:1", blocks_total=8), 0.0)
    sizes = ({"block_size": f.layout.block_size} for f in (facts, other))
    with pytest.raises(StartupError) as before:
        check_plan(plan(model_dir(tmp_path), *sizes), {})
    assert before.value.message == at_join.value.message


def test_values_known_only_on_the_host_of_a_worker_are_not_checked(tmp_path: Path) -> None:
    model = model_dir(tmp_path)
    check_plan(plan(model, {"block_size": 8}, {"block_size": 32, "dtype": "bfloat16"}), {})  # auto may be bfloat16
    check_plan(plan(model, {"max_model_len": 128}, {}), {})  # the model's own limit
    check_plan(plan(tmp_path / "elsewhere", {}, {"max_model_len": 64}), {})
    check_plan(plan(tmp_path / "elsewhere", {}, {}, decode_tp=3), {})


@pytest.mark.parametrize(
    ("changes", "ranks", "error"),
    [
        ({}, 3, "num_attention_heads 2 cannot be divided over 3 tensor-parallel ranks"),
        (
            SIX_OVER_TWO,
            3,
            "2 KV heads cannot be divided over 3 tensor-parallel ranks",
        ),
        ({"intermediate_size": 31}, 2, "intermediate_size 31 cannot be divided over 2 tensor-parallel ranks"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_numbers(
    changes: dict[str, object], ranks: int, error: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError) as caught:
        check_plan(plan(model_dir(tmp_path, **changes), {}, {}, decode_tp=ranks), {})
    assert caught.value.message == f"decode-0: {error}"


@pytest.mark.parametrize("longest", [1, 129])
def test_max_model_len_outside_the_range_of_the_model_is_refused(longest: int, tmp_path: Path) -> None:
    limit = "max-model-len must be from 2 to 128, the model's max_position_embeddings, not"
    with pytest.raises(StartupError) as caught:
        check_plan(plan(model_dir(tmp_path, max_position_embeddings=128), {}, {"max_model_len": longest}), {})
    assert caught.value.message == f"decode-0: {limit} {longest}"


@pytest.mark.parametrize(
    "options",
    [
        {"traffic": "v2"},
        {"traffic": "v2=70 v3=40"},
        {"allowed_origins": "chat.example"},
        {"otlp_endpoint": "127.0.0.1:4318"},
        {"tls_cert_file": "c.pem"},
        {"lora": "a"},
        {"lora": "a=b a=c"},
        {"api_key": "sha256:1"},
        {"store": True},
    ],
)
def test_an_option_that_the_coordinator_refuses_is_refused_before_it_starts_with_its_message(
    options: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(StartupError) as before:
        check_plan(plan(model_dir(tmp_path), {}, {}, **options), {})
    with pytest.raises(StartupError) as by_process:
        asyncio.run(run_coordinator(CoordinatorConfig(model=str(tmp_path), **options)))  # type: ignore[arg-type]
    assert before.value.message == f"coordinator: {by_process.value.message}"
    name = next(iter(options)).replace("_", "-")
    assert f"--{name}" in before.value.message


@pytest.mark.parametrize(
    ("option", "value"), [("revision", "a b"), ("domain", "/"), ("worker_id", "../x"), ("borrow_cores", "3-1")]
)
def test_a_name_or_cores_that_a_worker_refuses_are_refused_with_any_source(option: str, value: str) -> None:
    for sources in ({"file": {option: value}}, {"env": {f"BATON_{option.upper()}": value}}, {"flags": {option: value}}):
        with pytest.raises(StartupError, match=f"(?i){option.replace('_', '[_-]')}.* {value!r}"):
            resolve(WorkerConfig, **{"file": {}, "env": {}, "flags": {}, **sources})
    assert resolve(WorkerConfig, file={}, env={}, flags={option: "none"})


def test_a_block_size_that_exact_mode_refuses_is_refused_by_a_dry_run(tmp_path: Path) -> None:
    given = plan(model_dir(tmp_path), {}, {}, exact=True)
    options = {"device": "cpu", "exact": True, "block_size": 24}
    workers = tuple(replace(worker, options=options) for worker in given.topology.workers)
    with pytest.raises(StartupError, match=r"^prefill-0: exact mode: block-size must divide 64, not 24$"):
        dry_run(make_plan(replace(given.topology, workers=workers), given.model, "m"), Programs())


@pytest.mark.parametrize("dry", [True, False])
def test_up_refuses_an_invalid_plan_before_it_prints_or_creates_anything(
    dry: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def must_not_run(*_: object, **__: object) -> None:
        raise AssertionError("it went on")

    for name in ("check_ports", "run_directory", "LocalCluster"):
        monkeypatch.setattr(launch.up, name, must_not_run)
    config = UpConfig(model=str(model_dir(tmp_path)), device="cpu", decode_tp=3, dry_run=dry)
    with pytest.raises(StartupError, match="decode-0: num_attention_heads 2 cannot be divided over 3"):
        launch.up.up(config)
    assert capsys.readouterr().out == ""


TOKEN = "correct horse battery staple"


def topology(tmp_path: Path, change: str, into: str, host: str = "127.0.0") -> UpConfig:
    """A topology of nodes `a` and `b`, on this host unless `host` differs, with `change` replaced by `into`."""
    (model := tmp_path / "m").mkdir()
    model_dir(model)
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    options = f'draft = "{model}"\ncluster_token_file = "{tmp_path / "token"}"'
    path = loopback_topology(tmp_path / "t.toml", model, options=options)
    text = path.read_text()
    assert change in text
    path.write_text(text.replace(change, into).replace("127.0.0", host))
    return UpConfig(topology=str(path), dry_run=True)


MISSING = [
    ("cores = 2", 'cores = "0,4000"', "node a: 'cores' includes 4000, but this process may run on "),
    ("/m", "/n", "coordinator: model directory .*/n does not exist"),
    ("draft = ", 'draft = "/n/o" #', "decode-0: --draft: model directory /n/o does not exist"),
    ("/token", "/tokens", "coordinator: --cluster-token-file .*/tokens: No such file or directory"),
]


@pytest.mark.parametrize(("change", "into", "error"), MISSING)
def test_up_refuses_resources_that_this_host_lacks(
    change: str, into: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = topology(tmp_path, change, into)
    for dry in (True, False):
        with pytest.raises(StartupError, match=f"^{error}"):
            launch.up.up(replace(config, dry_run=dry, run_dir="/proc/self"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("change", "into", "error"), MISSING)
def test_dry_run_does_not_check_resources_of_other_hosts(change: str, into: str, error: str, tmp_path: Path) -> None:
    config = topology(tmp_path, change, into, host="203.0.113")
    assert launch.up.up(config) == 0
    with pytest.raises(StartupError, match=f"^{error}".replace("coordinator", "decode-0").replace("node a", "node b")):
        launch.up.up(replace(config, node="b"))
    with pytest.raises(StartupError, match="--node c: unknown node; the topology has a, b"):
        launch.up.up(replace(config, node="c"))


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ('api_key_file = "/n/keys"', "--api-key-file /n/keys: No such file"),
        ('cluster_tls_dir = "/n/tls"', "--cluster-tls-dir /n/tls/ca.pem: No such file"),
        ('tls_cert_file = "/n/c.pem"\ntls_key_file = "/n/k.pem"', "--tls-cert-file /n/c.pem: No such file"),
        ('lora = "a=/n/a"', "--lora a: /n/a: no such directory"),
    ],
)
def test_up_refuses_files_of_the_coordinator_that_its_host_lacks(option: str, error: str, tmp_path: Path) -> None:
    config = topology(tmp_path, "[coordinator]", f"[coordinator]\n{option}")
    for dry in (True, False):
        with pytest.raises(StartupError, match=f"^coordinator: {error}"):
            launch.up.up(replace(config, dry_run=dry, run_dir="/proc/self"))


def test_up_refuses_a_worker_whose_host_lacks_its_certificate(tmp_path: Path) -> None:
    config = topology(tmp_path, "[[decode]]", '[[decode]]\ncluster_tls_dir = "/n/tls"')
    with pytest.raises(StartupError, match=r"^decode-0: --cluster-tls-dir /n/tls/ca\.pem: No such file"):
        launch.up.up(config)


def test_member_on_a_non_loopback_address_of_this_host_needs_a_token(tmp_path: Path) -> None:
    config = topology(tmp_path, "cluster_token_file", "#", host="203.0.113")
    assert launch.up.up(config) == 0
    for node, error in (
        ("a", "coordinator: --control-host 203.0.113.1 is not a loopback address"),
        ("b", "decode-0: --host 203.0.113.2 is not a loopback address"),
    ):
        with pytest.raises(StartupError, match=f"^{error}: a cluster token is required"):
            launch.up.up(replace(config, node=node))


@pytest.mark.parametrize(
    ("found", "error"),
    [
        ("", r"node b: its address 127\.0\.0\.2 does not resolve here \(Name or service not known\)"),
        ("127.0.0.1", r"node b: its address 127\.0\.0\.2 is that of node a: 127\.0\.0\.1"),
    ],
)
def test_a_dry_run_refuses_addresses_that_do_not_resolve_or_are_those_of_another_node(
    found: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lookup(host: str, *_: object) -> list[Any]:
        address = found if host == "127.0.0.2" else host
        if not address:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with pytest.raises(StartupError, match=f"^{error}$"):
        dry_run(topology_plan(topology(tmp_path, "cores = 2", "cores = 2").topology), Programs())
    assert not capsys.readouterr().out, "no partial plan"


def test_refused_dry_run_prints_no_partial_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(model_dir(tmp_path), {"kv_memory_gib": 1e-8}, {})
    with pytest.raises(StartupError, match="too small for one sequence"):
        dry_run(made, Programs())
    assert capsys.readouterr().out == ""


def test_kv_memory_beyond_that_of_the_host_is_refused(tmp_path: Path) -> None:
    GIB = 1 << 30
    given = plan(model_dir(tmp_path), {"kv_memory_gib": 10.0}, {"kv_memory_gib": 6.5})
    nodes = {node.name for node in given.topology.nodes}
    check_memory(given, nodes, 17 * GIB)
    with pytest.raises(StartupError) as refused:
        check_memory(given, nodes, 16 * GIB)
    refusal = refused.value.message
    assert (
        "16.5 GiB (prefill-0 10.0, decode-0 6.5) exceeds the 16.0 GiB of this host" in refusal
        and "--kv-memory-gib" in refusal
    )
    check_memory(given, set(), 1)  # no node is this host
    check_memory(plan(model_dir(tmp_path), {}, {}), nodes, 1)  # chosen from the free memory
    assert host_memory_bytes() > GIB


def test_only_a_model_that_is_served_for_pooling_needs_no_decode_worker(tmp_path: Path) -> None:
    directory = model_dir(tmp_path)
    for runner, refused in (("auto", True), ("generate", True), ("pooling", False)):
        options = UpConfig(decode=0, device="cpu", runner=runner)
        without = make_plan(local_topology(options, [0, 1], ()), str(directory), "m")
        if refused:
            with pytest.raises(StartupError, match="no decode worker"):
                check_plan(without, {})
        else:
            check_plan(without, {})
    (directory / "modules.json").write_text("[]")
    check_plan(make_plan(local_topology(UpConfig(decode=0, device="cpu"), [0, 1], ()), str(directory), "m"), {})


@pytest.mark.parametrize(
    ("last", "options", "refused"),
    [
        ({"revision": "y"}, {}, True),
        ({"revision": "x", "domain": "a"}, {}, True),
        ({"revision": "x"}, {}, False),
        ({}, {}, False),  # the second prefill worker's
        ({"revision": "y"}, {"split": "auto"}, False),  # it computes prompts itself
    ],
)
def test_workers_none_of_which_can_be_paired_are_refused(
    last: dict[str, object], options: dict[str, object], refused: bool, tmp_path: Path
) -> None:
    given = plan(model_dir(tmp_path), {"revision": "x"}, last, **options)
    if refused:
        with pytest.raises(StartupError, match=r"its revision and domain: prefill-0 \(revision 'x', domain ''\)"):
            check_plan(given, {})
    else:
        check_plan(given, {})

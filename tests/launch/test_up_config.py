from __future__ import annotations

import os
import socket
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from baton.core.errors import StartupError
from baton.runtime.config import CoordinatorConfig, WorkerConfig
from baton.runtime.model_source import builtin_directory, resolve_model, served_name
from launch.cluster_api import get_cluster
from launch.members import Addresses, Members, Programs
from launch.plan import local_topology, make_plan
from launch.up import check_ports, plan_for
from launch.up_config import COORDINATOR_FIELDS, WORKER_FIELDS, UpConfig, check_environment


def plan(config: UpConfig, gpus: tuple[str, ...] = ()) -> Members:
    programs = Programs(("C",), (), ("W",))
    made = make_plan(local_topology(config, [0, 1], gpus), "/m", "m")
    return Members(made, frozenset({"local"}), Path("/r"), programs, 900, 30)


BOUND = Addresses("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")


def test_forwarded_options_have_the_same_types_and_defaults() -> None:
    up = {f.name: f for f in fields(UpConfig)}
    for names, other in ((COORDINATOR_FIELDS, CoordinatorConfig), (WORKER_FIELDS, WorkerConfig)):
        theirs = {f.name: f for f in fields(other)}
        for name in names:
            assert up[name].type == theirs[name].type
            assert name == "control_port" or up[name].default == theirs[name].default


def test_worker_command() -> None:
    spec = plan(UpConfig(decode=1, exact=True, threads=3)).worker("decode-0", BOUND)
    command = " ".join(spec.command)
    assert command.startswith(
        "W decode --model /m --worker-id decode-0 --coordinator 127.0.0.1:3 --host 127.0.0.1 --threads 3 "
    )
    assert " --exact " in command and spec.environment["OMP_NUM_THREADS"] == "3" and spec.log == Path("/r/decode-0.log")


def test_every_process_has_the_time_to_drain_of_up() -> None:
    """Workers drain by themselves too, at a roll for example, and had 30 s whatever `baton up` was given."""
    members = plan(UpConfig(drain_timeout_s=7.5))
    specs = members.coordinator(), members.worker("prefill-0", BOUND), members.worker("decode-0", BOUND)
    commands = [spec.command for spec in (*specs, members.batches(BOUND))]
    assert [command[command.index("--drain-timeout-s") + 1] for command in commands] == ["7.5"] * 4


def test_api_keys_are_on_no_command_line() -> None:
    given = UpConfig(api_key="k-1 k-2")
    members = plan(given)
    commands = [members.coordinator().command, members.worker("decode-0", BOUND).command]
    assert not any("k-1" in word or word == "--api-key" for command in commands for word in command)
    assert members.plan.has_keys and members.plan.admin and not plan(UpConfig()).plan.admin
    with pytest.raises(StartupError, match="--api-key cannot be combined with --topology: set api_key_file"):
        plan_for(UpConfig(api_key="k", topology="t.toml"))


def test_ranks_and_block_sizes_are_those_of_the_role() -> None:
    config = UpConfig(prefill_tp=2, threads=4, decode_block_size=32)
    prefill, decode = (plan(config, ("4", "5", "6")).worker(name, BOUND) for name in ("prefill-0", "decode-0"))
    assert prefill.command[:2] == ("W", "prefill") and decode.command[:2] == ("W", "decode")
    assert prefill.command[-2:] == ("--block-size", "16") and decode.command[-2:] == ("--block-size", "32")
    assert prefill.environment["OMP_NUM_THREADS"] == "2" and decode.environment["OMP_NUM_THREADS"] == "4"
    assert [s.environment["CUDA_VISIBLE_DEVICES"] for s in (prefill, decode)] == ["4,5", "6"]


def test_restarted_coordinator_gets_the_same_ports() -> None:
    command = " ".join(plan(UpConfig(port=0, grpc_port=0)).coordinator(BOUND).command)
    assert "--port 1 --grpc-port 2 --control-host 127.0.0.1 --control-port 3" in command and "-port 0" not in command


def test_gpus_are_assigned_unless_the_cpu_is_requested() -> None:
    assert plan(UpConfig(), ("4", "5")).worker("decode-0", BOUND).environment["CUDA_VISIBLE_DEVICES"] == "5"
    assert "CUDA_VISIBLE_DEVICES" not in plan(UpConfig(device="cpu"), ("4",)).worker("decode-0", BOUND).environment


@pytest.mark.parametrize(
    ("config", "gpus", "kind"),
    [
        (UpConfig(), (), "auto"),
        (UpConfig(), ("0",), "ipc"),
        (UpConfig(), ("GPU-5a",), "ipc"),
        (UpConfig(prefill=2, decode_tp=2), ("0",), "ipc"),
        (UpConfig(), ("0", "1"), "auto"),
        (UpConfig(decode=2), ("0", "1"), "gloo"),  # one pair shares a GPU, another does not see the peer's
        (UpConfig(), ("MIG-1",), "gloo"),
        (UpConfig(), ("MIG-1", "MIG-2"), "gloo"),
        (UpConfig(exact=True), ("0",), "ipc"),
        (UpConfig(device="cpu"), ("0",), "auto"),
        (UpConfig(edge_kind="gloo"), ("0",), "gloo"),
    ],
)
def test_workers_that_share_a_gpu_do_not_use_nccl(config: UpConfig, gpus: tuple[str, ...], kind: str) -> None:
    for worker in ("prefill-0", "decode-0"):
        command = plan(config, gpus).worker(worker, BOUND).command
        assert command[command.index("--edge-kind") + 1] == kind


@pytest.mark.parametrize(
    ("config", "gpus", "shares"),
    [
        (UpConfig(), ("0", "1"), (None, None)),
        (UpConfig(), ("0",), ("0.5000", "0.5000")),
        (UpConfig(prefill_tp=2), ("0", "1"), ("0.5000", "0.5000")),
        (UpConfig(prefill_tp=2, decode_tp=2), ("0", "1", "2"), ("0.5000", "0.5000")),
        (UpConfig(device="cpu"), ("0",), (None, None)),
    ],
)
def test_ranks_that_share_a_gpu_get_their_share_of_its_memory(
    config: UpConfig, gpus: tuple[str, ...], shares: tuple[str | None, str | None]
) -> None:
    """If each of two workers took 85 % of the free memory, almost nothing would be left for the second."""
    for name, share in zip(("prefill-0", "decode-0"), shares, strict=True):
        command = plan(config, gpus).worker(name, BOUND).command
        assert (command[command.index("--gpu-share") + 1] if "--gpu-share" in command else None) == share


@pytest.mark.parametrize("http", ["0.0.0.0:81", "127.0.0.1:81"])
def test_url_is_usable_by_a_client(http: str) -> None:
    assert Addresses(http, "", "").url == "http://127.0.0.1:81"
    assert Addresses("[::]:81", "", "").url == "http://[::1]:81"


def test_block_sizes_of_which_neither_divides_the_other_are_refused() -> None:
    with pytest.raises(StartupError, match="block_size: 24 at prefill-0 and 16 at decode-0"):
        plan_for(UpConfig(prefill_block_size=24))


def test_invalid_or_occupied_ports_are_refused() -> None:
    def check(**ports: object) -> None:
        check_ports(plan(UpConfig(**ports)).plan, frozenset({"local"}))

    check(port=0, grpc_port=0)
    with pytest.raises(StartupError, match="both 9000"):
        check(port=9000, grpc_port=9000)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} .* --grpc-port"):
            check(port=0, grpc_port=port)
    with pytest.raises(StartupError, match=r"192\.0\.2\.1"):
        check(host="192.0.2.1", port=0, grpc_port=0)


def test_model_paths_are_resolved_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("good") == tmp_path / "good" and served_name("good/") == "good"
    assert builtin_directory("target").parts[-2:] == ("builtin", "target") and served_name("builtin") == "builtin"
    for model, message in (
        ("empty", "no config.json"),
        ("good/config.json", "is a file"),
        ("./absent", "does not exist"),
        ("absent", "does not exist"),
    ):
        with pytest.raises(StartupError, match=message):
            resolve_model(model)
    for model in ("a\nb", "/"):
        with pytest.raises(StartupError, match=r"default name .* must be .* printable .*; set --served-model-name"):
            served_name(model)


def test_unreachable_hub_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Name or service not known\nand more")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(StartupError, match="hub request failed") as caught:
        resolve_model("nobody-at-all/no-such-model")
    assert "\n" not in caught.value.message and served_name("nobody-at-all/no-such-model").startswith("nobody")


def test_print_config_follows_the_precedence_of_flags_environment_and_file(tmp_path: Path) -> None:
    from launch.cli import baton

    file = tmp_path / "up.toml"
    file.write_text('prefill = 2\ndecode = 2\ndtype = "float32"\n')
    environment = {key: "" for key in os.environ if key.startswith("BATON_")} | {"BATON_DECODE": "3"}
    arguments = ["up", "--config", str(file), "--dtype", "bfloat16", "--exact", "--print-config"]
    shown = CliRunner().invoke(baton, arguments, env=environment).output
    assert sorted(shown.split()) == sorted(
        ["prefill", "=", "2", "decode", "=", "3", "dtype", "=", '"bfloat16"', "exact", "=", "true"]
    )


@pytest.mark.parametrize("url", ["http://[", "http://a:b", "http://a:99999", "", "//"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(StartupError, match="is not an address"):
        get_cluster(url)


def test_unknown_environment_variable_is_refused_with_the_nearest_name() -> None:
    check_environment({"BATON_PORT": "1", "BATON_LEASE_S": "2", "BATON_EVENT_LOG_DIR": "x", "BATON_CACHE_DIR": "z"})
    with pytest.raises(StartupError, match="unknown environment variable BATON_PROT; did you mean BATON_PORT"):
        check_environment({"BATON_PROT": "1"})

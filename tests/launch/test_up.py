"""`baton up` around fake processes: stages, restarts, refusals, and that nothing is ever left running."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.local import example_curl, example_request
from launch.supervisor import REPEAT_S
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import Cluster, command_line, start_cluster, wait_ready
from tests.support.forks import start as start_process
from tests.support.launchers import find_box
from tests.support.processes import listening
from tests.support.scale import CALIBRATION

ROOT = Path(__file__).parents[2]
FAKE_UP = (sys.executable, "-m", "tests.launch.fakes.up")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny-model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def start(tmp_path: Path, model: Path):
    started: list[Cluster] = []

    def run(env: dict[str, str] | None = None, model: Path = model, **flags: object) -> Cluster:
        env = {"PYTHONPATH": str(ROOT), **(env or {})}
        started.append(start_cluster(model, run_dir=tmp_path / "run", env=env, program=FAKE_UP, **flags))
        return started[-1]

    yield run
    for cluster in started:
        cluster.destroy()


def output(cluster: Cluster) -> str:
    return cluster.output.read_text()


def ended(cluster: Cluster, expect: int) -> list[str]:
    """Waits until the cluster ends by itself; returns the lines that it printed."""
    cluster.process.wait(20)
    cluster.stop(expect)
    return output(cluster).splitlines()


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_ready_then_a_signal_drains_and_exits_0(start, sig: int) -> None:
    cluster = wait_ready(start(prefill=1, decode=2))
    assert sorted(cluster.workers()) == ["decode-0", "decode-1", "prefill-0"]
    cluster.wait_until(lambda c: output(c).partition("curl ")[2].endswith("\n"), "the last lines")
    lines = output(cluster).splitlines()
    assert sum(" ready " in line for line in lines) == 1
    curl = shlex.split(lines[-1])
    assert curl[0] == "curl" and curl[2] == f"{cluster.url}/v1/completions" and '"model": "tiny-model"' in curl[-1]
    for name in ("coordinator", "prefill-0", "decode-0", "decode-1"):
        assert str(cluster.run_dir / f"{name}.log") in output(cluster)
    cluster.stop(0, sig)
    assert "all processes exited with 0" in output(cluster)


def test_agents_leave_no_temporary_files(start, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    cluster = wait_ready(start(env={"FAKE_AGENT": "1", "TMPDIR": str(temporary)}))
    cluster.stop()
    assert not list(temporary.iterdir())


def test_agent_that_refuses_its_flags_leaves_no_temporary_files(tmp_path: Path) -> None:
    agent = [sys.executable, "-m", "launch.agent", "--nproc-per-node", "no-number", "x.py"]
    ended = subprocess.run(agent, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, timeout=120)
    assert ended.returncode != 0 and not list(tmp_path.iterdir())


def test_each_worker_has_its_own_core(start) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    cluster = wait_ready(start())
    pinned = [os.sched_getaffinity(cluster.pids(name)[0]) for name in ("prefill-0", "decode-0")]
    assert not pinned[0] & pinned[1]
    assert len(os.sched_getaffinity(cluster.coordinator_pid())) == len(cores)
    cluster.stop()


@pytest.mark.parametrize("agent", ["", "1"])
def test_dead_worker_is_reported_and_restarted(start, agent: str) -> None:
    cluster = wait_ready(start(env={"FAKE_AGENT": agent}))
    before = cluster.pids("decode-0")[0]
    cluster.kill(before)
    cluster.wait_until(lambda c: c.pids("decode-0")[0] != before, "second life of decode-0")
    cluster.wait_until(lambda c: output(c).count("joined") == 3, "third join")
    assert "decode-0      died: killed by SIGKILL" in output(cluster)
    assert "| worker starts with" in output(cluster)
    log = (cluster.run_dir / "decode-0.log").read_text()
    assert re.findall("replaces: (.*)", log) == ["no", "true"], "its own previous run, whose lease may not have ended"
    cluster.stop()


ASCII = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_paths_outside_ascii_work_in_a_locale_without_them(start, tmp_path: Path, model: Path) -> None:
    (tmp_path / "möde").mkdir()
    cluster = wait_ready(start(env=ASCII, forked=False, model=model.rename(tmp_path / "möde" / "m")))
    assert "möde/m" in (cluster.run_dir / "decode-0.log").read_text(encoding="utf-8")
    cluster.stop()


def test_a_path_of_a_file_that_the_locale_cannot_express_is_a_one_line_error(start, tmp_path: Path) -> None:
    (tmp_path / "up.toml").write_text('api_key_file = "/tmp/ünï"\n', encoding="utf-8")
    lines = ended(start(env=ASCII, forked=False, config=tmp_path / "up.toml"), expect=3)
    assert lines[-1:] == [
        "error: this locale's encoding, ascii, lacks characters of '/tmp/\\xfcn\\xef'; set LC_ALL=C.UTF-8"
    ]


def test_worker_of_a_role_without_a_ready_worker_is_restarted_at_once(start) -> None:
    cluster = wait_ready(start(env={"FAKE_BACKOFF_S": "1000"}))
    before = cluster.pids("decode-0")[0]
    cluster.kill(before)
    cluster.wait_until(lambda c: c.pids("decode-0")[0] != before, "restart of decode-0")
    assert "restarting within 1000 s" in output(cluster)
    cluster.stop()


def test_unwritable_log_before_the_first_start_is_a_one_line_error(start, tmp_path: Path) -> None:
    (tmp_path / "run" / "prefill-0.log").mkdir(parents=True)
    lines = ended(start(), expect=3)
    assert lines[-1].startswith("error: the log ") and "prefill-0.log" in lines[-1]


def test_unwritable_addresses_are_a_one_line_error_with_the_directory(start, tmp_path: Path) -> None:
    (tmp_path / "run" / "cluster.json.partial").mkdir(parents=True)
    lines = ended(start(), expect=3)
    assert lines[-1].startswith(f"error: run directory {tmp_path / 'run'} cannot be written: Is a directory: ")


@pytest.mark.parametrize("refuses", [False, True])
def test_unwritable_stdout_does_not_affect_the_cluster(tmp_path: Path, model: Path, refuses: bool) -> None:
    program = ("/bin/sh", "-c", 'exec "$@" > /dev/full', "sh", *FAKE_UP)
    env = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "", **({"FAKE_WORKER": "refuse"} if refuses else {})}
    cluster = start_cluster(model, run_dir=tmp_path / "run", env=env, program=program)
    try:
        if refuses:
            lines = ended(cluster, expect=3)
            assert lines and lines == find_box(lines)
        else:
            wait_ready(cluster).stop(0)
            assert output(cluster) == ""
    finally:
        cluster.destroy()


@pytest.mark.parametrize("agent", ["", pytest.param("1", marks=pytest.mark.long)])
def test_log_that_becomes_unwritable_delays_only_the_restart_of_its_member(start, agent: str) -> None:
    cluster = wait_ready(start(env={"FAKE_AGENT": agent}))
    log = cluster.run_dir / "decode-0.log"
    log.unlink()
    log.mkdir()
    cluster.kill(cluster.pids("decode-0")[0])
    cluster.wait_until(lambda c: "retrying in" in output(c), "a start that failed")
    assert f"the log {log} cannot be written" in output(cluster)
    log.rmdir()
    cluster.wait_until(lambda c: output(c).count("joined") == 3, "third join")
    assert "worker starts with" in log.read_text()
    cluster.stop()


def test_dead_coordinator_is_restarted_on_the_same_ports(start) -> None:
    cluster = wait_ready(start(env={"FAKE_COORDINATOR": "crash-once"}))
    url = cluster.url
    cluster.wait_until(lambda c: output(c).count("joined") == 4, "workers to join again")
    assert "coordinator   died: exit code 1" in output(cluster) and "| the fake coordinator crashes" in output(cluster)
    assert sorted(cluster.workers()) == ["decode-0", "prefill-0"] and cluster.url == url
    cluster.stop()


@pytest.mark.parametrize("agent", ["", "1"])
def test_startup_error_of_a_worker_is_printed_last_in_a_box(start, agent: str) -> None:
    lines = ended(start(env={"FAKE_WORKER": "refuse", "FAKE_AGENT": agent}), expect=3)
    shown = find_box(lines)
    assert shown[-1] == lines[-1] and "-0 failed" in shown[0]
    assert ("rank 0 of 1" in "\n".join(shown)) == bool(agent)
    (error,) = (line for line in shown if "│ error" in line)
    assert "tensor lm_head.weight in model.safetensors is damaged" in error
    assert "noise" not in "\n".join(lines) and "fix the cause that the error names" in "\n".join(shown)


def test_batches_process_has_the_coordinators_address_and_is_restarted_on_its_own_port(start) -> None:
    cluster = wait_ready(start(batches=True))
    pid = cluster.batches_pid()
    words = command_line(pid)
    given = dict(zip(words[3::2], words[4::2], strict=False))
    front = command_line(cluster.coordinator_pid())
    address = front[front.index("--batches-address") + 1]
    assert address == f"127.0.0.1:{given['--batches-port']}" and not address.endswith(":0")
    assert given["--coordinator-url"] == cluster.url and given["--data-dir"] == str(cluster.run_dir / "data")
    cluster.kill(pid)
    cluster.wait_until(lambda c: "batches       up   (" in output(c).partition("killed by SIGKILL")[2], "second run")
    assert command_line(cluster.batches_pid()) == words
    cluster.stop(0)
    assert "ended by SIGTERM" in (cluster.run_dir / "batches.log").read_text()


def test_startup_error_of_the_coordinator_is_printed_last_in_a_box(start) -> None:
    lines = ended(start(env={"FAKE_COORDINATOR": "refuse"}), expect=3)
    shown = find_box(lines)
    assert shown[-1] == lines[-1] and "coordinator failed" in shown[0]
    assert "error      the fake coordinator refuses" in "\n".join(shown)


@pytest.mark.parametrize(("agent", "message"), [("", "before it joined"), ("1", "no reason recorded")])
def test_worker_that_keeps_crashing_before_it_joins_ends_the_cluster(start, agent: str, message: str) -> None:
    lines = ended(start(env={"FAKE_WORKER": "crash", "FAKE_AGENT": agent}), expect=3)
    assert any(message in line for line in find_box(lines))
    assert any("the fake worker crashes" in line for line in lines) and lines[-1] == find_box(lines)[-1]


DEMAND = {"admitted": 9, "admitted_tokens": 9000, "choices": 9, "queued_choices": 9, "queued_tokens": 900_000}
DEMAND |= {"backlog_tokens": 0, "waits_for": "", "expected_output_tokens": 99.0, "refused": 0}
DEMAND |= {"admitted_tokens_squared": 9_000_000, "max_queued_tokens": 1 << 20}


def _autoscaled(start, tmp_path: Path, **env: str) -> tuple[Cluster, Path]:
    costs, demand = tmp_path / "costs.json", tmp_path / "demand.json"
    costs.write_text(json.dumps(CALIBRATION.as_json()))
    flags = {"prefill": 2, "decode": 2, "autoscale": costs, "drain_timeout_s": 5.0}
    return wait_ready(start(env={"FAKE_DEMAND": str(demand), **env}, **flags)), demand


def test_workers_start_with_demand_and_only_the_least_run_without(start, tmp_path: Path) -> None:
    cluster, demand = _autoscaled(start, tmp_path)
    assert sorted(cluster.workers()) == ["decode-0", "prefill-0"]
    demand.write_text(json.dumps(DEMAND))
    cluster.wait_until(lambda c: "prefill-1" in c.workers(), "a second prefill worker")
    assert sorted(cluster.workers()) == ["decode-0", "prefill-0", "prefill-1"]
    assert re.search(r"autoscale +2 prefill \+ 1 decode: prefill 0.00 requests/s of 100000 uncached", output(cluster))
    cluster.kill(cluster.pids("prefill-0")[0])
    cluster.wait_until(lambda c: output(c).count("prefill-0     joined") == 2, "the killed worker again")
    cluster.stop()


def test_a_worker_that_the_autoscaler_starts_and_that_cannot_start_ends_no_other(start, tmp_path: Path) -> None:
    cluster, demand = _autoscaled(start, tmp_path, FAKE_WORKER="refuse", FAKE_WORKER_ID="prefill-1")
    demand.write_text(json.dumps(DEMAND))
    cluster.wait_until(lambda c: "is damaged" in output(c), "the box of the failure")
    before = cluster.pids("prefill-0")
    time.sleep(1.5)  # longer than between two decisions: it is not tried again at once
    assert cluster.process.poll() is None and cluster.pids("prefill-0") == before
    assert output(cluster).count("prefill-1     starting") == 1
    cluster.stop()


def _rolled(cluster: Cluster) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "launch.cli", "roll", "--run-dir", str(cluster.run_dir)]
    with (cluster.run_dir / "roll.out").open("wb") as shown:
        return start_process(command, env={**os.environ}, stdout=shown, stderr=subprocess.STDOUT)


def _result(cluster: Cluster, client: subprocess.Popen[bytes]) -> tuple[int, str]:
    return client.wait(60.0), (cluster.run_dir / "roll.out").read_text()


def test_a_roll_goes_on_after_the_coordinator_died_and_keeps_it_if_its_successor_cannot_start(start) -> None:
    """The first worker that had not joined again, here as it is stopped, ended the roll as "not running"."""
    cluster = wait_ready(start())
    first, before = cluster.coordinator_pid(), {name: cluster.pids(name) for name in ("prefill-0", "decode-0")}
    cluster.kill(before["decode-0"][0], signal.SIGSTOP)
    cluster.kill(first)
    cluster.wait_until(lambda c: "on the same ports   restart" in output(c), "restart of the coordinator")
    cluster.wait_until(lambda c: "prefill-0     joined again" in output(c), "its first worker")
    client = _rolled(cluster)
    progress = cluster.run_dir / "roll.json"
    waiting = {"now": "decode-0", "doing": "waiting until it has joined"}.items()
    cluster.wait_until(lambda c: waiting <= json.loads(progress.read_text()).items(), "decode-0's turn")
    cluster.kill(before["decode-0"][0], signal.SIGCONT)
    code, shown = _result(cluster, client)
    assert code == 1 and "the new coordinator ended at its start" in shown, shown
    assert cluster.coordinator_pid() != first
    assert not {name for name, pids in before.items() if cluster.pids(name) == pids}
    cluster.stop()


def test_a_signal_while_a_roll_starts_a_coordinator_drains_through_the_old_one(start) -> None:
    """The old one was killed, and with it the requests, as the new one served none yet."""
    cluster = wait_ready(start(env={"FAKE_COORDINATOR": "late"}))
    client = _rolled(cluster)
    cluster.wait_until(lambda c: ", beside pid" in output(c), "the second coordinator")
    cluster.stop()
    code, shown = _result(cluster, client)
    assert code == 3 and "the roll left no result" in shown, shown
    for name in ("prefill-0", "decode-0"):
        assert "drained by the coordinator" in (cluster.run_dir / f"{name}.log").read_text()


def test_port_in_use_is_a_one_line_error(start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert ended(start(port=port), expect=3) == [
            f"error: port {port} on 127.0.0.1 is in use; choose another with --port"
        ]


def test_second_cluster_in_the_same_run_directory_is_refused_without_effect(start, model: Path) -> None:
    cluster = wait_ready(start())
    cluster.wait_until(lambda c: "try:" in output(c), "the last lines")
    known, logs = (cluster.run_dir / "cluster.json").read_text(), cluster.logs()
    command = [*FAKE_UP, "--model", str(model), "--run-dir", str(cluster.run_dir), "--port", "0", "--grpc-port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment)
    message = f"is in use by pid {cluster.process.pid}; choose another with --run-dir"
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"error: run directory {cluster.run_dir} {message}\n"
    assert (cluster.run_dir / "cluster.json").read_text() == known and cluster.logs() == logs
    cluster.stop()
    assert not (cluster.run_dir / "cluster.json").exists() and not (cluster.run_dir / "coordinator.json").exists()


def test_second_signal_kills_members_that_do_not_drain(start) -> None:
    cluster = wait_ready(start(env={"FAKE_COORDINATOR": "hang", "FAKE_WORKER": "stubborn"}))
    cluster.process.send_signal(signal.SIGINT)
    cluster.wait_until(lambda c: "draining" in output(c), "draining")
    time.sleep(2 * REPEAT_S)
    cluster.stop(130)
    assert "still running, killing it" in output(cluster)


def test_drain_has_a_time_limit(start) -> None:
    cluster = wait_ready(start(env={"FAKE_WORKER": "stubborn", "FAKE_COORDINATOR": "hang"}, drain_timeout_s=0))
    began = time.monotonic()
    cluster.stop(1)
    assert time.monotonic() - began < 20


def test_no_process_survives_kill_9_of_the_launcher(start) -> None:
    cluster = wait_ready(start())
    assert len(cluster.processes()) == 4
    cluster.stop(-signal.SIGKILL, signal.SIGKILL)


def test_workers_restart_after_a_rank_or_an_agent_is_killed(start) -> None:
    """A rank's death is detected, and kill -9 of an agent or the launcher reaches the ranks."""
    cluster = wait_ready(start(env={"FAKE_AGENT": "1"}))
    assert len(cluster.processes()) == 6
    agents = [pid for pid in cluster.processes() if "launch.agent" in command_line(pid)]
    assert len(agents) == 2 and not [address for pid in agents for address in listening(pid)]
    first, rank = cluster.pids("prefill-0")[0], cluster.pids("decode-0")[0]
    assert os.getsid(rank) == rank  # no signal of a terminal or of a group reaches it
    cluster.kill(first)
    cluster.wait_until(lambda c: "prefill-0     died: killed by SIGKILL" in output(c), "report of the death")
    assert f"rank 0 of 1, pid {first}" in (cluster.run_dir / "prefill-0.log").read_text()
    cluster.wait_until(lambda c: c.pids("prefill-0")[0] != first, "restart of prefill-0")
    (agent,) = (pid for pid in cluster.processes() if "launch.agent" in (w := command_line(pid)) and "decode-0" in w)
    cluster.kill(agent)
    cluster.wait_until(lambda c: c.pids("decode-0")[0] != rank, "restart of decode-0")
    assert not {agent, rank} & set(cluster.processes())
    cluster.stop(-signal.SIGKILL, signal.SIGKILL)


def test_up_creates_a_cluster_token_and_removes_it_at_the_end(start) -> None:
    """Otherwise every process on this machine could join and receive prompts."""
    cluster = wait_ready(start())
    token = cluster.run_dir / "cluster.token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and len(token.read_text().strip()) == 64
    for pid in (cluster.coordinator_pid(), cluster.pids("prefill-0")[0], cluster.pids("decode-0")[0]):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert f"BATON_CLUSTER_TOKEN_FILE={token}".encode() in environment
    cluster.stop()
    assert not token.exists()


def test_configured_cluster_token_replaces_the_generated_one(start, tmp_path: Path) -> None:
    named = tmp_path / "named"
    named.write_text("a secret of thirty-two characters and more\n")
    named.chmod(0o600)
    cluster = wait_ready(start(env={"BATON_CLUSTER_TOKEN_FILE": str(named)}))
    assert not (cluster.run_dir / "cluster.token").exists()
    cluster.stop()


def test_the_example_request_suits_what_the_model_is_served_for(tmp_path: Path) -> None:
    """Printed once the cluster is ready, to be pasted."""
    for head, runner, path in (
        ("lm", "auto", "/v1/chat/completions"),
        ("lm", "pooling", "/v1/embeddings"),
        ("none", "auto", "/v1/embeddings"),
        ("score", "auto", "/v1/rerank"),
    ):
        made = make_checkpoint(tmp_path / f"{head}-{runner}", "qwen3", head=head)
        line = example_curl("http://h:1", "m", example_request(str(made), runner), key=False)
        assert line.startswith(f"curl -s http://h:1{path} "), line
        assert ("max_tokens" in line) == ("completions" in path)
    line = example_curl("http://[::1]:8100", "m", {"prompt": "x"}, key=False)
    assert line.startswith("curl -s 'http://[::1]:8100/v1/completions' "), line

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from baton.core.errors import StartupError
from baton.runtime.config import CoordinatorConfig, WorkerConfig
from baton.runtime.options import config_command, error_line, flags_of, read_config_file, run_main
from launch.cli import baton
from launch.up_config import UpConfig


def run(command: click.Command, *argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        run_main(command, argv)
    return int(ended.value.code or 0)


def test_every_field_is_an_option() -> None:
    for cls in (UpConfig, WorkerConfig, CoordinatorConfig):
        command = config_command(cls, name="x", help="x")(lambda config: 0)
        assert {f.name for f in fields(cls)} <= {parameter.name for parameter in command.params}


def test_flags_reach_the_command_and_its_return_value_is_the_exit_code() -> None:
    seen: list[WorkerConfig] = []

    @config_command(WorkerConfig, name="w", help="w")
    def command(config: WorkerConfig) -> int:
        seen.append(config)
        return 7

    assert run(command, "--worker-id", "prefill-3", "--exact", "--threads", "2") == 7
    assert (seen[0].worker_id, seen[0].exact, seen[0].threads) == ("prefill-3", True, 2)


def test_startup_error_is_one_line_and_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    @config_command(WorkerConfig, name="w", help="w")
    def command(config: WorkerConfig) -> int:
        raise StartupError("the file\n is damaged")

    assert run(command) == 3
    assert capsys.readouterr().err == "error: the file is damaged\n"


def test_wrong_values_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = config_command(WorkerConfig, name="w", help="w")(lambda config: 0)
    assert run(command, "--threads", "-1") == 3
    assert run(command, "--thread", "1") == 2
    assert "--threads" in capsys.readouterr().err
    file = tmp_path / "c.toml"
    file.write_text("step_token = 1")
    assert run(command, "--config", str(file)) == 3
    assert "did you mean 'step_tokens'" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-5", "nan", "-nan"])
@pytest.mark.parametrize("words", [("drain", "decode-0"), ("bench",)])
def test_timeout_outside_its_range_is_refused(words: tuple[str, ...], value: str) -> None:
    done = CliRunner().invoke(baton, [*words, "http://127.0.0.1:9", "--timeout-s", value])
    assert done.exit_code == 2
    assert re.search(r"'--timeout-s': \S+ is not in the range (0\.0<=x<=86400\.0|x>=0\.1)\.", done.stderr)


def test_missing_or_invalid_config_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"absent\.toml"):
        read_config_file(str(tmp_path / "absent.toml"))
    (tmp_path / "bad.toml").write_text("= 1")
    with pytest.raises(StartupError, match="not TOML"):
        read_config_file(str(tmp_path / "bad.toml"))


def test_config_file_with_a_bom_is_read_and_utf_16_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbfthreads = 2\r\n")
    assert read_config_file(str(tmp_path / "bom.toml")) == {"threads": 2}
    (tmp_path / "utf16.toml").write_text("threads = 2\n", encoding="utf-16")
    with pytest.raises(StartupError, match=r"config file .*utf16\.toml is not TOML: 'utf-8' codec can't decode"):
        read_config_file(str(tmp_path / "utf16.toml"))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("threads = " + "[" * 100_000, "is nested too deeply"),
        ("threads = " + "{a = " * 100_000, "is nested too deeply"),
        ("threads = " + "1" * 100_000, "is not TOML: Exceeds the limit"),
    ],
)
def test_config_file_over_the_parser_limits_is_a_one_line_error(text: str, error: str, tmp_path: Path) -> None:
    (file := tmp_path / "big.toml").write_text(text)
    with pytest.raises(StartupError) as caught:
        read_config_file(str(file))
    assert caught.value.message.startswith(f"config file {file} {error}")


WRITES = """
import sys
import click
from baton.core.errors import StartupError
from baton.runtime.options import run_main

@click.command()
@click.argument("how")
def command(how: str) -> int:
    if how == "echo":
        click.echo("said")
    elif how == "rich":
        import rich
        rich.print("said")
    else:
        print("said")
    if how == "refused":
        raise StartupError("refused")
    return 7 if how == "failed" else 0

run_main(command)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("how", "code", "expected"),
    [
        ("print", 1, "error: standard output cannot be written: No space left on device\n"),
        ("echo", 1, "error: standard output cannot be written: No space left on device\n"),
        ("rich", 1, "error: standard output cannot be written: No space left on device\n"),
        ("failed", 7, "error: standard output cannot be written: No space left on device\n"),
        ("refused", 3, "error: refused\n"),
    ],
)
def test_full_stdout_is_a_one_line_error_and_a_closed_pipe_is_silent(
    how: str, code: int, expected: str, unbuffered: str
) -> None:
    if unbuffered and how in ("failed", "refused"):
        code, expected = 1, "error: standard output cannot be written: No space left on device\n"  # writing failed
    command, environment = [sys.executable, "-c", WRITES, how], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (code, expected)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (code, expected if expected == "error: refused\n" else "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_stdout_over_the_file_size_limit_is_a_one_line_error(unbuffered: str, tmp_path: Path) -> None:
    no_room = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    command = [sys.executable, "-c", no_room + WRITES, "print"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: standard output cannot be written: File too large\n")


def test_os_error_not_caused_by_stdout_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def command() -> int:
        raise OSError(28, "No space left on device", "elsewhere")

    with pytest.raises(OSError, match="elsewhere"):
        run_main(command, [])


def test_flags_of_every_option_round_trip() -> None:
    config = WorkerConfig(exact=True, threads=4, kv_memory_gib=0.5, model="/a b")
    names = [f.name for f in fields(WorkerConfig)]
    seen: list[WorkerConfig] = []
    command = config_command(WorkerConfig, name="w", help="w")(lambda given: seen.append(given))
    assert run(command, *flags_of({name: getattr(config, name) for name in names})) == 0
    assert seen == [config]


def test_help_loads_neither_torch_nor_grpc() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom launch.cli import baton\n"
        "for words in (['--help'], ['up', '--help'], ['bench', '--help']):\n"
        "    assert CliRunner().invoke(baton, words).exit_code == 0\n"
        "heavy = {'torch', 'grpc', 'starlette', 'httpx', 'rich', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_worker_name_with_path_separators_is_refused_before_loading(tmp_path: Path) -> None:
    code = "from baton.runtime.worker_main import worker_main; worker_main('prefill', lambda: print('loads'))"
    logs = tmp_path / "deep" / "logs"
    environment = {**os.environ, "BATON_EVENT_LOG_DIR": str(logs)}
    command = [sys.executable, "-c", code, "--worker-id", "../../evil"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.strip() == "error: --worker-id '../../evil' is not 1 to 128 characters of A-Z a-z 0-9 . _ -"


@pytest.mark.parametrize(
    ("field", "model_is_named"), [("model_digest", True), ("config_digest", True), ("dtype", False)]
)
def test_worker_refused_for_its_model_reports_its_model_path(field: str, model_is_named: bool) -> None:
    code = (
        "from baton.core.errors import JoinRefused\nfrom baton.runtime.worker_main import worker_main\n"
        f"def load(): raise JoinRefused('decode worker d refused: {field}: a and b')\n"
        "worker_main('decode', load)"
    )
    command = [sys.executable, "-c", code, "--worker-id", "d", "--model", "/models/m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    own = " (this worker's --model is /models/m)" if model_is_named else ""
    expected = f"error: d: the coordinator refused this worker: decode worker d refused: {field}: a and b{own}\n"
    assert (done.returncode, done.stderr) == (3, expected)


@pytest.mark.parametrize("tier", ["prefill", "decode"])
def test_invalid_coordinator_address_is_refused_before_loading(tier: str) -> None:
    for value in ("10.0.0.1:83969", "nonsense", ""):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", tier, "--coordinator", value],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 3
        *imported, error = done.stderr.splitlines()
        assert error == f"error: --coordinator must be HOST:PORT with a port from 1 to 65535, not {value!r}"
        assert imported and not [line for line in imported if line.split()[-1] in ("torch", "grpc")]


def test_drain_refuses_an_invalid_coordinator_address() -> None:
    words = ["drain", "decode-0", "http://127.0.0.1:9", "--coordinator", "127.0.0.1:83969"]
    with pytest.raises(StartupError, match="--coordinator must be HOST:PORT with a port from 1 to 65535"):
        CliRunner().invoke(baton, words, standalone_mode=False, catch_exceptions=False)


def test_positional_argument_sets_its_field() -> None:
    @config_command(WorkerConfig, name="w", help="", positional="model")
    def command(config: WorkerConfig) -> int:
        print(config.model)
        return 0

    runner = CliRunner()
    assert runner.invoke(command, ["here"]).output == "here\n"
    assert runner.invoke(command, ["here", "--model", "here"]).output == "here\n"
    assert runner.invoke(command, []).output == "auto\n"
    refused = runner.invoke(command, ["here", "--model", "there"], standalone_mode=False)
    assert isinstance(refused.exception, StartupError) and "give one of them" in refused.exception.message


@pytest.mark.parametrize("cls", [UpConfig, CoordinatorConfig])
def test_api_keys_come_from_every_source_and_are_never_shown(
    cls: type[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen: list[Any] = []
    command = config_command(cls, name="c", help="c")(lambda given: seen.append(given))
    file = tmp_path / "c.toml"
    file.write_text('api_key = "of-the-file"')
    monkeypatch.setenv("BATON_API_KEY", "of-the environment")
    assert run(command, "--config", str(file), "--api-key", "sk-1", "--api-key", "sk-2") == 0
    assert "BATON_API_KEY" not in os.environ, "child processes would inherit it"
    assert run(command, "--config", str(file)) == 0
    monkeypatch.setenv("BATON_API_KEY", "of-the environment")
    assert run(command, "--config", str(file)) == 0
    assert [config.api_key for config in seen] == ["sk-1 sk-2", "of-the-file", "of-the environment"]
    assert "sk-1" not in repr(seen[0])
    assert run(command, "--print-config", "--api-key", "sk-1", "--port", "9") == 0
    assert capsys.readouterr().out.splitlines() == ["port = 9", "# api_key is set, and not shown"]


def test_an_empty_value_of_a_launcher_means_none() -> None:
    """`baton up` passes every option on to its processes."""
    seen: list[CoordinatorConfig] = []

    def take(given: CoordinatorConfig) -> int:
        seen.append(given)
        return 0

    command = config_command(CoordinatorConfig, name="c", help="c")(take)
    assert run(command, *flags_of({"lora": "", "port": 9})) == 0
    assert run(command, *flags_of({"lora": "a=/a b=/b"})) == 0
    assert [config.lora for config in seen] == ["", "a=/a b=/b"]


@pytest.mark.parametrize("given", ["", " ", "a b"])
def test_an_empty_api_key_is_refused_from_every_source(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It may be empty by mistake, and without any key every client is accepted."""
    command = config_command(CoordinatorConfig, name="c", help="c")(lambda given: 0)
    assert run(command, "--api-key", given) == 3
    assert capsys.readouterr().err == "error: --api-key: a value is empty or contains white space\n"
    monkeypatch.setenv("BATON_API_KEY", given)
    assert run(command) == (0 if given.strip() else 3)
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    file = tmp_path / "c.toml"
    for text in ('api_key = " "', 'api_key = {secret = "s"}', 'api_key = ["secret"]'):
        file.write_text(text)
        assert run(command, "--config", str(file)) == 3
        assert "secret" not in capsys.readouterr().err


def test_an_error_is_one_line_without_control_characters() -> None:
    line = error_line(StartupError("tensor a\x1b]0;b\x07\n c is twice " + "x" * 5000), "coordinator: ")
    assert line.startswith(r"error: coordinator: tensor a\x1b]0;b\x07 c is twice xx") and len(line) == 4007

"""The wheel, installed into a clean environment whose only other packages are those of the running one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("baton", "batches", "prefill", "decode", "coordinator", "launch", "sim")
SOURCES = (*PACKAGES, "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the repository stays as it is."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / name, source / name)
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(target)!r}))"
    run([sys.executable, "-c", code], cwd=source)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of the clean environment. The packages of the running environment are only appended to its
    path, so that its editable baton is not imported."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, with_pip=False, symlinks=True)
    interpreter = home / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", str(interpreter), "install", "-q", "--no-deps", "--no-index", wheel])
    (site,) = home.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return interpreter


def run(command: list[object], **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=100, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_wheel_has_the_packages_and_the_built_in_model_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert f"baton/builtin/target/{name}" in names
    scripts = [path.name for path in (REPOSITORY / "launch").iterdir() if path.suffix in (".sh", ".sbatch")]
    assert len(scripts) == 6 and {f"launch/{name}" for name in scripts} <= set(names)
    assert not [name for name in names if name.endswith((".proto", ".bin", ".pyc"))]


def test_the_image_is_built_from_what_the_wheel_needs() -> None:
    """`.dockerignore` names what the build may read; the build itself reaches package indexes only."""
    first, *allowed = [line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if "__" not in line]
    assert first == "*" and {name.removeprefix("!") for name in allowed} == {*SOURCES, "constraints.txt"}
    text = (REPOSITORY / "Dockerfile").read_text()
    assert re.findall(r"https?://[^/\s]+", text) == ["https://download.pytorch.org"]
    assert not re.search(r"curl|wget|git clone|ADD ", text)


def test_every_module_of_the_repository_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            assert path.relative_to(REPOSITORY).as_posix() in names, f"{path} is missing: name its package in pyproject"


def test_installed_commands_ignore_a_decode_py_in_the_working_directory(python: Path, tmp_path: Path) -> None:
    (tmp_path / "decode.py").write_text("raise SystemExit('the wrong decode')\n")
    elsewhere = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = {**elsewhere, "PYTHONSAFEPATH": "1"}
    assert "prefill and decode" in run([python.with_name("baton"), "--help"], cwd=tmp_path, env=elsewhere).stdout
    code = "import baton, prefill, decode, coordinator, launch; print(decode.__file__)"
    found = run([python, "-c", code], cwd=tmp_path, env=environment).stdout.strip()
    assert Path(found).is_relative_to(python.parents[1])
    for tier in ("prefill", "decode", "coordinator"):
        assert "--model" in run([python, "-m", tier, "--help"], cwd=tmp_path, env=environment).stdout
    code = "from baton.runtime.model_source import resolve_model; print(resolve_model('builtin'))"
    model = run([python, "-c", code], cwd=tmp_path, env=environment).stdout.strip()
    assert Path(model).is_relative_to(python.parents[1])


@pytest.mark.cluster
def test_installed_wheel_serves_the_built_in_model(python: Path, tmp_path: Path) -> None:
    import httpx

    from tests.support.cluster import start_cluster, wait_ready

    (tmp_path / "decode.py").write_text("raise SystemExit('the wrong decode')\n")
    environment = {"PYTHONPATH": "", "PWD": str(tmp_path)}
    program = ("env", "-C", str(tmp_path), str(python.with_name("baton")), "up")
    running = start_cluster("builtin", run_dir=tmp_path / "run", env=environment, program=program, draft="none")
    try:
        wait_ready(running)
        body = {"model": "builtin", "prompt": "def read_lines(path):", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0
        running.stop()
    finally:
        running.destroy()


@pytest.mark.parametrize("script", ["coordinator", "prefill", "decode"])
def test_script_reports_a_python_without_baton(script: str, tmp_path: Path) -> None:
    empty = tmp_path / "python3"
    empty.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    empty.chmod(0o755)
    path = Path(__file__).parents[2] / "launch" / f"{script}.sh"
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin"}
    done = subprocess.run([str(path), "--help"], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 3 and "Baton is not installed for python3; set PYTHON to" in done.stderr
    assert "No module" not in done.stderr


@pytest.mark.parametrize("words", [["bin/baton", "version"], ["bin/python", "-m", "launch", "version"]])
def test_ctrl_c_while_the_command_imports_is_no_traceback(python: Path, words: list[str], tmp_path: Path) -> None:
    """A module of the command line that cannot be imported because of it."""
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    command = [python.parent.parent / words[0], *words[1:]]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")

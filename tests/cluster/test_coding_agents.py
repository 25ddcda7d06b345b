"""Coding agents of npm, unchanged, against a running cluster: each calls its shell tool once and then answers.

The model is scripted: `[[codex]]` and `[[qwen]]` in the prompt make it call that agent's tool, whose output holds
`[[done]]`, after which it answers. Its template renders only these selectors of the agents' long prompts.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, cluster
from tests.support.packages import npm_install
from tests.support.scripted import SELECTORS_ONLY, make_scripted

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(500)]
CODEX, QWEN = "@openai/codex@0.171.0", "@qwen-code/qwen-code@0.15.10"
PROGRAMS = Path("npm") / "node_modules" / ".bin"
ANSWER = "All is well."


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SCRIPTS = {
    "codex": call("exec_command", cmd="echo [[done]]"),
    "qwen": call("run_shell_command", command="echo [[done]]", is_background="false"),
    "done": ANSWER,
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = make_scripted(tmp_path_factory.mktemp("model"), SCRIPTS, template=SELECTORS_ONLY)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 1 << 17}
    (model / "config.json").write_text(json.dumps(config))  # agents' messages are long before they are rendered
    with cluster(model, dtype="float32", served_model_name="scripted") as started:
        yield started


def run(program: Path, arguments: list[str], home: Path, **environment: str) -> str:
    """Runs an agent in an empty directory with a home of its own; returns its output."""
    work = home / "work"
    work.mkdir(parents=True)
    env = {"HOME": str(home), "PATH": os.environ["PATH"], **environment}
    done = subprocess.run(
        [program, *arguments],
        cwd=work,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_codex_runs_a_command_and_answers(running: Cluster, tmp_path: Path) -> None:
    npm_install(tmp_path / "npm", CODEX)
    home = tmp_path / "home"
    (home / ".codex").mkdir(parents=True)
    (home / ".codex" / "config.toml").write_text(
        'model = "scripted"\nmodel_provider = "baton"\n[model_providers.baton]\nname = "Baton"\n'
        f'base_url = "{running.url}/v1"\nwire_api = "responses"\n'
    )
    flags = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    events = [
        json.loads(line) for line in run(tmp_path / PROGRAMS / "codex", [*flags, "Please [[codex]]"], home).splitlines()
    ]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    (command,) = [item for item in items if item["type"] == "command_execution"]
    assert command["exit_code"] == 0 and command["aggregated_output"] == "[[done]]\n"
    assert items[-1]["type"] == "agent_message" and items[-1]["text"] == ANSWER


def test_qwen_code_runs_a_command_and_answers(running: Cluster, tmp_path: Path) -> None:
    npm_install(tmp_path / "npm", QWEN)
    base = {"OPENAI_API_KEY": "unused", "OPENAI_BASE_URL": f"{running.url}/v1", "OPENAI_MODEL": "scripted"}
    flags = ["--yolo", "--auth-type", "openai", "-p", "Please [[qwen]]"]
    assert ANSWER in run(tmp_path / PROGRAMS / "qwen", flags, tmp_path / "home", **base)

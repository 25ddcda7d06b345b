"""instructor, openai-agents and LiteLLM against a running cluster (support/python_clients.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import cluster
from tests.support.scripted import make_scripted

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]
PACKAGES = ("instructor==1.17.0", "openai-agents==0.24.0", "litellm==1.110.2")
SCRIPT = Path(__file__).parents[1] / "support" / "python_clients.py"
TEMPLATE = (
    "{# tools <tool_call> #}{% for m in messages %}{% if m.content and '[[' in m.content %}<|im_start|>{{ m.role }}\n"
    "[[{{ m.content.split('[[')[-1].split(']]')[0] }}]]<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCRIPTS = {
    "person": '<tool_call>\n{"name": "Person", "arguments": {"name": "Ada", "age": 36}}\n</tool_call>',
    "weather": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "json": '{"name": "Ada", "age": 36}',
    "hello": "Hello.",
}


def test_python_s_clients_get_what_they_ask_for(tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True, timeout=120)
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *PACKAGES]
    done = subprocess.run(install, capture_output=True, text=True, timeout=500)
    if done.returncode:
        pytest.skip(f"pip cannot install {PACKAGES}: {done.stderr.strip()[-200:]}")
    model = make_scripted(tmp_path / "m", SCRIPTS, template=TEMPLATE)
    with cluster(model, dtype="float32", served_model_name="scripted") as running:
        ran = subprocess.run(
            [python, SCRIPT, f"{running.url}/v1", "scripted"], capture_output=True, text=True, timeout=200
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
        assert ran.stdout.split() == ["ok", "instructor", "ok", "agents", "ok", "litellm"]

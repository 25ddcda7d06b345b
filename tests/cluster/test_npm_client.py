"""The openai package of npm against a running cluster (support/openai_client.mjs)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.cluster import cluster
from tests.support.packages import npm_install

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(300)]
PACKAGE = "openai@7.57.0"
SCRIPT = Path(__file__).parents[1] / "support" / "openai_client.mjs"
TARGET = Path(__file__).parents[2] / "baton" / "builtin" / "target"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content or m.tool_calls | tojson }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHECKS = ("models", "completion", "chat", "tools", "schema", "responses", "batches", "embeddings", "errors", "leaving")


def test_the_npm_openai_package_passes_every_check(tmp_path: Path) -> None:
    node = npm_install(tmp_path, PACKAGE)
    model = tmp_path / "model"
    shutil.copytree(TARGET, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)  # the built-in model's own template does not support tools
    with cluster(
        model, exact=True, served_model_name="builtin", data_dir=tmp_path / "data", tool_parser="hermes"
    ) as running:
        ran = subprocess.run(
            [node, str(SCRIPT), running.url, str(tmp_path)], capture_output=True, text=True, timeout=200
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert ran.stdout.split() == [word for name in CHECKS for word in ("ok", name)]
        running.wait_until(lambda _: not sum(row["running"] for row in running.workers().values()), "idle cluster")

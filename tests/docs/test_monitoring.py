"""The dashboard and the alert rules query metrics that exist, with queries that Prometheus parses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.core.errors import WorkerLost
from coordinator.metrics import Metrics
from coordinator.submission import Submission
from tests.coordinator.test_metrics import CLUSTER, ENDED
from tests.support.fake_generator import reply
from tools import dashboard

DIRECTORY = dashboard.OUT.parent
RULES = DIRECTORY / "baton-alerts.yml"
_NAME = re.compile(r"\bbaton_[a-z0-9_]+")
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian's package prometheus)")


def expressions() -> Iterator[tuple[str, str]]:
    """Yields a panel's title, or "alerts", and its query."""
    for panel in dashboard.dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    yield "alerts", RULES.read_text()


def alerts() -> list[str]:
    """Returns the names of the alerts."""
    return re.findall(r"- alert: (\w+)", RULES.read_text(encoding="utf-8"))


def live_names() -> set[str]:
    metrics = Metrics()
    for error in (None, WorkerLost("gone")):
        observed = metrics.request(Submission("r", (1, 2), 4))
        for delta in reply("a", "b") if error is None else ():
            observed.delta(delta)  # type: ignore[arg-type]
        observed.end(error)
    metrics.stages(ENDED)
    metrics.responses.labels("200").inc()
    text = metrics.text(CLUSTER).decode()
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def test_all_queried_metrics_exist() -> None:
    known, asked = live_names(), 0
    for title, query in expressions():
        names = {name for name in _NAME.findall(query) if not name.startswith("baton_alerts")}
        assert names <= known, f"{title}: {names - known}"
        asked += len(names)
    assert asked > 40


def test_each_alert_has_a_runbook() -> None:
    rules = RULES.read_text(encoding="utf-8")
    sections = re.findall(r"^## (\w+)$", (DIRECTORY / "runbooks.md").read_text(encoding="utf-8"), re.M)
    assert sections == alerts() and len(sections) >= 8
    assert re.findall(r'runbook: "runbooks.md#(\w+)"', rules) == [name.lower() for name in sections]


def test_dashboard_is_generated_from_its_table() -> None:
    assert dashboard.OUT.read_text() == dashboard.text(), "python tools/dashboard.py"
    panels = [p for p in json.loads(dashboard.OUT.read_text())["panels"] if p["type"] != "row"]
    assert all(p["description"] for p in panels)
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}
    assert len(places) == len(panels)


@promtool
def test_the_rules_are_valid_and_fire_when_they_should() -> None:
    for arguments in (("check", "rules", str(RULES)), ("test", "rules", "baton-alerts-test.yml")):
        done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, cwd=DIRECTORY, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_all_queries_are_valid(tmp_path: Path) -> None:
    """Each query is written as a rule, which promtool parses."""
    rules = [
        {"record": f"x:{i}", "expr": query.replace("$__rate_interval", "1m")}
        for i, (title, query) in enumerate(expressions())
        if title != "alerts"
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and f"{len(rules)} rules found" in done.stdout, done.stdout + done.stderr

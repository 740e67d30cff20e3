"""The pages of docs/reference say what the code says; and what is shown and watched exists."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from sava.cli.main import EXIT_UNKNOWN
from sava.config import Config
from sava.doctor.brokers import METRIC_ALERTS
from sava.pipeline.runner.process import LOST
from sava.server import EXIT_FAILED, EXIT_OK, EXIT_START
from tests.support.pages import text_of
from tools.reference import configuration, errors
from tools.reference.__main__ import PAGES
from tools.reference.metrics import Described, metrics
from tools.reference.pages import DIRECTORY

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "sava.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
NAME = re.compile(r"\bsava_[a-z0-9_]+\b")


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_code_says(name: str) -> None:
    page = DIRECTORY / name
    assert page.exists(), "run `make docs`"
    assert page.read_text(encoding="utf-8") == PAGES[name](), f"{page} is stale: run `make docs`"


def test_the_bounds_of_a_key_are_shown() -> None:
    keys = {key.path: key for _, _, keys in configuration.sections_of(Config) for key in keys}
    assert keys["replication.max_backlog_gb"].kind == "> 0"
    assert keys["broker.ports.raft"].kind == "1 … 65535"
    assert keys["bootstrap_namespaces"].kind == "list"


@pytest.mark.parametrize("name", PAGES)
def test_no_page_shows_what_is_pythons_own(name: str) -> None:
    found = re.findall(r"typing\.|FieldInfo|<class |<function |object at 0x", (DIRECTORY / name).read_text())
    assert found == []


def test_every_exit_code_is_told() -> None:
    told = re.findall(r"^\| (\d+) \|", (DIRECTORY / "cli.md").read_text(), re.MULTILINE)
    codes = {EXIT_OK, EXIT_START, EXIT_FAILED, EXIT_UNKNOWN, LOST, 2, 130}
    assert {int(code) for code in told} == codes


def test_every_key_of_the_configuration_has_a_meaning() -> None:
    silent = [key.path for _, _, keys in configuration.sections_of(Config) for key in keys if not key.meaning]
    assert silent == []


def test_every_error_says_what_it_stands_for() -> None:
    silent = [kind.__name__ for kind in errors.kinds() if not errors.meaning_of(kind)]
    assert silent == [], "write a docstring, with the way out"


def test_every_option_says_what_it_is_for_and_what_it_takes() -> None:
    page = (DIRECTORY / "cli.md").read_text()
    assert re.findall(r"^\| `[^|]+\|(?:[^|]*\|)? +\|$", page, re.MULTILINE) == []
    for choice in ("dead_letter", "exponential", "full_transitive", "protobuf", "local-get"):
        assert f"`{choice}`" in page
    assert "`SAVA_TLS_CA`" in page


@cache
def known() -> dict[str, Described]:
    return {each.name: each for each in asyncio.run(metrics())}


def test_every_metric_has_a_name_and_help() -> None:
    for name, metric in known().items():
        assert re.fullmatch(r"(sava|pulsar)_[a-z][a-z0-9_]*", name)
        assert metric.help.endswith("."), f"{name} needs help that is a sentence"
        assert (metric.kind == "counter") == name.endswith("_total"), name
        if metric.kind == "histogram":
            assert name.endswith(("_seconds", "_bytes", "_messages")), f"{name} needs its unit in its name"


def names_in(expression: str) -> set[str]:
    """The metrics of an expression, as the page names them."""
    found = set()
    for name in NAME.findall(expression):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        found.add(base if base in known() and known()[base].kind == "histogram" else name)
    return found


def expressions_of(value: Any) -> list[str]:
    """Everything that is an expression, anywhere in a dashboard."""
    if isinstance(value, dict):
        own = [value["expr"]] if isinstance(value.get("expr"), str) else []
        if isinstance(value.get("query"), str):
            own.append(value["query"])
        return own + [each for below in value.values() for each in expressions_of(below)]
    if isinstance(value, list):
        return [each for below in value for each in expressions_of(below)]
    return []


def check_names(expressions: list[str]) -> None:
    used = set().union(*map(names_in, expressions))
    assert used
    assert sorted(used - known().keys()) == []


def test_the_dashboard_shows_metrics_that_exist() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    check_names(expressions_of(dashboard))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(panel["title"] and panel["targets"] and panel["fieldConfig"] for panel in panels)


def test_the_alerts_watch_over_metrics_that_exist() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    check_names([rule["expr"] for rule in rules])
    assert {
        *("SavaNoLeader", "SavaReplicationDisconnected", "SavaBacklogWithoutProgress", "SavaDiskFilling"),
        *("SavaLedgerDegraded", "SavaPublishingRefused", "SavaRecoveryWaiting", "SavaBrokerDown"),
    } <= {rule["alert"] for rule in rules}
    for rule in rules:
        assert rule["for"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_the_page_says_for_each_alert_what_to_do() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    rows = re.findall(r"^\| (`Sava.+?) \| .+ \|$", text_of("diagnosis.md"), re.MULTILINE)
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(told) == sorted(rule["alert"] for rule in rules)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, which comes with Prometheus")
def test_the_alerts_fire_when_they_should() -> None:
    ran = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yaml"], cwd=ALERTS.parent, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_doctor_looks_at_metrics_that_exist() -> None:
    check_names([alert.metric for alert in METRIC_ALERTS])

"""The Prometheus side as its own tools see it: configuration, rules, rule tests, names."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tidegate.daemon.routes.alerts import MAX_ALERTS
from tidegate.knobs.knobs import SPECS
from tidegate.metrics.catalogue import BY_NAME

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "grafana" / "prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
RECORD_NAME = re.compile(r"[a-z_]+:[a-z0-9_]+:[a-z0-9_]+")


def tool(*command: str | Path) -> str:
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def rules() -> list[dict[str, Any]]:
    return [rule for path in RULES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def families(expression: str) -> set[str]:
    """Names of raw tidegate families in a PromQL expression: recorded ones hold a colon."""
    return set(re.findall(r"(?<![\w:])tidegate_\w+(?![\w:])", expression))


def test_prometheus_accepts_the_configuration() -> None:
    assert "SUCCESS" in tool("promtool", "check", "config", PROMETHEUS / "prometheus.yml")


def test_discovery_is_left_as_the_daemon_says_it() -> None:
    jobs = {
        job["job_name"]: job for job in yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    }
    assert jobs["tidegate-agent"]["http_sd_configs"][0]["url"].endswith("/sd")
    assert not any("relabel_configs" in job or "metric_relabel_configs" in job for job in jobs.values())


@pytest.mark.parametrize("path", RULES, ids=lambda path: str(path.stem))
def test_rules_have_no_lint(path: Path) -> None:
    tool("promtool", "check", "rules", "--lint=all", "--lint-fatal", path)


def test_alertmanager_accepts_the_configuration() -> None:
    tool("amtool", "check-config", PROMETHEUS / "alertmanager.yml")
    assert yaml.safe_load((PROMETHEUS / "alertmanager.yml").read_text())["route"]["group_by"] == ["run"]


@pytest.mark.parametrize("route", [0, 1], ids=["daemon", "operators"])
def test_a_critical_alert_waits_for_no_other_alert(route: int) -> None:
    config = yaml.safe_load((PROMETHEUS / "alertmanager.yml").read_text())["route"]
    (critical,) = config["routes"][route]["routes"]
    assert critical == {
        "matchers": ["severity = critical"],
        "group_by": ["alertname", "run"],
        "group_wait": "5s",
        "group_interval": "10s",
    }


@pytest.mark.parametrize("severity", ["critical", "warning"])
def test_every_alert_reaches_the_daemon_and_operators(severity: str) -> None:
    command = ("amtool", "config", "routes", "test", f"--config.file={PROMETHEUS / 'alertmanager.yml'}")
    assert tool(*command, f"severity={severity}", "run=llama").splitlines()[0] == "tidegate-daemon,operators"


def test_every_family_in_a_rule_is_in_the_catalogue() -> None:
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
    known = {name + suffix for name, metric in BY_NAME.items() for suffix in suffixes[metric.type]}
    used = set().union(*(families(rule["expr"]) for rule in rules()))
    assert used
    assert used <= known


def test_every_label_value_in_a_rule_is_in_the_catalogue() -> None:
    selector = re.compile(r"(tidegate_\w+)\{([^}]*)\}")
    for rule in rules():
        for name, inside in selector.findall(rule["expr"]):
            metric = BY_NAME[re.sub(r"_(bucket|sum|count)$", "", name)]
            for label, values in re.findall(r'(\w+)=~?"([^"]*)"', inside):
                assert set(values.split("|")) <= set(metric.labels[label]), f"{name}: {label}={values}"


def test_records_are_named_level_metric_operation_and_used_ones_exist() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert all(RECORD_NAME.fullmatch(name) for name in recorded)
    used = {name for rule in rules() for name in RECORD_NAME.findall(rule["expr"])}
    assert used <= recorded


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def test_every_alert_says_how_bad_what_to_turn_and_where_to_read_on() -> None:
    for alert in alerts():
        assert alert["labels"]["severity"] in {"info", "warning", "critical"}
        assert "for" in alert
        assert {"summary", "description", "knob", "runbook_url"} <= set(alert["annotations"])
        summary = alert["annotations"]["summary"]
        figures = {"TidegateRankNotScraped": "5 minutes", "TidegateDaemonDown": "a minute"}
        known = figures.get(alert["alert"], "$value")
        assert known in summary or "| query |" in summary, "it has no figure"
        assert alert["annotations"]["runbook_url"] == f"docs/runbooks/{alert['alert']}.md"


def test_every_knob_to_turn_is_one() -> None:
    """In the templates of the annotation, too: words that are no template are names of knobs, or `none`."""
    for alert in alerts():
        words = re.sub(r"\{\{.*?\}\}", " ", alert["annotations"]["knob"]).split()
        assert words
        assert set(words) <= {*SPECS, "none"}, alert["alert"]


def test_inhibition_is_between_alerts_that_exist() -> None:
    names = {alert["alert"] for alert in alerts()}
    for rule in yaml.safe_load((PROMETHEUS / "alertmanager.yml").read_text())["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            label, _, value = re.split(r"\s*(=~?)\s*", matcher)
            assert label == "alertname"
            assert set(value.strip('"').split("|")) <= names


def test_alertmanager_tells_the_daemon_with_a_token() -> None:
    config = yaml.safe_load((PROMETHEUS / "alertmanager.yml").read_text())
    (webhook,) = next(r for r in config["receivers"] if r["name"] == "tidegate-daemon")["webhook_configs"]
    assert webhook["url"].endswith(":8790/v1/alerts")
    assert webhook["send_resolved"]
    assert webhook["max_alerts"] <= MAX_ALERTS
    assert webhook["http_config"]["authorization"] == {"credentials_file": "alert.token"}
    first = config["route"]["routes"][0]
    assert (first["receiver"], first["continue"]) == ("tidegate-daemon", True)

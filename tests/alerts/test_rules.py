"""Every alert fires when it must and keeps still when it must not, on the series of a recorded scrape (promtool)."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.alerts.cases import CASES, Case
from tests.alerts.scaling import SECONDS, scaled
from tests.services import ROOT, program
from tidegate.metrics.catalogue import BY_NAME

RULES = sorted((ROOT / "grafana" / "prometheus" / "rules").glob("*.yml"))
RECORDED = Path(__file__).with_name("recorded.prom").read_text().splitlines()
Labels = dict[str, str]


def alerts() -> dict[str, dict[str, Any]]:
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def parsed(series: str) -> tuple[str, Labels]:
    name, _, inside = series.partition("{")
    return name, dict(re.findall(r'(\w+)="([^"]*)"', inside))


def recorded() -> list[tuple[str, Labels, str]]:
    """Name, labels and value of every series."""
    return [(*parsed(line.rpartition(" ")[0]), line.rpartition(" ")[2]) for line in RECORDED]


INSTANCE = next(labels["instance"] for name, labels, _ in recorded() if labels["job"] == "tidegate-daemon")


def samples(case: Case) -> int:
    """How many there are up to the case's time, which is written as promtool does."""
    seconds = lambda text: sum(int(n) * SECONDS[unit] for n, unit in re.findall(r"(\d+)([hms])", text))  # noqa: E731
    return seconds(case.at) // seconds(case.interval)


@functools.cache
def families() -> frozenset[str]:
    """Every raw family that a rule uses; recorded ones hold a colon."""
    text = "".join(path.read_text() for path in RULES)
    return frozenset(re.findall(r"(?<![\w:])tidegate_\w+(?![\w:])", text)) | {"up"}


def input_series(case: Case) -> list[dict[str, str]]:
    """The recorded series with the values that the case gives them: the last selector that fits says which."""
    wanted = [(*parsed(selector), values) for selector, values in case.series.items()]
    used, found = set(), []
    for name, labels, value in recorded():
        if name not in families():
            continue
        values = f"{value}x{samples(case)}"
        for asked, inside, given in wanted:
            if asked in ("", name) and inside.items() <= labels.items():
                used.add((asked, *inside.items()))
                values = given
        ranks = ("0", "1") if case.second_rank and "rank" in labels else (labels.get("rank"),)
        for rank in ranks:
            shown = {**labels, **({"rank": rank, "instance": f"a:{rank}"} if case.second_rank and rank else {})}
            text = ",".join(f'{label}="{value}"' for label, value in shown.items())
            found.append({"series": f"{name}{{{text}}}", "values": values})
    for selector, values in case.beside.items():
        name, changed = parsed(selector)
        of_family = [labels for known, labels, _ in recorded() if known == name]
        labels = {**of_family[0], **changed}
        assert labels not in of_family, f"{selector} was recorded"
        assert all(value in BY_NAME[name].labels.get(label, (value,)) for label, value in changed.items()), (
            "no such value"
        )
        text = ",".join(f'{label}="{value}"' for label, value in labels.items())
        found.append({"series": f"{name}{{{text}}}", "values": values})
    missed = {(asked, *inside.items()) for asked, inside, _ in wanted} - used
    assert not missed, f"no such series was recorded: {missed}"
    return found


def expected(case: Case) -> list[dict[str, Labels]]:
    if not case.summary:
        return []
    rule = alerts()[case.alert]
    notes = {**rule["annotations"], "summary": case.summary.replace("DAEMON", INSTANCE)}
    notes |= {"knob": case.knob} if case.knob else {}
    labels = {name: INSTANCE if value == "DAEMON" else value for name, value in case.labels.items()}
    return [{"exp_labels": {**labels, "severity": rule["labels"]["severity"]}, "exp_annotations": notes}]


@pytest.mark.parametrize("rules", RULES, ids=lambda path: str(path.stem))
@pytest.mark.parametrize("interval", sorted({case.interval for case in CASES}))
def test_the_cases(tmp_path: Path, interval: str, rules: Path) -> None:
    """All of a file in one run of promtool, which names those that fail."""
    own = {rule.get("alert") for group in yaml.safe_load(rules.read_text())["groups"] for rule in group["rules"]}
    tests = [
        {
            "name": f"{case.alert}: {case.why}",
            "interval": interval,
            "input_series": input_series(case),
            "alert_rule_test": [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": expected(case)}],
        }
        for case in CASES
        if case.interval == interval and case.alert in own
    ]
    path = tmp_path / "tests.yml"
    files = [str(path) for path in RULES if path == rules or path.stem == "update"]  # its records are used by others
    path.write_text(yaml.safe_dump({"rule_files": files, "evaluation_interval": interval, "tests": tests}))
    done = subprocess.run([program("promtool"), "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", alerts())
def test_each_alert_has_a_case_that_fires_and_one_that_does_not(alert: str) -> None:
    found = {bool(case.summary) for case in CASES if case.alert == alert}
    assert found == {True, False}


def test_cases_are_of_alerts_that_exist() -> None:
    assert {case.alert for case in CASES} == set(alerts())


def test_the_scrape_has_every_family_that_rules_use() -> None:
    """So that no case can be about a series that was never there."""
    known = {name for name, _, _ in recorded()}
    assert families() <= known


def test_the_scrape_is_of_the_catalogue() -> None:
    for name, labels, _ in recorded():
        if name == "up":
            continue
        metric = BY_NAME[re.sub(r"_(sum|count)$", "", name) if name not in BY_NAME else name]
        for label in metric.labels:
            assert labels[label] in metric.values(label, ("nvme", "pfs")), (name, labels)


@pytest.mark.parametrize(
    ("text", "faster"),
    [
        ("expr: rate(x[5m]) > 60", "expr: rate(x[5000ms]) > 60"),
        ("rate(x[30m]) rate(x[30s])", "rate(x[30000ms]) rate(x[5000ms])"),
        ("        for: 2m\n        keep_firing_for: 3m", "        for: 2000ms\n        keep_firing_for: 3000ms"),
        ("group_wait: 15s", "group_wait: 250ms"),
        ("scrape_interval: 5s", "scrape_interval: 1s"),
        ("summary: for 5 minutes", "summary: for 5 minutes"),
    ],
)
def test_faster_time(text: str, faster: str) -> None:
    assert scaled(text) == faster


def test_faster_rules_differ_in_durations_only() -> None:
    still = re.compile(r"\d+(ms|[smhd])\b")
    for path in RULES:
        before, after = path.read_text(), scaled(path.read_text())
        assert before != after or ("[" not in before and "m\n" not in before)
        assert still.sub("#", before) == still.sub("#", after)

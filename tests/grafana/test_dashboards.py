"""The dashboards against a real Prometheus that scrapes a real run: every panel shows something, for every variable."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import tidegate
from tests.agent.training import RATES, Training
from tests.grafana.promql import QUERY_VARIABLE, VARIABLE, filled, has_data, legend_labels, parts
from tests.services import ROOT, Prometheus, daemon_process, prometheus, until
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.grafana.dashboards import DASHBOARDS, FOLDER
from tidegate.grafana.dashboards.panels import COLUMNS
from tidegate.metrics.catalogue import BY_NAME

RUN = "dashboards"
WINDOW_SECONDS = 30
ALL_OF_IT_SECONDS = 900
"""Longer than all tests of this module take: for what happened once."""
RULES = sorted((ROOT / "grafana" / "prometheus" / "rules").glob("*.yml"))
OF_TARGETS = {"run", "rank", "host", "device_kind", "instance", "job", "le"}
"""Labels that the daemon's discovery and Prometheus itself add."""
NOT_OURS = {"up", "ALERTS"}
"""Made by Prometheus itself."""

REQUIRES = {
    "node / GPU utilization": "nvml",
    "node / PCIe: NVML's figure": "nvml",
    "node / PCIe: share that is not Tidegate's": "nvml",
    "node / CPU in use": "node_exporter",
    "node / Memory available": "node_exporter",
    "node / Disks in use": "node_exporter",
    "node / Waiting for I/O": "node_exporter",
    "node / GPU utilization (dcgm)": "dcgm",
    "node / GPU memory in use": "dcgm",
    "node / Power": "dcgm",
    "node / PCIe replays": "dcgm",
}
"""All panels that are empty without something that Tidegate does not bring along."""

EXPORTERS = {
    "node_exporter": {
        "node_cpu_seconds_total", "node_memory_MemAvailable_bytes", "node_disk_io_time_seconds_total",
        "node_pressure_io_waiting_seconds_total", "node_uname_info",
    },
    "dcgm": {
        "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
    },
    "nvml": {name for name, metric in BY_NAME.items() if metric.needs == "nvml"},
}  # fmt: skip
"""What these are known to export, by name."""


def board(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def panels(name: str) -> list[dict[str, Any]]:
    """Those with figures."""
    return [panel for panel in board(name)["panels"] if panel["type"] not in ("row", "text")]


def requirement(panel: dict[str, Any]) -> str | None:
    found = re.search(r"\n\nrequires: (\w+)$", panel["description"])
    return found.group(1) if found else None


ALL_PANELS = [
    pytest.param(name, panel, id=f"{name} / {panel['title']}") for name in DASHBOARDS for panel in panels(name)
]
DATA_PANELS = [p for p in ALL_PANELS if requirement(p.values[1]) is None]  # type: ignore[arg-type]


# ---- the files


def test_the_files_are_what_the_code_makes() -> None:
    command = [sys.executable, "-m", "tidegate.grafana.dashboards", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in FOLDER.glob("*.json")} == set(DASHBOARDS)


def test_a_file_that_was_edited_by_hand_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tidegate.grafana import dashboards
    from tidegate.grafana.dashboards import __main__ as command

    for path in FOLDER.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(dashboards, "FOLDER", tmp_path)
    assert command.main(["--check"]) == 0
    (tmp_path / "run.json").write_text((tmp_path / "run.json").read_text().replace("Last step", "Letzter Schritt"))
    assert command.main(["--check"]) == 1
    assert command.main([]) == 0
    assert command.main(["--check"]) == 0


@pytest.mark.parametrize(("name", "panel"), ALL_PANELS)
def test_every_panel_says_what_it_is(name: str, panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert len(panel["description"]) > 20
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["targets"]
    refs = [target["refId"] for target in panel["targets"]]
    assert len(set(refs)) == len(refs)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_nothing_overlaps_and_nothing_sticks_out(name: str) -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= COLUMNS, panel["title"]
        return {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}

    numbers = [panel["id"] for panel in board(name)["panels"]]
    assert len(set(numbers)) == len(numbers)
    assert 0 not in numbers
    for one, other in combinations(board(name)["panels"], 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])


def test_panels_that_need_more_than_tidegate_are_these() -> None:
    found: dict[str, str] = {}
    for name in DASHBOARDS:
        for panel in panels(name):
            if (needs := requirement(panel)) is not None:
                key = f"{name} / {panel['title']}"
                found[f"{key} ({needs})" if key in found else key] = needs
                used = set().union(*(parts(filled(t["expr"], ANY)).names for t in panel["targets"]))
                assert used <= EXPORTERS[needs], (key, used - EXPORTERS[needs])
    assert found == REQUIRES


@pytest.mark.parametrize("name", DASHBOARDS)
def test_variables_are_declared_once_before_use_and_used(name: str) -> None:
    made = board(name)
    variables = made["templating"]["list"]
    names = [variable["name"] for variable in variables]
    assert len(set(names)) == len(names)
    for i, variable in enumerate(variables):
        if variable["type"] == "query":
            assert variable["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert set(VARIABLE.findall(variable["query"])) <= set(names[:i])
    links = json.dumps(made["links"])
    used = set(VARIABLE.findall(links + json.dumps(made["panels"]) + json.dumps(made["annotations"])))
    used |= {name for variable in variables for name in VARIABLE.findall(json.dumps(variable.get("query")))}
    assert set(names) <= used, set(names) - used


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_runbook_that_a_panel_names_is_the_one_of_an_alert(name: str) -> None:
    alerts = {r["alert"] for path in RULES for g in yaml.safe_load(path.read_text())["groups"] for r in g["rules"]
              if "alert" in r}  # fmt: skip
    named = {word for panel in panels(name) for word in re.findall(r"\bTidegate[A-Z]\w+", panel["description"])}
    assert named <= alerts


def test_every_runbook_is_a_panel() -> None:
    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "runbooks").glob("Tidegate*.md")}
    assert {panel["title"]: panel["options"]["content"] for panel in board("runbooks")["panels"]} == pages


ANY = {"run": ".*", "host": ".*", "rank": ".*", "path": ".*", "window": "5m"}


# ---- against a real run


@pytest.fixture(scope="module")
def prom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A run with storage paths, a slow link that raises an alert, and knobs that were turned; scraped while it runs."""
    folder = tmp_path_factory.mktemp("dashboards")
    with daemon_process(folder / "state") as daemon, prometheus(folder / "prometheus", daemon.port) as found:
        training = _training(folder)
        with training.optimizer:
            tidegate.attach(training.optimizer, training.model, run=RUN, daemon=daemon.url, token=daemon.token("agent"))
            training.start()
            try:
                until(lambda: training.steps > 4, "steps", 60)
                until(lambda: found.value(f'tidegate_desired_generation{{run="{RUN}"}}') == 0, "the first scrape")
                with daemon.client() as client:
                    client.set_knobs(RUN, {"static_ratio": 0.25, "tier_split": "nvme:1,pfs:1"}, wait=10)
                until(lambda: found.value(f'max(tidegate_generation{{run="{RUN}"}})') == 1, "generation 1")
                until(lambda: found.alerts("TidegateUpdateStalled", "firing"), "the alert", 90)
                # A rate needs two scrapes; quantiles of requests a few of them.
                scrapes = f'min(count_over_time(tidegate_steps_total{{run="{RUN}"}}[1m]))'
                until(lambda: (found.value(scrapes) or 0) >= 8, "scrapes")
                yield found
            finally:
                training.stop()


def _training(folder: Path) -> Training:
    paths = {}
    for name in ("nvme", "pfs"):
        (folder / name).mkdir()
        paths[name] = PathSettings(directory=folder / name, wear_bytes_per_day=10**12)
    slow = tidegate.EmulatedRates(
        h2d_bytes_per_second=RATES.h2d_bytes_per_second / 20,
        d2h_bytes_per_second=RATES.d2h_bytes_per_second,
        update_params_per_second=RATES.update_params_per_second,
    )
    training = Training(paths=paths, host_cache=7_000_000, tier_split="nvme:2,pfs:1", static_ratio=0.5, emulated=slow)
    training.model.register_forward_hook(
        lambda _model, _inputs, loss: training.optimizer.log(loss=loss.item(), tokens=512)
    )
    return training


def values(prom: Prometheus, name: str) -> dict[str, str]:
    """The variables of a dashboard with the values that Prometheus gives them: all of them, as one pattern."""
    chosen: dict[str, str] = {}
    for variable in board(name)["templating"]["list"]:
        if variable["type"] == "interval":
            chosen[variable["name"]] = variable["current"]["value"]
        if variable["type"] != "query":
            continue
        found = QUERY_VARIABLE.fullmatch(filled(variable["query"], chosen))
        assert found, variable["query"]
        rows = prom.ask("series", **{"match[]": found["selector"]})
        offered = sorted({row[found["label"]] for row in rows if row.get(found["label"])})
        assert offered, f"{name}: variable {variable['name']} has no value"
        chosen[variable["name"]] = "|".join(offered)
    return chosen


def faults(prom: Prometheus, expression: str, legend: str = "", seconds: int = WINDOW_SECONDS) -> list[str]:
    """What is wrong with an expression on the data of the run; nothing if it is well."""
    wrong = _unknown(prom, expression)
    now = time.time()
    rows = prom.ask("query_range", query=expression, start=now - seconds, end=now, step=1)["result"]
    if not has_data(rows):
        wrong.append("no data")
    return wrong + [
        f"the legend's {label} is empty"
        for label in sorted(legend_labels(legend))
        if not all(row["metric"].get(label) for row in rows)
    ]


def _unknown(prom: Prometheus, expression: str) -> list[str]:
    """Selectors that select nothing, and labels that nothing selected carries."""
    found = parts(expression)
    wrong = [f"no series {selector}" for selector in found.selectors if not _series(prom, selector)]
    carried = {label for selector in found.selectors for row in _series(prom, selector) for label in row}
    return wrong + [f"no label {label}" for label in sorted(found.labels - carried - found.made)]


def _series(prom: Prometheus, selector: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = prom.ask("series", **{"match[]": selector})
    return found


def panel_faults(prom: Prometheus, name: str, panel: dict[str, Any]) -> list[str]:
    chosen = values(prom, name)
    return [
        f"{target['expr']}: {fault}"
        for target in panel["targets"]
        for fault in faults(prom, filled(target["expr"], chosen), target["legendFormat"])
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "panel"), DATA_PANELS)
def test_every_panel_shows_data(prom: Prometheus, name: str, panel: dict[str, Any]) -> None:
    assert panel_faults(prom, name, panel) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_variable_has_values_and_every_annotation_happened(prom: Prometheus, name: str) -> None:
    chosen = values(prom, name)
    assert RUN in chosen.get("run", RUN).split("|")
    for mark in board(name)["annotations"].get("list", []):
        text = mark["titleFormat"] + mark["textFormat"]
        expression = filled(mark["target"]["expr"], chosen)
        assert faults(prom, expression, text, ALL_OF_IT_SECONDS) == [], mark["name"]


@pytest.mark.slow
def test_the_mark_of_a_generation_has_its_number(prom: Prometheus) -> None:
    mark = board("run")["annotations"]["list"][0]
    now = time.time()
    expression = filled(mark["target"]["expr"], values(prom, "run"))
    rows = prom.ask("query_range", query=expression, start=now - ALL_OF_IT_SECONDS, end=now, step=1)["result"]
    assert [row["metric"]["generation"] for row in rows] == ["1"]
    assert len(rows[0]["values"]) <= 3, "it is a moment, not the time in which the generation is in force"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", RULES, ids=lambda path: str(path.stem))
def test_every_rule_speaks_of_what_there_is(prom: Prometheus, path: Path) -> None:
    for rule in (rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]):
        expression = re.sub(r"\[\d+[smhd]\]", "[20s]", rule["expr"])
        assert _unknown(prom, expression) == [], rule.get("record") or rule["alert"]
        prom.ask("query", query=expression)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_metric_is_in_the_catalogue(name: str) -> None:
    known = {n + suffix for n, m in BY_NAME.items() for suffix in _suffixes(m.type)} | NOT_OURS
    known |= {metric for needs in ("node_exporter", "dcgm") for metric in EXPORTERS[needs]}
    for panel in panels(name):
        for target in panel["targets"]:
            assert parts(filled(target["expr"], ANY)).names <= known, panel["title"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_label_and_every_value_of_one_is_in_the_catalogue(name: str) -> None:
    matcher = re.compile(r'(\w+)(?:=|=~|!=|!~)"([^"]*)"')
    for panel in panels(name):
        for target in panel["targets"]:
            found = parts(filled(target["expr"], ANY))
            ours = {n: BY_NAME.get(re.sub(r"_(bucket|sum|count)$", "", n)) for n in found.names}
            if any(metric is None or metric.owner == "daemon" for metric in ours.values()):
                continue  # labels of the daemon's own metrics, and of others' exporters, are not in the catalogue
            known = OF_TARGETS.union(*(metric.labels for metric in ours.values()))
            grouped = found.labels | legend_labels(target["legendFormat"])
            assert grouped - found.made <= known, panel["title"]
            for selector in found.selectors:
                metric, inside = ours[selector.partition("{")[0]], selector.partition("{")[2]
                for label, value in matcher.findall(inside):
                    assert label in OF_TARGETS or label in metric.labels, (panel["title"], label)
                    if label in metric.labels and value not in ANY.values():
                        assert set(value.split("|")) <= set(metric.values(label, ("nvme", "pfs"))), panel["title"]


def _suffixes(kind: str) -> tuple[str, ...]:
    return ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("by (cause)", "by (why)", "no label why"),
        ('phase="update"', 'stage="update"', "no series"),
        ('phase="update"', 'phase="updates"', "no data"),
        ("tidegate_stall_seconds_total", "tidegate_stalls_seconds_total", "no series"),
        ("{{cause}}", "{{why}}", "the legend's why is empty"),
    ],
)
def test_a_panel_on_a_renamed_label_fails(prom: Prometheus, before: str, after: str, fault: str) -> None:
    panel = next(p for p in panels("run") if p["title"] == "Stalls of the update, by cause")
    assert panel_faults(prom, "run", panel) == []
    changed = json.loads(json.dumps(panel).replace(json.dumps(before)[1:-1], json.dumps(after)[1:-1]))
    assert changed != panel
    assert any(fault in found for found in panel_faults(prom, "run", changed))

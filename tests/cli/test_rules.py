"""`tidegate rules`: the configuration of Prometheus and Alertmanager, with links to runbooks that lead somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.alerts.test_rules import alerts
from tests.services import ROOT, program
from tidegate.cli.rules import rules
from tidegate.errors import ConfigError, TidegateError

SOURCE = ROOT / "grafana" / "prometheus"
RUNBOOKS = "https://docs.example.org/tidegate/runbooks"


def texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.yml")}


def links(folder: Path) -> dict[str, str]:
    """The link of each alert."""
    groups = [group for path in folder.glob("rules/*.yml") for group in yaml.safe_load(path.read_text())["groups"]]
    found = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    return {rule["alert"]: rule["annotations"]["runbook_url"] for rule in found}


def test_without_an_address_the_files_are_those_of_the_repository(tmp_path: Path) -> None:
    rules(tmp_path / "new" / "folder")
    assert texts(tmp_path / "new" / "folder") == texts(SOURCE)


@pytest.mark.parametrize("given", [RUNBOOKS, f"{RUNBOOKS}/"])
def test_each_alert_links_to_a_page_of_the_html_site(tmp_path: Path, given: str) -> None:
    rules(tmp_path, given)
    assert links(tmp_path) == {name: f"{RUNBOOKS}/{name}.html" for name in alerts()}
    assert all((ROOT / "docs" / "runbooks" / f"{name}.md").is_file() for name in alerts())
    assert yaml.safe_load(re.sub(r"!!\S+|!ENV", "", (ROOT / "mkdocs.yml").read_text()))["use_directory_urls"] is False
    different = {name for name, text in texts(tmp_path).items() if text != texts(SOURCE)[name]}
    assert {name.partition("/")[0] for name in different} == {"rules"}


def test_prometheus_takes_them(tmp_path: Path) -> None:
    rules(tmp_path, RUNBOOKS)
    command = [program("promtool"), "check", "config", tmp_path / "prometheus.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_file_that_is_there_stays_unless_it_may_be_overwritten(tmp_path: Path) -> None:
    (tmp_path / "alertmanager.yml").write_text("mine")
    with pytest.raises(TidegateError, match=r"--overwrite.*alertmanager\.yml\.$"):
        rules(tmp_path)
    assert texts(tmp_path) == {"alertmanager.yml": "mine"}
    rules(tmp_path, overwrite=True)
    assert texts(tmp_path) == texts(SOURCE)


@pytest.mark.parametrize("address", ["docs/runbooks", "https://x/{{ y }}", "https://x/#y", "https://x/ y", "file:///x"])
def test_what_is_no_address_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="--runbooks"):
        rules(tmp_path, address)
    assert texts(tmp_path) == {}


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TidegateError, match="cannot be written"):
        rules(tmp_path / "file" / "folder")

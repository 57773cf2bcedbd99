"""Runbooks: a page for each alert, in one form, with commands that exist and names that mean something."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer

from tests.alerts.pages import HEADINGS, PLACEHOLDERS, RUNBOOKS, commands, filled, section
from tests.alerts.test_rules import RULES, alerts
from tests.services import ROOT
from tidegate.cli.main import app
from tidegate.metrics.catalogue import BY_NAME

PAGES = {path.stem: path.read_text() for path in RUNBOOKS.glob("*.md") if path.stem != "README"}
VALUES = {
    **dict.fromkeys(PLACEHOLDERS, "word"), "PATH_NAME": "nvme", "OTHER_PATH": "pfs", "PORT": "8790", "PID": "4711",
}  # fmt: skip


def test_each_alert_has_a_page_and_each_page_an_alert() -> None:
    assert set(PAGES) == set(alerts())


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_to_look_at_what_to_do_and_how_to_know(name: str) -> None:
    page = PAGES[name]
    assert page.startswith(f"# {name}\n")
    assert tuple(re.findall(r"^## (.+)$", page, re.MULTILINE)) == HEADINGS
    for heading in HEADINGS:
        assert len(section(page, heading).split()) >= 8, heading


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_to_type(name: str) -> None:
    assert commands(name)


@pytest.mark.parametrize("name", PAGES)
def test_services_of_systemd_are_ones_that_we_deploy(name: str) -> None:
    units = {path.stem for path in (ROOT / "deploy" / "systemd").glob("*.service")}
    for line in re.findall(r"\b(?:systemctl|journalctl) ([^`\n]*)", PAGES[name]):
        named = {word.removesuffix(".service") for word in re.findall(r"\btidegate[\w.-]*", line)}
        assert named, line
        assert named <= units, line


def all_commands() -> list[tuple[str, str]]:
    found = []
    for name, page in PAGES.items():
        for block in re.findall(r"^ *```bash\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL):
            found += [(name, line.strip()) for line in block.splitlines()]
        found += [(name, line.strip()) for line in page.splitlines() if line.startswith("    tidegate ")]
        found += [(name, words) for words in re.findall(r"`(tidegate [^`]+)`", page)]
    return found


@pytest.mark.parametrize(("name", "line"), all_commands())
def test_commands_of_ours_are_ones_that_the_command_line_takes(name: str, line: str) -> None:
    for words in re.findall(r"\btidegate ([^;|&>]+)", filled(line, VALUES)):
        taken(shlex.split(words))


def taken(arguments: list[str]) -> None:
    """Parses them as the command line would; a usage error for what it does not take."""
    command: Any = typer.main.get_command(app)
    parent = None
    while hasattr(command, "commands"):
        name, *arguments = arguments
        parent, command = command.make_context(name, [], parent, resilient_parsing=True), command.commands[name]
    command.make_context(command.name, list(arguments), parent)


@pytest.mark.parametrize(
    "line", ["knobz get RUN", "knobs set RUN stride=4 --dry-runn", "doctor --paths X", "status extra"]
)
def test_a_command_that_does_not_exist_is_found_out(line: str) -> None:
    with pytest.raises(Exception, match=r"knobz|No such option|unexpected extra argument"):
        taken(line.split())


@pytest.mark.parametrize("name", PAGES)
def test_names_of_metrics_and_links_lead_somewhere(name: str) -> None:
    page = PAGES[name]
    recorded = set(re.findall(r"record: (\S+)", "".join(path.read_text() for path in RULES)))
    for metric in re.findall(r"\b(?:\w+:)?tidegate_\w+(?::\w+)?", page):
        raw = re.sub(r"_(sum|count)$", "", metric)
        assert metric in recorded or raw in BY_NAME or metric in BY_NAME, metric
    for target in re.findall(r"\]\(([^)]+)\)", page):
        assert (RUNBOOKS / target.partition("#")[0]).is_file(), target


def test_the_list_of_alerts_is_that_of_the_rules() -> None:
    """docs/runbooks/README.md: name, severity and knob of each."""
    rows = re.findall(
        r"^\| \[(\w+)\]\((\w+)\.md\) \| (\w+) \| .+ \| .+ \|$", (RUNBOOKS / "README.md").read_text(), re.MULTILINE
    )
    assert {name: severity for name, _, severity in rows} == {n: a["labels"]["severity"] for n, a in alerts().items()}
    assert all(name == target for name, target, _ in rows)

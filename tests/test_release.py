"""What a release is made of: workflows, the wheels that they build, the citation, and one version everywhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import tidegate
from tests.services import ROOT

FLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
EACH = pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.stem)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def schema_says(schema: str, *files: Path) -> str:
    """What check-jsonschema says against the files; nothing where they are valid."""
    command = [sys.executable, "-m", "check_jsonschema", "--force-filetype", "yaml", "--builtin-schema", schema, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def parsed(flow: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(flow.read_text())
    return found


def steps(flow: Path) -> list[dict[str, Any]]:
    return [step for job in parsed(flow)["jobs"].values() for step in job["steps"]]


# ---- workflows


@pytest.mark.parametrize("schema", ["vendor.github-workflows", "custom.github-workflows-require-timeout"])
def test_workflows_are_what_github_takes(schema: str) -> None:
    assert FLOWS
    assert schema_says(schema, *FLOWS) == ""


def test_the_schema_finds_a_mistake(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(FLOWS[0].read_text().replace("runs-on:", "run-on:"))
    assert "run-on" in schema_says("vendor.github-workflows", wrong)


@EACH
def test_actions_are_pinned_to_a_major_version(flow: Path) -> None:
    used = [step["uses"] for step in steps(flow) if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"(actions|pypa)/[\w-]+@(release/)?v\d+", name)] == []


@EACH
def test_a_workflow_may_read_and_no_more(flow: Path) -> None:
    """Only the job that publishes may do more: it gets the identity by which PyPI knows it, and runs no command."""
    assert parsed(flow)["permissions"] == {"contents": "read"}
    more = {name: job for name, job in parsed(flow)["jobs"].items() if "permissions" in job}
    assert set(more) <= {"publish"}
    for job in more.values():
        assert job["permissions"] == {"id-token": "write"}
        assert job["if"] == "github.event_name == 'release'"
        assert not [step for step in job["steps"] if "run" in step]
    checkouts = [step for step in steps(flow) if step.get("uses", "").startswith("actions/checkout")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


@EACH
def test_no_text_of_an_event_gets_into_a_script(flow: Path) -> None:
    """The name of a branch may be a command: scripts read it from the environment."""
    scripts = [step["run"] for step in steps(flow) if "run" in step]
    assert [script for script in scripts if "${{" in script] == []
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_a_push_runs_what_continuous_integration_runs() -> None:
    flow = parsed(ROOT / ".github" / "workflows" / "test.yml")
    commands = re.findall(r"^make (\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    job = flow["jobs"]["make"]
    assert {row["target"] for row in job["strategy"]["matrix"]["include"]} == set(commands)
    assert job["steps"][-1]["run"] == 'make "$TARGET"'
    assert {"push", "pull_request"} <= set(flow[True])  # YAML 1.1 has `on` for true
    assert "python:3.11-" in job["container"]["image"]


# ---- wheels


def test_a_wheel_for_each_python_that_the_package_names() -> None:
    machines = ("x86_64", "aarch64")
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", "linux"]
    done = subprocess.run(
        [*command, "--archs", ",".join(machines), str(ROOT)], capture_output=True, text=True, check=True
    )
    named = [re.fullmatch(r"Programming Language :: Python :: (\d)\.(\d+)", line) for line in PROJECT["classifiers"]]
    pythons = [f"cp{found[1]}{found[2]}" for found in named if found]
    assert set(done.stdout.split()) == {f"{python}-manylinux_{machine}" for python in pythons for machine in machines}
    runners = parsed(ROOT / ".github" / "workflows" / "wheels.yml")["jobs"]["wheels"]["strategy"]["matrix"]["include"]
    assert {runner["arch"] for runner in runners} == set(machines)


# ---- the citation


def test_the_citation_is_valid(tmp_path: Path) -> None:
    file = ROOT / "CITATION.cff"
    assert schema_says("vendor.citation-file-format", file) == ""
    wrong = tmp_path / "wrong.cff"
    wrong.write_text(file.read_text().replace("family-names", "family-name", 1))
    assert "family-name" in schema_says("vendor.citation-file-format", wrong)


def test_the_citation_names_both_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert [paper["title"].partition(":")[0] for paper in citation["references"]] == [
        "Deep Optimizer States",
        "MLP-Offload",
    ]
    assert citation["license"] == PROJECT["license"]
    assert PROJECT["description"] == citation["abstract"].strip().rstrip(".")


# ---- the version


def test_one_version_everywhere() -> None:
    version = PROJECT["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    deployed = (ROOT / "Dockerfile").read_text() + (ROOT / "docker-compose.yml").read_text()
    images = re.findall(r"tidegate-\w+:(\S+)", deployed)
    assert images
    assert {tidegate.__version__, newest[1], *images} == {version}
    assert str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]) == version

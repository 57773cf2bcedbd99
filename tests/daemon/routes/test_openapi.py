"""The API's description, and whether the live application does as it says: schemathesis, all checks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.live import ROOT, Agent, Daemon, threaded
from tidegate.daemon.routes.examples import EXAMPLES
from tidegate.knobs.knobs import SPECS

SNAPSHOT = ROOT / "docs" / "openapi.json"
CONFIG = """
hooks = "hooks"
[checks.positive_data_acceptance]
# What a knob takes depends on the run (422), what If-Match takes on its newest generation (412), and a report that is
# valid may be too large (413).
expected-statuses = ["2xx", "401", "403", "404", "409", "412", "413", "422"]
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 409, 412, 413, 422, 428]
[checks.missing_required_header]
expected-statuses = [401, 403, 404, 422, 428]
"""
# A valid wait may be as long as a minute, and a response after ten seconds counts as a failure.
HOOKS = """
import schemathesis

@schemathesis.hook
def map_query(context, query):
    wait = (query or {}).get("wait")
    return {**query, "wait": min(wait, 0.2)} if isinstance(wait, int | float) else query
"""


def test_the_description_is_the_committed_one(daemon: Daemon) -> None:
    found = daemon.http("GET", "/v1/openapi.json", "read").json()
    kept = json.loads(SNAPSHOT.read_text())
    found["info"].pop("version"), kept["info"].pop("version")
    assert found == kept, "the API changed: python -m tidegate.daemon.openapi > docs/openapi.json"


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("tier_split", "nvme:2,pfs:1"),
        ("tier_split", "nvme:0.5,pfs:1e-05"),
        ("tier_split", "eq1"),
        ("host_cache", "12GiB"),
        ("host_cache", "1.5 MB"),
    ],
)
def test_texts_that_a_knob_takes_are_described(knob: str, value: str) -> None:
    SPECS[knob].parse(value)
    described = json.loads(SNAPSHOT.read_text())["components"]["schemas"]["KnobPatch"]["properties"]["changes"]
    kinds = described["properties"][knob]["anyOf"]
    assert any(value in kind.get("enum", ()) or re.search(kind.get("pattern", "$^"), value) for kind in kinds)


def test_every_operation_says_what_it_needs_and_how_it_fails(daemon: Daemon) -> None:
    document = daemon.http("GET", "/v1/openapi.json", "read").json()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            told = f"{method} {path}"
            assert operation["description"], told
            needs_token = path.startswith("/v1/") and path != "/v1/proof"  # which is asked before a token is sent
            assert ("security" in operation) == needs_token, told
            for status, answer in operation["responses"].items():
                if int(status) >= 400:
                    assert list(answer["content"]) == ["application/problem+json"], told
    assert {type(example).__name__ for example in EXAMPLES} <= set(document["components"]["schemas"])


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["operate", "agent"])
def test_schemathesis(scope: str, tmp_path: Path) -> None:
    """Every operation that the scope may ask for; the endless stream of events is not among them."""
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    (tmp_path / "hooks.py").write_text(HOOKS)
    state = tmp_path / "state"
    with threaded(state, forgiven_failures=10**9, proposal_seconds=0.2) as daemon:
        Agent(daemon, "llama-7b", paths=("nvme",)).train(12, 1.0)
        only = ["--include-path-regex", "/v1/agents"] if scope == "agent" else ["--exclude-path-regex", "/v1/agents"]
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(tmp_path / "schemathesis.toml"), "run"),
            *(f"{daemon.url}/v1/openapi.json", "-H", f"Authorization: Bearer {daemon.tokens[scope]}"),
            *("--checks", "all", "--phases", "examples,coverage,fuzzing", "--max-examples", "8", "--no-color"),
            *("--exclude-path", "/v1/runs/{run}/events", "--seed", "1", "--generation-deterministic", *only),
        ]
        env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

"""Logs: one line an event, whole for machines; in processes of their own, as handlers are a process's."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.services import ROOT, free_port, until
from tidegate.logs import VARIABLE, JsonFormatter, TextFormatter, event

AGENT = """
import logging, torch, tidegate
params = [torch.nn.Parameter(torch.ones(8))]
optimizer = tidegate.AdamW(params, offload=tidegate.Offload(device="emulated"))
with optimizer, tidegate.attach(optimizer, run="logged"):
    params[0].grad = torch.ones(8)
    optimizer.step()
logging.getLogger("theirs").info("not ours")
"""


TRAINING = """
import logging, os, sys
from tidegate.cli import main, training

def train(options):
    logging.getLogger("tidegate").info("trained %d steps", options.steps)
    logging.getLogger("theirs").warning("a warning")
    print(os.environ.get("TIDEGATE_LOG_FORMAT"))
    return 0

training.run_demo = train
sys.argv = ["tidegate", *{arguments!r}]
main.main()
"""


def python(code: str, form: str | None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != VARIABLE} | ({VARIABLE: form} if form else {})
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_record_is_one_line_with_its_event_its_fields_and_its_exception() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        raised = sys.exc_info()
    record = logging.LogRecord("tidegate.tiers", logging.ERROR, __file__, 1, "path %s:\nretired", ("nvme",), raised)
    vars(record).update(event("path_retired", path="nvme", directory=Path("/nvme")))
    line = JsonFormatter().format(record)
    assert "\n" not in line
    row = json.loads(line)
    assert row["timestamp"].endswith("+00:00")
    assert (row["level"], row["logger"], row["message"]) == ("error", "tidegate.tiers", "path nvme:\nretired")
    assert (row["event"], row["path"], row["directory"]) == ("path_retired", "nvme", "/nvme")
    assert "ValueError: two\nlines" in row["exception"]


def test_text_has_its_time_in_utc() -> None:
    record = logging.LogRecord("tidegate.tiers", logging.INFO, __file__, 1, "path nvme retired", (), None)
    record.created, record.msecs = 1_782_000_000.25, 250.0
    assert TextFormatter("%(asctime)s %(message)s").format(record) == "2026-06-21 00:00:00.250Z path nvme retired"


def test_an_agent_logs_as_json_where_the_environment_says_so() -> None:
    done = python(AGENT, "json")
    assert done.returncode == 0, done.stderr
    found = rows(done.stderr)
    assert [row["event"] for row in found] == ["emulated", "attached", "detached"]
    assert found[1]["run"] == "logged"
    assert found[1]["metrics_address"].startswith("127.0.0.1:")
    assert found[2]["steps"] == 1


@pytest.mark.slow
def test_an_agent_leaves_the_logs_of_other_peoples_programs_alone() -> None:
    done = python(AGENT, None)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert done.stderr.startswith("the weights are on the CPU: the device is emulated")


@pytest.mark.parametrize("command", ["train", "demo"])
def test_training_commands_and_the_daemon_that_they_start_log_in_the_form_that_they_are_told(command: str) -> None:
    done = python(TRAINING.format(arguments=[command, "--steps", "3", "--log-format", "json"]), None)
    assert (done.returncode, done.stdout) == (0, "json\n"), done.stderr
    assert [row["message"] for row in rows(done.stderr)] == ["trained 3 steps", "a warning"]
    quiet = python(TRAINING.format(arguments=[command, "--steps", "3"]), None)
    assert (quiet.stdout, quiet.stderr) == ("None\n", "a warning\n")


@pytest.mark.slow
def test_a_format_that_there_is_not_is_said() -> None:
    done = python(AGENT, "xml")
    assert done.returncode != 0
    assert "TIDEGATE_LOG_FORMAT='xml' is not a log format: use one of text, json." in done.stderr


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_daemon_logs_in_the_form_that_it_is_told(tmp_path: Path, form: str) -> None:
    """The mode of a token file that others may read is the first event that matters to it."""
    (tmp_path / "agent.token").write_text("token-that-is-long-enough-0123456789\n")
    (tmp_path / "agent.token").chmod(0o644)
    command = ["daemon", "--port", str(free_port()), "--state-dir", str(tmp_path), "--log-format", form]
    process = forked.Popen(
        [sys.executable, "-m", "tidegate", *command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    until((tmp_path / "daemon.json").exists, "the daemon")
    process.terminate()
    lines = process.communicate(timeout=30)[1].splitlines()
    warned = [line for line in lines if "its mode is now 0600" in line]
    assert len(warned) == 1
    if form == "json":
        assert all(json.loads(line)["logger"].startswith("tidegate") for line in lines)
    else:
        assert "WARNING tidegate.daemon" in warned[0]


def test_every_event_is_described_and_every_description_has_its_event() -> None:
    """With the fields that it has."""
    table = (ROOT / "docs" / "logs.md").read_text()
    described = {
        name: set(re.findall(r"`(\w+)`", fields))
        for name, fields in re.findall(r"^`(\w+)` \| \w+ \| ([^|]*)\|", table, re.MULTILINE)
    }
    logged: dict[str, set[str]] = {}
    for path in [path for part in ("agent", "daemon", "dashboard", "tidegate") for path in (ROOT / part).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "event":
                first = node.args[0]
                assert isinstance(first, ast.Constant)
                logged[str(first.value)] = {str(keyword.arg) for keyword in node.keywords}
    assert logged == described

"""A pytest plugin that writes down what comes out of each of DeepSpeed's own tests; for `deepspeed_own`."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.deepspeed_rank import MODE, NOTES

LOG, UNTIL = "OWN_TESTS_LOG", "OWN_TESTS_UNTIL"
"""Variables: where outcomes go; when to begin no further test."""


class Recorder:
    """Appends one line for each test when it begins, and one when it ends."""

    def __init__(self) -> None:
        self.log, self.notes, self.mode = Path(os.environ[LOG]), Path(os.environ[NOTES]), os.environ[MODE]
        self.until = float(os.environ[UNTIL])
        self.outcome = ("passed", "")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """What has an outcome already, or was being run when all was stopped, is not run again; without Tidegate only
        what has failed with it is."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        known = {line["test"] for line in lines if line["mode"] == self.mode}
        failed = {line["test"] for line in lines if line["mode"] == "tidegate" and line.get("outcome") == "failed"}
        items[:] = [
            item
            for item in items
            if item.nodeid not in known and stage_of(item) == 3 and (self.mode == "tidegate" or item.nodeid in failed)
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if time.time() > self.until:
            pytest.exit("the time given is over", 0)
        self.notes.write_text("")
        self.outcome = ("passed", "")
        self._write(test=item.nodeid, begun=True)
        began = time.monotonic()
        done = yield
        outcome, message = self.outcome
        self._write(
            test=item.nodeid, outcome=outcome, message=message, seconds=round(time.monotonic() - began, 1),
            **told_by_ranks(self.notes),
        )  # fmt: skip
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "passed" or self.outcome[0] == "failed":
            return
        if report.outcome == "skipped":
            told = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
            self.outcome = "skipped", str(told)
        else:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.outcome = "failed", str(crash.message if crash is not None else report.longrepr)

    def _write(self, **what: Any) -> None:
        with self.log.open("a") as log:
            log.write(json.dumps({"mode": self.mode, **what}) + "\n")


def told_by_ranks(notes: Path) -> dict[str, Any]:
    """How many engines had Tidegate in them, and what ranks failed with."""
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    return {
        "built": sum(what == "built" for what, _ in lines),
        "said": list(dict.fromkeys(message for what, message in lines if what == "failed")),
    }


def stage_of(item: pytest.Item) -> int:
    """The stage that a test is made for, 3 where it does not say."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return int(next((params[name] for name in ("zero_stage", "stage") if name in params), 3))


def pytest_configure(config: pytest.Config) -> None:
    # Ranks are forked from a process that has imported all of it.
    multiprocessing.set_forkserver_preload(["unit.common"])
    config.pluginmanager.register(Recorder())

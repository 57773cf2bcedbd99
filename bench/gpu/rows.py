"""The rows (results) of a stage: each is measured in its own process and saved immediately.

When a stage is run again, complete rows are taken from the file. Rows whose measurement was stopped for lack of time
are measured again, with twice the time limit. So all rows are complete after a few runs of the stage.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu.iteration import run_side
from bench.gpu.target import Target

ALL = 0.9
"""Share of the stage's time. A row that was stopped after at least this share is not measured again, because a further
run of the stage could not give it more time."""


class Rows:
    """Measures the rows of a stage, and stores each result in a file. The attribute `lacked_time` has the names of the
    rows that had not enough time; for these the stage must be run again."""

    def __init__(self, target: Target, run: Callable[..., dict[str, Any]] = run_side) -> None:
        self.lacked_time: list[str] = []
        self._target, self._run = target, run
        self._end = time.monotonic() + target.seconds
        self._file = file_of(target.results, target.stage)
        self._kept: dict[str, dict[str, Any]] = {}
        if self._file.exists():
            self._kept = dict(json.loads(line) for line in self._file.read_text().splitlines())

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def measure(self, name: str, side: str, shape: str, *, limit: float, **more: Any) -> dict[str, Any]:
        """The row with this name, unique in the stage: from the file if it is complete, otherwise measured. limit:
        seconds for the first attempt."""
        key = f"{'dry' if self._target.dry else 'gpu'} {name}"
        kept = self._kept.get(key)
        if kept is not None and "lacked_seconds" not in kept:
            return kept
        wanted = limit if kept is None else max(limit, 2 * kept["lacked_seconds"])
        given = min(wanted, self.seconds_left)
        if given < 1.0:
            row = kept or {"side": side, "not_measured": "the stage had no time left for it", "lacked_seconds": 0.0}
        else:
            row = self._run(self._target, side, shape, limit=given, **more)
        if row.get("lacked_seconds", 0.0) >= ALL * self._target.seconds:
            del row["lacked_seconds"]  # it had all the time that there is
        if "lacked_seconds" in row:
            self.lacked_time.append(name)
        if "lacked_seconds" in row or "not_measured" not in row:
            self._keep(key, row)
        return row

    def _keep(self, key: str, row: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps([key, row]) + "\n")


def file_of(results: Path, stage: str) -> Path:
    return results / f"{stage}.rows"

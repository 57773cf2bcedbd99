"""A decision that another process's write lock stops is made again, and nothing is done twice."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from tests.daemon.live import hello
from tidegate.daemon.control.control_plane import ControlPlane
from tidegate.daemon.storage.store import Store
from tidegate.knobs.knobs import Knobs
from tidegate.wire.agent import AgentReport


class Stand:
    """A control plane whose store refuses its next writes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refusals = 0
        self.store = Store(f"sqlite:///{folder}/tidegate.db")
        self.plane = ControlPlane(self.store)
        save = self.store.save

        def refusing(*args: Any, **more: Any) -> None:
            if self.refusals:
                self.refusals -= 1
                raise OperationalError("", {}, Exception("database is locked"))
            save(*args, **more)

        monkeypatch.setattr(self.store, "save", refusing)

    def report(self, agent: str, generation: int, step: int) -> None:
        self.plane.report(
            agent, AgentReport(timestamp=time.time(), step=step, phase="other", generation=generation, effective={})
        )


def test_a_report_that_is_tried_again_is_no_second_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a second report with a generation says that the rank will not name the generation's first step."""
    stand = Stand(tmp_path, monkeypatch)
    rank = hello("llama", world_size=1)
    stand.plane.hello(rank, Knobs(stride=2.0))
    run, member = stand.plane.registry.member(rank.agent)
    stand.report(rank.agent, 0, 1)
    member.applied.clear()
    monkeypatch.setattr(stand.plane._events, "measure_effect", lambda *_: stand.store.save(run.name))
    stand.refusals = 1
    with pytest.raises(OperationalError):
        stand.report(rank.agent, 1, 7)
    stand.report(rank.agent, 1, 7)
    assert 1 not in member.applied
    stand.report(rank.agent, 1, 8)
    assert member.applied[1] == 8
    stand.store.close()

"""Knobs of storage paths, turned from the command line through a real daemon while a real training runs."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests import forked
from tests.agent.training import Training
from tests.services import ROOT, DaemonProcess, daemon_process, until
from tidegate.agent.engine import memory_budget
from tidegate.errors import MemoryBudgetError
from tidegate.timeline.step_result import StepPhases, StepResult

RUN = "path-knobs"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with daemon_process(tmp_path / "state") as running:
        yield running


class Watched:
    """A training with two paths; `after` has where each subgroup's state was at the end of every step."""

    def __init__(self, folder: Path, daemon: DaemonProcess) -> None:
        for name in ("nvme", "pfs"):
            (folder / name).mkdir()
        paths = {"nvme": folder / "nvme", "pfs": tidegate.PathSettings(directory=folder / "pfs", capacity_bytes=2**24)}
        self.training = Training(paths=paths, host_cache=0, tier_split="nvme:1", order="pinned")
        self.after: list[tuple[str, ...]] = []
        optimizer = self.training.optimizer
        optimizer.observers.append(self._note)
        tidegate.attach(optimizer, self.training.model, run=RUN, daemon=daemon.url, token=daemon.token("agent"))

    def _note(self, result: StepResult, _: StepPhases) -> None:
        self.after.append(tuple(placed.after for placed in result.plan.placements))

    def counts(self) -> Counter[str]:
        return Counter(self.after[-1])


def knobs(daemon: DaemonProcess, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of `tidegate knobs set`."""
    done = forked.run(
        [sys.executable, "-m", "tidegate", "knobs", "set", "--run", RUN, "--daemon", daemon.url, *words],
        cwd=ROOT, env={**os.environ, "TIDEGATE_STATE_DIR": str(daemon.state)}, timeout=60,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.timeout(120)
def test_they_reach_the_engine_within_two_steps(daemon: DaemonProcess, tmp_path: Path) -> None:
    watched = Watched(tmp_path, daemon)
    training = watched.training
    # The state of a subgroup takes 3.2 MB: two fit in a cache of 8 MB.
    turns: list[tuple[tuple[str, ...], Callable[[], Any]]] = [
        (("tier_split=nvme:2,pfs:1",), lambda: watched.counts()["pfs"] == round(len(watched.after[-1]) / 3)),
        (("host_cache=8MB",), lambda: watched.counts()["host"] == 2),
        (("host_cache=16MB", "order=alternate"), lambda: watched.after[-1] != watched.after[-2] == watched.after[-4]),
        (("host_cache=0", "order=pinned", "tier_split=nvme:1"), lambda: set(watched.after[-1]) == {"nvme"}),
    ]
    with training.optimizer:
        assert (training.step(), set(watched.after[-1])) == (None, {"nvme"})
        training.start()
        for words, there in turns:
            code, said, errors = knobs(daemon, *words)
            # The step that is under way when the answer comes may be followed by two that do not have it yet.
            target = training.steps + 3 + 4 * ("order=alternate" in words)
            assert code == 0, said + errors
            until(lambda target=target: training.steps >= target, "the step under way, and two more")  # type: ignore[misc]
            assert there(), (words, watched.after[-4:])
        training.stop()


@pytest.mark.timeout(120)
def test_what_cannot_be_is_refused_in_one_sentence_and_nothing_changes(daemon: DaemonProcess, tmp_path: Path) -> None:
    watched = Watched(tmp_path, daemon)
    training = watched.training
    with training.optimizer:
        training.start()
        code, said, _ = knobs(daemon, "tier_split=pfs:1")
        assert (code, "Rank 0" in said, "pfs" in said) == (1, True, True), said
        code, _, errors = knobs(daemon, "tier_split=ssd:1")
        assert (code, "the run's paths are: nvme, pfs" in errors) == (2, True), errors
        wanted = ("tier_split=pfs:1,nvme:1", "--dry-run", "--json")
        until(lambda: json.loads(knobs(daemon, *wanted)[1])["predicted_after"], "rates of a few steps")
        seen = json.loads(knobs(daemon, *wanted)[1])
        assert seen["no_prediction"] == ""
        assert seen["predicted_before"]["lane_bytes"]["pfs:read"] == 0
        assert seen["predicted_after"]["lane_bytes"]["pfs:read"] > 0
        code, said, _ = knobs(daemon, *wanted[:-1])
        assert code == 0
        assert all(words in said for words in ("update, predicted", "at least, and why", "host memory")), said
        steps = training.steps
        until(lambda: training.steps > steps + 2, "training goes on")
        training.stop()
        assert set(watched.after[-1]) == {"nvme"}


def test_reports_tell_why_a_path_is_retired_and_what_auto_would_take(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    (tmp_path / "pfs").mkdir()
    training = Training(paths={"nvme": tmp_path / "nvme", "pfs": tmp_path / "pfs"}, host_cache=0)
    with training.optimizer as optimizer, tidegate.attach(optimizer, training.model, run=RUN) as attachment:
        training.step()
        store = optimizer.engine.store
        assert store is not None
        store.retire("pfs", "Path pfs: the disk is gone.")
        evidence = attachment._messages.report().evidence
        assert evidence is not None
        assert (evidence.retired, evidence.retired_reasons) == (("pfs",), {"pfs": "Path pfs: the disk is gone."})
        assert evidence.automatic_cache_bytes == pytest.approx(optimizer._automatic_cache_bytes(), rel=0.2)


def test_a_cache_is_refused_only_where_what_the_state_needs_of_it_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvme").mkdir()
    with Training(paths={"nvme": tmp_path / "nvme"}, host_cache=0).optimizer as optimizer:
        memory, state = optimizer.engine.memory, sum(s.nbytes("state") for s in optimizer.engine.subgroups)
        needed = state + memory.host_slot_bytes() - sum(memory.host_bytes().values())
        wanted = replace(optimizer.knobs, host_cache=999 * 2**30)
        monkeypatch.setattr(memory_budget, "host_available_bytes", lambda: needed)
        optimizer.check_knobs(wanted)
        monkeypatch.setattr(memory_budget, "host_available_bytes", lambda: needed - 1)
        with pytest.raises(MemoryBudgetError, match="bytes does not fit in host memory"):
            optimizer.check_knobs(wanted)

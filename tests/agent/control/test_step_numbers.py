"""One number for a step: the optimizer's own, in reports, in what was applied and on screens, also after a resume."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

import tidegate
from tests.agent.training import Training
from tests.daemon.live import Daemon, new_run, threaded, wait_until
from tidegate.agent.control import link_timing
from tidegate.agent.control.rank_predictor import rank_predictor
from tidegate.agent.telemetry.recorder import Recorder
from tidegate.knobs.knobs import Knobs
from tidegate.wire import evidence

OFFLOAD = tidegate.Offload(device="emulated", stride=2.0, subgroup_numel=64, cpu_threads=1)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports come as soon as there is something to tell."""
    monkeypatch.setattr(link_timing, "REPORT_SECONDS", 0.05)
    monkeypatch.setattr(link_timing, "LONGEST_REPORT_SECONDS", 0.05)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with threaded(tmp_path_factory.mktemp("state")) as running:
        yield running


class Resumed:
    """An optimizer that is attached first and loads a state then."""

    def __init__(self, daemon: Daemon) -> None:
        self.run, self.client = new_run(), daemon.client()
        self.model = torch.nn.Linear(16, 16)
        self.optimizer = tidegate.AdamW(self.model.parameters(), offload=OFFLOAD)
        self.attachment = tidegate.attach(
            self.optimizer, self.model, run=self.run, daemon=daemon.url, token=daemon.tokens["agent"]
        )

    def step(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 16)).square().mean().backward()
            self.optimizer.step()

    def told(self, steps: list[int]) -> None:
        """Waits until the daemon knows these steps, and no other."""
        wait_until(lambda: [row.step for row in self.client.steps(self.run, 0).steps] == steps, f"steps {steps}", 20)
        assert self.client.run(self.run).step == steps[-1]

    def applied(self) -> int:
        """The first step with the newest generation."""
        number = self.client.generations(self.run)[-1].generation

        def found() -> int | None:
            return self.client.generations(self.run)[number].applied.get(0)

        step: int = wait_until(found, "what was applied", 20)
        return step


@pytest.mark.slow
def test_after_a_checkpoint_steps_are_the_runs_own(daemon: Daemon, tmp_path: Path) -> None:
    resumed = Resumed(daemon)
    with resumed.optimizer as optimizer:
        resumed.step(40)
        optimizer.save_checkpoint(tmp_path)
        weights = {name: tensor.clone() for name, tensor in resumed.model.state_dict().items()}
    resumed = Resumed(daemon)
    with resumed.optimizer as optimizer:
        resumed.model.load_state_dict(weights)
        optimizer.load_checkpoint(tmp_path)
        wait_until(lambda: resumed.client.run(resumed.run).step == 40, "the step of the checkpoint", 20)
        resumed.step(2)
        resumed.told([41, 42])
        assert resumed.client.set_knobs(resumed.run, {"stride": 3}).state == "committed"
        wait_until(lambda: resumed.attachment.link.committed.generation == 1, "the generation")  # type: ignore[union-attr]
        resumed.step(2)
        assert resumed.applied() == 44, "committed before step 43 had ended"
        resumed.told([41, 42, 43, 44])
        # Back to the checkpoint, as after a loss that ran away: what was undone is not told any more.
        resumed.model.load_state_dict(weights)
        optimizer.load_checkpoint(tmp_path)
        resumed.step(3)
        resumed.told([41, 42, 43])
        assert resumed.attachment.applied_at == [(1, 41)]
        assert optimizer.knobs == Knobs(stride=3.0, static_ratio=0.0)


def test_after_a_state_dict_steps_are_the_runs_own(daemon: Daemon) -> None:
    first, resumed = Resumed(daemon), Resumed(daemon)
    with first.optimizer, resumed.optimizer as optimizer:
        first.step(5)
        resumed.model.load_state_dict(first.model.state_dict())
        optimizer.load_state_dict(first.optimizer.state_dict())
        assert optimizer.num_steps == 5
        resumed.step(1)
        resumed.told([6])


def test_the_counter_of_steps_is_of_the_process_and_their_number_is_of_the_run(daemon: Daemon) -> None:
    """Prometheus would take the steps before the resume for steps of the last minutes."""
    first, resumed = Resumed(daemon), Resumed(daemon)
    with first.optimizer, resumed.optimizer as optimizer:
        first.step(5)
        recorder = resumed.attachment.recorder
        assert recorder.rows("tidegate_steps_total") == recorder.rows("tidegate_step") == {(): 0}
        resumed.step(2)
        optimizer.load_state_dict(first.optimizer.state_dict())
        assert recorder.rows("tidegate_steps_total") == {(): 2}
        assert recorder.rows("tidegate_step") == {(): 5}
        resumed.step(1)
        assert recorder.rows("tidegate_steps_total") == {(): 3}
        assert recorder.rows("tidegate_step") == {(): 6}


def test_an_optimizer_that_was_trained_before_it_is_attached(daemon: Daemon) -> None:
    resumed = Resumed(daemon)
    with resumed.optimizer:
        resumed.step(2)
        resumed.attachment.close()
        again = tidegate.attach(
            resumed.optimizer, resumed.model, run=resumed.run, daemon=daemon.url, token=daemon.tokens["agent"]
        )
        resumed.step(1)
        resumed.told([3])
        assert again.recorder.steps == 1


def test_the_daemon_hears_of_parameters_that_come_later(daemon: Daemon) -> None:
    """Previews ask the model about every subgroup."""
    resumed = Resumed(daemon)

    def known() -> int:
        member = daemon.app.state.plane.registry.runs[resumed.run].members[0]
        return sum(sizes.numel * sizes.count for sizes in member.hello.subgroups)

    with resumed.optimizer as optimizer:
        assert known() == 16 * 17
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(100))]})
        wait_until(lambda: known() == 16 * 17 + 100, "the new subgroups")


def test_a_check_that_fails_is_a_no_at_once(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    check, broken = tidegate.AdamW.check_knobs, threading.Event()

    def checked(optimizer: tidegate.AdamW, knobs: Knobs) -> None:
        if broken.is_set():
            raise RuntimeError("dictionary changed size during iteration")
        check(optimizer, knobs)

    monkeypatch.setattr(tidegate.AdamW, "check_knobs", checked)
    resumed = Resumed(daemon)
    with resumed.optimizer:
        broken.set()
        made = resumed.client.set_knobs(resumed.run, {"stride": 3})
        broken.clear()
        assert (made.state, "RuntimeError: dictionary changed size" in made.outcome) == ("refused", True), made


def test_rates_that_cannot_be_hold_up_no_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    with training.optimizer as optimizer, tidegate.attach(optimizer, training.model, run="rates") as attachment:
        training.step()
        training.step()
        known = attachment.recorder.rates
        assert known is not None
        wrong = dataclasses.replace(known, h2d_bytes_per_second=math.inf)
        monkeypatch.setattr(Recorder, "rates", property(lambda _: wrong))
        for _ in range(2):
            training.step()
            report = attachment._messages.report()
            assert report.rates is None
            assert report.steps
    assert [record.event for record in caplog.records if hasattr(record, "event")].count("rates_refused") == 1


def test_subgroups_of_which_the_daemon_does_not_know_hold_up_no_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More than it takes: it keeps the registration of before, and reports go on without evidence."""
    training = Training()
    with training.optimizer as optimizer, tidegate.attach(optimizer, training.model, run="many") as attachment:
        training.step()
        messages, known = attachment._messages, optimizer.engine.subgroups
        messages.hello("", reset_knobs=False)
        assert messages.report().evidence == rank_predictor(optimizer, attachment.recorder).evidence(known)
        monkeypatch.setattr(evidence, "MAX_SUBGROUPS", len(known))
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        with pytest.raises(ValidationError, match="make subgroups larger"):
            messages.hello("", reset_knobs=False)
        for _ in range(2):
            training.step()
            report = messages.report()
            assert report.evidence is None
            assert report.steps
    assert [record.event for record in caplog.records if hasattr(record, "event")].count("evidence_refused") == 1

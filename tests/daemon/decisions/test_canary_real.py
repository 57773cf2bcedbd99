"""Canaries on a real run: real training on an emulated device that is slow, a real daemon, real steps."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import tidegate
from tests.daemon.live import ROOT, Daemon, environment, new_run, wait_until
from tidegate.knobs.knobs import KnobValue
from tidegate.wire.canary import CanaryRequest
from tidegate.wire.knobs import GenerationView

STEPS = 12
SLOW_DEVICE = tidegate.EmulatedRates(h2d_bytes_per_second=1e9, d2h_bytes_per_second=1e9, update_params_per_second=4e6)
"""No help: what it updates takes far longer than on the CPU."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make the model's own time jump where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network(width: int) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3)))


@contextmanager
def training(daemon: Daemon, run: str, width: int = 512, resume: Path | None = None) -> Iterator[None]:
    """`resume`: the optimizer is attached, and takes the checkpoint in this folder then."""
    model = network(width)
    offload = tidegate.Offload(stride=4.0, subgroup_numel=100_000, cpu_threads=1, emulated=SLOW_DEVICE)
    end, failed = threading.Event(), list[BaseException]()

    def loop() -> None:
        inputs = torch.randn(4, width)
        try:
            while not end.is_set():
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
        except BaseException as error:
            failed.append(error)

    with tidegate.AdamW(model.parameters(), lr=1e-4, offload=offload) as optimizer:
        tidegate.attach(optimizer, model, run=run, daemon=daemon.url, token=daemon.tokens["agent"])
        if resume is not None:
            model.load_state_dict(torch.load(resume / "model.pt"))
            optimizer.load_checkpoint(resume)
        thread = threading.Thread(target=loop)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join(60)
    assert not failed, failed


def on_trial(daemon: Daemon, run: str, stride: KnobValue) -> int:
    """The generation that the rank agreed to try. On a busy machine its vote may come too late: it is asked again."""

    def asked() -> int | None:
        made = daemon.client().set_knobs(run, {"stride": stride}, canary=CanaryRequest(steps=STEPS))
        return made.generation if made.state in ("committed", "applied") else None

    number: int = wait_until(asked, "a trial", 60)
    return number


def settled(daemon: Daemon, run: str) -> list[GenerationView]:
    """The generations, once the newest that any rank had is applied and no trial is open."""
    client = daemon.client()

    def found() -> list[GenerationView] | None:
        made = client.generations(run)
        ran = [g for g in made if g.state in ("committed", "applied")]
        trials = [g.canary.state for g in made if g.canary is not None]
        return made if ran[-1].state == "applied" and not {"waiting", "condemned"} & set(trials) else None

    made: list[GenerationView] = wait_until(found, "the end of the trial", 120)
    return made


@pytest.mark.slow
def test_a_harmful_stride_is_rolled_back_and_a_helpful_one_stays(daemon: Daemon) -> None:
    """Reports come a second apart, a dozen steps take less: ranks on trial report more often."""
    run, client = new_run(), daemon.client()
    with training(daemon, run):
        enough = lambda: len(client.steps(run, 0).steps) > STEPS  # noqa: E731
        wait_until(lambda: client.runs() and any(v.run == run for v in client.runs()) and enough(), "steps", 120)
        number = on_trial(daemon, run, 1)
        made = settled(daemon, run)
        harmful, back = made[number], next(g for g in reversed(made) if g.state == "applied")
        assert harmful.canary is not None
        assert (harmful.canary.state, back.restores, back.knobs["stride"]) == ("rolled_back", 0, 4.0), harmful.canary
        assert back.applied[0] - harmful.applied[0] <= 2 * STEPS

        def baseline() -> bool:
            return sum(s.step > back.applied[0] for s in client.steps(run, 0).steps) >= STEPS

        wait_until(baseline, "steps after the way back", 120)
        number = on_trial(daemon, run, "off")
        helpful = settled(daemon, run)[number]
        assert helpful.canary is not None
        assert (helpful.canary.state, client.knobs(run).desired["stride"]) == ("promoted", "off"), helpful.canary
        assert helpful.canary.verdict.startswith("Helpful"), helpful.canary
        for trial in (harmful.canary, helpful.canary):
            assert trial.measured is not None
            assert trial.predicted_update_seconds_before is not None
            assert trial.predicted_update_seconds_after is not None
        assert harmful.canary.measured.exposed_shift > 0 > helpful.canary.measured.exposed_shift  # type: ignore[union-attr]
        told = {row.generation: row.effect for row in client.audit(run) if row.action in ("condemned", "promoted")}
        assert set(told) == {harmful.generation, helpful.generation}
        assert all("predicted" in effect and "before" in effect for effect in told.values()), told


def trained(folder: Path, width: int, steps: int) -> None:
    """Leaves a checkpoint of so many steps, and the weights, in this folder."""
    model = network(width)
    offload = tidegate.Offload(device="emulated", stride="off", cpu_threads=1)
    with tidegate.AdamW(model.parameters(), lr=1e-4, offload=offload) as optimizer:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4, width)).square().mean().backward()
            optimizer.step()
        optimizer.save_checkpoint(folder)
    torch.save(model.state_dict(), folder / "model.pt")


@pytest.mark.slow
def test_after_a_resume_a_trial_takes_its_own_steps_and_no_more(daemon: Daemon, tmp_path: Path) -> None:
    """The steps that were loaded are none of the trial's, and status shows the run's own step."""
    run, client = new_run(), daemon.client()
    trained(tmp_path, width=256, steps=1000)
    with training(daemon, run, width=256, resume=tmp_path):
        told = lambda: [row.step for row in client.steps(run, 0).steps]  # noqa: E731
        wait_until(lambda: any(view.run == run for view in client.runs()) and len(told()) > STEPS, "steps", 120)
        asked_at = client.run(run).step
        number = on_trial(daemon, run, "off")
        made = settled(daemon, run)[number]
        judged_by = client.run(run).step
        assert made.canary is not None
        assert made.canary.state in ("promoted", "rolled_back"), made.canary
        assert made.canary.measured is not None
        assert made.canary.measured.steps_after <= STEPS
        assert judged_by - asked_at < 500, "it waited as many steps as were loaded"
        assert 1000 + STEPS < made.applied[0] < judged_by
        assert told()[0] > 1000, "as the optimizer counts them"
        shown = subprocess.run(
            [sys.executable, "-m", "tidegate", "status", "--run", run, "--json"], cwd=ROOT, capture_output=True,
            text=True, check=True, timeout=60, env=environment(daemon.state, TIDEGATE_DAEMON=daemon.url),
        )  # fmt: skip
        assert json.loads(shown.stdout)[0]["step"] >= judged_by > 1000

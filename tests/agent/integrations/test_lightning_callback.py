"""Lightning's callback, for real: one run over fits, searches and exceptions, figures in the loggers, a real daemon."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.integrations.test_lightning import OFFLOAD, Regression, batches, trainer_of
from tests.documented import program
from tests.services import ROOT, DaemonProcess, assert_nothing_grows, daemon_process, until
from tidegate.agent.control.attachment import Attachment
from tidegate.agent.integrations.lightning import TidegateCallback
from tidegate.client.daemon_client import DaemonClient
from tidegate.errors import ConfigError
from tidegate.wire.run import RunView

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning
    from lightning.pytorch.callbacks import LearningRateFinder
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
    from lightning.pytorch.tuner import Tuner

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.`.*"),
]

RUN = "lightning"


class Validated(Regression):
    """With a validation, and so with a sanity check before the first step."""

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("val_loss", self.layers(batch).square().mean())

    def val_dataloader(self) -> torch.utils.data.DataLoader[torch.Tensor]:
        return batches()


class Remembering(Regression):
    """Keeps the losses that its training steps returned."""

    def __init__(self, ours: bool) -> None:
        super().__init__(ours)
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.losses.append(loss.item())
        return loss


class Watched(TidegateCallback):
    """Keeps what was attached, also after it was closed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(RUN, **options)
        self.seen: list[Attachment] = []

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        assert self.attachment is not None
        self.seen.append(self.attachment)

    @property
    def steps(self) -> list[int]:
        """Of each fit."""
        return [attachment.recorder.steps for attachment in self.seen]


def fit(folder: Path, callback: TidegateCallback, steps: int, model: Regression | None = None, **settings: Any) -> None:
    model = model or Regression(True)
    settings = {"enable_checkpointing": False, **settings}
    trainer_of(folder, steps, callbacks=[callback], **settings).fit(model, batches())


def is_closed(attachment: Attachment) -> bool:
    return repr(attachment).endswith("closed)")


def rows_of(logger: CSVLogger) -> list[dict[str, str]]:
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_figures_of_the_steps_since_the_last_entry_go_to_the_logger(tmp_path: Path, accumulate: int) -> None:
    logger, callback = CSVLogger(tmp_path), Watched()
    settings = {"log_every_n_steps": 5, "accumulate_grad_batches": accumulate, "logger": logger}
    fit(tmp_path, callback, 15, Validated(True), **settings)
    rows = rows_of(logger)
    entries = [row for row in rows if row.get("tidegate_update_seconds")]
    assert [int(row["step"]) for row in entries] == [4, 9, 14]
    recorder = callback.seen[0].recorder
    assert callback.steps == [15]
    measured = recorder.seconds("tidegate_phase_seconds")[("update",)]
    measured += recorder.rows("tidegate_update_spill_seconds_total")[()]
    assert sum(float(row["tidegate_update_seconds"]) for row in entries) == pytest.approx(measured, rel=1e-3)
    assert all(0 <= float(e["tidegate_stall_seconds"]) <= float(e["tidegate_update_seconds"]) for e in entries)
    sentences = [row["tidegate_verdict"] for row in rows if row.get("tidegate_verdict")]
    assert len(sentences) == 3
    assert all("of the step" in sentence for sentence in sentences)
    assert callback.verdict == sentences[-1]
    assert is_closed(callback.seen[0])
    assert callback.attachment is None


def test_training_step_is_the_forward_and_losses_are_told(tmp_path: Path) -> None:
    callback, model = Watched(), Remembering(True)
    fit(tmp_path, callback, 6, model, log_every_n_steps=2, accumulate_grad_batches=2)
    recorder = callback.seen[0].recorder
    assert {phase for (phase,) in recorder.seconds("tidegate_phase_seconds")} >= {"forward", "backward", "update"}
    reports = [report for report in recorder.take_unreported() if report.loss is not None]
    assert [report.step for report in reports] == [3, 5]
    # Lightning divides each loss by the number of batches of a step, after `training_step`.
    assert [report.loss for report in reports] == [pytest.approx(model.losses[at]) for at in (3, 7)]


@pytest.mark.slow
def test_tensorboard_gets_the_verdict_as_a_text(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    callback = Watched()
    fit(tmp_path, callback, 4, log_every_n_steps=2, logger=logger)
    (events,) = Path(logger.log_dir).glob("events*")
    content = events.read_bytes()
    assert content.count(b"tidegate_update_seconds") == 2
    assert b"tidegate_verdict" in content
    assert callback.verdict.encode() in content


def test_an_exception_closes_it_and_the_next_fit_attaches_again(tmp_path: Path) -> None:
    class Failing(Regression):
        fails = True

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if self.fails and index == 3:
                raise RuntimeError("out of memory, say")
            return super().training_step(batch, index)

    callback, model = Watched(), Failing(True)
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(tmp_path, callback, 6, model)
    assert callback.attachment is None
    assert is_closed(callback.seen[0])
    model.fails = False
    fit(tmp_path, callback, 6, model)
    assert callback.steps == [3, 6]


@pytest.mark.slow
def test_one_trainer_fits_several_times(tmp_path: Path) -> None:
    callback, model = Watched(), Regression(True)
    trainer = trainer_of(tmp_path, 4, callbacks=[callback], enable_checkpointing=False)
    trainer.fit(model, batches())
    trainer.fit_loop.epoch_loop.max_steps = 10
    trainer.fit(model, batches())
    assert callback.steps == [4, 6]
    assert all(map(is_closed, callback.seen))


@pytest.mark.slow
def test_a_resumed_fit_counts_on(tmp_path: Path) -> None:
    first = trainer_of(tmp_path, 5)
    first.fit(Regression(True), batches())
    first.save_checkpoint(tmp_path / "saved.ckpt")
    callback = Watched()
    trainer = trainer_of(tmp_path, 8, callbacks=[callback])
    trainer.fit(Regression(True), batches(), ckpt_path=tmp_path / "saved.ckpt", weights_only=False)
    assert callback.steps == [3]
    assert callback.seen[0].recorder.number == 8


@pytest.mark.parametrize("order", [*(pytest.param(o, marks=pytest.mark.slow) for o in ("tuner", "before")), "after"])
def test_a_search_for_a_learning_rate_is_no_part_of_the_run(tmp_path: Path, order: str) -> None:
    callback, model = Watched(), Regression(True)
    finder = [] if order == "tuner" else [LearningRateFinder(num_training_steps=12)]
    callbacks = [*finder, callback] if order == "before" else [callback, *finder]
    trainer = trainer_of(tmp_path, 5, callbacks=callbacks)
    if order == "tuner":
        Tuner(trainer).lr_find(model, train_dataloaders=batches(), num_training=12, update_attr=True)
        assert not callback.seen
    trainer.fit(model, batches())
    assert callback.steps == [5]
    assert callback.seen[0].recorder.number == 5


class Again(LearningRateFinder):
    """A search in the middle of a fit, as Lightning's documentation has it."""

    def on_fit_start(self, *_: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


@pytest.mark.slow
def test_a_search_in_the_middle_counts_on_from_before_it(tmp_path: Path) -> None:
    callback = Watched()
    trainer = trainer_of(tmp_path, 12, callbacks=[callback, Again(num_training_steps=10)], log_every_n_steps=4)
    trainer.fit(Regression(True), batches())
    assert callback.seen[0].recorder.number == 12
    assert callback.attachment is None


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with daemon_process(tmp_path / "state") as running:
        yield running


def test_fits_are_parts_of_one_finished_run_of_the_daemon_and_nothing_grows(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    model = Regression(True)
    agents: set[str] = set()

    def fit_once(number: int) -> None:
        callback = Watched(daemon=daemon.url, token=daemon.token("agent"))
        fit(tmp_path, callback, 6 + number, model)
        run = finished(client)
        agents.update(rank.agent for rank in run.ranks)
        assert (run.step, len(agents)) == (6 + number, number + 1)
        assert told(client, 0) == [*range(1, 7 + number)]

    with daemon.client() as client:
        assert_nothing_grows(fit_once, rounds=4)


def finished(client: DaemonClient) -> RunView:
    return until(lambda: next((run for run in client.runs() if run.liveness == "finished"), None), "the run's end")


def told(client: DaemonClient, rank: int) -> list[int]:
    """The steps that the daemon has."""
    return [row.step for row in client.steps(RUN, rank).steps]


@pytest.mark.slow
def test_two_ranks_of_ddp_train_as_with_torchs_adamw(daemon: DaemonProcess, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.agent.integrations.lightning_ranks",
        str(tmp_path),
        daemon.url,
        daemon.token("agent"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.name for path in tmp_path.glob("ddp-*")} == {"ddp-0", "ddp-1"}
    with daemon.client() as client:
        run = finished(client)
        assert (run.world_size, run.step) == (2, 12)
        # The last fit began at step 7.
        assert told(client, 0)[-6:] == told(client, 1)[-6:] == [7, 8, 9, 10, 11, 12]


@pytest.mark.slow
def test_the_program_of_the_documentation_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return SimpleNamespace(loss=self.layer(x).square().mean())

    monkeypatch.chdir(tmp_path)
    data = torch.utils.data.DataLoader([{"x": torch.ones(8)}] * 8, batch_size=2)  # type: ignore[arg-type]
    given: dict[str, Any] = {"model": Model(), "batches": data, "torch": torch}
    exec(program("frameworks", "Lightning").replace("max_steps=1000", 'max_steps=60, accelerator="cpu"'), given)
    assert given["trainer"].global_step == 60
    assert given["trainer"].logged_metrics["tidegate_update_seconds"] > 0


class TwoOptimizers(Regression):
    def __init__(self) -> None:
        super().__init__(True)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first, _, last = self.layers
        return [tidegate.AdamW(part.parameters(), offload=OFFLOAD) for part in (first, last)]


def test_what_it_cannot_attach_is_said_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"returned AdamW, not tidegate\.AdamW"):
        fit(tmp_path, TidegateCallback(RUN), 2, Regression(False))
    with pytest.raises(ConfigError, match=r"has 2 optimizers of type tidegate\.AdamW.*attach each.*on_train_start"):
        fit(tmp_path, TidegateCallback(RUN), 2, TwoOptimizers())


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_it_is_a_callback_of_the_package_that_was_imported(package: str, tmp_path: Path) -> None:
    program = f"""
import sys, torch, tidegate
from tidegate.agent.control import attach
from tidegate.agent.integrations import log_figures
from tidegate.agent.optimizer import adamw
packages = {{"lightning", "pytorch_lightning"}}
assert not packages & set(sys.modules)
import {package} as chosen
from {package}.demos.boring_classes import BoringModel
from tidegate.agent.integrations.lightning import TidegateCallback
assert packages & set(sys.modules) == {{chosen.__name__.partition(".")[0]}}
class Model(BoringModel):
    def configure_optimizers(self):
        return tidegate.AdamW(self.parameters())
callback = TidegateCallback("run")
trainer = chosen.Trainer(callbacks=[callback], accelerator="cpu", max_steps=3, log_every_n_steps=1, logger=False)
trainer.fit(Model())
assert "of the step" in callback.verdict
assert set(trainer.callback_metrics) >= {{"tidegate_update_seconds", "tidegate_stall_seconds"}}
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]

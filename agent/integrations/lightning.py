"""Integration with Lightning: a callback attaches the optimizer to a run while `fit` trains, and writes figures of
Tidegate to the module's logger.

    Trainer(…, callbacks=[TidegateCallback(run="llama-7b", daemon=url)])

The module returns a `tidegate.AdamW` from `configure_optimizers`. If `lightning` or `pytorch_lightning` was imported
before this module, the callback works with the Trainer of that package; if neither was, with that of `lightning` if it
is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from tidegate.agent.control.attach import attach
from tidegate.agent.control.attachment import Attachment
from tidegate.agent.integrations.log_figures import VERDICT, LogFigures
from tidegate.agent.optimizer.module_hooks import ModelHook
from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.agent.optimizer.wrapped import innermost
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    _NAMES: Final = ("lightning.pytorch", "pytorch_lightning")
    """Two packages that define the same classes separately."""

    def _callbacks() -> tuple[type, ...]:
        first = _NAMES[0] if importlib.util.find_spec("lightning") else _NAMES[1]
        imported = [sys.modules[name] for name in _NAMES if name in sys.modules] or [importlib.import_module(first)]
        return tuple(package.Callback for package in imported)

    Callback = type("Callback", _callbacks(), {})


class TidegateCallback(Callback):
    """Attaches the optimizer when `fit` begins to train, and closes the attachment when `fit` ends or raises.

    Where the Trainer logs a step, `tidegate_update_seconds` and `tidegate_stall_seconds`, summed over all steps since
    the last entry, go to the module's logger. `verdict` is one sentence that says what the updates of these steps
    waited for. TensorBoard (as a text) and the CSV logger get the sentence as `tidegate_verdict`; other loggers accept
    only numbers.

    run, daemon, options: as in `tidegate.attach`. Further calls of `fit` belong to the same run. Steps of Lightning's
    search for a learning rate or a batch size, and of its sanity check, are not included.

    ConfigError when training begins and `configure_optimizers` has returned no `tidegate.AdamW`, or several.
    """

    def __init__(self, run: str, daemon: str | None = None, **options: Any) -> None:
        self.attachment: Attachment | None = None
        self.verdict = "no update yet"
        self._run, self._daemon, self._options = run, daemon, options
        self._optimizer: Optimizer | None = None
        self._figures: LogFigures | None = None
        self._steps = 0
        """Number of steps of the optimizer at the start of the present batch."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach()
        optimizer = _single_optimizer(trainer.optimizers)
        # Lightning calls `training_step`, which may not call the module's forward: phases are set by Lightning's own
        # hooks.
        self.attachment = attach(optimizer, run=self._run, daemon=self._daemon, **self._options)
        self._optimizer, self._figures = optimizer, LogFigures(self.attachment, optimizer)

    def on_train_batch_start(self, *_: Any) -> None:
        if self._optimizer is not None:
            self._steps = self._optimizer.num_steps
            self._optimizer.phases.enter("forward")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if self._optimizer is not None:
            self._optimizer.phases.enter("other")
            loss.register_hook(ModelHook(self._optimizer._backward_began))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._optimizer is None or self._figures is None:
            return
        if self._optimizer.phases.current == "forward":  # there was no backward
            self._optimizer.phases.enter("other")
        # Lightning's own monitors use this check, too. It is true for all batches whose gradients are accumulated.
        if not trainer._logger_connector.should_update_logs or self._optimizer.num_steps == self._steps:
            return
        if isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), torch.Tensor):
            self._optimizer.log(loss=outputs["loss"].item() * trainer.accumulate_grad_batches)
        figures = self._figures.since_last()
        self.verdict = figures.pop(VERDICT)
        pl_module.log_dict(figures)
        _log_verdict(trainer, self.verdict)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._detach()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._detach()

    def _detach(self) -> None:
        """Closes the attachment. Idempotent: several hooks of Lightning call this at the end of `fit`, because none of
        them is called in every case."""
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = self._optimizer = self._figures = None


def _single_optimizer(optimizers: list[Any]) -> Optimizer:
    """The only tidegate.AdamW in the list. ConfigError when there is none, or several."""
    found = [innermost(optimizer) for optimizer in optimizers]
    ours = [optimizer for optimizer in found if isinstance(optimizer, Optimizer)]
    if len(ours) == 1:
        return ours[0]
    if ours:
        raise ConfigError(
            f"The module has {len(ours)} optimizers of type tidegate.AdamW, and TidegateCallback can attach only one: "
            "attach each in the module's on_train_start instead, with tidegate.attach(optimizer, run='…') and another "
            "run name for each."
        )
    names = ", ".join(type(optimizer).__name__ for optimizer in found) or "no optimizer"
    raise ConfigError(
        f"configure_optimizers has returned {names}, not tidegate.AdamW: return tidegate.AdamW(self.parameters(), …), "
        "or leave TidegateCallback out."
    )


def _log_verdict(trainer: Trainer, sentence: str) -> None:
    """Logs the verdict with loggers that accept text. Other loggers are skipped, because they would raise or warn."""
    step = trainer.fit_loop.epoch_loop._batches_that_stepped
    for logger in trainer.loggers:
        kinds = {kind.__name__ for kind in type(logger).__mro__}
        if "TensorBoardLogger" in kinds:
            logger.experiment.add_text(VERDICT, sentence, step)  # type: ignore[attr-defined]
        elif "CSVLogger" in kinds:
            logger.log_metrics({VERDICT: sentence}, step)  # type: ignore[dict-item]

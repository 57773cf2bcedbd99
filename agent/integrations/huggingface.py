"""Integration with the Hugging Face Trainer and Accelerate: metrics, knobs, and figures of Tidegate in the Trainer's
own logs.

    optimizer = (tidegate.AdamW, {"lr": 3e-4, "offload": tidegate.Offload(…)})
    Trainer(…, optimizer_cls_and_kwargs=optimizer, callbacks=[TidegateCallback(run="llama-7b", daemon=url)])

With Accelerate, `accelerator.prepare` accepts a `tidegate.AdamW` like any optimizer, and `tidegate.attach` accepts the
prepared optimizer. `unwrapped` returns the optimizer inside, for example to close it.
"""

from __future__ import annotations

from typing import Any, Final

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tidegate.agent.control.attach import attach
from tidegate.agent.control.attachment import Attachment
from tidegate.agent.integrations.log_figures import VERDICT, LogFigures
from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.agent.optimizer.wrapped import innermost
from tidegate.agent.parameters.shards import LocalShard
from tidegate.errors import ConfigError

LONGEST_TEXT: Final = 100
"""Number of characters of the longest text that the Trainer's progress bar shows. It shows a remark in place of longer
texts."""


def unwrapped(optimizer: Any) -> Optimizer:
    """The `tidegate.AdamW` inside a wrapper of Accelerate or DeepSpeed. ConfigError when there is none."""
    inner = innermost(optimizer)
    if isinstance(inner, Optimizer):
        return inner
    raise ConfigError(
        f"The training uses {type(inner).__name__}, not tidegate.AdamW: give the Trainer "
        "optimizer_cls_and_kwargs=(tidegate.AdamW, {…}) or optimizers=(optimizer, None); with DeepSpeed, call "
        'tidegate.enable_deepspeed() and put a "tidegate" block into its configuration.'
    )


class TidegateCallback(TrainerCallback):
    """Attaches the Trainer's optimizer when training begins. Adds three figures to each log entry that has
    a loss: `tidegate_update_seconds` and `tidegate_stall_seconds`, summed over all steps since the last such entry, and
    `tidegate_verdict`, one sentence that says what the updates of these steps waited for.

    run, daemon, options: as in `tidegate.attach`. Callbacks that the Trainer creates itself (TensorBoard and others)
    run before callbacks that are passed to the Trainer, so they do not get these figures. The figures are also in the
    Trainer's `state.log_history` and in Tidegate's own metrics. What the Trainer prints has the first clauses of the
    sentence only, at most `LONGEST_TEXT` characters.

    ConfigError when training begins with another optimizer, or with gradients="release", because the Trainer reads the
    gradients.
    """

    def __init__(self, run: str, daemon: str | None = None, **options: Any) -> None:
        self.attachment: Attachment | None = None
        self._run, self._daemon, self._options = run, daemon, options
        self._figures: LogFigures | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        optimizer, model = unwrapped(given.get("optimizer")), given.get("model")
        _check_works(optimizer)
        self._detach()  # the Trainer does not call on_train_end after an exception
        self.attachment = attach(optimizer, model, run=self._run, daemon=self._daemon, **self._options)
        self._figures = LogFigures(self.attachment, optimizer)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **given: Any,
    ) -> None:
        if self._figures is None or logs is None or "loss" not in logs:
            return
        unwrapped(given.get("optimizer")).log(loss=float(logs["loss"]))
        figures = self._figures.since_last()
        if state.log_history:
            state.log_history[-1] |= figures
        logs |= figures | {VERDICT: _shortened(figures[VERDICT])}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self._detach()

    def _detach(self) -> None:
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = self._figures = None


def _shortened(sentence: str) -> str:
    """Leaves out the last clauses of a verdict that is too long for the Trainer's progress bar."""
    while len(sentence) > LONGEST_TEXT:
        sentence = sentence.rpartition("; ")[0]
    return sentence


def _check_works(optimizer: Optimizer) -> None:
    """Raises ConfigError for settings that cannot work in the Trainer. It is called when training begins, so that the
    error comes before the first step."""
    under_deepspeed = isinstance(
        optimizer.param_groups[0]["params"][0], LocalShard
    )  # DeepSpeed clips, and knows the last backward of a step
    if optimizer.offload.gradients == "release" and not under_deepspeed:
        raise ConfigError(
            "gradients='release' cannot work in the Trainer, which reads all gradients for their norm before each "
            "step, and does not tell which backward is the last of a step. Use gradients='keep'."
        )

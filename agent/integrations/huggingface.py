"""Hugging Face Trainer and Accelerate: metrics, knobs and a verdict in the Trainer's own logs.

    optimizer = (tidegate.AdamW, {"lr": 3e-4, "offload": tidegate.Offload(…)})
    Trainer(…, optimizer_cls_and_kwargs=optimizer, callbacks=[TidegateCallback(run="llama-7b", daemon=url)])

With Accelerate, `accelerator.prepare` takes a `tidegate.AdamW` like any optimizer; `tidegate.attach` takes what comes
back from it through `unwrapped`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tidegate.agent.attach import Attachment, attach
from tidegate.agent.optimizer import AdamW
from tidegate.agent.shards import Part
from tidegate.agent.telemetry.delivery import Delivery
from tidegate.errors import ConfigError
from tidegate.verdict import Taken, verdict

PREFIX = "tidegate_"


def unwrapped(optimizer: Any) -> AdamW:
    """The `tidegate.AdamW` inside what Accelerate or DeepSpeed makes of it. ConfigError when there is none."""
    inner = optimizer
    while inner is not None and not isinstance(inner, AdamW):
        inner = getattr(inner, "tidegate", None) or getattr(inner, "optimizer", None)
    if inner is None:
        raise ConfigError(
            f"The training uses {type(getattr(optimizer, 'optimizer', optimizer)).__name__}, not tidegate.AdamW: give "
            "the Trainer optimizer_cls_and_kwargs=(tidegate.AdamW, {…}) or optimizers=(optimizer, None); with "
            'DeepSpeed, call tidegate.enable_deepspeed() and put a "tidegate" block into its configuration.'
        )
    return inner


@dataclass(frozen=True)
class _Passed:
    """Seconds since the run began."""

    step: float = 0.0
    update: float = 0.0
    stalls: tuple[tuple[str, float], ...] = ()
    delivery: Delivery = field(default_factory=Delivery)

    @classmethod
    def of(cls, attachment: Attachment) -> _Passed:
        recorder = attachment.recorder
        with recorder.lock:
            stalls = recorder.rows("tidegate_stall_seconds_total")
            phases = {phase: seconds for (phase,), seconds in recorder.seconds("tidegate_phase_seconds").items()}
            spill = sum(recorder.rows("tidegate_update_spill_seconds_total").values())
            delivery = recorder.totals.delivery
        by_cause = tuple((cause, seconds) for (phase, cause), seconds in stalls.items() if phase == "update")
        return cls(sum(phases.values()), phases.get("update", 0.0) + spill, by_cause, delivery)

    def since(self, before: _Passed) -> _Passed:
        earlier = dict(before.stalls)
        stalls = tuple((cause, seconds - earlier.get(cause, 0.0)) for cause, seconds in self.stalls)
        delivery = self.delivery - before.delivery
        return _Passed(self.step - before.step, self.update - before.update, stalls, delivery)

    def taken(self, attachment: Attachment) -> Taken:
        return Taken(
            step_seconds=self.step,
            update_seconds=self.update,
            stalls=dict(self.stalls),
            paths=attachment.recorder.path_names,
            recopied=self.delivery.recopied,
            first_gradient=self.delivery.first_gradient,
        )


class TidegateCallback(TrainerCallback):
    """Attaches the Trainer's optimizer when training begins, and adds to each log entry what the update cost since the
    last: `tidegate_update_seconds`, `tidegate_stall_seconds`, and `tidegate_verdict`, one sentence.

    run, daemon, options: as in `tidegate.attach`. Callbacks that the Trainer makes itself (TensorBoard and others) run
    before those that it is given: they see the figures in the trainer's `state.log_history` and Tidegate's own metrics.

    ConfigError when training begins and the optimizer is another, or releases its gradients, which the Trainer reads.
    """

    def __init__(self, run: str, daemon: str | None = None, **options: Any) -> None:
        self.attachment: Attachment | None = None
        self._run, self._daemon, self._options = run, daemon, options
        self._before = _Passed()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        optimizer, model = unwrapped(given.get("optimizer")), given.get("model")
        _check_works(optimizer)
        self._detach()  # a training that raised has not ended for the Trainer
        self.attachment = attach(optimizer, model, run=self._run, daemon=self._daemon, **self._options)
        self._before = _Passed()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **given: Any,
    ) -> None:
        if self.attachment is None or logs is None or "loss" not in logs:
            return
        now = _Passed.of(self.attachment)
        passed, self._before = now.since(self._before), now
        optimizer = unwrapped(given.get("optimizer"))
        optimizer.log(loss=float(logs["loss"]))
        figures = {
            "update_seconds": round(passed.update, 6),
            "stall_seconds": round(sum(seconds for _, seconds in passed.stalls), 6),
            "verdict": verdict(passed.taken(self.attachment), optimizer.engine.effective),
        }
        for entry in (logs, *state.log_history[-1:]):
            entry |= {f"{PREFIX}{name}": value for name, value in figures.items()}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self._detach()

    def _detach(self) -> None:
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None


def _check_works(optimizer: AdamW) -> None:
    """Better said when training begins than at the first step."""
    under_deepspeed = isinstance(optimizer.param_groups[0]["params"][0], Part)  # it clips, and knows the last backward
    if optimizer.offload.gradients == "release" and not under_deepspeed:
        raise ConfigError(
            "gradients='release' cannot work in the Trainer, which reads all gradients for their norm before each "
            "step, and does not say which backward is the last of a step. Use gradients='keep'."
        )

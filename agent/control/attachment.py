"""The connection of an optimizer to telemetry and the control daemon, as `tidegate.attach` makes it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import ExitStack
from typing import Self

import torch

from tidegate.agent.control import attachment_registry
from tidegate.agent.control.applied_knobs import AppliedKnobs
from tidegate.agent.control.attach_checks import (
    AttachSettings,
    check_model,
    configure_logs,
    connect,
    metrics_port_of_rank,
    raise_on_all_ranks,
    validated,
    warn_if_unreachable,
)
from tidegate.agent.control.committed_knobs import CommittedKnobs
from tidegate.agent.control.daemon_link import AgentLink
from tidegate.agent.control.phase_hooks import PhaseHooks
from tidegate.agent.control.rank_messages import RankMessages
from tidegate.agent.control.step_sync import BoundaryMessage, agree
from tidegate.agent.control.tuning import Tuning
from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.agent.ranks import Ranks
from tidegate.agent.telemetry.rank_metrics import RankMetrics
from tidegate.agent.telemetry.recorder import Recorder
from tidegate.errors import ConfigError
from tidegate.knobs.knobs import Knobs, KnobValue, same, show
from tidegate.logs import event
from tidegate.timeline.step_result import StepPhases, StepResult
from tidegate.wire.agent import AgentHello, AgentReport

log = logging.getLogger("tidegate")


class Attachment:
    """Telemetry of an optimizer and its link to the daemon. Created by `tidegate.attach`, which documents the
    arguments; ended by `close()`, a `with` block or `optimizer.close()`.

    It is closed when it is garbage-collected. When the process ends, the daemon gets a goodbye message. If it is closed
    while an exception is handled or leaves a `with` block, or if an exception ends the process, the rank has failed.

    run, rank, world_size: name of the run, number of this rank, number of all ranks.
    metrics_address: "host:port" of /metrics.
    recorder: recorder of all finished steps.
    tuning: the tuner of knobs on `auto`.
    link: the link to the daemon; None without one.
    applied_at: list of pairs (generation of knobs, first step with this generation). Steps are numbered as in the
        optimizer.
    """

    def __init__(self, optimizer: Optimizer, model: torch.nn.Module | None, settings: AttachSettings) -> None:
        """`settings`: the keyword arguments of `attach`."""
        self._ranks = Ranks.current()
        self.run, self.rank, self.world_size = settings.run, self._ranks.rank, self._ranks.count
        with raise_on_all_ranks(self._ranks):
            settings.check()
            check_model(model, optimizer.offload.gradients)
            configure_logs(settings.strict)
            self._close_conflicting(optimizer, settings.strict)
        optimizer.wait()  # a step that runs already is not recorded
        optimizer._follow_params()
        self._applied = applied = AppliedKnobs(optimizer.num_steps + 1)
        self._optimizer = optimizer
        self._pid = os.getpid()
        self._said_goodbye = False
        """Whether the goodbye message was queued."""
        self.recorder = Recorder(optimizer)
        self._messages = RankMessages(optimizer, self.recorder, self._applied, self.run, self._ranks)
        self.tuning = Tuning(optimizer, self.recorder, self._ranks)
        self.link: AgentLink | None = None
        with ExitStack() as undo:
            with raise_on_all_ranks(self._ranks):
                port = metrics_port_of_rank(settings.metrics_port)
                bind = settings.metrics_bind
                self._metrics = RankMetrics(
                    optimizer, self.recorder, lambda: applied.generation, bind, port, settings.strict
                )
                undo.callback(self._stop)
                self.metrics_address = f"{settings.advertise_host or bind}:{self._metrics.port}"
                self.link = connect(settings, lambda: self._hello(settings.reset_knobs), self._messages, self.rank)
                if self.link is not None:
                    arguments = settings, self.metrics_address
                    # A name server that does not answer must not delay the training.
                    threading.Thread(target=warn_if_unreachable, args=arguments, daemon=True).start()
            self._synchronize(optimizer.num_steps + 1)
            undo.pop_all()
        self._phases = PhaseHooks(optimizer)
        self._handles = self._phases.on(model) if model is not None else []
        optimizer.observers.append(self._on_step)
        optimizer.boundaries.append(self._between_steps)
        optimizer.attachment = self
        attachment_registry.register(self)
        log.info(
            "run %s, rank %d of %d is attached: /metrics is at %s",
            self.run, self.rank, self.world_size, self.metrics_address,
            extra=event(
                "attached", run=self.run, rank=self.rank, world_size=self.world_size,
                metrics_address=self.metrics_address, device=optimizer.device.kind,
            ),
        )  # fmt: skip

    def _close_conflicting(self, optimizer: Optimizer, strict: bool) -> None:
        """Closes earlier attachments of the same optimizer, and of the same run and rank in this process. With
        `strict`, ConfigError if the optimizer is attached already."""
        if optimizer.attachment is not None:
            if strict:
                raise ConfigError("This optimizer is attached already; close() that attachment first.")
            optimizer.attachment.close()
        attachment_registry.close_existing(self.run, self.rank)

    @property
    def generation(self) -> int:
        """Generation of the knobs in force; 0 for those that the optimizer was built with."""
        return self._applied.generation

    @property
    def applied_at(self) -> list[tuple[int, int]]:
        """Pairs (generation of knobs, first step with this generation), oldest first."""
        return self._applied.since

    @property
    def overhead(self) -> dict[str, float]:
        """CPU seconds used so far, by part of the telemetry: `recorder`, `tuner`, `exporter`, `sampler` (of the GPU),
        `link`."""
        return {**self._metrics.overhead_seconds, "link": self.link.cpu_seconds if self.link is not None else 0.0}

    @property
    def overhead_seconds(self) -> float:
        """CPU seconds used so far: the sum of `overhead`."""
        return sum(self.overhead.values())

    def rebuild(self) -> None:
        """Restarts telemetry when the optimizer has moved to another device before its first step, and registers the
        rank again with the daemon."""
        self.recorder.begin()
        self._metrics.begin()
        self._register_again()

    def extended(self) -> None:
        """Registers the rank again with the daemon after parameters were added, so that the daemon knows all
        subgroups."""
        self._register_again()

    def _register_again(self) -> None:
        """Registers the rank again with the daemon, with its present values. If the daemon would reject them, a warning
        is logged and the earlier registration stays."""
        if self.link is None:
            return
        try:
            self.link.update_hello(validated(lambda: self._hello(reset_knobs=False)))
        except ConfigError as error:
            log.warning("%s The daemon keeps the values that it received before.", error, extra=event("hello_refused"))

    def resumed(self) -> None:
        """Sets the step number of telemetry to the optimizer's, after the optimizer loaded a state. Registers the rank
        as a new agent, as after a restart, because the daemon ignores steps whose numbers it already has from the same
        agent."""
        steps = self._optimizer.num_steps
        if steps == self.recorder.number:
            return
        self._messages.renew_agent()
        self._applied.restart(steps + 1)
        if self.link is None:
            self.recorder.count_from(steps)
        else:
            self.link.restart_as(self._hello(reset_knobs=False), lambda: self.recorder.count_from(steps))
            self.link.applied(self.generation, steps + 1)

    def close(self) -> None:
        """Sends the final report and the goodbye to the daemon, and stops serving /metrics. Idempotent; does nothing in
        a forked child. While an exception is handled, the goodbye says that the rank has failed, and names its type."""
        if os.getpid() == self._pid and self._on_step in self._optimizer.observers:
            attachment_registry.unregister(self)
            self._optimizer.observers.remove(self._on_step)
            self._optimizer.boundaries.remove(self._between_steps)
            self._optimizer.attachment = None
            for handle in self._handles:
                handle.remove()
            self._stop()
            log.info(
                "run %s, rank %d is detached after %d steps", self.run, self.rank, self.recorder.steps,
                extra=event("detached", run=self.run, rank=self.rank, steps=self.recorder.steps),
            )  # fmt: skip

    def leave(self, error: str = "") -> None:
        """Queues the final report and the goodbye message, after which the link ends. Returns without waiting. `error`:
        name of the type of the exception by which the training fails; empty for none."""
        if self.link is not None and not self._said_goodbye and os.getpid() == self._pid:
            self._said_goodbye = True
            self.link.leave(self._last_report(), error)

    def __del__(self) -> None:
        """Queues the final report and the goodbye message when the attachment is garbage-collected. Does nothing
        without a link to the daemon. The server of /metrics ends by itself."""
        if getattr(self, "link", None) is not None:
            self.leave()

    def _stop(self) -> None:
        """Sends the final report and the goodbye message, waits until they are sent, and stops serving /metrics."""
        try:
            self.leave(attachment_registry.error_name(sys.exc_info()[1]))
            if self.link is not None:
                self.link.close()
        finally:
            self._metrics.close()

    def _hello(self, reset_knobs: bool) -> AgentHello:
        return self._messages.hello(self.metrics_address, reset_knobs)

    def __repr__(self) -> str:
        who = f"run={self.run!r}, rank {self.rank} of {self.world_size}"
        if self._optimizer.attachment is not self:
            return f"Attachment({who}, closed)"
        daemon = "no daemon" if self.link is None else "with a daemon"
        return f"Attachment({who}, generation {self.generation}, metrics at {self.metrics_address}, {daemon})"

    def _last_report(self) -> AgentReport | None:
        """The final report; None, with a log message, when it cannot be made."""
        try:
            return self._messages.report()
        except Exception:
            log.exception("the final report to the daemon could not be built", extra=event("report_failed"))
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- at the end of each step

    def _on_step(self, result: StepResult, phases: StepPhases) -> None:
        """Records the result and the phases of a finished step for metrics and reports, and gives its duration to the
        tuner."""
        try:
            self.recorder.record(result, phases)
        except Exception:
            # Errors of telemetry do not affect the weights: training continues.
            log.exception("step %d could not be recorded for metrics and reports", self.recorder.steps)
        self.tuning.observe(result, phases)

    def _between_steps(self, next_step: int) -> None:
        """Exchanges messages with the other ranks, applies committed knobs and runs the tuner. `next_step`: number of
        the step that follows."""
        began = time.thread_time()
        agreed = self._synchronize(next_step)
        self.tuning.between_steps(agreed)
        self._metrics.overhead["tuner"] += time.thread_time() - began
        if self.link is not None:
            self._metrics.overhead["link"] = self.link.cpu_seconds
            self._metrics.thread_failures, self._metrics.refused = self.link.restarts, self.link.refused

    def _synchronize(self, next_step: int) -> BoundaryMessage:
        """Exchanges a message with all ranks. If all ranks know the same committed generation, each rank applies its
        knobs; otherwise none does. Returns the agreed values."""
        committed = self.link.committed if self.link is not None else None  # read once: the link may replace it
        agreed = agree(self._ranks, self.tuning.boundary_message(committed.generation if committed is not None else 0))
        self._apply_committed(next_step, committed, agreed.generation)
        return agreed

    def _apply_committed(self, next_step: int, committed: CommittedKnobs | None, generation: int) -> None:
        """Applies committed knobs if all ranks know them and they were not applied or refused before.

        next_step: number of the step that follows.
        committed: the newest committed knobs that this rank knows; None if it knows none.
        generation: the generation that all ranks agreed on.
        """
        if committed is None or generation != committed.generation:
            return
        is_first = not self._applied.has_decided
        if not self._applied.decide(committed):
            return
        if committed.knobs != self._optimizer.knobs:
            if is_first:
                self._warn_of_other_knobs(committed)
            if not self._apply(committed):
                return
        self._applied.record(generation, next_step)
        if self.link is not None:
            self.link.applied(generation, next_step)

    def _warn_of_other_knobs(self, committed: CommittedKnobs) -> None:
        """Warns that the run has other knobs than the script: those that were set before this process began."""
        kept, script = self._by_name(committed.knobs), self._by_name(self._optimizer.knobs)
        others = [name for name, value in script.items() if not same(name, value, kept[name])]
        if others:
            pairs = ", ".join(f"{name}={show(name, kept[name])}, not {show(name, script[name])}" for name in others)
            log.warning(
                "run %s goes on with the knobs of its generation %d, which differ from the script's: %s. The script's "
                "are taken with attach(reset_knobs=True), or under another name of the run.",
                self.run, committed.generation, pairs,
                extra=event("knobs_kept", run=self.run, generation=committed.generation, knobs=kept),
            )  # fmt: skip

    def _by_name(self, knobs: Knobs) -> dict[str, KnobValue]:
        """The knobs by name; with those of storage paths if this rank has paths."""
        return knobs.as_dict(paths=self._optimizer.engine.store is not None)

    def _apply(self, committed: CommittedKnobs) -> bool:
        """Applies committed knobs. False when they cannot work on this rank: that is logged and reported to the
        daemon."""
        try:
            self._optimizer.check_knobs(committed.knobs)
        except ConfigError as refusal:
            if self.link is not None:
                self.link.report_unusable(committed.decision, str(refusal))
            log.error(
                "generation %d of the knobs cannot be applied on this rank, the last good knobs stay in force: %s",
                committed.generation, refusal,
                extra=event("generation_refused", run=self.run, generation=committed.generation, reason=str(refusal)),
            )  # fmt: skip
            return False
        self._optimizer.apply_knobs(committed.knobs)
        knobs = self._by_name(committed.knobs)
        log.info(
            "generation %d of the knobs is applied: %s", committed.generation, knobs,
            extra=event("generation_applied", run=self.run, generation=committed.generation, knobs=knobs),
        )  # fmt: skip
        return True

"""`tidegate.attach`: connects an optimizer to telemetry and the control daemon.

Hooks on the model mark the phases, /metrics is served, a link to the daemon is opened, and knobs are applied between
steps.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from pydantic import ValidationError

from tidegate.agent.control import attachment_registry
from tidegate.agent.control.attach_checks import check_arguments, configure_logs, connect, validated
from tidegate.agent.control.daemon_link import AgentLink, CommittedKnobs
from tidegate.agent.control.process_identity import this_host, this_process
from tidegate.agent.control.step_sync import BoundaryMessage, agree
from tidegate.agent.control.tuning import Tuning
from tidegate.agent.engine.phases import StepPhases
from tidegate.agent.engine.step_result import StepResult
from tidegate.agent.optimizer.adamw import AdamW
from tidegate.agent.optimizer.module_hooks import ModelHook
from tidegate.agent.ranks import Ranks, local_rank
from tidegate.agent.telemetry.rank_metrics import RankMetrics
from tidegate.agent.telemetry.recorder import Recorder
from tidegate.errors import ConfigError
from tidegate.knobs.knobs import Knobs
from tidegate.logs import event
from tidegate.speeds.rate_card import RateCard
from tidegate.wire.agent import AgentHello, AgentReport, Rates, SubgroupSizes

log = logging.getLogger("tidegate")


class Attachment:
    """Result of `attach`: telemetry of an optimizer and its link to the daemon. End it with `close()` or
    `optimizer.close()`.

    It closes itself when it is garbage-collected, and says goodbye when the process ends. `recorder` holds the figures
    of all steps, `metrics_address` is the address of /metrics, `generation` is the generation of knobs in force.
    """

    def __init__(
        self,
        optimizer: AdamW,
        model: torch.nn.Module | None = None,
        *,
        run: str,
        daemon: str | None = None,
        token: str | None = None,
        metrics_bind: str = "127.0.0.1",
        metrics_port: int = 0,
        advertise_host: str | None = None,
        reset_knobs: bool = False,
        strict: bool = False,
    ) -> None:
        self._ranks = Ranks.current()
        self.run, self.rank, self.world_size = run, self._ranks.rank, self._ranks.count
        with _on_all(self._ranks):
            check_arguments(run, daemon, metrics_port, advertise_host)
            configure_logs(strict)
            self._close_conflicting(optimizer, strict)
        optimizer.wait()  # a step that runs already is not recorded
        optimizer.follow_params()
        self.generation = 0
        self.applied_at: list[tuple[int, int]] = [(0, optimizer.num_steps + 1)]
        """(generation, first step with it), oldest first. Steps are numbered as the optimizer counts them."""
        self._optimizer = optimizer
        self._pid = os.getpid()
        self._rates_refused = False
        self._said_goodbye = False
        """Whether the goodbye was queued."""
        self._agent = uuid.uuid4().hex
        self._started_at = time.time()
        self._decided: tuple[int, int] | None = None
        """Last decision of the daemon that was applied or refused."""
        self.recorder = Recorder(optimizer)
        self.tuning = Tuning(optimizer, self.recorder, self._ranks)
        self.link: AgentLink | None = None
        with ExitStack() as undo:
            with _on_all(self._ranks):
                self._metrics = RankMetrics(optimizer, self.recorder, metrics_bind, _port(metrics_port), strict)
                undo.callback(self._stop)
                self.metrics_address = f"{advertise_host or metrics_bind}:{self._metrics.port}"
                if daemon is not None:
                    who = f"run {run}, rank {self.rank}"
                    self.link = connect(daemon, token, lambda: self._hello(reset_knobs), self, who, strict)
            self._synchronize(optimizer.num_steps + 1)
            undo.pop_all()
        self._phases = _PhaseHooks(optimizer)
        self._handles = self._phases.on(model) if model is not None else []
        optimizer.observers.append(self._on_step)
        optimizer.boundaries.append(self._between_steps)
        optimizer.attachment = self
        attachment_registry.register(self)
        log.info(
            "run %s, rank %d of %d: metrics at %s", self.run, self.rank, self.world_size, self.metrics_address,
            extra=event(
                "attached", run=self.run, rank=self.rank, world_size=self.world_size,
                metrics_address=self.metrics_address, device=optimizer.device.kind,
            ),
        )  # fmt: skip

    def _close_conflicting(self, optimizer: AdamW, strict: bool) -> None:
        """Closes earlier attachments of the same optimizer, and of the same run and rank."""
        if optimizer.attachment is not None:
            if strict:
                raise ConfigError("This optimizer is attached already; close() that attachment first.")
            optimizer.attachment.close()
        attachment_registry.close_existing(self.run, self.rank)

    @property
    def overhead(self) -> dict[str, float]:
        """CPU seconds so far of each part: recording, tuning, exporting, sampling, reporting."""
        return {**self._metrics.overhead_seconds, "link": self.link.cpu_seconds if self.link is not None else 0.0}

    @property
    def overhead_seconds(self) -> float:
        """Sum of `overhead`."""
        return sum(self.overhead.values())

    def rebuild(self) -> None:
        """Follows the optimizer to another device, before its first step: telemetry starts over, and the daemon is
        informed."""
        self.recorder.begin()
        self._metrics.begin()
        self._register_again()

    def extended(self) -> None:
        """Informs the daemon of the subgroups of added parameters."""
        self._register_again()

    def _register_again(self) -> None:
        """Registers the changed rank with the daemon. If its values are out of bounds, the earlier registration
        stays."""
        if self.link is None:
            return
        try:
            self.link.update_hello(validated(lambda: self._hello(reset_knobs=False)))
        except ConfigError as error:
            log.warning("%s The daemon keeps the earlier values.", error, extra=event("hello_refused"))

    def resumed(self) -> None:
        """Follows the optimizer's step number after it loaded a state. The rank registers as a new agent, as after a
        restart: otherwise the daemon would treat the new steps as repeated ones."""
        steps = self._optimizer.num_steps
        if steps == self.recorder.number:
            return
        self._agent = uuid.uuid4().hex
        self.applied_at = [(self.generation, steps + 1)]
        if self.link is None:
            self.recorder.count_from(steps)
        else:
            self.link.restart_as(self._hello(reset_knobs=False), lambda: self.recorder.count_from(steps))
            self.link.applied(self.generation, steps + 1)

    def close(self) -> None:
        """Says goodbye to the daemon and stops serving /metrics. Idempotent; does nothing in a forked child."""
        if os.getpid() == self._pid and self._on_step in self._optimizer.observers:
            attachment_registry.unregister(self)
            self._optimizer.observers.remove(self._on_step)
            self._optimizer.boundaries.remove(self._between_steps)
            self._optimizer.attachment = None
            for handle in self._handles:
                handle.remove()
            self._stop()
            log.info(
                "run %s, rank %d: %d steps", self.run, self.rank, self.recorder.steps,
                extra=event("detached", run=self.run, rank=self.rank, steps=self.recorder.steps),
            )  # fmt: skip

    def leave(self) -> None:
        """Queues the final report and the goodbye, which end the link. Does not wait."""
        if self.link is not None and not self._said_goodbye and os.getpid() == self._pid:
            self._said_goodbye = True
            self.link.leave(self._last_report())

    def __del__(self) -> None:
        """Says goodbye when it is garbage-collected. No thread holds a reference to it, so its attributes still exist;
        /metrics ends by itself."""
        if getattr(self, "link", None) is not None:
            self.leave()

    def _stop(self) -> None:
        """Says goodbye, waits until it is sent, and stops serving /metrics."""
        try:
            self.leave()
            if self.link is not None:
                self.link.close()
        finally:
            self._metrics.close()

    def __repr__(self) -> str:
        who = f"run={self.run!r}, rank {self.rank} of {self.world_size}"
        if self._optimizer.attachment is not self:
            return f"Attachment({who}, closed)"
        daemon = "no daemon" if self.link is None else "with a daemon"
        return f"Attachment({who}, generation {self.generation}, metrics at {self.metrics_address}, {daemon})"

    def _last_report(self) -> AgentReport | None:
        """The final report; None, with a log message, when it cannot be made."""
        try:
            return self.report()
        except Exception:
            log.exception("the last report could not be made", extra=event("report_failed"))
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- at the end of each step

    def _on_step(self, result: StepResult, phases: StepPhases) -> None:
        """Records a finished step."""
        try:
            self.recorder.record(result, phases)
        except Exception:
            # Errors of telemetry do not affect the weights: training continues.
            log.exception("step %d could not be recorded", self.recorder.steps)
        self.tuning.observe(result, phases)

    def _between_steps(self, next_step: int) -> None:
        """Agrees with the other ranks, applies knobs and runs the tuner."""
        began = time.thread_time()
        agreed = self._synchronize(next_step)
        self.tuning.between_steps(agreed)
        self._metrics.overhead["tuner"] += time.thread_time() - began
        if self.link is not None:
            self._metrics.overhead["link"] = self.link.cpu_seconds
            self._metrics.thread_failures = self.link.restarts

    def _synchronize(self, next_step: int) -> BoundaryMessage:
        """Exchanges a message with all ranks, and applies committed knobs on all ranks or on none. Returns the agreed
        values."""
        committed = (
            self.link.committed if self.link is not None else None
        )  # read once: the link's thread may replace it
        agreed = agree(self._ranks, self.tuning.boundary_message(committed.generation if committed is not None else 0))
        self._apply_committed(next_step, committed, agreed.generation)
        return agreed

    def _apply_committed(self, next_step: int, committed: CommittedKnobs | None, generation: int) -> None:
        """Applies committed knobs if they are new and all ranks know them."""
        if committed is None or generation != committed.generation or committed.decision == self._decided:
            return
        self._decided = committed.decision
        if committed.knobs != self._optimizer.knobs and not self._apply(committed):
            return
        self.generation = self._metrics.generation = generation
        if (generation, next_step) != self.applied_at[-1]:
            self.applied_at.append((generation, next_step))
        if self.link is not None:
            self.link.applied(generation, next_step)

    def _apply(self, committed: CommittedKnobs) -> bool:
        """Applies committed knobs; False, with a log message, when they cannot work on this rank."""
        try:
            self._optimizer.check_knobs(committed.knobs)
        except ConfigError as refusal:
            if self.link is not None:
                self.link.report_unusable(committed.decision, str(refusal))
            log.error(
                "generation %d cannot be applied, last good knobs stay: %s", committed.generation, refusal,
                extra=event("generation_refused", run=self.run, generation=committed.generation, reason=str(refusal)),
            )  # fmt: skip
            return False
        self._optimizer.apply_knobs(committed.knobs)
        knobs = committed.knobs.as_dict()
        log.info(
            "generation %d applied: %s", committed.generation, knobs,
            extra=event("generation_applied", run=self.run, generation=committed.generation, knobs=knobs),
        )  # fmt: skip
        return True

    # ---- messages for the daemon

    def _hello(self, reset_knobs: bool) -> AgentHello:
        """Registration of this rank."""
        engine = self._optimizer.engine
        sizes = Counter((s.numel, s.weight_bytes, s.grad_bytes, s.state_bytes) for s in engine.subgroups)
        return AgentHello(
            agent=self._agent,
            run=self.run,
            rank=self.rank,
            world_size=self.world_size,
            host=this_host(),
            pid=os.getpid(),
            device_kind=self._optimizer.device.kind,
            metrics_address=self.metrics_address,
            knobs=self._optimizer.knobs.as_dict(),
            reset_knobs=reset_knobs,
            subgroups=tuple(
                SubgroupSizes(numel=numel, count=count, weight_bytes=weight, grad_bytes=grad, state_bytes=state)
                for (numel, weight, grad, state), count in sizes.items()
            ),
            num_slots=engine.num_slots,
            device_memory_bytes=self._optimizer.device.capacity_bytes,
            host_slots=self._optimizer.offload.host_slots,
            gradients=self._optimizer.offload.gradients,
            policy=self._optimizer.offload.policy,
            paths=tuple(engine.host_slots),
            started_at=self._started_at,
            process=this_process(),
        )

    def _rates_message(self, rates: RateCard) -> Rates | None:
        """Rates for a report; None, logged once, for values that the daemon would reject: the report is then sent
        without rates."""
        try:
            return Rates(**rates.to_dict())
        except ValidationError as error:
            if not self._rates_refused:
                log.warning(
                    "the measured rates are out of bounds and are not reported: %s", error, extra=event("rates_refused")
                )
            self._rates_refused = True
            return None

    def check(self, knobs: Knobs) -> None:
        """ConfigError when the knobs cannot work on this rank."""
        self._optimizer.check_knobs(knobs)

    def undelivered(self, report: AgentReport) -> None:
        """Includes the steps of an undelivered report in the next one."""
        self.recorder.give_back(report.steps)

    def report(self) -> AgentReport:
        """Builds the report since the last one. May be called from any thread."""
        recorder = self.recorder
        rates, last = recorder.rates, recorder.last_step
        timeline = None if last is None else last.view()  # before steps are taken: an error here must not lose them
        return AgentReport(
            timestamp=time.time(),
            step=recorder.totals.steps,
            phase=self._optimizer.phases.current,
            generation=self.generation,
            effective=self._optimizer.effective_knobs(),
            rates=None if rates is None else self._rates_message(rates),
            steps=recorder.take_unreported(),
            timeline=timeline,
            predicted_update_seconds=recorder.totals.predicted_update_seconds,
        )


def attach(optimizer: AdamW, model: torch.nn.Module | None = None, **settings: Any) -> Attachment:
    """Connects an optimizer to telemetry and, if given, to the control daemon.

    model: its forward and backward become phases; without a model only backward and update are separate phases.
    run: name of the run; all ranks of a run use the same name.
    daemon: address of the control daemon; None runs without one (metrics are still served).
    token: agent token; by default TIDEGATE_AGENT_TOKEN, TIDEGATE_TOKEN or the file that the daemon wrote.
    metrics_bind, metrics_port: address of /metrics. Each further rank of a host (LOCAL_RANK, which torchrun and
        deepspeed set) takes the next port; 0 takes a free one.
    advertise_host: host under which others reach /metrics.
    reset_knobs: the start-up settings replace the knobs that the run had before.
    strict: raises instead of training without telemetry, or with other telemetry than requested. RankTaken when another
        live agent holds this run and rank (after its lease, where it may have ended on another host), NotAuthorized for
        a wrong token, ConfigError for an optimizer that is attached already or a port that is taken, and other errors
        when the environment prevents a connection to the daemon.

    Without `strict`, only arguments that are wrong in every environment raise, as ConfigError: training continues
    whatever the daemon, the environment, other processes or earlier attachments of this process do. The rank of a
    process that has ended on this host is taken over at once. Earlier attachments of this process with the same run and
    rank, or of this optimizer, are closed.
    """
    return Attachment(unwrapped(optimizer), model, **settings)


def unwrapped(optimizer: Any) -> AdamW:
    """The tidegate.AdamW inside an optimizer that was passed to `attach`. ConfigError when there is none."""
    inner = innermost(optimizer)
    if isinstance(inner, AdamW):
        return inner
    raise ConfigError(
        f"attach() was given an {type(inner).__name__} of {type(inner).__module__}: give it a tidegate.AdamW, or a "
        "wrapper that holds one as `optimizer`."
    )


def innermost(optimizer: Any) -> Any:
    """Unwraps an optimizer: from wrappers of Accelerate, Lightning and others, which hold it as `optimizer`, and from
    DeepSpeed's, which hold it as `tidegate`."""
    current = optimizer
    while not isinstance(current, AdamW):
        inner = getattr(current, "tidegate", None) or getattr(current, "optimizer", None)
        if inner is None:
            break
        current = inner
    return current


@contextmanager
def _on_all(ranks: Ranks) -> Iterator[None]:
    """Makes an error on one rank an error on all ranks: otherwise the others would wait in the next collective, for
    minutes."""
    try:
        yield
    except Exception:
        ranks.all_true(False)
        raise
    if not ranks.all_true(True):
        raise ConfigError("Another rank could not attach, so this one does not either: that rank's error says why.")


def _port(first: int) -> int:
    """Metrics port of this rank: `first` plus the local rank; 0 takes a free port."""
    here = local_rank()
    if first and first + here > 65_535:
        raise ConfigError(
            f"metrics_port={first} and LOCAL_RANK={here} make port {first + here}, and the highest is 65535: "
            f"choose a lower metrics_port, or 0 for a free one."
        )
    return first and first + here


class _PhaseHooks:
    """Hooks on a model that set the optimizer's phase clock at the begin and end of a forward and the begin of a
    backward."""

    def __init__(self, optimizer: AdamW) -> None:
        self._optimizer = optimizer

    def on(self, model: torch.nn.Module) -> list[Any]:
        """Registers the hooks and returns their handles."""
        return [
            # Registered before all other hooks, so that waits in other hooks count as forward.
            model.register_forward_pre_hook(ModelHook(self.before_forward), prepend=True),
            model.register_forward_hook(ModelHook(self.after_forward)),
        ]

    def before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._optimizer.phases.enter("forward")

    def after_forward(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if self._optimizer.phases.current == "forward":
            self._optimizer.phases.enter("other")
            for tensor in _tensors(output):
                # The gradient of an output is computed first in a backward. The hook must not keep the optimizer alive
                # through a loss that is kept.
                tensor.register_hook(ModelHook(self._optimizer.backward_began))
                break


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Tensors in a model's output that require gradients."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, dict):
        yield from (t for value in output.values() for t in _tensors(value))
    elif isinstance(output, (tuple, list)):
        yield from (t for value in output for t in _tensors(value))

"""`tidegate.attach`: phases from hooks on the model, metrics, the link to the daemon, and knobs at step boundaries."""

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
from tidegate.agent.control.attach_checks import check_arguments, configure_logs, join, made
from tidegate.agent.control.daemon_link import AgentLink, Committed
from tidegate.agent.control.process_identity import this_host, this_process
from tidegate.agent.control.step_sync import Boundary, agree
from tidegate.agent.control.tuning import Tuning
from tidegate.agent.engine.engine import StepResult
from tidegate.agent.engine.phases import StepPhases
from tidegate.agent.optimizer.adamw import AdamW
from tidegate.agent.optimizer.module_hooks import ModelHook
from tidegate.agent.ranks import Ranks, local_rank
from tidegate.agent.telemetry.rank_metrics import Watch
from tidegate.agent.telemetry.recorder import Recorder
from tidegate.errors import ConfigError
from tidegate.knobs.knobs import Knobs
from tidegate.logs import event
from tidegate.speeds.rate_card import RateCard
from tidegate.wire.agent import AgentHello, AgentReport, Rates, SubgroupSizes

log = logging.getLogger("tidegate")


class Attachment:
    """What `attach` started; `close()` it, or let `optimizer.close()` do so.

    One that is dropped closes itself when it is collected, and says goodbye when the process ends. `recorder` holds the
    figures of every step, `metrics_address` is where /metrics is served, `generation` is the newest generation of knobs
    that runs.
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
            self._make_way(optimizer, strict)
        optimizer.wait()  # its step is none of ours
        optimizer.follow_params()
        self.generation = 0
        self.applied_at: list[tuple[int, int]] = [(0, optimizer.num_steps + 1)]
        """(generation, first step that ran with it), oldest first. Steps are numbered as the optimizer counts them."""
        self._optimizer = optimizer
        self._pid = os.getpid()
        self._rates_refused = False
        self._left = False
        """The link was told to say goodbye."""
        self._agent = uuid.uuid4().hex
        self._started_at = time.time()
        self._decided: tuple[int, int] | None = None
        """The decision of the daemon that was applied or refused last."""
        self.recorder = Recorder(optimizer)
        self.tuning = Tuning(optimizer, self.recorder, self._ranks)
        self.link: AgentLink | None = None
        with ExitStack() as undo:
            with _on_all(self._ranks):
                self._watch = Watch(optimizer, self.recorder, metrics_bind, _port(metrics_port), strict)
                undo.callback(self._stop_watching)
                self.metrics_address = f"{advertise_host or metrics_bind}:{self._watch.port}"
                if daemon is not None:
                    who = f"run {run}, rank {self.rank}"
                    self.link = join(daemon, token, lambda: self._hello(reset_knobs), self, who, strict)
            self._meet(optimizer.num_steps + 1)
            undo.pop_all()
        self._phases = _PhaseHooks(optimizer)
        self._handles = self._phases.on(model) if model is not None else []
        optimizer.observers.append(self._on_step)
        optimizer.boundaries.append(self._between_steps)
        optimizer.attachment = self
        attachment_registry.seat(self)
        log.info(
            "run %s, rank %d of %d: metrics at %s", self.run, self.rank, self.world_size, self.metrics_address,
            extra=event(
                "attached", run=self.run, rank=self.rank, world_size=self.world_size,
                metrics_address=self.metrics_address, device=optimizer.device.kind,
            ),
        )  # fmt: skip

    def _make_way(self, optimizer: AdamW, strict: bool) -> None:
        """The attachments are closed whose optimizer, or whose place in the run, this one takes."""
        if optimizer.attachment is not None:
            if strict:
                raise ConfigError("This optimizer is attached already; close() that attachment first.")
            optimizer.attachment.close()
        attachment_registry.vacate(self.run, self.rank)

    @property
    def overhead(self) -> dict[str, float]:
        """CPU seconds that recording, tuning, exporting, sampling and reporting have cost so far, each by its name."""
        return {**self._watch.costs, "link": self.link.cpu_seconds if self.link is not None else 0.0}

    @property
    def overhead_seconds(self) -> float:
        """All of `overhead`."""
        return sum(self.overhead.values())

    def rebuild(self) -> None:
        """The optimizer works on another device, before its first step: figures are of that one, the daemon hears of
        it."""
        self.recorder.begin()
        self._watch.begin()
        self._greet_again()

    def extended(self) -> None:
        """The optimizer has more parameters: the daemon hears of their subgroups."""
        self._greet_again()

    def _greet_again(self) -> None:
        """The daemon hears what the rank is now; where that is out of bounds, it has what it heard before."""
        if self.link is None:
            return
        try:
            self.link.greet_as(made(lambda: self._hello(reset_knobs=False)))
        except ConfigError as error:
            log.warning("%s The daemon has what it was told before.", error, extra=event("hello_refused"))

    def resumed(self) -> None:
        """The optimizer has loaded a state: steps are numbered on from there. To the daemon this is another agent, as
        after a restart, or it would take the steps for those that it was told before."""
        steps = self._optimizer.num_steps
        if steps == self.recorder.number:
            return
        self._agent = uuid.uuid4().hex
        self.applied_at = [(self.generation, steps + 1)]
        if self.link is None:
            self.recorder.count_from(steps)
        else:
            self.link.begin_anew(self._hello(reset_knobs=False), lambda: self.recorder.count_from(steps))
            self.link.applied(self.generation, steps + 1)

    def close(self) -> None:
        """Says goodbye to the daemon and stops serving /metrics. Idempotent; nothing in a fork."""
        if os.getpid() == self._pid and self._on_step in self._optimizer.observers:
            attachment_registry.unseat(self)
            self._optimizer.observers.remove(self._on_step)
            self._optimizer.boundaries.remove(self._between_steps)
            self._optimizer.attachment = None
            for handle in self._handles:
                handle.remove()
            self._stop_watching()
            log.info(
                "run %s, rank %d: %d steps", self.run, self.rank, self.recorder.steps,
                extra=event("detached", run=self.run, rank=self.rank, steps=self.recorder.steps),
            )  # fmt: skip

    def leave(self) -> None:
        """Says goodbye to the daemon with the last steps, and waits for nothing. The link ends by that."""
        if self.link is not None and not self._left and os.getpid() == self._pid:
            self._left = True
            self.link.leave(self._last_report())

    def __del__(self) -> None:
        """Whatever has threads holds none of this, so it is still whole: /metrics ends by itself."""
        if getattr(self, "link", None) is not None:
            self.leave()

    def _stop_watching(self) -> None:
        try:
            self.leave()
            if self.link is not None:
                self.link.close()
        finally:
            self._watch.close()

    def __repr__(self) -> str:
        who = f"run={self.run!r}, rank {self.rank} of {self.world_size}"
        if self._optimizer.attachment is not self:
            return f"Attachment({who}, closed)"
        daemon = "no daemon" if self.link is None else "with a daemon"
        return f"Attachment({who}, generation {self.generation}, metrics at {self.metrics_address}, {daemon})"

    def _last_report(self) -> AgentReport | None:
        try:
            return self.report()
        except Exception:
            log.exception("the last report could not be made", extra=event("report_failed"))
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- at every step's end

    def _on_step(self, result: StepResult, phases: StepPhases) -> None:
        try:
            self.recorder.record(result, phases)
        except Exception:
            # The weights are right whatever watching makes of it: training goes on.
            log.exception("step %d could not be recorded", self.recorder.steps)
        self.tuning.observe(result, phases)

    def _between_steps(self, next_step: int) -> None:
        began = time.thread_time()
        heard = self._meet(next_step)
        self.tuning.between_steps(heard)
        self._watch.overhead["tuner"] += time.thread_time() - began
        if self.link is not None:
            self._watch.overhead["link"] = self.link.cpu_seconds
            self._watch.thread_failures = self.link.restarts

    def _meet(self, next_step: int) -> Boundary:
        """What holds for all ranks now; what the daemon committed is applied, on all of them or on none."""
        committed = self.link.committed if self.link is not None else None  # once: the link may hear of a newer one
        heard = agree(self._ranks, self.tuning.says(committed.generation if committed is not None else 0))
        self._apply_committed(next_step, committed, heard.generation)
        return heard

    def _apply_committed(self, next_step: int, committed: Committed | None, generation: int) -> None:
        if committed is None or generation != committed.generation or committed.decision == self._decided:
            return
        self._decided = committed.decision
        if committed.knobs != self._optimizer.knobs and not self._apply(committed):
            return
        self.generation = self._watch.generation = generation
        if (generation, next_step) != self.applied_at[-1]:
            self.applied_at.append((generation, next_step))
        if self.link is not None:
            self.link.applied(generation, next_step)

    def _apply(self, committed: Committed) -> bool:
        try:
            self._optimizer.check_knobs(committed.knobs)
        except ConfigError as refusal:
            if self.link is not None:
                self.link.cannot(committed.decision, str(refusal))
            log.error(
                "generation %d kept from the run, last good knobs stay: %s", committed.generation, refusal,
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

    # ---- what the daemon hears

    def _hello(self, reset_knobs: bool) -> AgentHello:
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

    def _told(self, rates: RateCard) -> Rates | None:
        """None, said once, for figures that the daemon would refuse: the rest of the report is told without them."""
        try:
            return Rates(**rates.to_dict())
        except ValidationError as error:
            if not self._rates_refused:
                log.warning("rates were measured that cannot be told: %s", error, extra=event("rates_refused"))
            self._rates_refused = True
            return None

    def check(self, knobs: Knobs) -> None:
        """ConfigError when they cannot work here."""
        self._optimizer.check_knobs(knobs)

    def undelivered(self, report: AgentReport) -> None:
        """Its steps are told again."""
        self.recorder.give_back(report.steps)

    def report(self) -> AgentReport:
        """What there is to tell the daemon since the last one. From any thread."""
        recorder = self.recorder
        rates, last = recorder.rates, recorder.last_step
        timeline = None if last is None else last.view()  # before steps are taken: they would be lost if it failed
        return AgentReport(
            timestamp=time.time(),
            step=recorder.totals.steps,
            phase=self._optimizer.phases.current,
            generation=self.generation,
            effective=self._optimizer.effective_knobs(),
            rates=None if rates is None else self._told(rates),
            steps=recorder.take_unreported(),
            timeline=timeline,
            predicted_update_seconds=recorder.totals.predicted_update_seconds,
        )


def attach(optimizer: AdamW, model: torch.nn.Module | None = None, **settings: Any) -> Attachment:
    """Makes a run visible and tunable: see `Attachment` for the settings.

    model: its forward and backward become phases; without it only backward and update are told apart.
    run: the run's name; ranks of one run share it.
    daemon: address of the control daemon; None runs without one (metrics are still served).
    token: agent token; by default TIDEGATE_AGENT_TOKEN, TIDEGATE_TOKEN or the file that the daemon wrote.
    metrics_bind, metrics_port: where /metrics listens. Each further rank of a host (LOCAL_RANK, which torchrun and
        deepspeed set) takes the next port; 0 takes a free one. advertise_host: how others reach it.
    reset_knobs: the start-up settings win over the knobs that the run had before.
    strict: raises where training would otherwise go on unseen, or seen otherwise than was asked for: RankTaken when
        another live agent holds this run and rank (after its lease, where it may have ended on another host),
        NotAuthorized for a wrong token, ConfigError for an optimizer that is attached or a port that is taken, and what
        else keeps the daemon from being reached by what the environment holds.

    Without `strict` only arguments that can work nowhere raise, as ConfigError: whatever the daemon, the environment,
    other processes or earlier attachments of this one do, training goes on. A rank whose process has ended on this host
    is taken over at once. The attachment that this process, or this optimizer, had before is closed.
    """
    return Attachment(unwrapped(optimizer), model, **settings)


def unwrapped(optimizer: Any) -> AdamW:
    """The optimizer inside what was given to `attach`. ConfigError where there is none of ours."""
    found = innermost(optimizer)
    if isinstance(found, AdamW):
        return found
    raise ConfigError(
        f"attach() was given an {type(found).__name__} of {type(found).__module__}: give it a tidegate.AdamW, or what "
        "holds one as `optimizer`."
    )


def innermost(optimizer: Any) -> Any:
    """The optimizer in the wrappers of Accelerate, Lightning and others, which keep it as `optimizer`, and ours in what
    DeepSpeed has for one."""
    found = optimizer
    while not isinstance(found, AdamW):
        inner = getattr(found, "tidegate", None) or getattr(found, "optimizer", None)
        if inner is None:
            break
        found = inner
    return found


@contextmanager
def _on_all(ranks: Ranks) -> Iterator[None]:
    """What fails on one rank fails on all: the others would wait for it in the next collective, for minutes."""
    try:
        yield
    except Exception:
        ranks.all_true(False)
        raise
    if not ranks.all_true(True):
        raise ConfigError("Another rank could not attach, so this one does not either: that rank's error says why.")


def _port(first: int) -> int:
    """Of this rank, when the first one of the host has `first`; 0 takes a free one."""
    here = local_rank()
    if first and first + here > 65_535:
        raise ConfigError(
            f"metrics_port={first} and LOCAL_RANK={here} make port {first + here}, and there are none above 65535: "
            f"choose a lower metrics_port, or 0 for a free one."
        )
    return first and first + here


class _PhaseHooks:
    """Tells the optimizer's phase clock when a model's forward begins and ends, and when a backward begins."""

    def __init__(self, optimizer: AdamW) -> None:
        self._optimizer = optimizer

    def on(self, model: torch.nn.Module) -> list[Any]:
        return [
            # First of all hooks: what others wait for in theirs is part of the forward.
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
                # The gradient of an output comes first in a backward pass.
                # Whoever keeps a loss keeps no optimizer.
                tensor.register_hook(ModelHook(self._optimizer.backward_began))
                break


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, dict):
        yield from (t for value in output.values() for t in _tensors(value))
    elif isinstance(output, (tuple, list)):
        yield from (t for value in output for t in _tensors(value))

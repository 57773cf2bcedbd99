"""The engine of an optimizer: makes the plan of each step, starts it, and finishes it.

A plan starts with the first gradient of a step, or with `step()`. Before `step()` it only copies data and may be
dropped. After `step()` it runs to its end; the caller waits for the end with `wait_for_update`, at once or later, or
with `wait_for_step` for all but the deferred flushes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tidegate.agent.cleanup import close_all
from tidegate.agent.devices.base import Device
from tidegate.agent.engine.engine_settings import EngineSettings
from tidegate.agent.engine.executor import Executor
from tidegate.agent.engine.gradient_routing import GradientRouting, GradientSource
from tidegate.agent.engine.memory import StateMemory
from tidegate.agent.engine.op_runner import MemoryRunner, StepInputs, StepOutcome
from tidegate.agent.engine.plan_in_flight import PlanInFlight
from tidegate.agent.engine.prepared_gradients import GradientOpPreparer
from tidegate.agent.engine.prepared_ops import OpPreparer
from tidegate.agent.engine.residency import Residences
from tidegate.agent.engine.step_planner import StepPlanner
from tidegate.agent.engine.usability import Usability
from tidegate.agent.engine.weight_edits import WeightEdits, refuse_edits
from tidegate.agent.gradients.accumulation import HostSums
from tidegate.agent.gradients.gradients import Gradients
from tidegate.agent.interrupts import DelayInterrupt
from tidegate.agent.parameters.shards import GradientNorm, shard_of
from tidegate.agent.parameters.subgroups import Layout
from tidegate.agent.ranks import Ranks, check_ranks_are_known
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.kernels import ThreadPool
from tidegate.kernels.arithmetic.implementation import Implementation
from tidegate.plan import Subgroup
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import D2H, DEVICE, H2D, LANES, path_lanes
from tidegate.timeline.step_result import StepResult
from tidegate.timeline.timeline import Span

MAX_DROPPED_SPANS = 10_000
"""Most spans of dropped plans in the result of a step: a script may call backward many times without `step()`."""


class Engine:
    """Plans and runs the updates of one optimizer. Its methods are called by the training thread and, in gradient
    hooks, by autograd's thread."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        layouts: Sequence[Layout],
        device: Device,
        rule: Implementation,
        *,
        settings: EngineSettings,
        effective: EffectiveKnobs,
        norm: GradientNorm,
        source: GradientSource,
        store: TierStore | None = None,
    ) -> None:
        """`rule`: the update rule. `effective`: the first values of the knobs. `norm`: sums the squares of the
        gradients of `params` over all ranks. `source`: where gradients come from. `store`: the storage paths."""
        self.params, self.layouts, self.device, self.rule = list(params), list(layouts), device, rule.rule
        self.shards = [shard_of(param) for param in params]
        """This rank's shard of each parameter: the whole parameter if it is not divided among ranks."""
        self.num_slots = settings.num_slots
        self.effective = effective
        self._pool = ThreadPool(settings.cpu_threads)
        self._dropped: deque[Span] = deque(maxlen=MAX_DROPPED_SPANS)
        """Spans of the plans that were dropped since the last step."""
        self.store = store
        self.host_slots = dict.fromkeys(store.paths, settings.host_slots) if store is not None else {}
        if store is not None:
            store.add_subgroups(layouts)
            store.calibrate()
        self.residences = Residences(store) if store is not None else None
        mode, accumulation, early = settings.gradients, settings.accumulation, settings.early_gradients
        self.memory = StateMemory(device, self.layouts, self.num_slots, mode == "release", store, self.host_slots)
        self.planner = StepPlanner(self.memory, self.residences, settings, self.host_slots)
        self.planner.place_new_subgroups(self.effective)
        sums = HostSums(device, self._pool, accumulation == "host_fp32") if accumulation != "device" else None
        self.gradients = Gradients(device, params, self.layouts, mode, early, sums)
        self.weights = WeightEdits(device, self.memory, self.params, self.shards)
        self._runner = MemoryRunner(device, self.memory, self.gradients, self.shards, norm, self._pool, rule)
        self._preparer = OpPreparer(device, self.memory, self._runner, self._pool, rule)
        of_paths = [lane for path in self.host_slots for lane in path_lanes(path)]
        self._executor = Executor(
            self._runner,
            lanes=(*LANES, *of_paths),
            ahead=of_paths,
            watchdog_seconds=settings.watchdog_seconds,
        )
        gradient_ops = GradientOpPreparer(device, self.memory, self._runner, self.gradients)
        self.routing = GradientRouting(
            self._executor, self._runner, self.gradients, self.layouts, source, early, gradient_ops
        )
        self.gradients_made_at: float | None = None
        """Time at which the device had computed all gradients of the last `step()`, in seconds on the monotonic clock.
        None if the gradients were computed already when `step()` was called."""
        self._flight: PlanInFlight | None = None
        self.last_outcome: StepOutcome | None = None
        """Inputs and outcome of the last `step()`; None before the first one."""
        self._starting = threading.Lock()
        """Guards the start of a plan: under DDP, the threads of the collectives report gradients, too."""
        self.num_updates_begun = 0
        """Number of updates that have begun. If one of them cannot be completed, the engine is no longer usable."""
        self._num_ranks = Ranks.current().count
        self.usability = Usability(self._executor)

    def extend(self, params: Sequence[torch.nn.Parameter], layouts: Sequence[Layout]) -> None:
        """Appends parameters and their subgroups. May be called only between steps."""
        assert self._flight is None, "a plan is in flight"
        self.weights.adapt_to_edits()  # or earlier edits by the user would go unnoticed
        self.params += params
        self.shards += [shard_of(param) for param in params]
        self._runner.norm_over_ranks.extend(params)
        self.layouts += layouts
        self.planner.extend(layouts)
        if self.store is not None:
            self.store.add_subgroups(layouts)
        self.memory.extend(layouts)
        self.planner.place_new_subgroups(self.effective)
        self.gradients.extend(params, layouts)
        self.weights.extend(layouts)

    @property
    def subgroups(self) -> tuple[Subgroup, ...]:
        """The sizes of all subgroups."""
        return self.planner.subgroups

    # ---- a step

    @property
    def running(self) -> bool:
        """Whether a step has begun and `wait_for_update` has not returned."""
        return self._flight is not None and self._flight.outcome is not None and self.usability.is_in_own_process

    @property
    def updating(self) -> bool:
        """Whether a step has begun and some of its ops are not done. May be called from any thread."""
        flight = self._flight
        return flight is not None and flight.outcome is not None and not self._executor.all_ops_done

    def start(self) -> None:
        """Starts the plan of the next step unless it is started already. Copies of state and weights begin at once;
        each gradient is copied after it has arrived."""
        self.usability.require()
        if self._flight is None:
            with DelayInterrupt(), self._starting:
                if self._flight is None:
                    self._flight = self._launch()

    def _launch(self) -> PlanInFlight:
        if self._executor.busy:
            self._drop()  # a second Ctrl-C has cut short the start or the drop of that plan
        # In mode `keep` gradients can be copied again, so that the check for edits through `.data` may wait for step().
        self.weights.adapt_to_edits(by_data=self.gradients.mode == "release")
        self.planner.idle_time.ended()
        effective = self.effective
        plan, room_bytes = self.planner.prepare(effective, self.routing.order)
        self._runner.begin()
        self.routing.begin_plan(plan, room_bytes)
        # State is copied into memory that the framework may still use, and weights are copied to their mirrors.
        self._order_after_framework(H2D, D2H)
        self._executor.start(plan, self._preparer.before_step(plan))
        return PlanInFlight(plan, effective, time.monotonic())

    def stage(self) -> None:
        """Allocates device and host memory for the next plan, with the present knobs. Called before the hook of the
        first gradient starts the plan, because an allocation in that hook would be late: activations then fill most of
        the device, and pinning host memory takes long. Does nothing while a plan is in flight."""
        if self._flight is None and not self._executor.busy:
            self.planner.stage(self.effective)

    def gradient_accumulated(self, param: int) -> None:
        """Takes the gradient that autograd has just accumulated for a parameter: starts the plan if there is none, and
        gives the gradient to the plan (see `GradientRouting`). Waits if the device has no memory for the next gradient.
        A gradient that is only added to a sum starts no plan."""
        if not self.routing.add_to_sum(param):
            self.start()
            self.routing.accumulated(param)
            with self._failing(Exception):  # a Ctrl-C while waiting changes nothing
                self.routing.wait_for_memory()

    def step(self, inputs: StepInputs) -> tuple[int, ...]:
        """Begins the update and waits until the gradient norm is known. Returns the numbers of the parameters that the
        update changes: none if the step is skipped.

        `wait_for_update` waits for the end of the update. Raises ConfigError at the first step if the optimizer with
        storage paths was built before the process group.
        """
        assert not self.running, "wait for the last update first"
        if not self.num_updates_begun:
            check_ranks_are_known(self._num_ranks, has_paths=self.store is not None)
        made, called = self.device.mark(), time.monotonic()
        self.gradients.watch_unfrozen()
        self.start()
        self.gradients.refresh()
        self._replan_if_changed()
        flight = self._in_flight()
        with self._failing():
            self.num_updates_begun += 1
            self.last_outcome = outcome = StepOutcome(inputs, self.gradients.present)
            self._runner.outcome = flight.outcome = outcome
            if self.store is not None:
                self.store.step += 1
            # All other writes of an update come after NORM, which this lane and the host wait for.
            self._order_after_framework(DEVICE)
            batches = self._preparer.in_step(flight.plan)
            self._executor.prepare(next(batches))
            self._executor.step(repeat=self.routing.stale_copies())
            self.routing.prepare_copies()
            self._executor.let_lanes_run()
            for batch in batches:
                self._executor.prepare(batch)
                self._executor.let_lanes_run(batch)
            outcome.skipped = not self._executor.wait_for_norm()
            self.routing.release_read()
            made_at = made.span()[1]  # NORM comes after it, and was waited for
            self.gradients_made_at = made_at if made_at > called else None
            self.planner.observe_step_delay(max(made_at, called) - flight.began)
            flight.stepped = () if outcome.skipped else tuple(i for i, has in enumerate(outcome.has_grad) if has)
            for index in flight.stepped:
                torch.autograd.graph.increment_version(self.shards[index])
            self.weights.update_began()
            self.gradients.clear_released()
        return flight.stepped

    def fail_uncounted_step(self, error: BaseException) -> None:
        """Makes the engine unusable until a complete state is loaded. To be called when `error` has interrupted a step
        that has begun and is not counted: state and step counts may not match."""
        if self.usable:
            self._fail(error)

    def _replan_if_changed(self) -> None:
        """Drops the plan and starts another one if weights were edited or knobs were changed since the plan was made.

        A plan for which gradients were released cannot be dropped, because these gradients no longer exist in `.grad`.
        Then changed knobs are used from the next step on, and edited weights raise EngineError.
        """
        edited = self.weights.edited()
        if self.gradients.any_released:
            refuse_edits(edited)
        elif edited or self._in_flight().effective != self.effective:
            self.drop_plan()
            self.weights.adapt_to_edits()
            self.start()
            self.gradients.refresh()

    def wait_for_step(self) -> StepResult | None:
        """Like `wait_for_update`, but does not wait for deferred flushes. If there are any, it returns None."""
        flight = self._flight
        if flight is None or not flight.returns_early or not self.running:
            return self.wait_for_update()
        with DelayInterrupt(), self._failing():
            self._executor.wait_until_done(flight.plan.last_in_step)
            flight.has_returned = True
            self._end_step()
        return None

    def wait_for_update(self) -> StepResult | None:
        """Waits for the end of the update that `step` began, and returns its result; None when there is no update."""
        if not self.running:
            return None
        flight = self._in_flight()
        self.planner.idle_time.forget()
        with DelayInterrupt(), self._failing():
            spans, skipped = self._executor.finish()
            self._runner.outcome = None
            self._flight = None
            self._finish(flight, skipped, spans)
            dropped = tuple(self._dropped)
            self._dropped.clear()
            return flight.result(spans, skipped, dropped)

    def wait_for_weights(self, params: Iterable[int]) -> None:
        """Makes the device wait for the update of these parameters before it runs work that is enqueued later."""
        if not self.running:
            return
        flight = self._in_flight()
        wanted = {layout.id for param in params for layout in self.gradients.subgroups_of(param)}
        with self._failing(Exception):  # a Ctrl-C while waiting changes nothing
            events = self._executor.wait_until_issued(flight.weight_writes(wanted))
        for event in events:
            self.device.block(event)

    def drop_plan(self, dropping: bool = False) -> None:
        """Drops the plan that was started before `step()`, and waits for its ops in progress; does nothing if there is
        no plan. No data is lost in mode `keep`.

        dropping: what happens to gradients that are released already and exist only in the plan. True drops them; False
            raises EngineError if there are any.
        """
        assert not self.running, "wait for the update first"
        if not self._executor.busy or not self.usability.is_in_own_process or self._executor.stuck:
            return
        if not dropping:
            self.routing.require_none_released()
        with DelayInterrupt():
            self._drop()

    def _drop(self) -> None:
        """Cancels the plan, and waits for its ops in progress. If this wait is cut short, the executor stays busy, and
        the next plan is started only after another wait. Released gradients are then lost, as those of a dropped plan
        are."""
        self._flight = None
        try:
            self._dropped += self._executor.cancel()
        except BaseException as error:
            if self._executor.stuck:
                self._fail(error)
            elif self.gradients.any_released:
                self.gradients.forget()
            raise
        self._runner.begin()

    def _in_flight(self) -> PlanInFlight:
        assert self._flight is not None, "no plan was started"
        return self._flight

    @contextmanager
    def _failing(self, kind: type[BaseException] = BaseException) -> Iterator[None]:
        """Makes the engine unusable if an error of this kind occurs in the block."""
        try:
            yield
        except kind as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self.usability.problem = f"{type(error).__name__}: {error}"
        self._flight = None
        self.gradients.forget()
        if not self._executor.stuck:
            self._executor.cancel()
            self._runner.outcome = None

    def _order_after_framework(self, *lanes: str) -> None:
        """Makes later work of these lanes wait for the work that the framework has enqueued."""
        now = self.device.now()
        for lane in lanes:
            self.device.wait(lane, now)

    def _finish(self, flight: PlanInFlight, skipped: bool, spans: Sequence[Span]) -> None:
        if not flight.has_returned:
            self._end_step()
        self._runner.begin()
        if flight.outcome is not None:
            self.planner.observe_early_sums(outdated=flight.outcome.sums_outdated)
        if not skipped:
            self.memory.commit(flight.plan.placements)
            if self.residences is not None:
                self.residences.observe(spans, self.memory.residence, flight.plan.deferred_flushes)

    def _end_step(self) -> None:
        self.routing.end_step()
        self.weights.update_ended()
        self.planner.idle_time.began()

    # ---- state and weights from outside

    def weights_loaded(self) -> None:
        """Prepares the engine for a state that will be loaded for the present weights: discards state on paths, resets
        what belongs to the weights (see `WeightEdits.reset`), and makes an engine that has failed usable again."""
        if self.store is not None:
            self.memory.forget_stored()
            self.planner.place_new_subgroups(self.effective)
        self.weights.reset()
        self.usability.problem = None

    # ---- closing

    def close(self, why: str = "it was closed") -> None:
        """Stops the lanes and frees memory; the weights stay unchanged. All clean-up steps run even if the GPU fails;
        then the first error is raised. Does nothing in a forked child.

        why: the reason that errors of later calls give.
        """
        if not self.usability.is_in_own_process:
            return
        self.usability.problem = self.usability.problem if self._executor.closed else why
        close_all(self._executor.close, self.gradients.close, self._close_memory)
        self._flight = None

    def _close_memory(self) -> None:
        # A lane that is stuck still uses all but the store, so that the executor keeps it for ever.
        unused = self.memory, self.store, self._pool, self.device
        close_all(*(one.close for one in ((self.store,) if self._executor.stuck else unused) if one is not None))

    @property
    def usable(self) -> bool:
        """Whether steps and reads of the state are possible (see `Usability`)."""
        return self.usability.is_usable

"""The engine of an optimizer: makes the plan of each step, starts it, and finishes it.

A plan starts with the first gradient of a step, or with `step()`. Before `step()` it only copies data and may be
dropped. After `step()` it runs to its end; the caller waits for the end with `wait_for_update`, at once or later.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from tidegate.agent.cleanup import close_all
from tidegate.agent.devices.base import Device
from tidegate.agent.engine.clock import MonotonicClock
from tidegate.agent.engine.executor import Executor
from tidegate.agent.engine.memory import StateMemory
from tidegate.agent.engine.op_runner import MemoryRunner, StepInputs
from tidegate.agent.engine.planning_inputs import StablePathSpeeds, StepDelay
from tidegate.agent.engine.residency import Residences
from tidegate.agent.engine.weight_edits import WeightEdits
from tidegate.agent.gradients.accumulation import Accumulation, HostSums
from tidegate.agent.gradients.gradients import Gradients, Mode
from tidegate.agent.interrupts import DelayInterrupt
from tidegate.agent.parameters.shards import GradientNorm, NormOverRanks, shard_of
from tidegate.agent.parameters.subgroups import Layout
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.errors import EngineError, PathFull, PathUnusable
from tidegate.kernels import ThreadPool
from tidegate.plan import Placement, Plan, Policy, make_plan, place_subgroups, verify
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import D2H, DEVICE, H2D, LANES, OpKind, Processor, Residence, is_path, path_lanes
from tidegate.plan.path_times import PathOpTimes
from tidegate.plan.tasks import StepOrder
from tidegate.plan.tier_split import PathSpeeds
from tidegate.timeline.timeline import Span

READS_GRADIENT = (OpKind.GRAD_D2H, OpKind.GRAD_NORM, OpKind.DEVICE_UPDATE)
WRITES_WEIGHT = (OpKind.WEIGHT_H2D, OpKind.DEVICE_UPDATE)
MAX_PLANS = 16
MAX_DROPPED_SPANS = 10_000
"""Limit for loops that call backward and never `step()`, which must not fill the memory."""


@dataclass(frozen=True)
class StepResult:
    """Result of one step. Span times are in seconds on the monotonic clock."""

    plan: Plan
    spans: tuple[Span, ...]
    skipped: bool
    grad_norm: float | None
    effective: EffectiveKnobs
    stepped: tuple[int, ...]
    """Parameters that were updated."""
    num_dropped: int = 0
    """Number of spans, the first ones, that belong to plans which were dropped before `step()`: the op ids of these
    spans are not ids of `plan`."""
    bad_params: tuple[int, ...] = ()
    """If the step was skipped: parameters whose gradients are not finite on this rank."""
    scaled: bool = False
    """Whether a GradScaler has found gradients that are not finite."""


@dataclass
class _PlanInFlight:
    """The plan that is being executed. `inputs` is set when `step()` begins, `stepped` when the norm is known."""

    plan: Plan
    effective: EffectiveKnobs
    began: float
    """Start of the plan, in seconds on the monotonic clock."""
    inputs: StepInputs | None = None
    stepped: tuple[int, ...] | None = None
    """Numbers of the parameters that this step updates."""


class Engine:
    """Plans and runs the updates of one optimizer. Driven by the training thread (and, in hooks, by autograd's
    thread)."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        layouts: Sequence[Layout],
        device: Device,
        *,
        num_slots: int,
        cpu_threads: int,
        policy: Policy = "interleaved",
        gradients: Mode = "keep",
        accumulation: Accumulation = "device",
        gradient_memory_bytes: int = 0,
        headroom_bytes: int = 0,
        early_gradients: bool = True,
        watchdog_seconds: float = 120.0,
        effective: EffectiveKnobs | None = None,
        store: TierStore | None = None,
        host_slots: int = 3,
    ) -> None:
        """`num_slots`: staging slots on the device. `effective`: the first values of the knobs. `store`: the storage
        paths. `host_slots`: number of staging slots in host memory for each path."""
        self.params, self.layouts, self.device = list(params), list(layouts), device
        self.shards = [shard_of(param) for param in params]
        """This rank's shard of each parameter: the whole parameter if it is not divided among ranks."""
        self._norm: GradientNorm = NormOverRanks(params)
        self.subgroups = tuple(layout.subgroup() for layout in layouts)
        self.num_slots = num_slots
        self.policy: Policy = policy
        self.effective = effective or EffectiveKnobs("off", 0.0)
        self.early_gradients = early_gradients
        self.gradients_come_reduced = False
        """Whether the gradients that autograd accumulates are partial, and `gradients_reduced` gives the final ones."""
        self._gradient_memory_bytes, self._headroom_bytes = gradient_memory_bytes, headroom_bytes
        self._pool = ThreadPool(cpu_threads)
        self._dropped: deque[Span] = deque(maxlen=MAX_DROPPED_SPANS)
        """Spans of the plans that were dropped since the last step."""
        released = gradients == "release"
        self.store = store
        self.host_slots = dict.fromkeys(store.paths, host_slots) if store is not None else {}
        if store is not None:
            store.add_subgroups(layouts)
            store.calibrate()
        self.residences = Residences(store) if store is not None else None
        self.memory = StateMemory(device, self.layouts, num_slots, released, store, self.host_slots)
        self._place_new_subgroups()
        sums = HostSums(device, self._pool, accumulation == "host_fp32") if accumulation != "device" else None
        self.gradients = Gradients(device, params, self.layouts, gradients, speculative=early_gradients, sums=sums)
        self.weights = WeightEdits(device, self.memory, self.shards)
        self._runner = MemoryRunner(device, self.memory, self.gradients, self.shards, self._norm, self._pool)
        of_paths = [lane for path in self.host_slots for lane in path_lanes(path)]
        self._executor = Executor(
            self._runner,
            MonotonicClock(),
            lanes=(*LANES, *of_paths),
            ahead=of_paths,
            watchdog_seconds=watchdog_seconds,
        )
        self._plans: dict[Hashable, Plan] = {}
        """Cache of plans by the inputs of the planner, except for the order of gradients: a plan keeps the order that
        was expected when it was made."""
        self._order: tuple[int, ...] = ()
        self._arrived: dict[int, None] = {}
        """Subgroups in the order in which their gradients arrived in this step (an ordered set): the next plan expects
        the same order."""
        self.gradients_made_at: float | None = None
        """When the device had computed the gradients of the last `step()`, in seconds on the monotonic clock; None if
        this was before the call of `step()`."""
        self._step_delay = StepDelay()
        self._path_speeds = StablePathSpeeds()
        self._flight: _PlanInFlight | None = None
        self._starting = threading.Lock()
        """Guards the start of a plan: under DDP, the threads of the collectives report gradients, too."""
        self.num_updates_begun = 0
        """Number of updates that were begun. Each of them is completed, or the engine is no longer usable."""
        self._pid = os.getpid()
        self._broken: str | None = None

    def extend(self, params: Sequence[torch.nn.Parameter], layouts: Sequence[Layout]) -> None:
        """Appends parameters and their subgroups. Between steps."""
        self.require_idle()
        self.weights.take_edited()  # or earlier edits by the user would go unnoticed
        self.params += params
        self.shards += [shard_of(param) for param in params]
        self._norm.extend(params)
        self.layouts += layouts
        self.subgroups = tuple(layout.subgroup() for layout in self.layouts)
        if self.store is not None:
            self.store.add_subgroups(layouts)
        self.memory.extend(layouts)
        self._place_new_subgroups()
        self.gradients.extend(params, layouts)
        self.weights.extend(layouts)
        self._plans.clear()

    def sum_norms_with(self, norm: GradientNorm) -> None:
        """Sets the object that sums squares of gradients over ranks. Between steps."""
        self.require_idle()
        self._norm = self._runner.norm_over_ranks = norm

    def _place_new_subgroups(self) -> None:
        """Places subgroups that were never updated as the knobs want it."""
        if self.residences is not None:
            effective = self.effective
            placed = place_subgroups(len(self.layouts), stride=effective.stride, static_ratio=effective.static_ratio)
            residences = self.residences
            self._retry_on_path_failure(
                lambda: self.memory.place_new_subgroups(
                    residences.next_residences(self.subgroups, placed, effective)[0]
                )
            )

    def _retry_on_path_failure(self, attempt: Callable[[], None]) -> None:
        """Calls `attempt`, which places subgroups, again while a path turns out to be full or unusable: the store then
        gives this path less, and `attempt` divides the subgroups again.

        CapacityError when the paths are too small, or the error of the last path.
        """
        for _ in range(2 * len(self.host_slots)):  # each path may first be full, then fail
            with suppress(PathFull, PathUnusable):
                attempt()
                return
        attempt()

    # ---- a step

    @property
    def step_at(self) -> float:
        """Seconds from the start of a plan after which the plan expects `step()`."""
        return self._step_delay.step_at

    @property
    def path_speeds(self) -> Mapping[str, PathSpeeds] | None:
        """Speeds of the paths, by which the planner orders ops on paths; None without paths."""
        return None if self.store is None else dict(self._path_speeds.speeds or self.store.speeds)

    @property
    def gradient_order(self) -> tuple[int, ...] | None:
        """Subgroups in the order in which their gradients arrived in the last step; None unless all arrived."""
        return self._order if len(self._order) == len(self.layouts) else None

    @property
    def running(self) -> bool:
        """Whether a step has begun and `wait_for_update` has not returned."""
        return self._flight is not None and self._flight.inputs is not None and os.getpid() == self._pid

    @property
    def updating(self) -> bool:
        """Whether a step has begun and some of its ops are not done. From any thread."""
        flight = self._flight
        return flight is not None and flight.inputs is not None and not self._executor.all_ops_done

    def start(self) -> None:
        """Starts the next step's plan unless it has started: copies of state and weights begin, those of gradients
        follow."""
        self.require_usable()
        if self._flight is None:
            with DelayInterrupt(), self._starting:
                if self._flight is None:
                    self._flight = self._launch()

    def _launch(self) -> _PlanInFlight:
        # In mode `keep` gradients can be copied again, so that the check for edits through `.data` may wait for step().
        self.weights.take_edited(by_data=self.gradients.mode == "release")
        effective = self.effective
        placed = place_subgroups(len(self.layouts), stride=effective.stride, static_ratio=effective.static_ratio)
        room_bytes = self._gradient_room(placed)
        spilled = self.memory.spilled(placed, room_bytes)
        plan = self._prepared(placed, spilled, effective)
        self._runner.begin()
        self._arrived.clear()
        read = [self.layouts[op.subgroup] for op in plan.of_kind(*READS_GRADIENT) if not op.spilled]
        self.gradients.expect_reads(read, room_bytes)
        # State is copied into memory that the framework may still use, and weights are copied to their mirrors.
        self._order_after_framework(H2D, D2H)
        self._executor.start(plan)
        return _PlanInFlight(plan, effective, time.monotonic())

    def stage(self) -> None:
        """Allocates the staging memory of the next plan ahead of time, as far as the plan is known. A plan starts in
        the hook of the first gradient, when activations fill most of the device, and pinning host memory takes long.
        Does nothing while a plan is in flight, which has its memory."""
        if self._flight is not None:
            return
        effective, lives = self.effective, self.memory.residence
        placed = place_subgroups(len(self.layouts), stride=effective.stride, static_ratio=effective.static_ratio)
        spilled = self.memory.spilled(placed, self._gradient_room(placed))
        stay = [now if is_path(now) and then == "host" else then for now, (_, then) in zip(lives, placed, strict=True)]
        self.memory.stage([self._placement(i, placed[i][0], stay[i], spilled[i]) for i in range(len(placed))])

    def _prepared(
        self, placed: Sequence[tuple[Processor, Residence]], spilled: Sequence[bool], effective: EffectiveKnobs
    ) -> Plan:
        """Makes the plan of the next step, and allocates all memory and all space on paths that it needs."""
        plans: list[Plan] = []

        def prepare() -> None:
            after, order = self._next_residences(placed, effective)
            placements = tuple(
                self._placement(i, processor, after[i], spilled[i]) for i, (processor, _) in enumerate(placed)
            )
            self.memory.prepare(placements)
            plans.append(self._plan(placements, order))

        self._retry_on_path_failure(prepare)
        return plans[0]

    def _next_residences(
        self, placed: Sequence[tuple[Processor, Residence]], effective: EffectiveKnobs
    ) -> tuple[list[Residence], StepOrder]:
        if self.residences is None:
            return [residence for _, residence in placed], "ascending"
        return self.residences.next_residences(self.subgroups, placed, effective)

    def _placement(self, subgroup: int, processor: Processor, after: Residence, spilled: bool) -> Placement:
        before = self.memory.residence[subgroup]
        placed = Placement(processor, before, after, self.memory.mirror_valid[subgroup], spilled)
        if not placed.uses_host_slot:
            return placed
        # The host slot has room for the gradient, too, but in mode `release` a gradient cannot wait for a free slot.
        in_slot = processor == "cpu" and self.gradients.mode == "keep"
        return replace(placed, mirror_valid=False, grad_in_slot=in_slot)

    def _gradient_room(self, placed: Sequence[tuple[str, Residence]]) -> int:
        """Bytes that gradients may take on the device until they are used: in mode `keep` all of them, as they belong
        to the framework."""
        if self.gradients.mode == "keep":
            return sum(s.nbytes("gradient") for s in self.subgroups)
        left = self.device.capacity_bytes - self._headroom_bytes - sum(s.nbytes("weight") for s in self.subgroups)
        room = left - sum(self.memory.state_bytes_on_device(placed))
        return min(room, self._gradient_memory_bytes or room)

    def gradient_accumulated(self, param: int) -> None:
        """To be called when autograd has accumulated the gradient of a parameter: its subgroups may be copied early."""
        if self.gradients.accumulating and self.gradients.mode == "release":
            self.gradients.add_to_sum(param)
            return
        self.start()
        if self.gradients_come_reduced:
            return
        ready = self.gradients.accumulated(param)
        if self.early_gradients or self.gradients.mode == "release":
            self._open_gradient_gates(ready)
        self._wait_for_gradient_memory()

    def _wait_for_gradient_memory(self) -> None:
        """Waits for reads of released gradients while the next gradient would not fit on the device: the host enqueues
        a backward far ahead of the device, and the memory of a gradient is free only when the device has read it."""
        memory = self.gradients.memory
        if not memory.full:
            return
        try:
            self._executor.wait_until_ready_ops_issued((D2H, DEVICE))
            while memory.full and memory.wait_for_oldest():
                pass
        except Exception as error:  # a Ctrl-C while waiting changes nothing
            self._fail(error)
            raise

    def gradients_reduced(self, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Takes final gradients, with the numbers of their parameters, from a collective. From any thread, after
        `start`."""
        for param, grad in gradients:
            self._open_gradient_gates(self.gradients.reduced(param, grad))

    def _open_gradient_gates(self, subgroups: Sequence[int]) -> None:
        """Opens the gate `gradient` of these subgroups, and takes note of their order."""
        self._arrived.update(dict.fromkeys(subgroups))
        if subgroups:
            self._executor.gradient_ready(subgroups)

    def step(self, inputs: StepInputs) -> tuple[int, ...]:
        """Begins the update; returns the numbers of the parameters that it changes, none when the step is skipped.

        Fills in `has_grad`, `grad_norm` and `grad_scale` of the inputs. `wait_for_update` waits for the rest.
        """
        assert not self.running, "wait for the last update first"
        made, called = self.device.mark(), time.monotonic()
        self.gradients.watch_unfrozen()
        self.start()
        self.gradients.refresh()
        self._replan_if_changed()
        flight = self._in_flight()
        try:
            self.num_updates_begun += 1
            self._runner.inputs = flight.inputs = inputs
            if self.store is not None:
                self.store.step += 1
            # All other writes of an update come after NORM, which this lane and the host wait for.
            self._order_after_framework(DEVICE)
            self._executor.step(repeat=self._stale_gradient_copies(flight.plan))
            goes_on = self._executor.wait_for_norm()
            made_at = made.span()[1]  # NORM comes after it, and was waited for
            self.gradients_made_at = made_at if made_at > called else None
            if self.store is not None:
                self._step_delay.observe(max(made_at, called) - flight.began)
            flight.stepped = tuple(i for i, has in enumerate(inputs.has_grad) if has) if goes_on else ()
            for index in flight.stepped:
                torch.autograd.graph.increment_version(self.shards[index])
            self.weights.update_began()
            self.gradients.clear_released()
        except BaseException as error:
            self._fail(error)
            raise
        return flight.stepped

    def fail_uncounted_step(self, error: BaseException) -> None:
        """Makes the engine unusable until a whole state is loaded: its caller was interrupted by `error` after an
        update began and before the caller had counted the update."""
        if self.usable:
            self._fail(error)

    def _replan_if_changed(self) -> None:
        """Drops the plan and starts another if weights were edited or knobs changed since the plan was made.

        EngineError when weights were edited and gradients are released already.
        """
        edited = self.weights.edited()
        if self.gradients.any_released:
            if edited:
                raise EngineError(
                    f"Parameter {min(edited)} was edited between backward and step(), and its gradient is released "
                    "already. Edit weights after step(), or use gradients='keep'."
                )
        elif edited or self._in_flight().effective != self.effective:
            self.drop_plan()
            self.weights.take_edited()
            self.start()
            self.gradients.refresh()

    def wait_for_update(self) -> StepResult | None:
        """Waits for the end of the update that `step` began, and returns its result; None when there is no update."""
        if not self.running or os.getpid() != self._pid:
            return None
        flight = self._in_flight()
        with DelayInterrupt():
            try:
                spans, skipped = self._executor.finish()
                self._runner.inputs = None
                self._flight = None
                inputs = flight.inputs
                assert inputs is not None
                self._finish(flight, skipped, spans)
                dropped = tuple(self._dropped)
                self._dropped.clear()
                return StepResult(
                    flight.plan, (*dropped, *spans), skipped, inputs.grad_norm, flight.effective, flight.stepped or (),
                    len(dropped), inputs.bad_params, inputs.skip,
                )  # fmt: skip
            except BaseException as error:
                self._fail(error)
                raise

    def wait_for_weights(self, params: Iterable[int]) -> None:
        """Makes the device work that the calling thread enqueues from now on wait for the update of these
        parameters."""
        if not self.running:
            return
        flight = self._in_flight()
        wanted = {layout.id for param in params for layout in self.gradients.subgroups_of(param)}
        ops = [op.id for op in flight.plan.of_kind(*WRITES_WEIGHT) if op.subgroup in wanted]
        try:
            events = self._executor.wait_until_issued(ops)
        except Exception as error:  # a Ctrl-C while waiting changes nothing
            self._fail(error)
            raise
        for event in events:
            self.device.block(event)

    def drop_plan(self, dropping: bool = False) -> None:
        """Drops a plan that waits for `step()`; does nothing without one. No data is lost in mode `keep`.

        dropping: allows the loss of gradients that are released already, which exist only in the plan; EngineError
        without it.
        """
        assert not self.running, "wait for the update first"
        if not self._executor.busy or os.getpid() != self._pid or self._executor.stuck:
            return
        if self.gradients.any_released and not dropping:
            raise EngineError(
                "Gradients of this step are released already: they exist in the update that waits for step() and "
                "nowhere else. Call step() first, or drop them with zero_grad()."
            )
        with DelayInterrupt():
            self._dropped += self._executor.cancel()
            self._flight = None
            self._runner.begin()

    def _in_flight(self) -> _PlanInFlight:
        assert self._flight is not None, "no plan was started"
        return self._flight

    def _fail(self, error: BaseException) -> None:
        self._broken = f"{type(error).__name__}: {error}"
        self._flight = None
        self.gradients.forget()
        if not self._executor.stuck:
            self._executor.cancel()
            self._runner.inputs = None

    def _order_after_framework(self, *lanes: str) -> None:
        """Makes later work of these lanes wait for the work on weights and gradients that the framework has
        enqueued."""
        now = self.device.now()
        for lane in lanes:
            self.device.wait(lane, now)

    def _finish(self, flight: _PlanInFlight, skipped: bool, spans: Sequence[Span]) -> None:
        self._order = tuple(self._arrived)
        self.gradients.step_done()
        self._runner.begin()
        if not skipped:
            self.memory.commit(flight.plan.placements)
            if self.residences is not None:
                self.residences.observe(spans, self.memory.residence)
        self.weights.update_ended()

    def _stale_gradient_copies(self, plan: Plan) -> list[int]:
        """Ids of early GRAD_D2H ops that copied a gradient which has changed since. Only in mode `keep`."""
        return [
            op.id for op in self._executor.done_early()
            if self._runner.copied.get(op.subgroup) != self.gradients.records_of(self.layouts[op.subgroup])
        ] if self.gradients.mode == "keep" else []  # fmt: skip

    def _plan(self, placements: tuple[Placement, ...], order: StepOrder) -> Plan:
        if self.store is not None:
            self._path_speeds.observe(self.store.speeds)
        # Other policies do not use time estimates.
        speeds = self._path_speeds.speeds if self.policy == "interleaved" else {}
        key = (placements, order, self._step_delay.step_at, tuple(speeds.items()))
        if key not in self._plans:
            plan = make_plan(
                self.subgroups, placements, num_slots=self.num_slots, policy=self.policy,
                grad_on_host_order=self.gradient_order,
                norms="gradient" if self.gradients.mode == "release" else "step", host_slots=self.host_slots,
                order=order, rates=PathOpTimes(speeds) if speeds else None, step_at=self._step_delay.step_at,
            )  # fmt: skip
            verify(plan)
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return self._plans[key]

    # ---- state and weights from outside

    def weights_loaded(self) -> None:
        """To be called before state is loaded for the present weights: remainders start at 0, mirrors are copied again,
        and an engine that has failed is usable again."""
        if self.store is not None:
            self.memory.forget_stored()
            self._place_new_subgroups()
        self.weights.reset()
        self._broken = None

    @contextmanager
    def whole_or_lost(self) -> Iterator[None]:
        """State is replaced inside: when that ends half-way, nothing can be done until a whole one is loaded."""
        try:
            yield
        except BaseException as error:
            self.state_lost(error)
            raise

    def state_lost(self, error: BaseException) -> None:
        """To be called when loading of state failed half-way: the engine is not usable until a whole state is
        loaded."""
        self._broken = f"loading its state failed: {type(error).__name__}: {error}"

    # ---- knobs, closing

    def check(self, effective: EffectiveKnobs, headroom_bytes: int, more: Sequence[Layout] = ()) -> None:
        """Checks that these knobs, with `more` subgroups, work here: MemoryBudgetError, KnobError or CapacityError with
        figures if the device, host memory or the paths cannot hold the state."""
        subgroups = [*self.subgroups, *(layout.subgroup() for layout in more)]
        weights = sum(s.nbytes("weight") for s in subgroups)
        if self.gradients.mode == "keep":
            gradients = sum(s.nbytes("gradient") for s in subgroups)
        else:
            # Gradients are released as they arrive: a backward needs room for the gradient of the largest parameter.
            gradients = max((p.numel() * p.element_size() for p in self.shards), default=0)
        self.memory.check_fits(effective.stride, effective.static_ratio, weights + gradients + headroom_bytes, more)
        if self.residences is not None:
            self.residences.check(subgroups, effective)
            self.memory.check_host(effective.host_cache_bytes)

    def watch(self, on_gradient: Callable[[int], None]) -> None:
        """Calls `on_gradient` with the number of a parameter when autograd has accumulated its gradient."""
        self.gradients.watch(on_gradient)

    def close(self, why: str = "it was closed") -> None:
        """Stops the lanes and frees memory; the weights stay unchanged. All clean-up steps run even if the GPU fails;
        then the first error is raised. `why`: the reason in the error of later calls. Does nothing in a forked
        child."""
        if os.getpid() != self._pid:
            return
        self._broken = self._broken if self._executor.closed else why
        close_all(self._executor.close, self.gradients.close, self._close_memory)
        self._flight = None

    def _close_memory(self) -> None:
        close_store = [self.store.close] if self.store is not None else []
        if self._executor.stuck:
            # A lane still uses this memory. The lane's thread holds the memory, which is freed when the thread ends, if
            # it ever does.
            close_all(*close_store)
        else:
            close_all(self.memory.close, *close_store, self._pool.close, self.device.close)

    def require_idle(self) -> None:
        """Asserts that no plan is in flight."""
        assert self._flight is None, "a plan is in flight"

    @property
    def usable(self) -> bool:
        """Whether this engine can step and be read."""
        return self._broken is None and os.getpid() == self._pid

    def require_loadable(self) -> None:
        """EngineError when this engine cannot be used even after a whole state is loaded."""
        if os.getpid() != self._pid or self._executor.closed:
            self.require_usable()
        if self._executor.stuck:
            raise EngineError(f"A lane is stuck ({self._broken}) and may still use its memory: build a new optimizer.")

    def require_usable(self) -> None:
        """EngineError with the reason when this engine cannot step or be read."""
        if os.getpid() != self._pid:
            raise EngineError("This optimizer belongs to the parent process; a forked child cannot step it.")
        if self._broken:
            raise EngineError(
                f"This optimizer is not usable: {self._broken}. "
                "Load weights and state of a checkpoint, or build a new one."
            )

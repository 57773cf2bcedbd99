"""Turns backward passes and `step()` into plans in flight: plans, starts, checks what changed, finishes, commits.

A plan is in flight from the first gradient on (or from `step()`). Until `step()` it only copies and may be dropped;
after `step()` it runs to its end, while the caller waits or, if it wants to, does something else (`settle`).
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
from tidegate.agent.engine.planning_inputs import Pace, PathPace
from tidegate.agent.engine.residency import Residences
from tidegate.agent.engine.weight_edits import Weights
from tidegate.agent.gradients.accumulation import Accumulation, HostSums
from tidegate.agent.gradients.gradients import Gradients, Mode
from tidegate.agent.interrupts import Uninterrupted
from tidegate.agent.parameters.shards import Norm, NormOverRanks, shard_of
from tidegate.agent.parameters.subgroups import Layout
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.errors import EngineError, PathFull, PathUnusable
from tidegate.kernels import ThreadPool
from tidegate.plan import Placement, Plan, Policy, make_plan, place, verify
from tidegate.plan.effective_knobs import Effective
from tidegate.plan.ops import D2H, DEVICE, H2D, LANES, OpKind, Processor, Residence, is_path, path_lanes
from tidegate.plan.path_times import PathClock
from tidegate.plan.tasks import Order as StepOrder
from tidegate.plan.tier_split import PathSpeeds
from tidegate.timeline.timeline import Span

READS_GRADIENT = (OpKind.GRAD_D2H, OpKind.GRAD_NORM, OpKind.DEVICE_UPDATE)
WRITES_WEIGHT = (OpKind.WEIGHT_H2D, OpKind.DEVICE_UPDATE)
MAX_PLANS = 16
MAX_DROPPED_SPANS = 10_000
"""Whoever calls backward and never `step()` must not fill the memory."""


@dataclass(frozen=True)
class StepResult:
    """What one step did. Span times are on the monotonic clock."""

    plan: Plan
    spans: tuple[Span, ...]
    skipped: bool
    grad_norm: float | None
    effective: Effective
    stepped: tuple[int, ...]
    """Parameters that were updated."""
    num_dropped: int = 0
    """How many of the first spans are of plans that were dropped before `step()`: their ids are not this plan's."""
    bad_params: tuple[int, ...] = ()
    """Of a skipped step: parameters whose gradients are not finite on this rank."""
    scaled: bool = False
    """A GradScaler has found gradients that are not finite."""


@dataclass
class _Flight:
    """One plan in flight. `inputs` are there once `step()` has begun; `stepped` once its norm is known."""

    plan: Plan
    effective: Effective
    began: float
    """Seconds of the monotonic clock."""
    inputs: StepInputs | None = None
    stepped: tuple[int, ...] | None = None
    """Parameters that this step updates."""


class Engine:
    """One per optimizer. Driven by the training thread (and autograd's, in hooks)."""

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
        effective: Effective | None = None,
        store: TierStore | None = None,
        host_slots: int = 3,
    ) -> None:
        """`effective`: the knobs to begin with. `store`: the storage paths; `host_slots`: staging slots in host memory
        that each of them has."""
        self.params, self.layouts, self.device = list(params), list(layouts), device
        self.shards = [shard_of(param) for param in params]
        """What this rank has of the parameters: all of those that are not divided among ranks."""
        self._norm: Norm = NormOverRanks(params)
        self.subgroups = tuple(layout.subgroup() for layout in layouts)
        self.num_slots = num_slots
        self.policy: Policy = policy
        self.effective = effective or Effective("off", 0.0)
        self.early_gradients = early_gradients
        self.gradients_come_reduced = False
        """What autograd accumulates is one rank's part: `gradients_reduced` tells of the whole."""
        self._gradient_memory_bytes, self._headroom_bytes = gradient_memory_bytes, headroom_bytes
        self._pool = ThreadPool(cpu_threads)
        self._dropped: deque[Span] = deque(maxlen=MAX_DROPPED_SPANS)
        """What plans did that were dropped since the last step."""
        released = gradients == "release"
        self.store = store
        self.host_slots = dict.fromkeys(store.paths, host_slots) if store is not None else {}
        if store is not None:
            store.add_subgroups(layouts)
            store.calibrate()
        self.residences = Residences(store) if store is not None else None
        self.memory = StateMemory(device, self.layouts, num_slots, released, store, self.host_slots)
        self._settle_new()
        sums = HostSums(device, self._pool, accumulation == "host_fp32") if accumulation != "device" else None
        self.gradients = Gradients(device, params, self.layouts, gradients, speculative=early_gradients, sums=sums)
        self.weights = Weights(device, self.memory, self.shards)
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
        """By what they are made from. The order of gradients is that of when they were made."""
        self._order: tuple[int, ...] = ()
        self._arrived: dict[int, None] = {}
        """Subgroups in the order in which their gradients came: the next plan expects the same."""
        self.gradients_made_at: float | None = None
        """When the device had made the gradients of the last `step()`, on the monotonic clock; None if it was called
        later than that."""
        self._pace = Pace()
        self._path_pace = PathPace()
        self._flight: _Flight | None = None
        self._starting = threading.Lock()
        """Under DDP gradients are announced by the threads of the collectives."""
        self._pid = os.getpid()
        self._broken: str | None = None

    def extend(self, params: Sequence[torch.nn.Parameter], layouts: Sequence[Layout]) -> None:
        """More parameters and their subgroups, behind those that are there. Between steps."""
        self.require_idle()
        self.weights.take_edited()  # what was edited until now would be taken for ours
        self.params += params
        self.shards += [shard_of(param) for param in params]
        self._norm.extend(params)
        self.layouts += layouts
        self.subgroups = tuple(layout.subgroup() for layout in self.layouts)
        if self.store is not None:
            self.store.add_subgroups(layouts)
        self.memory.extend(layouts)
        self._settle_new()
        self.gradients.extend(params, layouts)
        self.weights.extend(layouts)
        self._plans.clear()

    def sum_norms_with(self, norm: Norm) -> None:
        """Norms over ranks are made by `norm` from now on. Between steps."""
        self.require_idle()
        self._norm = self._runner.norm_over_ranks = norm

    def _settle_new(self) -> None:
        """Subgroups that were never updated begin where the knobs want them."""
        if self.residences is not None:
            now = self.effective
            placed = place(len(self.layouts), stride=now.stride, static_ratio=now.static_ratio)
            residences = self.residences
            self._on_paths_left(lambda: self.memory.settle(residences.after(self.subgroups, placed, now)[0]))

    def _on_paths_left(self, attempt: Callable[[], None]) -> None:
        """Places subgroups; a path that turns out to be full or broken gets less, and they are divided anew.

        CapacityError when there is too little room, or the error of the last path.
        """
        for _ in range(2 * len(self.host_slots)):  # each path may first be full, then fail
            with suppress(PathFull, PathUnusable):
                attempt()
                return
        attempt()

    # ---- a step

    @property
    def step_at(self) -> float:
        """Seconds after which plans count on `step()`."""
        return self._pace.step_at

    @property
    def path_speeds(self) -> Mapping[str, PathSpeeds] | None:
        """What ops on paths are ordered by; None without paths."""
        return None if self.store is None else dict(self._path_pace.speeds or self.store.speeds)

    @property
    def gradient_order(self) -> tuple[int, ...] | None:
        """Subgroups as their gradients arrived in the last step; None when not all of them did."""
        return self._order if len(self._order) == len(self.layouts) else None

    @property
    def running(self) -> bool:
        """A step has begun and was not settled."""
        return self._flight is not None and self._flight.inputs is not None and os.getpid() == self._pid

    @property
    def updating(self) -> bool:
        """A step has begun and ops of it are left. From any thread."""
        flight = self._flight
        return flight is not None and flight.inputs is not None and not self._executor.at_rest

    def start(self) -> None:
        """Begins the next step's plan, unless it has begun: admissions and prefetches run, gradients follow."""
        self.require_usable()
        if self._flight is None:
            with Uninterrupted(), self._starting:
                if self._flight is None:
                    self._flight = self._launch()

    def _launch(self) -> _Flight:
        # A gradient that is kept can be copied again: whether `.data` was edited may wait for step().
        self.weights.take_edited(by_data=self.gradients.mode == "release")
        effective = self.effective
        placed = place(len(self.layouts), stride=effective.stride, static_ratio=effective.static_ratio)
        room_bytes = self._gradient_room(placed)
        spilled = self.memory.spilled(placed, room_bytes)
        plan = self._prepared(placed, spilled, effective)
        self._runner.begin()
        self._arrived.clear()
        read = [self.layouts[op.subgroup] for op in plan.of_kind(*READS_GRADIENT) if not op.spilled]
        self.gradients.expect_reads(read, room_bytes)
        # State comes into memory that the framework may have used just now, and weights go to their mirrors.
        self._follow_framework(H2D, D2H)
        self._executor.start(plan)
        return _Flight(plan, effective, time.monotonic())

    def stage(self) -> None:
        """Takes the staging memory of the next plan, as far as it is known: a plan begins in the first gradient's hook,
        when activations take most of the device, and pinning takes long. A plan in flight has its own."""
        if self._flight is not None:
            return
        effective, lives = self.effective, self.memory.residence
        placed = place(len(self.layouts), stride=effective.stride, static_ratio=effective.static_ratio)
        spilled = self.memory.spilled(placed, self._gradient_room(placed))
        stay = [now if is_path(now) and then == "host" else then for now, (_, then) in zip(lives, placed, strict=True)]
        self.memory.stage([self._placement(i, placed[i][0], stay[i], spilled[i]) for i in range(len(placed))])

    def _prepared(
        self, placed: Sequence[tuple[Processor, Residence]], spilled: Sequence[bool], effective: Effective
    ) -> Plan:
        """The plan of the next step, with all memory and all space on paths that it needs."""
        found: list[Plan] = []

        def prepare() -> None:
            after, order = self._after(placed, effective)
            placements = tuple(
                self._placement(i, processor, after[i], spilled[i]) for i, (processor, _) in enumerate(placed)
            )
            self.memory.prepare(placements)
            found.append(self._plan(placements, order))

        self._on_paths_left(prepare)
        return found[0]

    def _after(
        self, placed: Sequence[tuple[Processor, Residence]], effective: Effective
    ) -> tuple[list[Residence], StepOrder]:
        if self.residences is None:
            return [residence for _, residence in placed], "ascending"
        return self.residences.after(self.subgroups, placed, effective)

    def _placement(self, subgroup: int, processor: Processor, after: Residence, spilled: bool) -> Placement:
        before = self.memory.residence[subgroup]
        placed = Placement(processor, before, after, self.memory.mirror_valid[subgroup], spilled)
        if not placed.uses_host_slot:
            return placed
        # Its host slot has room for the gradient, too; one that is released cannot wait until the slot is free.
        in_slot = processor == "cpu" and self.gradients.mode == "keep"
        return replace(placed, mirror_valid=False, grad_in_slot=in_slot)

    def _gradient_room(self, placed: Sequence[tuple[str, Residence]]) -> int:
        """Bytes that gradients may take on the device until they are used. In mode `keep` they are the framework's."""
        if self.gradients.mode == "keep":
            return sum(s.nbytes("gradient") for s in self.subgroups)
        left = self.device.capacity_bytes - self._headroom_bytes - sum(s.nbytes("weight") for s in self.subgroups)
        room = left - sum(self.memory.state_bytes_on_device(placed))
        return min(room, self._gradient_memory_bytes or room)

    def gradient_accumulated(self, param: int) -> None:
        """Autograd has accumulated into a parameter: its subgroups may be copied early."""
        if self.gradients.accumulating and self.gradients.mode == "release":
            self.gradients.set_aside(param)
            return
        self.start()
        if self.gradients_come_reduced:
            return
        ready = self.gradients.accumulated(param)
        if self.early_gradients or self.gradients.mode == "release":
            self._open(ready)
        self._make_room()

    def _make_room(self) -> None:
        """Waits for reads of released gradients while the next one would have no room on the device: whoever enqueues
        a backward is far ahead of the device, and memory is free when the device has read it."""
        memory = self.gradients.memory
        if not memory.full:
            return
        try:
            self._executor.hand_over((D2H, DEVICE))
            while memory.full and memory.wait_for_oldest():
                pass
        except Exception as error:  # a Ctrl-C while waiting changes nothing
            self._fail(error)
            raise

    def gradients_reduced(self, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Gradients (with their parameters) that a collective has made final. From any thread, in a started plan."""
        for param, grad in gradients:
            self._open(self.gradients.reduced(param, grad))

    def _open(self, subgroups: Sequence[int]) -> None:
        """The gradients of these subgroups are there."""
        self._arrived.update(dict.fromkeys(subgroups))
        if subgroups:
            self._executor.gradient_ready(subgroups)

    def step(self, inputs: StepInputs) -> tuple[int, ...]:
        """Begins the update; returns the parameters that it changes, none when the gradients are not finite.

        The inputs' `has_grad`, `grad_norm` and `grad_scale` are filled in. `settle` waits for the rest.
        """
        assert not self.running, "settle the last step first"
        made, called = self.device.mark(), time.monotonic()
        self.gradients.watch_unfrozen()
        self.start()
        self.gradients.refresh()
        self._begin_anew_if_needed()
        flight = self._in_flight()
        self._runner.inputs = flight.inputs = inputs
        if self.store is not None:
            self.store.step += 1
        # Whatever else an update writes comes after NORM, which this lane and the host wait for.
        self._follow_framework(DEVICE)
        try:
            self._executor.step(repeat=self._stale(flight.plan))
            goes_on = self._executor.decided()
            made_at = made.span()[1]  # NORM comes after it, and was waited for
            self.gradients_made_at = made_at if made_at > called else None
            if self.store is not None:
                self._pace.observe(max(made_at, called) - flight.began)
            flight.stepped = tuple(i for i, has in enumerate(inputs.has_grad) if has) if goes_on else ()
            for index in flight.stepped:
                torch.autograd.graph.increment_version(self.shards[index])
            self.weights.note()
            self.gradients.clear_released()
        except BaseException as error:
            self._fail(error)
            raise
        return flight.stepped

    def _begin_anew_if_needed(self) -> None:
        """Weights that were edited, or knobs that were changed, since the plan was made: it is dropped for another."""
        edited = self.weights.edited()
        if self.gradients.any_released:
            if edited:
                raise EngineError(
                    f"Parameter {min(edited)} was edited between backward and step(), and its gradient is released "
                    "already. Edit weights after step(), or use gradients='keep'."
                )
        elif edited or self._in_flight().effective != self.effective:
            self.quiesce()
            self.weights.take_edited()
            self.start()
            self.gradients.refresh()

    def settle(self) -> StepResult | None:
        """Waits for the end of the update that `step` began; None when there is none."""
        if not self.running or os.getpid() != self._pid:
            return None
        flight = self._in_flight()
        with Uninterrupted():
            try:
                spans, skipped = self._executor.finish()
                self._runner.inputs = None
                self._flight = None
                inputs = flight.inputs
                assert inputs is not None
                self._finish(flight, skipped, spans)
            except BaseException as error:
                self._fail(error)
                raise
            dropped = tuple(self._dropped)
            self._dropped.clear()
            return StepResult(
                flight.plan, (*dropped, *spans), skipped, inputs.grad_norm, flight.effective, flight.stepped or (),
                len(dropped), inputs.bad_params, inputs.skip,
            )  # fmt: skip

    def wait_for_weights(self, params: Iterable[int]) -> None:
        """What the calling thread enqueues from now on reads these weights as the update leaves them."""
        if not self.running:
            return
        flight = self._in_flight()
        wanted = {layout.id for param in params for layout in self.gradients.subgroups_of(param)}
        ops = [op.id for op in flight.plan.of_kind(*WRITES_WEIGHT) if op.subgroup in wanted]
        try:
            events = self._executor.issued(ops)
        except Exception as error:  # a Ctrl-C while waiting changes nothing
            self._fail(error)
            raise
        for event in events:
            self.device.block(event)

    def quiesce(self, dropping: bool = False) -> None:
        """Drops a plan that waits for its `step()`. Nothing is lost, unless gradients are released already: then only
        `dropping` them is possible, and EngineError says so."""
        assert not self.running, "settle the step first"
        if not self._executor.busy or os.getpid() != self._pid or self._executor.stuck:
            return
        if self.gradients.any_released and not dropping:
            raise EngineError(
                "Gradients of this step are released already: they exist in the update that waits for step() and "
                "nowhere else. Call step() first, or drop them with zero_grad()."
            )
        with Uninterrupted():
            self._dropped += self._executor.cancel()
            self._flight = None
            self._runner.begin()

    def _in_flight(self) -> _Flight:
        assert self._flight is not None, "no plan was started"
        return self._flight

    def _fail(self, error: BaseException) -> None:
        self._broken = f"{type(error).__name__}: {error}"
        self._flight = None
        self.gradients.forget()
        if not self._executor.stuck:
            self._executor.cancel()
            self._runner.inputs = None

    def _follow_framework(self, *lanes: str) -> None:
        """What these lanes do from now on comes after what the framework has done to weights and gradients."""
        now = self.device.now()
        for lane in lanes:
            self.device.wait(lane, now)

    def _finish(self, flight: _Flight, skipped: bool, spans: Sequence[Span]) -> None:
        self._order = tuple(self._arrived)
        self.gradients.step_done()
        self._runner.begin()
        if not skipped:
            self.memory.commit(flight.plan.placements)
            if self.residences is not None:
                self.residences.observe(spans, self.memory.residence)
        self.weights.settled()

    def _stale(self, plan: Plan) -> list[int]:
        return [
            op.id for op in self._executor.done_early()
            if self._runner.copied.get(op.subgroup) != self.gradients.take(self.layouts[op.subgroup])
        ] if self.gradients.mode == "keep" else []  # fmt: skip

    def _plan(self, placements: tuple[Placement, ...], order: StepOrder) -> Plan:
        if self.store is not None:
            self._path_pace.observe(self.store.speeds)
        speeds = self._path_pace.speeds if self.policy == "interleaved" else {}  # the others go by no clock
        key = (placements, order, self._pace.step_at, tuple(speeds.items()))
        if key not in self._plans:
            plan = make_plan(
                self.subgroups, placements, num_slots=self.num_slots, policy=self.policy,
                grad_on_host_order=self.gradient_order,
                norms="gradient" if self.gradients.mode == "release" else "step", host_slots=self.host_slots,
                order=order, rates=PathClock(speeds) if speeds else None, step_at=self._pace.step_at,
            )  # fmt: skip
            verify(plan)
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return self._plans[key]

    # ---- state and weights from outside

    def weights_loaded(self) -> None:
        """State is about to be loaded for the weights as they are now: remainders start at 0, mirrors are copied anew,
        and an earlier failure is over."""
        if self.store is not None:
            self.memory.forget_stored()
            self._settle_new()
        self.weights.loaded()
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
        """What replaced the state failed half-way: nothing can be done until a whole one is loaded."""
        self._broken = f"loading its state failed: {type(error).__name__}: {error}"

    # ---- knobs, life

    def check(self, effective: Effective, headroom_bytes: int, more: Sequence[Layout] = ()) -> None:
        """MemoryBudgetError with figures when these knobs, and `more` subgroups, do not fit the device."""
        subgroups = [*self.subgroups, *(layout.subgroup() for layout in more)]
        weights = sum(s.nbytes("weight") for s in subgroups)
        if self.gradients.mode == "keep":
            gradients = sum(s.nbytes("gradient") for s in subgroups)
        else:
            # They are released as they come: a backward needs room for the largest parameter's.
            gradients = max((p.numel() * p.element_size() for p in self.shards), default=0)
        self.memory.check_fits(effective.stride, effective.static_ratio, weights + gradients + headroom_bytes, more)
        if self.residences is not None:
            self.residences.check(subgroups, effective)
            self.memory.check_host(effective.host_cache_bytes)

    def watch(self, on_gradient: Callable[[int], None]) -> None:
        self.gradients.watch(on_gradient)

    def close(self, why: str = "it was closed") -> None:
        """Stops the lanes and gives memory back. The weights stay as they are. Nothing is left out because the GPU
        fails; then the first error is raised. `why`: what is said to those who would still use it."""
        if os.getpid() != self._pid:
            return
        self._broken = self._broken if self._executor.closed else why
        close_all(self._executor.close, self.gradients.close, self._close_memory)
        self._flight = None

    def _close_memory(self) -> None:
        close_store = [self.store.close] if self.store is not None else []
        if self._executor.stuck:
            # A lane still works on this memory: it is given back when the lane ends, if it ever does. Its thread holds
            # on to it.
            close_all(*close_store)
        else:
            close_all(self.memory.close, *close_store, self._pool.close, self.device.close)

    def require_idle(self) -> None:
        assert self._flight is None, "a plan is in flight"

    @property
    def usable(self) -> bool:
        return self._broken is None and os.getpid() == self._pid

    def require_loadable(self) -> None:
        """EngineError when not even a loaded state makes this engine usable again."""
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

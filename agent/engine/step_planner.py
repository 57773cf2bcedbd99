"""Makes the plan of each step from the knobs, allocates the memory that the plan needs, and reserves its space on
paths."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from cachetools import LRUCache
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from tidegate.agent.engine.engine_settings import EngineSettings
from tidegate.agent.engine.memory import StateMemory
from tidegate.agent.engine.memory_budget import MemoryBudget
from tidegate.agent.engine.planning_inputs import IdleTime, StablePathSpeeds, StepDelay
from tidegate.agent.engine.residency import Residences
from tidegate.agent.parameters.subgroups import Layout
from tidegate.errors import PathFull, PathUnusable
from tidegate.plan import Placement, Plan, make_plan, verify
from tidegate.plan.deferral import deferrable_bytes, with_deferred_flushes
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import Processor, Residence, is_path
from tidegate.plan.path_times import PathOpTimes
from tidegate.plan.residency import NextResidences, next_residences, norms_of, placement, spilled_gradients
from tidegate.plan.tasks import StepOrder, in_order
from tidegate.plan.tier_split import PathSpeeds

MAX_PLANS = 16
OUTDATED_STEPS = 3
"""One such step means nothing: the first step with micro-batches is one."""


class StepPlanner:
    """Makes the plans of one engine's steps, and allocates the memory and space that they need."""

    def __init__(
        self,
        memory: StateMemory,
        residences: Residences | None,
        settings: EngineSettings,
        host_slots: Mapping[str, int],
    ) -> None:
        """`residences`: None without storage paths. `host_slots`: number of staging slots in host memory by path."""
        self.subgroups = tuple(layout.subgroup() for layout in memory.layouts)
        self._memory, self._residences = memory, residences
        self._settings, self._host_slots = settings, host_slots
        self.budget = MemoryBudget(memory, settings)
        self._plans: LRUCache[Hashable, Plan] = LRUCache(MAX_PLANS)
        """The key consists of the inputs of the planner, except for the expected order of gradients: a
        cached plan keeps the order that was expected when the plan was made."""
        self.early_gradients = settings.early_gradients
        """Whether gradients are final when autograd has accumulated them, so that their squares can be summed then."""
        self._outdated_steps = 0
        self._step_delay = StepDelay()
        self.idle_time = IdleTime()
        self._path_speeds = StablePathSpeeds()

    def extend(self, layouts: Sequence[Layout]) -> None:
        """Adds the subgroups of `layouts` to the plans that are made from now on, and empties the cache of plans."""
        self.subgroups += tuple(layout.subgroup() for layout in layouts)
        self._plans.clear()

    def observe_early_sums(self, *, outdated: bool) -> None:
        """Counts steps in which most gradients changed after their squares were summed. After OUTDATED_STEPS such steps
        in a row, plans sum squares in `step()`: the script changes gradients between backward and `step()`, for example
        to clip them, and earlier sums are made twice."""
        self._outdated_steps = self._outdated_steps + 1 if outdated else 0
        if self._outdated_steps == OUTDATED_STEPS:
            self.early_gradients = False
            self._plans.clear()

    @property
    def step_at(self) -> float:
        """Estimated seconds from the start of a plan to the call of `step()`. The planner uses this value."""
        return self._step_delay.step_at

    @property
    def path_speeds(self) -> Mapping[str, PathSpeeds] | None:
        """Speeds of the paths, with which the planner orders the ops on paths; None if the run has no paths."""
        store = self._memory.store
        return None if store is None else dict(self._path_speeds.speeds or store.speeds)

    def observe_step_delay(self, seconds: float) -> None:
        """Records that `step()` was called `seconds` after the start of its plan. Does nothing without storage paths,
        because only plans with ops on paths use this time."""
        if self._memory.store is not None:
            self._step_delay.observe(seconds)

    @property
    def idle_seconds(self) -> float:
        """Estimated seconds from the end of `step()` to the next plan. The planner defers flushes that fit into this
        time; 0 where it defers none."""
        settings, has_paths = self._settings, self._memory.store is not None
        defers = has_paths and settings.gradients == "release" and settings.policy == "interleaved"
        return self.idle_time.seconds if defers else 0.0

    def place_new_subgroups(self, effective: EffectiveKnobs) -> None:
        """With storage paths: places subgroups that have no state yet in host memory or on a path, according to the
        knobs."""
        if self._residences is not None:
            residences = self._residences
            self._retry_on_path_failure(
                lambda: self._memory.place_new_subgroups(residences.next(self.subgroups, effective)[0].after)
            )

    def stage(self, effective: EffectiveKnobs) -> None:
        """Allocates device memory and host memory for the next plan, with the knobs `effective`, before it is made.
        With storage paths, the host buffers for state are not included: `prepare` allocates them."""
        # Paths are decided later: until then, state on a path stays there.
        decided = next_residences(self.subgroups, effective, None, "ascending")
        lives = self._memory.residence
        after = [
            now if is_path(now) and then == "host" else then for now, then in zip(lives, decided.after, strict=True)
        ]
        room_bytes = self.budget.gradient_room(decided.processors, after)
        self._memory.stage(self._placements(decided.processors, after, room_bytes))

    def prepare(self, effective: EffectiveKnobs, gradient_order: tuple[int, ...] | None) -> tuple[Plan, int]:
        """Makes the plan of the next step, and allocates all memory and all space on paths that the plan needs.

        effective: the knobs. gradient_order: the subgroups in the order in which their gradients are expected; None if
        the order is unknown. Returns the plan, and the bytes of device memory that gradients may take until the update
        has used them.
        """
        plans: list[tuple[Plan, int]] = []

        def attempt() -> None:
            decided, order = self._next_residences(effective)
            room_bytes = self.budget.gradient_room(decided.processors, decided.after)
            placements = self._placements(decided.processors, decided.after, room_bytes)
            plan = self._plan(placements, order, gradient_order)
            self._memory.prepare(plan)
            plans.append((plan, room_bytes))

        self._retry_on_path_failure(attempt)
        return plans[0]

    def check(self, effective: EffectiveKnobs, headroom_bytes: int, more: Sequence[Layout] = ()) -> None:
        """Checks that device, host memory and paths can hold the state with these knobs, including the state of the
        additional subgroups `more`. Raises MemoryBudgetError, KnobError or CapacityError, with figures, if they cannot.

        headroom_bytes: device memory that the state must leave free.
        """
        self.budget.check_device(effective, headroom_bytes, more)
        if self._residences is not None:
            self._residences.check([*self.subgroups, *(layout.subgroup() for layout in more)], effective)
            self.budget.check_host(effective.host_cache_bytes)

    def _next_residences(self, effective: EffectiveKnobs) -> tuple[NextResidences, StepOrder]:
        if self._residences is None:
            return next_residences(self.subgroups, effective, None, "ascending"), "ascending"
        return self._residences.next(self.subgroups, effective)

    def _placements(
        self, processors: Sequence[Processor], after: Sequence[Residence], room_bytes: int
    ) -> tuple[Placement, ...]:
        """The placement of each subgroup. room_bytes: device memory for gradients that are not used yet."""
        before, mode, has_paths = self._memory.residence, self._settings.gradients, self._memory.store is not None
        spilled = spilled_gradients(self.subgroups, processors, before, after, room_bytes)
        rows = zip(processors, before, after, self._memory.mirror_valid, spilled, strict=True)
        return tuple(
            placement(*row[:3], mirror_valid=row[3], spilled=row[4], mode=mode, has_paths=has_paths) for row in rows
        )

    def _retry_on_path_failure(self, attempt: Callable[[], None]) -> None:
        """Calls `attempt`, which places subgroups, and repeats the call when a path turns out to be full or unusable.
        The store then accepts fewer subgroups for this path, so that the next attempt divides the subgroups in another
        way.

        Raises CapacityError if the paths are too small, or the error of the last path.
        """
        stop = stop_after_attempt(1 + 2 * len(self._host_slots))  # each path may first be full, then fail
        Retrying(stop=stop, retry=retry_if_exception_type((PathFull, PathUnusable)), reraise=True)(attempt)

    def _plan(
        self, placements: tuple[Placement, ...], order: StepOrder, gradient_order: tuple[int, ...] | None
    ) -> Plan:
        """Returns the plan for these placements: from the cache, or a new plan, which is verified and stored there. As
        many flushes are deferred as the paths can do while they are idle.

        order: order in which the subgroups are updated. gradient_order: the subgroups in the order in which their
        gradients are expected; None if the order is unknown.
        """
        if self._memory.store is not None:
            self._path_speeds.observe(self._memory.store.speeds)
        settings, step_at = self._settings, self._step_delay.step_at
        # Other policies do not use time estimates.
        speeds = self._path_speeds.speeds if settings.policy == "interleaved" else {}
        idle = self.idle_seconds
        key = (placements, order, step_at, tuple(speeds.items()), idle)
        if key not in self._plans:
            if idle:
                ids = in_order(range(len(placements)), order)
                placements = with_deferred_flushes(self.subgroups, placements, ids, deferrable_bytes(speeds, idle))
            plan = make_plan(
                self.subgroups, placements, num_slots=settings.num_slots, policy=settings.policy,
                grad_on_host_order=gradient_order,
                norms=norms_of(placements, settings.gradients, self.early_gradients),
                host_slots=self._host_slots, order=order, rates=PathOpTimes(speeds) if speeds else None,
                step_at=step_at,
            )  # fmt: skip
            verify(plan)
            self._plans[key] = plan
        return self._plans[key]

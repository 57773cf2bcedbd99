"""The planner: which ops a step needs, in which order, and which ops each of them waits for.

An op waits for another op only if both access the same place and one of them writes it (`effects`), and only if the
order of the lanes and its other dependencies do not imply that already: every dependency of a plan is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tidegate.errors import PlanError
from tidegate.plan.dependencies import with_dependencies
from tidegate.plan.ops import PATH_NAME, Norms, Subgroup, is_path
from tidegate.plan.plan import Placement, Plan, Policy
from tidegate.plan.schedule import OpTimes, TypicalOpTimes, in_program_order, waits_of_deferred
from tidegate.plan.slot_sizes import WEIGHT_SLOTS
from tidegate.plan.tasks import StepOrder, step_work


def make_plan(
    subgroups: Sequence[Subgroup],
    placements: Sequence[Placement],
    *,
    num_slots: int,
    policy: Policy = "interleaved",
    grad_on_host_order: Sequence[int] | None = None,
    rates: OpTimes | None = None,
    norms: Norms = "step",
    host_slots: Mapping[str, int] | None = None,
    weight_slots: int = WEIGHT_SLOTS,
    order: StepOrder = "ascending",
    step_at: float = 0.0,
) -> Plan:
    """The plan of one step. The same arguments always give the same plan.

    `placements[i]` belongs to `subgroups[i]`. `num_slots`: staging slots on the device, used in turns.
    `grad_on_host_order` lists subgroup ids in the order in which their gradients are expected; by default the reverse
    order of ids, as in a backward pass. `rates` estimates run times, to order ops that share a lane; the plan is
    correct whatever the estimates are. `norms`: with `gradient`, squares for the norm are summed as gradients arrive,
    so that gradients can be released before the step; with `step`, in `step()`. `host_slots` names the paths, and gives
    the number of slots in host memory for state on its way from or to each path. `weight_slots`: number of slots in
    host memory for weights of subgroups without a mirror. `order`: order of the updates, by subgroup id. `step_at`:
    expected earliest time of the call of `step()`, in seconds after the first gradient (fetches and copies of gradients
    can run before it); like `rates`, it is used only to order ops that share a lane.

    Policies: `interleaved` runs all ops concurrently that no data dependency orders (Deep Optimizer States,
    Algorithm 1; with paths, MLP-Offload, Algorithm 1); `sequential` has the same ops, one at a time; `twinflow` updates
    the residents first and then everything else on the CPU, one op at a time (DeepSpeed's TwinFlow).

    PlanError if no plan is possible with these arguments.
    """
    paths = dict(host_slots or {})
    _check(subgroups, placements, num_slots, policy)
    _check_weight_slots(placements, weight_slots)
    _check_paths(placements, paths, norms)
    _check_deferred(placements, norms, policy)
    gradients = _gradient_order(placements, grad_on_host_order)
    work = step_work(subgroups, placements, gradients, norms, paths, order, weight_slots)
    ops = in_program_order(work, policy, num_slots, len(subgroups), norms, rates or TypicalOpTimes(), step_at)
    plan = Plan(
        policy, tuple(subgroups), tuple(placements), num_slots, (), norms, tuple(paths), sum(paths.values()),
        weight_slots if any(p.weight_in_slot for p in placements) else 0, work.gradient_memory,
    )  # fmt: skip
    waits, chain = waits_of_deferred(ops), policy != "interleaved"
    return replace(plan, ops=with_dependencies(ops, plan.lane_names, len(subgroups), norms, chain=chain, waits=waits))


def _check(subgroups: Sequence[Subgroup], placements: Sequence[Placement], num_slots: int, policy: Policy) -> None:
    if len(subgroups) != len(placements):
        raise PlanError(f"{len(subgroups)} subgroups have {len(placements)} placements: give one each.", "subgroups")
    if [s.id for s in subgroups] != list(range(len(subgroups))):
        raise PlanError("Subgroup ids must be 0, 1, 2, … in order.", "subgroups")
    staged = [i for i, p in enumerate(placements) if p.is_staged]
    if staged and num_slots < 1:
        raise PlanError(
            f"Subgroup {staged[0]} needs a staging slot, but num_slots={num_slots}: give at least 1.", "slots"
        )
    if staged and policy == "twinflow":
        raise PlanError(f"The policy twinflow cannot stage subgroup {staged[0]}: use stride='off'.", "policy")
    for i, placement in enumerate(placements):
        if placement.processor == "cpu" and placement.after == "device":
            raise PlanError(
                f"Subgroup {i} is updated on the CPU, so its state cannot go to the device: set after to 'host' or the "
                "name of a path.",
                "placement",
            )
        if placement.spilled and not placement.is_staged:
            raise PlanError(
                f"Subgroup {i} is not staged, so its gradient cannot be spilled: set spilled=False.", "placement"
            )


def _check_weight_slots(placements: Sequence[Placement], weight_slots: int) -> None:
    for i, placement in enumerate(placements):
        if not placement.weight_in_slot:
            continue
        if placement.processor != "cpu" or placement.uses_host_slot or placement.mirror_valid:
            raise PlanError(
                f"Subgroup {i} has no weight that a weight slot could hold: set weight_in_slot=False.", "placement"
            )
        if weight_slots < 1:
            raise PlanError(
                f"Subgroup {i} needs a weight slot, but weight_slots={weight_slots}: give 1 or more.", "slots"
            )


def _check_deferred(placements: Sequence[Placement], norms: Norms, policy: Policy) -> None:
    for i, placement in enumerate(placements):
        if not placement.deferred:
            continue
        on_paths = is_path(placement.before) and is_path(placement.after)
        if policy != "interleaved":
            raise PlanError(f"The policy {policy} defers no flush: set deferred=False for subgroup {i}.", "policy")
        if placement.processor != "cpu" or not on_paths or placement.mirror_valid or norms != "gradient":
            raise PlanError(
                f"Subgroup {i} cannot be flushed after the step: only subgroups that stay on paths and are updated on "
                "the CPU, with gradients that are released before the step, can. Set deferred=False.",
                "placement",
            )


def _check_paths(placements: Sequence[Placement], host_slots: Mapping[str, int], norms: Norms) -> None:
    for path, count in host_slots.items():
        if not PATH_NAME.fullmatch(path):
            raise PlanError(f"A path cannot be called {path!r}: use 1 to 32 of a-z, 0-9, _ and -.", "paths")
        if count < 1:
            raise PlanError(f"Path {path} has {count} host slots: give it at least 1.", "slots")
    for i, placement in enumerate(placements):
        for residence in (placement.before, placement.after):
            if is_path(residence) and residence not in host_slots:
                known = ", ".join(host_slots) or "none"
                raise PlanError(f"Subgroup {i} has its state on {residence!r}, but the paths are: {known}.", "paths")
        if placement.uses_host_slot and placement.processor == "cpu" and placement.mirror_valid:
            raise PlanError(
                f"Subgroup {i} is updated in a host slot, so its weight has no mirror: set mirror_valid=False.",
                "placement",
            )
        if placement.grad_in_slot and not (placement.uses_host_slot and placement.needs_grad_on_host):
            raise PlanError(f"Subgroup {i} has no gradient in a host slot: set grad_in_slot=False.", "placement")
        if placement.grad_in_slot and norms == "gradient":
            raise PlanError(
                f"Subgroup {i} has its gradient released before the step, when its host slot may not be free yet: "
                "set grad_in_slot=False.",
                "placement",
            )


def _gradient_order(placements: Sequence[Placement], given: Sequence[int] | None) -> tuple[int, ...]:
    """All subgroup ids in the expected order of their gradients. `given` may omit gradients that no op copies to the
    host; they come last."""
    if given is None:
        return tuple(reversed(range(len(placements))))
    known = set(given)
    copied = [i for i, p in enumerate(placements) if p.needs_grad_on_host]
    missing = set(copied) - known
    if missing or len(known) != len(given) or not all(0 <= i < len(placements) for i in given):
        raise PlanError(
            "grad_on_host_order must name valid subgroups, each once, and every subgroup whose gradient is copied to "
            "the host.",
            "gradient order",
        )
    return (*given, *(i for i in reversed(range(len(placements))) if i not in known))

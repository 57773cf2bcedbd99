from __future__ import annotations

from tidegate.agent.telemetry.plan_cache import RECENT_PLANS, RecentPlans
from tidegate.plan import Placement, Plan, Subgroup, make_plan

SUBGROUP = Subgroup(id=0, numel=1_000, weight_bytes=2, grad_bytes=2, state_bytes=10)
ON_CPU = Placement("cpu", "host", "host", True)


def plan() -> Plan:
    """Equal to all others that this makes, and not the same."""
    return make_plan([SUBGROUP], [ON_CPU], num_slots=0)


def test_what_runs_every_other_step_stays_whatever_runs_between() -> None:
    recent: RecentPlans[str] = RecentPlans()
    kept = plan()
    recent.add(kept, "kept")
    for number in range(3 * RECENT_PLANS):
        once = plan()
        assert recent.get(once) is None, "an equal plan is not the same"
        recent.add(once, str(number))
        assert recent.get(kept) == "kept"


def test_what_was_asked_for_longest_ago_is_forgotten() -> None:
    recent: RecentPlans[int] = RecentPlans()
    plans = [plan() for _ in range(RECENT_PLANS + 1)]
    for number, one in enumerate(plans[:-1]):
        assert recent.add(one, number) == number
    assert recent.get(plans[0]) == 0
    recent.add(plans[-1], -1)
    assert recent.get(plans[1]) is None
    assert (recent.get(plans[0]), recent.get(plans[-1])) == (0, -1)

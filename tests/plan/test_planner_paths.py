"""Plans with paths as tables: fetch → update → flush, whose host slot, and who waits for whom."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.plan.test_planner import names, subgroups
from tidegate.errors import PlanError
from tidegate.plan import (
    Op,
    OpKind,
    Placement,
    Plan,
    Policy,
    Subgroup,
    make_plan,
    place_subgroups,
    steady_placements,
    verify,
)
from tidegate.plan.plan import Placement as P
from tidegate.simulator.simulate import simulate, update_seconds
from tidegate.speeds.rate_card import PathRates, RateCard

POLICIES: tuple[Policy, Policy] = ("interleaved", "sequential")
TIERED = P("cpu", "nvme", "nvme", False)
TIERED_STAGED = P("device", "nvme", "nvme", False)
CACHED = P("cpu", "host", "host", True)
FILL = P("cpu", "nvme", "host", False)
EVICT = P("cpu", "host", "nvme", True)
CACHED = P("cpu", "host", "host", False, weight_in_slot=True)


def plan_of(
    placements: Sequence[Placement],
    policy: Policy = "interleaved",
    host_slots: Mapping[str, int] | None = None,
    num_slots: int = 2,
    **options: Any,
) -> Plan:
    slots = {"nvme": 2, "pfs": 1} if host_slots is None else host_slots
    groups = subgroups(len(placements), 100_000_000)
    plan = make_plan(groups, placements, num_slots=num_slots, policy=policy, host_slots=slots, **options)
    verify(plan)
    return plan


@pytest.mark.parametrize(
    ("placement", "ops"),
    [
        # Through a host slot on the CPU. The gradient waits in a place of its own, or comes to the slot.
        (TIERED, [
            *["grad_d2h 0", "norm", "weight_d2h 0 host slot 0", "fetch 0 nvme host slot 0"],
            *["cpu_update 0 host slot 0", "weight_h2d 0 host slot 0", "flush 0 nvme host slot 0"],
        ]),
        (replace(TIERED, grad_in_slot=True), [
            *["norm", "weight_d2h 0 host slot 0", "fetch 0 nvme host slot 0", "grad_d2h 0 host slot 0"],
            *["cpu_update 0 host slot 0", "weight_h2d 0 host slot 0", "flush 0 nvme host slot 0"],
        ]),
        # …to another path: migration.
        (P("cpu", "nvme", "pfs", False), [
            *["grad_d2h 0", "norm", "weight_d2h 0 host slot 0", "fetch 0 nvme host slot 0"],
            *["cpu_update 0 host slot 0", "weight_h2d 0 host slot 0", "flush 0 pfs host slot 0"],
        ]),
        (P("cpu", "device", "pfs", False), [
            *["grad_d2h 0", "norm", "weight_d2h 0 host slot 2", "state_d2h 0 host slot 2"],
            *["cpu_update 0 host slot 2", "weight_h2d 0 host slot 2", "flush 0 pfs host slot 2"],
        ]),
        # Into and out of the host cache, without a slot.
        (FILL, ["weight_d2h 0", "grad_d2h 0", "norm", "fetch 0 nvme", "cpu_update 0", "weight_h2d 0"]),
        (EVICT, ["grad_d2h 0", "norm", "cpu_update 0", "weight_h2d 0", "flush 0 nvme"]),
        # In the host cache, with the weight in a slot.
        (CACHED, [
            *["grad_d2h 0", "norm", "weight_d2h 0 weight slot 0", "cpu_update 0 weight slot 0"],
            "weight_h2d 0 weight slot 0",
        ]),
        (replace(CACHED, before="nvme"), [
            *["grad_d2h 0", "norm", "weight_d2h 0 weight slot 0", "fetch 0 nvme", "cpu_update 0 weight slot 0"],
            "weight_h2d 0 weight slot 0",
        ]),
        # On the device, with its staging slot behind the one on the host.
        (TIERED_STAGED, [
            *["norm", "fetch 0 nvme host slot 0", "state_h2d 0 slot 0 host slot 0", "device_update 0 slot 0"],
            *["state_d2h 0 slot 0 host slot 0", "flush 0 nvme host slot 0"],
        ]),
        (replace(TIERED_STAGED, spilled=True), [
            *["grad_d2h 0", "norm", "fetch 0 nvme host slot 0", "state_h2d 0 slot 0 host slot 0", "grad_h2d 0 slot 0"],
            *["device_update 0 slot 0", "state_d2h 0 slot 0 host slot 0", "flush 0 nvme host slot 0"],
        ]),
        (P("device", "nvme", "host", False), [
            *["norm", "fetch 0 nvme", "state_h2d 0 slot 0", "device_update 0 slot 0", "state_d2h 0 slot 0"],
        ]),
        (P("device", "host", "nvme", False), [
            *["norm", "state_h2d 0 slot 0", "device_update 0 slot 0", "state_d2h 0 slot 0", "flush 0 nvme"],
        ]),
        (P("device", "nvme", "device", False), [
            *["norm", "fetch 0 nvme host slot 0", "state_h2d 0 host slot 0", "device_update 0"],
        ]),
        (P("device", "device", "nvme", False), [
            *["norm", "device_update 0", "state_d2h 0 host slot 0", "flush 0 nvme host slot 0"],
        ]),
    ],
)  # fmt: skip
def test_ops_of_one_subgroup(placement: Placement, ops: list[str]) -> None:
    assert names(plan_of([placement], "sequential").ops) == ops
    assert sorted(names(plan_of([placement]).ops)) == sorted(ops)


def test_paths_have_lanes_and_slots_of_their_own() -> None:
    plan = plan_of([replace(TIERED, before=path, after=path) for path in ("pfs", "nvme") * 3])
    assert plan.lane_names == ("h2d", "d2h", "cpu", "device", "nvme:read", "nvme:write", "pfs:read", "pfs:write")
    assert (plan.paths, plan.num_host_slots) == (("nvme", "pfs"), 3)
    assert names(plan.lanes["nvme:read"]) == [
        f"fetch {i} nvme host slot {slot}" for i, slot in [(1, 0), (3, 1), (5, 0)]
    ]
    assert names(plan.lanes["pfs:read"]) == [f"fetch {i} pfs host slot 2" for i in (0, 2, 4)]
    assert plan.link_bytes("nvme:read") == plan.link_bytes("pfs:write") == 3_000_000_000


def test_weights_of_the_host_cache_take_the_weight_slots_in_turns() -> None:
    plan = plan_of([CACHED] * 3)
    waits = {op.name: [plan.by_id[dep].name for dep in op.deps] for op in plan.ops}
    assert plan.num_weight_slots == 2
    assert waits["weight_d2h 0 weight slot 0"] == waits["weight_d2h 1 weight slot 1"] == []
    assert waits["weight_d2h 2 weight slot 0"] == ["weight_h2d 0 weight slot 0"]
    assert waits["cpu_update 2 weight slot 0"] == ["weight_d2h 2 weight slot 0"]


def test_weights_of_what_comes_from_a_path_take_weight_slots_first() -> None:
    """Updates of the others can wait: they hold up no path."""
    plan = plan_of([CACHED, CACHED, replace(CACHED, before="nvme")])
    slots = {op.subgroup: op.weight_slot for op in plan.of_kind(OpKind.CPU_UPDATE)}
    assert slots == {2: 0, 0: 1, 1: 0}


@pytest.mark.parametrize(
    ("placement", "slots", "rule"),
    [
        (Placement("cpu", "host", "host", True, weight_in_slot=True), 2, "placement"),
        (Placement("cpu", "nvme", "nvme", False, weight_in_slot=True), 2, "placement"),
        (Placement("device", "host", "host", False, weight_in_slot=True), 2, "placement"),
        (Placement("cpu", "host", "host", False, weight_in_slot=True), 0, "slots"),
    ],
)
def test_a_weight_slot_that_no_weight_could_use_is_refused(placement: Placement, slots: int, rule: str) -> None:
    subgroup = Subgroup(0, 10, 2, 2, 8)
    with pytest.raises(PlanError) as caught:
        make_plan([subgroup], [placement], num_slots=1, host_slots={"nvme": 1}, weight_slots=slots)
    assert caught.value.rule == rule


def test_a_fetch_waits_for_its_slot_and_an_update_for_its_fetch() -> None:
    plan = plan_of([TIERED, TIERED], host_slots={"nvme": 1})
    waits = {op.name.removesuffix(" host slot 0"): [plan.by_id[dep].name for dep in op.deps] for op in plan.ops}
    assert waits == {
        "weight_d2h 0": [],
        "grad_d2h 1": [],
        "grad_d2h 0": [],
        "norm": [],
        "fetch 0 nvme": [],
        "cpu_update 0": ["fetch 0 nvme host slot 0", "grad_d2h 0", "norm"],
        "flush 0 nvme": ["cpu_update 0 host slot 0"],
        "weight_h2d 0": ["cpu_update 0 host slot 0"],
        "weight_d2h 1": ["weight_h2d 0 host slot 0"],
        "fetch 1 nvme": ["flush 0 nvme host slot 0"],
        "cpu_update 1": ["weight_d2h 1 host slot 0", "fetch 1 nvme host slot 0"],
        "weight_h2d 1": ["cpu_update 1 host slot 0"],
        "flush 1 nvme": ["cpu_update 1 host slot 0"],
    }


def test_what_comes_from_the_path_takes_slots_before_what_goes_there() -> None:
    leaves = P("device", "device", "nvme", False)
    plan = plan_of([leaves, TIERED, TIERED], host_slots={"nvme": 2})
    assert names(plan.lanes["nvme:read"]) == ["fetch 1 nvme host slot 0", "fetch 2 nvme host slot 1"]
    assert next(op.host_slot for op in plan.of_kind(OpKind.FLUSH) if op.subgroup == 0) == 0


def test_paths_take_turns_where_the_cpu_is_what_they_wait_for() -> None:
    placements = [replace(TIERED, before=path, after=path) for path in ("nvme",) * 8 + ("pfs",) * 8]
    slow_cpu = replace(CARD, cpu_params_per_second=1e7)
    plan = plan_of(placements, host_slots={"nvme": 2, "pfs": 2}, rates=slow_cpu)
    first = [op.subgroup < 8 for op in plan.lanes["cpu"]][:8]
    assert 3 <= sum(first) <= 5


def test_weights_do_not_wait_behind_state_that_a_path_brings_late() -> None:
    plan = plan_of([TIERED_STAGED] * 2 + [CACHED] * 4, rates=slower("nvme", 10))
    assert [op.kind for op in plan.lanes["h2d"]] == [OpKind.WEIGHT_H2D] * 4 + [OpKind.STATE_H2D] * 2


def test_first_fetches_need_no_step() -> None:
    plan = plan_of([TIERED] * 5)
    spans = simulate(plan, CARD, step_at=100.0).spans
    assert [span.subgroup for span in spans if span.kind is OpKind.FETCH and span.end < 100.0] == [0, 1]


def test_cached_ones_fill_the_wait_for_the_first_fetch() -> None:
    """All gradients are there when the plan begins: a fetch of 0.33 s leaves time for cached updates of 0.05 s."""
    timeline = simulate(plan_of([TIERED] * 4 + [CACHED] * 8, rates=CARD), CARD, step_at=0.0)
    first_fetch = min(span.end for span in timeline.spans if span.kind is OpKind.FETCH)
    before = [span.subgroup for span in timeline.spans if span.kind is OpKind.CPU_UPDATE and span.start < first_fetch]
    assert len(before) >= 4
    assert set(before) <= set(range(4, 12))


def test_what_was_fetched_before_the_step_is_updated_first() -> None:
    """So that its path has something to write, and a slot for the next fetch."""
    plan = plan_of([CACHED] * 8 + [TIERED] * 4, rates=CARD, step_at=1.0)
    assert [op.subgroup for op in plan.lanes["cpu"]][:2] == [8, 9]
    spans = simulate(plan, CARD, step_at=1.0).spans
    assert min(span.start for span in spans if span.kind is OpKind.FLUSH) < 1.06


def test_cached_ones_take_turns_with_those_that_are_fetched_in_the_step() -> None:
    """None is updated while no fetch can be: all slots are full when the step begins. Then one behind each fetched."""
    plan = plan_of([CACHED] * 4 + [TIERED] * 10, rates=CARD, step_at=1.0)
    assert [op.subgroup for op in plan.lanes["cpu"]][:9] == [4, 5, 6, 0, 7, 1, 8, 2, 9]
    spans = simulate(plan, CARD, step_at=1.0).spans
    fetched = min(span.end for span in spans if span.kind is OpKind.FETCH and span.start > 1.0)
    assert all(span.start >= fetched for span in spans if span.kind is OpKind.CPU_UPDATE and span.subgroup < 4)


def test_turns_are_longer_where_more_is_cached_than_fetched() -> None:
    """And they end when the CPU has no more time to spare: it must be done when the path is."""
    cpu = [op.subgroup for op in plan_of([CACHED] * 12 + [TIERED] * 6, rates=CARD, step_at=1.0).lanes["cpu"]]
    assert cpu == [12, 13, 14, 0, 1, 2, 15, 3, 4, 5, 16, 6, 7, 8, 9, 10, 11, 17]


def test_cached_ones_do_not_wait_where_the_cpu_is_what_takes_longest() -> None:
    slow_cpu = replace(CARD, cpu_params_per_second=1e8)
    plan = plan_of([CACHED] * 4 + [TIERED] * 10, rates=slow_cpu, step_at=1.0)
    timeline = simulate(plan, slow_cpu, step_at=1.0)
    cpu = sorted((s.start, s.end) for s in timeline.spans if s.kind is OpKind.CPU_UPDATE)
    assert all(start == pytest.approx(end) for (_, end), (start, _) in itertools.pairwise(cpu)), "it never rests"


@given(fetched=st.integers(1, 12), cached=st.integers(0, 12), slots=st.integers(1, 4), cpu=st.floats(1e7, 1e10))
def test_turns_cost_no_more_than_one_turn(fetched: int, cached: int, slots: int, cpu: float) -> None:
    """By what takes longest without them: the path, or the CPU with all updates and the last flush."""
    card = replace(CARD, cpu_params_per_second=cpu)
    options: Any = {"host_slots": {"nvme": slots}, "rates": card, "step_at": 10.0}
    alone = plan_of([TIERED] * fetched, **options)
    plan = plan_of([CACHED] * cached + [TIERED] * fetched, **options)
    one = {op.kind: card.seconds(op) for op in plan.ops}
    cpu_bound = one[OpKind.NORM] + (cached + fetched) * one[OpKind.CPU_UPDATE] + one[OpKind.FLUSH]
    turn = (-(-cached // fetched) + 1) * one[OpKind.CPU_UPDATE] + one[OpKind.WEIGHT_H2D]
    limit = max(update_seconds(alone, card, step_at=10.0), cpu_bound) + turn
    assert update_seconds(plan, card, step_at=10.0) <= limit + 1e-9


def test_what_a_slow_path_brings_after_the_step_has_begun_waits_for_its_turn() -> None:
    slow = [replace(TIERED, before="pfs", after="pfs")] * 2
    plan = plan_of([*slow, *[TIERED] * 2, *[CACHED] * 8], rates=slower("pfs", 10), step_at=1.0)
    first = [op.subgroup for op in plan.lanes["cpu"]]
    assert first[:2] == [2, 3]
    assert min(first.index(0), first.index(1)) > 8


def test_what_is_cached_and_what_comes_from_paths_is_merged() -> None:
    """One cached update between two fetched ones, and not all at the start: fetches and updates overlap."""
    card = replace(CARD, paths={"nvme": PathRates(read_bytes_per_second=10e9, write_bytes_per_second=1e12)})
    cpu = [op.subgroup for op in plan_of([TIERED] * 6 + [CACHED] * 6, rates=card).lanes["cpu"]]
    tiered_at = [at for at, subgroup in enumerate(cpu) if subgroup < 6]
    assert [cpu[at] for at in tiered_at] == list(range(6))
    assert all(after - before >= 2 for before, after in itertools.pairwise(tiered_at))


CARD = RateCard(
    h2d_bytes_per_second=25e9,
    d2h_bytes_per_second=25e9,
    cpu_params_per_second=2e9,
    device_params_per_second=25e9,
    norm_params_per_second=500e9,
    paths={path: PathRates(read_bytes_per_second=3e9, write_bytes_per_second=2e9) for path in ("nvme", "pfs")},
)


def slower(path: str, factor: float) -> RateCard:
    slow = PathRates(read_bytes_per_second=3e9 / factor, write_bytes_per_second=2e9 / factor)
    return replace(CARD, paths={**CARD.paths, path: slow})


@pytest.mark.parametrize("stride", ["off", 2, 1])
def test_a_slow_path_does_not_hold_up_another(stride: float) -> None:
    """Slots are each path's own, and what shares a lane is ordered by when it is ready."""
    places = [
        (p, ("nvme", "pfs", "host")[i % 3])
        for i, (p, _) in enumerate(place_subgroups(48, stride=stride, static_ratio=0))
    ]

    def done(rates: RateCard, lane: str) -> float:
        plan = plan_of(steady_placements(places), rates=rates, host_slots={"nvme": 3, "pfs": 3}, num_slots=2)
        return max(span.end for span in simulate(plan, rates, step_at=0.0).spans if span.lane == lane)

    assert done(slower("pfs", 10), "pfs:write") > 5 * done(CARD, "pfs:write")
    assert done(slower("pfs", 10), "nvme:write") == pytest.approx(done(CARD, "nvme:write"), rel=0.02)


seconds = st.sampled_from([0.0, 1.0, 2.0]) | st.floats(0.1, 9)
residences = st.sampled_from(["host", "nvme", "pfs"])


@settings(max_examples=examples(150))
@given(
    moves=st.lists(st.tuples(residences, residences), min_size=1, max_size=14),
    times=st.lists(seconds, min_size=1, max_size=9),
    slots=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    order=st.sampled_from(["ascending", "descending"]),
)
def test_the_cpu_is_never_idle_while_something_is_ready(
    moves: list[tuple[str, str]], times: list[float], slots: tuple[int, int], order: str
) -> None:
    """When ops take as long as was estimated: what comes after a pause was not ready before its end."""

    class Estimate:
        def seconds(self, op: Op, /) -> float:
            early = op.kind in (OpKind.GRAD_D2H, OpKind.WEIGHT_D2H, OpKind.NORM)
            return 0.0 if early else times[(7 * op.subgroup + len(op.kind)) % len(times)]

    placements = [P("cpu", before, after, "host" in (before, after)) for before, after in moves]
    plan = plan_of(placements, host_slots={"nvme": slots[0], "pfs": slots[1]}, rates=Estimate(), order=order)
    spans = {s.op: s for s in simulate(plan, CARD, step_at=0.0, durations=Estimate().seconds).spans}
    cpu = plan.lanes["cpu"]
    brings = (OpKind.FETCH, OpKind.WEIGHT_D2H, OpKind.GRAD_D2H, OpKind.NORM)
    ready = {
        op.id: max(spans[other.id].end for other in plan.of_kind(*brings) if other.subgroup in (op.subgroup, -1))
        for op in cpu
    }
    pauses = [(spans[a.id].end, spans[b.id].start) for a, b in itertools.pairwise(cpu)]
    for i, (low, high) in enumerate(pauses):
        if high > low:
            assert all(ready[op.id] >= high for op in cpu[i + 1 :])


def alternation(num_subgroups: int, num_cached: int, num_steps: int) -> list[Plan]:
    """MLP-Offload's: what the last step updated last is still on the host, so the next step begins with it."""
    cached: set[int] = set()
    plans = []
    for step in range(num_steps):
        descending = step % 2 == 1
        kept = set(range(num_cached)) if descending else set(range(num_subgroups - num_cached, num_subgroups))
        where: list[Callable[[int], str]] = [
            lambda i, held=frozenset(held): "host" if i in held else "nvme"  # type: ignore[misc]
            for held in (cached, kept)
        ]
        placements = [P("cpu", where[0](i), where[1](i), False) for i in range(num_subgroups)]
        plans.append(plan_of(placements, order="descending" if descending else "ascending"))
        cached = kept
    return plans


def test_alternation_is_a_plan() -> None:
    first, second, third = alternation(12, 4, 3)
    assert [op.subgroup for op in first.of_kind(OpKind.CPU_UPDATE) if op.host_slot is not None] == list(range(8))
    assert [op.subgroup for op in second.of_kind(OpKind.FETCH) if op.host_slot is not None] == [7, 6, 5, 4]
    assert {op.subgroup for op in second.of_kind(OpKind.FETCH)} == set(range(8))
    assert {op.subgroup for op in second.of_kind(OpKind.FLUSH)} == set(range(4, 12))
    assert {op.subgroup for op in third.of_kind(OpKind.FETCH)} == set(range(4, 12))


def test_alternation_moves_as_much_as_a_fixed_cache() -> None:
    alternating = alternation(12, 4, 2)[1]
    fixed = plan_of([TIERED] * 8 + [CACHED] * 4)
    for lane in ("nvme:read", "nvme:write"):
        assert alternating.link_bytes(lane) == fixed.link_bytes(lane)


def test_sequential_descends_too() -> None:
    plan = plan_of([TIERED, CACHED, TIERED], "sequential", order="descending")
    assert [op.subgroup for op in plan.of_kind(OpKind.CPU_UPDATE)] == [2, 1, 0]
    assert [op.host_slot for op in plan.of_kind(OpKind.FETCH)] == [0, 1]


def test_twinflow_with_paths_updates_residents_first() -> None:
    plan = plan_of([TIERED, P("device", "device", "device", False)], "twinflow")
    assert [op.kind for op in plan.ops if op.numel and op.kind is not OpKind.NORM] == ["device_update", "cpu_update"]


@pytest.mark.parametrize(
    ("rule", "placement", "options"),
    [
        ("slots", TIERED, {"host_slots": {"nvme": 0}}),
        ("paths", TIERED, {"host_slots": {"pfs": 1}}),
        ("paths", TIERED, {"host_slots": {}}),
        ("paths", CACHED, {"host_slots": {"host": 1}}),
        ("paths", CACHED, {"host_slots": {"NVMe": 1}}),
        ("paths", CACHED, {"host_slots": {"": 1}}),
        ("slots", TIERED_STAGED, {"num_slots": 0}),
        ("policy", TIERED_STAGED, {"policy": "twinflow"}),
        ("placement", P("cpu", "nvme", "device", False), {}),
        ("placement", replace(TIERED, mirror_valid=True), {}),
        ("placement", replace(CACHED, grad_in_slot=True), {}),
        ("placement", replace(TIERED_STAGED, grad_in_slot=True), {}),
        ("placement", replace(TIERED, grad_in_slot=True), {"norms": "gradient"}),
    ],
)
def test_what_cannot_be_planned(rule: str, placement: Placement, options: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of([placement], **options)
    assert caught.value.rule == rule


def test_a_path_may_be_called_almost_anything() -> None:
    for name in ("nvme-0_a", "hostess", "device2", "x" * 32):
        assert plan_of([replace(TIERED, before=name, after=name)], host_slots={name: 1}).paths == (name,)


def test_steady_state_on_a_path_has_no_mirror() -> None:
    found = steady_placements([("cpu", "nvme"), ("cpu", "host"), ("device", "nvme")])
    assert [(p.before, p.after, p.mirror_valid) for p in found] == [
        ("nvme", "nvme", False),
        ("host", "host", True),
        ("nvme", "nvme", False),
    ]


def test_interleaving_hides_most_of_what_one_at_a_time_shows() -> None:
    interleaved, sequential = (
        update_seconds(plan_of([TIERED] * 20, policy, {"nvme": 4}, rates=CARD), CARD, step_at=1.0)
        for policy in POLICIES
    )
    reads, writes = 20 * 1e9 / 3e9, 20 * 1e9 / 2e9
    assert interleaved < 1.1 * max(reads, writes)
    assert sequential > reads + writes


def test_400_subgroups_on_four_paths_are_planned_in_a_tenth_of_a_second() -> None:
    paths = ("a", "b", "c", "d")
    places = [(p, paths[i % 4]) for i, (p, _) in enumerate(place_subgroups(400, stride=2, static_ratio=0))]
    start = time.process_time()
    make_plan(subgroups(400), steady_placements(places), num_slots=3, host_slots=dict.fromkeys(paths, 4))
    # Ten times what it takes on an idle core.
    assert time.process_time() - start < 1.0

"""The clock that plans with paths are ordered by."""

from dataclasses import replace

from tidegate.plan import Op, OpKind, Subgroup, make_plan
from tidegate.plan.interference import DUPLEX
from tidegate.plan.path_times import PathOpTimes
from tidegate.plan.plan import Placement
from tidegate.plan.schedule import TypicalOpTimes
from tidegate.plan.tier_split import PathSpeeds

DISK = PathSpeeds(read_bytes_per_second=400.0, write_bytes_per_second=100.0)


def test_both_ways_go_at_the_pace_of_whole_subgroups() -> None:
    fetch, flush = (Op(0, kind, 0, 800, 0, path="disk") for kind in (OpKind.FETCH, OpKind.FLUSH))
    shared, duplex = PathOpTimes({"disk": DISK}), PathOpTimes({"disk": replace(DISK, factors=DUPLEX)})
    assert shared.seconds(fetch) == shared.seconds(flush) == 10.0, "read and written in turns"
    assert duplex.seconds(fetch) == duplex.seconds(flush) == 8.0, "the slower way decides"


def test_what_is_not_measured_is_typical() -> None:
    clock, typical = PathOpTimes({"disk": DISK}), TypicalOpTimes()
    for op in (Op(0, OpKind.CPU_UPDATE, 0, 0, 100), Op(0, OpKind.FETCH, 0, 800, 0, path="other")):
        assert clock.seconds(op) == typical.seconds(op)


def test_updates_of_a_shared_disk_do_not_hold_up_those_of_a_faster_path() -> None:
    """The disk fetches at 4 while it rests and at 2 while it writes: ordered by 4, the CPU waits in vain."""
    subgroups = [Subgroup(i, 10**9, 2, 2, 10) for i in range(24)]
    paths = ["disk" if i % 2 else "net" for i in range(24)]
    placements = [Placement("cpu", path, path, False, grad_in_slot=True) for path in paths]
    speeds = {
        "disk": PathSpeeds(read_bytes_per_second=4e9, write_bytes_per_second=4e9),
        "net": PathSpeeds(read_bytes_per_second=4e9, write_bytes_per_second=4e9, factors=DUPLEX),
    }
    plan = make_plan(subgroups, placements, num_slots=2, host_slots={"disk": 3, "net": 3}, rates=PathOpTimes(speeds))
    updated = [paths[op.subgroup] for op in plan.of_kind(OpKind.CPU_UPDATE)]
    assert updated[:12].count("net") >= 7, "twice as fast, so about two of three while it has any"

"""Claim: a separate lane for copies of weights to the device makes the update no shorter.

A prediction of the simulator, for the 72 subgroups of Llama 7B (100 million 16-bit parameters each) on one GPU; nothing
is measured on a GPU. `lane`: the update time if copies of weights to the device (WEIGHT_H2D) have their own lane,
divided by the time without it. That lane shares the link fairly with the other copies to the device. CPU updates take
the time of the rate card, or up to 30 % more (random, seeded).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import fields, replace

from tidegate.plan import Placement, Plan, make_plan, place_subgroups
from tidegate.plan.dependencies import with_dependencies
from tidegate.plan.ops import H2D, LANES, Op, OpKind, Subgroup
from tidegate.simulator.event_loop import times_together
from tidegate.simulator.simulate import simulate
from tidegate.speeds.rate_card import RateCard

SUBGROUPS = [Subgroup(i, 100_000_000, weight_bytes=2, grad_bytes=2, state_bytes=10) for i in range(72)]
LINKS = {"PCIe 3": 12e9, "PCIe 4": 25e9, "PCIe 5": 50e9}
STRIDES = ("off", 4.0, 3.0, 2.0, 1.0)
STEP_AT = 1.0
OWN = "weights"


class _Weights(Op):
    __slots__ = ()

    @property
    def lane(self) -> str:
        return OWN


class _WithOwnLane(Plan):
    @property
    def lane_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*LANES, OWN)

    @property
    def lanes(self) -> dict[str, tuple[Op, ...]]:  # type: ignore[override]
        return {name: tuple(op for op in self.ops if op.lane == name) for name in self.lane_names}


def main() -> int:
    for name, speed in LINKS.items():
        for cpu in (2e9, 8e9):
            card = RateCard(
                h2d_bytes_per_second=speed, d2h_bytes_per_second=speed, cpu_params_per_second=cpu,
                device_params_per_second=40e9, norm_params_per_second=400e9,
            )  # fmt: skip
            for stride in STRIDES:
                row = {"link": name, "cpu_params_per_second": cpu, "stride": stride}
                plan = _plan(stride)
                print(json.dumps(row | {"lane": _by_lane(plan, card)}))
    return 0


def _plan(stride: float | str) -> Plan:
    placed = place_subgroups(len(SUBGROUPS), stride=stride, static_ratio=0.0)  # type: ignore[arg-type]
    placements = [Placement(processor, lives, lives, processor == "cpu") for processor, lives in placed]
    return make_plan(SUBGROUPS, placements, num_slots=3)


def _update(plan: Plan, card: RateCard, seconds: Callable[[Op], float]) -> float:
    timeline = simulate(plan, card, step_at=STEP_AT, durations=seconds)
    return max(span.end for span in timeline.spans) - STEP_AT


def _by_lane(plan: Plan, card: RateCard) -> dict[str, float]:
    own = [
        (_Weights if op.kind is OpKind.WEIGHT_H2D else Op)(
            **{f.name: getattr(replace(op, deps=()), f.name) for f in fields(Op)}
        )
        for op in plan.ops
    ]
    apart = _WithOwnLane(
        plan.policy, plan.subgroups, plan.placements, plan.num_slots,
        with_dependencies(own, (*LANES, OWN), len(plan.subgroups), plan.norms, chain=False), plan.norms,
    )  # fmt: skip
    found = {}
    for name, more in (("as the rates say", 0.0), ("up to 30 % more", 0.3)):
        slower = {s.id: 1 + more * random.Random(s.id).random() for s in plan.subgroups}

        def seconds(op: Op, slower: dict[int, float] = slower) -> float:
            return card.seconds(op) * (slower[op.subgroup] if op.kind is OpKind.CPU_UPDATE else 1.0)

        ((_, ends),) = times_together(
            [apart], seconds, lambda op: STEP_AT if op.gate == "step" else 0.0, {},
            lambda op: {H2D: 1.0} if op.lane in (H2D, OWN) else {},
        )  # fmt: skip
        found[name] = round((max(ends.values()) - STEP_AT) / _update(plan, card, seconds), 4)
    return found


if __name__ == "__main__":
    raise SystemExit(main())

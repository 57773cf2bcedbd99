"""Stage: measures the time of the update for several strides and static ratios. Compares it with a lower bound (time of
the busiest lane), and with the model's prediction: from the calibration if the stage `calibration` has run, otherwise
from the speeds of the stage `links` alone, which do not say how much lanes slow each other down.

Weights and gradients are bf16. There is no real backward: the gradients are given. A pause before `step()` lets the
early copies end, as they would during a long backward.
"""

from __future__ import annotations

import time
from typing import Any

import psutil
import torch

import tidegate
from bench.gpu.calibration import calibrated_card
from bench.gpu.target import Target, run_stage, spread
from tidegate.knobs.knobs import Knobs
from tidegate.plan import Plan
from tidegate.plan.ops import OpKind
from tidegate.simulator.steady_state import Rank
from tidegate.simulator.what_if import what_if
from tidegate.speeds.rate_card import RateCard

HOST_BYTES_PER_PARAM = 14
ROUNDS = 5
SUBGROUP_NUMEL, SLOTS = 25_000_000, 3
SETTINGS: list[tuple[float | str, float]] = [
    ("off", 0.0), *((float(k), 0.0) for k in range(1, 9)), *((s, r) for r in (0.25, 0.5, 0.75) for s in ("off", 2.0)),
]  # fmt: skip


class _Give(torch.autograd.Function):
    """Autograd function whose backward returns given gradients, without computation."""

    @staticmethod
    def forward(ctx: Any, grads: list[torch.Tensor], *params: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        return torch.zeros((), device=params[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None, *ctx.grads)


def rates_of(links: dict[str, Any]) -> RateCard:
    return RateCard(
        h2d_bytes_per_second=links["both_at_once"]["h2d"]["median"],
        d2h_bytes_per_second=links["both_at_once"]["d2h"]["median"],
        cpu_params_per_second=links["cpu_update_params_per_second"]["median"],
        device_params_per_second=links["device_update_params_per_second"]["median"],
        norm_params_per_second=links["device_update_params_per_second"]["median"],
    )


def bound_seconds(plan: Plan, rates: RateCard) -> float:
    """Lower bound of the update's time with this plan, in seconds: the busiest lane's work that cannot begin before
    `step()`.

    Copies of gradients and mirrors, and the first copy of state into each slot, can be done before.
    """
    busy = dict.fromkeys(plan.lanes, 0.0)
    filled: set[int | None] = set()
    for op in plan.ops:
        early = op.kind in (OpKind.GRAD_D2H, OpKind.WEIGHT_D2H)
        if op.kind is OpKind.STATE_H2D and op.slot not in filled:
            filled.add(op.slot)
            early = True
        if not early:
            busy[op.lane] += rates.seconds(op)
    return max(busy.values())


def measure(
    optimizer: tidegate.AdamW,
    params: list[torch.nn.Parameter],
    target: Target,
    knobs: Knobs,
    rates: RateCard,
    calibrated: RateCard | None,
) -> dict[str, Any]:
    optimizer.apply_knobs(knobs)
    grads = [torch.randn_like(p) * 1e-2 for p in params]
    pause = 1.5 * sum(g.numel() * g.element_size() for g in grads) / (rates.d2h_bytes_per_second or 1e9)
    seconds, plans = [], []
    optimizer.observers[:] = [lambda result, _: plans.append(result.plan)]
    for step in range(ROUNDS + 2):
        optimizer.zero_grad()
        _Give.apply(grads, *params).backward()
        target.finish_enqueued()
        time.sleep(pause)
        start = time.monotonic()
        optimizer.step()
        target.finish_enqueued()
        if step >= 2:  # knobs settle in the first
            seconds.append(time.monotonic() - start)
    engine = optimizer.engine
    rank = Rank(engine.subgroups, engine.num_slots)
    predicted = what_if(rank, engine.effective, calibrated or rates)
    numel, found = sum(p.numel() for p in params), spread(seconds)
    bound = bound_seconds(plans[-1], rates)
    return {
        "stride": knobs.stride,
        "static_ratio": knobs.static_ratio,
        "update_seconds": found,
        "params_per_second": numel / found["median"],
        "bound_seconds": bound,
        "share_of_bound": bound / found["median"],
        "predicted_seconds": predicted.update_seconds,
        "link_bytes": predicted.link_bytes,
    }


def stage(target: Target) -> dict[str, Any]:
    links = target.result_of("links")
    if links is None:
        raise SystemExit("The stage `links` comes first: run it, because this stage needs the speeds that it measures.")
    rates, calibrated = rates_of(links), calibrated_card(target)
    room = psutil.virtual_memory().available // (2 * HOST_BYTES_PER_PARAM)
    numel = target.sized(min(1_000_000_000, room), 64_000)
    params = [torch.nn.Parameter(torch.randn(numel // 16).to(target.device, torch.bfloat16)) for _ in range(16)]
    offload = target.offload(stride=2.0, subgroup_numel=target.sized(SUBGROUP_NUMEL, 2_000), num_slots=SLOTS)
    settings = SETTINGS[:: 3 if target.dry else 1]
    with tidegate.AdamW(params, offload=offload) as optimizer:
        rows = [
            measure(optimizer, params, target, Knobs(stride=s, static_ratio=r), rates, calibrated) for s, r in settings
        ]  # type: ignore[arg-type]
    return {
        "numel": numel,
        "rates": rates.to_dict(),
        "predicted_from": "links" if calibrated is None else "calibration",
        "settings": rows,
    }


if __name__ == "__main__":
    run_stage(stage)

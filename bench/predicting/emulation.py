"""Speeds of an emulated device that leave the processors to the lanes that are real.

A real device copies and updates without the host's processors; the emulated one does both with them. Paced to more than
a processor can do, its lanes are the processor's own speed under another name, and they take from the CPU's lane and
from the paths' threads what no device would take.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, closing
from statistics import median
from typing import Final

from tidegate.agent.calibration.lane_loads import device_loads
from tidegate.agent.calibration.lane_rates import rate
from tidegate.agent.devices.emulated import EmulatedDevice, EmulatedRates
from tidegate.plan.ops import D2H, DEVICE, H2D

SHARES: Final = {H2D: 0.5, D2H: 0.25, DEVICE: 0.2}
"""Of one processor that each lane takes at its pace. Copies to the device bring back every weight that the CPU updates:
any slower, and nothing would be bound by the CPU."""
NUMEL, PIECE_BYTES = 8_000_000, 8 << 20
SECONDS, ROUNDS = 0.1, 5


def affordable() -> EmulatedRates:
    """Each lane's speed without a pace, alone, times its share."""
    endless = EmulatedRates(
        h2d_bytes_per_second=math.inf, d2h_bytes_per_second=math.inf, update_params_per_second=math.inf
    )
    found: dict[str, list[float]] = {}
    with closing(EmulatedDevice(1 << 30, endless)) as device, ExitStack() as stack:
        loads = device_loads(stack, device, NUMEL, PIECE_BYTES)
        for _ in range(ROUNDS):
            for load in loads:
                found.setdefault(load.lane, []).append(rate(load.once, SECONDS))
    return EmulatedRates(
        h2d_bytes_per_second=SHARES[H2D] * median(found[H2D]),
        d2h_bytes_per_second=SHARES[D2H] * median(found[D2H]),
        update_params_per_second=SHARES[DEVICE] * median(found[DEVICE]),
    )

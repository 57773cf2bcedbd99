"""Rates for the emulated device that leave enough processor time for the real lanes.

The emulated device copies and updates with the host's processors, which a real device does not need. With rates above
the speed of a processor, its lanes would only show the speed of the processor, and would take time from the CPU lane
and from the threads of the paths.
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
"""Share of one processor that each emulated lane may use. It is largest for copies to the device: they carry every
weight that the CPU has updated, and if they were slower, the CPU would never be the bottleneck."""
NUMEL, PIECE_BYTES = 8_000_000, 8 << 20
SECONDS, ROUNDS = 0.1, 5


def affordable() -> EmulatedRates:
    """Rates for the emulated device: the speed of each lane alone without pacing, times its share in SHARES."""
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

"""Stage: calibrates this machine as `tidegate calibrate` does, without storage paths. The stages that measure updates
compare them with predictions from this calibration."""

from __future__ import annotations

import sys
from typing import Any

import torch

from bench.gpu.target import Target, run_stage
from tidegate.agent.calibration.calibrate import calibrate
from tidegate.agent.devices.selection import choose_device
from tidegate.kernels.adamw import IMPLEMENTATION
from tidegate.speeds.rate_card import RateCard
from tidegate.speeds.saved_calibration import Calibration


def calibrated_card(target: Target) -> RateCard | None:
    """The rate card of this stage's result; None if the stage was not run."""
    found = target.result_of("calibration")
    return None if found is None else Calibration.from_dict(found).card


def stage(target: Target) -> dict[str, Any]:
    sizes: dict[str, Any] = {"numel": 200_000, "op_bytes": 1 << 18, "seconds": 0.02, "rounds": 1} if target.dry else {}
    settings = target.offload(device_memory_bytes=target.sized(0, 1 << 26))
    device = choose_device(settings, [torch.zeros(1).to(target.device)], IMPLEMENTATION)
    try:
        found = calibrate(device=device, progress=lambda what: print(what, file=sys.stderr, flush=True), **sizes)
    finally:
        device.close()
    return found.to_dict()


if __name__ == "__main__":
    run_stage(stage)

"""Formulas of the papers "Deep Optimizer States" and "MLP-Offload", with the symbols of the papers.

DOS: Maurya et al., "Deep Optimizer States", Middleware '24, https://doi.org/10.1145/3652892.3700781.
MLP: Maurya et al., "MLP-Offload", SC '25.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tidegate.errors import ConfigError
from tidegate.plan.tier_split import PathSpeeds


def cpu_to_device_ratio(B: float, U_c: float, U_g: float, D_c: float = math.inf) -> float:
    """The number of subgroups updated on the CPU for each subgroup updated on the device (DOS Eq. 1):

        k = (3/B + 1/U_g) / (1/U_c + 1/D_c - 1/(2B))

    All arguments are in parameters per second. `B`: speed of the link in one direction, with one fp32 word for each
    parameter. `U_c`, `U_g`: speed of updates on the CPU and on the device. `D_c`: speed at which the CPU converts new
    weights to 16 bits; infinite when the update itself writes 16 bits. The formula assumes a state of three fp32 words
    per parameter, and a weight of half a word.

    The ratio is infinite when the denominator is not positive: then the CPU updates a subgroup faster than its weight
    crosses the link, and no share on the device makes the update shorter.
    """
    for name, value in {"B": B, "U_c": U_c, "U_g": U_g, "D_c": D_c}.items():
        if not value > 0:
            raise ConfigError(f"{name}={value!r} must be a positive number of parameters per second.")
    cpu_seconds = 1 / U_c + 1 / D_c - 1 / (2 * B)
    return (3 / B + 1 / U_g) / cpu_seconds if cpu_seconds > 0 else math.inf


def stride_from_ratio(ratio: float) -> float:
    """The stride (DOS Algorithm 1) for a CPU-to-device ratio (DOS Eq. 1): the ratio plus one.

    The device share is 1/stride in Algorithm 1, and 1/(ratio + 1) in Eq. 1. DOS calls both numbers k.
    """
    if not ratio >= 0:
        raise ConfigError(f"ratio={ratio!r} must not be negative.")
    return ratio + 1


def interleaved_seconds(cpu_params: float, staged_params: float, B: float, U_c: float, U_g: float) -> float:
    """The time of an update in seconds according to DOS Eq. 1: the time of the CPU or of the device, whichever is
    longer. With the ratio k of Eq. 1 both times are equal.

    cpu_params, staged_params: numbers of parameters that are updated on the CPU, and on the device with staged state.
    `B`, `U_c` and `U_g` as in `cpu_to_device_ratio`.
    """
    return max(cpu_params / U_c, staged_params * (3 / B + 1 / U_g) + cpu_params / (2 * B))


def stored_seconds(stored_bytes: Mapping[str, float], speeds: Mapping[str, PathSpeeds]) -> float:
    """The storage time in seconds according to MLP Eq. 1: the time of the path that needs longest. Each path reads and
    writes its bytes once, both at the smaller of its two bandwidths.

    stored_bytes: bytes of state on each path, by name. speeds: speeds of the paths, by name.
    """
    return max(
        (
            2 * nbytes / min(speeds[path].read_bytes_per_second, speeds[path].write_bytes_per_second)
            for path, nbytes in stored_bytes.items()
        ),
        default=0.0,
    )

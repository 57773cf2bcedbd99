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
    """Subgroups updated on the CPU for each one on the device (DOS Eq. 1):

        k = (3/B + 1/U_g) / (1/U_c + 1/D_c - 1/(2B))

    All in parameters per second: `B`, the link, one direction, in fp32 words; `U_c` and `U_g`, updates on CPU and
    device; `D_c`, the CPU's conversion of new weights to 16 bits (infinite when the update itself writes them). The
    formula assumes state of three fp32 words per parameter, and a weight of half a word.

    Infinite when the denominator is not positive: then the CPU updates a subgroup faster than its weight crosses the
    link, and no share on the device makes the update shorter.
    """
    for name, value in {"B": B, "U_c": U_c, "U_g": U_g, "D_c": D_c}.items():
        if not value > 0:
            raise ConfigError(f"{name}={value!r} must be a positive number of parameters per second.")
    cpu_seconds = 1 / U_c + 1 / D_c - 1 / (2 * B)
    return (3 / B + 1 / U_g) / cpu_seconds if cpu_seconds > 0 else math.inf


def stride_from_ratio(ratio: float) -> float:
    """Stride (DOS Algorithm 1: device share = 1/stride) of a CPU-to-device ratio (DOS Eq. 1: 1/(ratio + 1)).

    DOS writes k for both; they differ by one.
    """
    if not ratio >= 0:
        raise ConfigError(f"ratio={ratio!r} must not be negative.")
    return ratio + 1


def ratio_from_stride(stride: float) -> float:
    """CPU-to-device ratio (DOS Eq. 1) of a stride (DOS Algorithm 1)."""
    if not stride >= 1:
        raise ConfigError(f"stride={stride!r} must be at least 1.")
    return stride - 1


def interleaved_seconds(cpu_params: float, staged_params: float, B: float, U_c: float, U_g: float) -> float:
    """The time of an update according to DOS Eq. 1: the maximum of the times of CPU and device. The ratio k of Eq. 1
    makes both equal.

    cpu_params, staged_params: parameters updated on the CPU, and on the device with staged state. `B`, `U_c` and `U_g`
    as in `cpu_to_device_ratio`.
    """
    return max(cpu_params / U_c, staged_params * (3 / B + 1 / U_g) + cpu_params / (2 * B))


def stored_seconds(stored_bytes: Mapping[str, float], speeds: Mapping[str, PathSpeeds]) -> float:
    """The storage time according to MLP Eq. 1: each path reads and writes its bytes at the smaller of its
    bandwidths."""
    return max(
        (
            2 * nbytes / min(speeds[path].read_bytes_per_second, speeds[path].write_bytes_per_second)
            for path, nbytes in stored_bytes.items()
        ),
        default=0.0,
    )

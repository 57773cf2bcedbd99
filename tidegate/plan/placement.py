"""Placement of subgroups: which processor updates each, and where its state lives, from `stride` and `static_ratio`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from tidegate.errors import KnobError
from tidegate.knobs.knobs import OFF, Off, spec
from tidegate.plan.ops import Processor, Residence
from tidegate.plan.plan import Placement

MAX_DENOMINATOR = 1_000_000


def place_subgroups(
    subgroup_count: int, *, stride: float | Off, static_ratio: float
) -> tuple[tuple[Processor, Residence], ...]:
    """The processor and the residence of each of the subgroups 0 to `subgroup_count` - 1.

    The last `static_ratio` of the ids (rounded half up) are residents: updated on the device, where their state stays.
    Of the others, every `stride`-th is updated on the device and the rest on the CPU; their state lives on the host.
    For a whole-number stride k these are the ids with `(i + 1) % k == 0` (Deep Optimizer States, Algorithm 1); with a
    fractional stride they are spread evenly. The placement of a subgroup depends on its id only, so that it does not
    change with the order of the updates.
    """
    first_resident = subgroup_count - _resident_count(subgroup_count, static_ratio)
    staged = _staged_ids(first_resident, stride)
    host: tuple[tuple[Processor, Residence], ...] = tuple(
        ("device" if i in staged else "cpu", "host") for i in range(first_resident)
    )
    return host + (("device", "device"),) * (subgroup_count - first_resident)


def steady_placements(places: Iterable[tuple[Processor, Residence]]) -> tuple[Placement, ...]:
    """Placements in the steady state: the step before had the same ones, so no state moves to another residence."""
    return tuple(
        Placement(
            processor=processor,
            before=residence,
            after=residence,
            mirror_valid=processor == "cpu" and residence == "host",
        )
        for processor, residence in places
    )


def _resident_count(subgroup_count: int, static_ratio: float) -> int:
    ratio = _exact(float(spec("static_ratio").parse(static_ratio)))
    return math.floor(ratio * subgroup_count + Fraction(1, 2))


def _staged_ids(count: int, stride: float | Off) -> frozenset[int]:
    if stride == OFF:
        return frozenset()
    value = spec("stride").parse(stride)
    if isinstance(value, str):
        raise KnobError(f"stride={stride!r} must be a number or 'off' before subgroups can be placed.", "stride")
    step = _exact(value)
    # floor(i / step) in whole numbers: with floats the count could be off by one where i / step is nearly whole.
    staged_before = [i * step.denominator // step.numerator for i in range(count + 1)]
    return frozenset(i for i in range(count) if staged_before[i + 1] > staged_before[i])


def _exact(value: float) -> Fraction:
    """The exact value of a number as it was written: 1.1 is 11/10, not the nearest binary fraction."""
    return Fraction(value).limit_denominator(MAX_DENOMINATOR)

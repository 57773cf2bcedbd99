"""The tuner: moves the stride where `auto` lets it, only for a predicted gain over a threshold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tidegate.knobs import Off
from tidegate.model.rates import RateCard
from tidegate.model.simulate import better_stride
from tidegate.plan.ops import Subgroup

FIRST_LOOK_STEPS: Final = 8
"""Steps after a move until the next look: rates settle, and the change shows."""
LONGEST_WAIT_STEPS: Final = 64
"""Each look that finds nothing better doubles the steps until the next, up to this: looking costs time too."""
MINIMUM_GAIN: Final = 0.05
"""Share of the update time that a move must promise."""


class StrideTuner:
    """Proposes strides from live rates. Deterministic: the same calls give the same proposals."""

    def __init__(self) -> None:
        self._steps_left = self._wait_steps = FIRST_LOOK_STEPS

    def propose(
        self,
        stride: float | Off,
        subgroups: Sequence[Subgroup],
        static_ratio: float,
        num_slots: int,
        rates: Callable[[], RateCard | None],
    ) -> float | Off | None:
        """A better stride than the present one, or None to stay. To be called once a step; `rates` are rarely asked."""
        self._steps_left -= 1
        if self._steps_left > 0:
            return None
        known = rates()
        if known is None or known.missing:
            return None
        better = better_stride(stride, subgroups, static_ratio, num_slots, known, minimum_gain=MINIMUM_GAIN)
        stays = better is None
        self._wait_steps = min(2 * self._wait_steps, LONGEST_WAIT_STEPS) if stays else FIRST_LOOK_STEPS
        self._steps_left = self._wait_steps
        return better

"""The tuner: moves the stride where `auto` lets it, only for a predicted gain over a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidegate.knobs import Off
from tidegate.model.rates import RateCard
from tidegate.model.simulate import best_stride, what_if
from tidegate.plan.ops import Subgroup

EVERY_STEPS: Final = 8
"""Steps between two looks: rates settle, and a change shows before the next."""
MINIMUM_GAIN: Final = 0.05
"""Share of the update time that a move must promise."""


class StrideTuner:
    """Proposes strides from live rates. Deterministic: the same calls give the same proposals."""

    def __init__(self) -> None:
        self._steps = 0

    def propose(
        self, stride: float | Off, subgroups: Sequence[Subgroup], static_ratio: float, num_slots: int, rates: RateCard
    ) -> float | Off | None:
        """A better stride than the present one, or None to stay. To be called once a step."""
        self._steps += 1
        if self._steps % EVERY_STEPS or rates.missing:
            return None
        best = best_stride(subgroups, static_ratio, num_slots, rates)
        if best == stride:
            return None
        now = what_if(subgroups, stride=stride, static_ratio=static_ratio, num_slots=num_slots, rates=rates)
        then = what_if(subgroups, stride=best, static_ratio=static_ratio, num_slots=num_slots, rates=rates)
        return best if then.update_seconds < (1 - MINIMUM_GAIN) * now.update_seconds else None

"""What a change of knobs would do to the update, asked of the simulator with the run's own rates."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from tidegate.daemon.control.run import Run
from tidegate.errors import TidegateError
from tidegate.knobs import AUTO, OFF, Knobs, KnobValue, same
from tidegate.model.rates import RateCard
from tidegate.model.simulate import what_if
from tidegate.plan.ops import Subgroup
from tidegate.wire import KnobPreview

log = logging.getLogger(__name__)

NO_STORAGE = "No prediction: storage is not yet in it, and this run has storage paths."
NO_RATES = "No prediction yet: it needs the rates of a few steps."


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of the lead rank: sizes and speeds. `effective_stride` is what `auto` stands for."""

    subgroups: tuple[Subgroup, ...]
    rates: RateCard
    num_slots: int
    effective_stride: KnobValue

    def update_seconds(self, knobs: Knobs) -> float | None:
        """None when a rate that these knobs need was never measured."""
        stride = self.effective_stride if knobs.stride == AUTO else knobs.stride
        if stride == AUTO:
            return None
        try:
            found = what_if(
                self.subgroups,
                stride=OFF if stride == OFF else float(stride),
                static_ratio=knobs.static_ratio,
                num_slots=self.num_slots,
                rates=self.rates,
            )
        except TidegateError as error:
            log.info("no prediction: %s", error)
            return None
        return found.update_seconds


def evidence(run: Run) -> Evidence | None:
    """None until the lead rank has told its sizes and rates, and for runs with paths: `what_if` knows no storage."""
    if run.lead is None or run.lead[1].rates is None or not run.lead[1].hello.subgroups or run.paths:
        return None
    member = run.lead[1]
    hello, rates = member.hello, run.lead[1].rates
    kinds = [Subgroup(0, s.numel, s.weight_bytes, s.grad_bytes, s.state_bytes) for s in hello.subgroups]
    repeated = [kind for kind, sizes in zip(kinds, hello.subgroups, strict=True) for _ in range(sizes.count)]
    return Evidence(
        subgroups=tuple(replace(subgroup, id=number) for number, subgroup in enumerate(repeated)),
        rates=RateCard.from_dict(rates.model_dump()),
        num_slots=hello.num_slots,
        effective_stride=member.effective.get("stride", AUTO),
    )


def preview(
    run: str, generation: int, before: Knobs, after: Knobs, known: Evidence | None, *, paths: bool
) -> KnobPreview:
    """The difference, and the predicted update seconds before and after. Slow enough to keep off the event loop.

    paths: whether the run has storage paths, and so their knobs.
    """
    old, new = before.as_dict(paths=paths), after.as_dict(paths=paths)
    now, then = (known.update_seconds(knobs) if known else None for knobs in (before, after))
    return KnobPreview(
        run=run,
        generation=generation,
        before=old,
        after=new,
        changed={name: value for name, value in new.items() if not same(name, value, old[name])},
        predicted_update_seconds_before=now,
        predicted_update_seconds_after=then,
        no_prediction="" if now is not None and then is not None else NO_STORAGE if paths else NO_RATES,
    )

"""The verdict on a step: one sentence with the main wait of its update, figures, and a remedy.

The table REMEDIES says which remedy belongs to which cause; verdicts, screens and alerts follow it. A remedy is a rule
of thumb; `GET /v1/runs/{run}/advice` gives a prediction of the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tidegate.knobs.knobs import OFF, device_share
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import COMPUTE_LANES, LINK_LANES

NO_KNOB: Final = "none"
SMALL_WAIT_SHARE: Final = 0.02
"""Smallest wait that counts, as a share of the update."""
COPIED_AGAIN_SHARE: Final = 0.5
"""Smallest share of gradients that were copied twice for which there is a remedy."""
LATE_GRADIENT_SHARE: Final = 0.75
"""If at least this share of the backward has passed when its first gradient arrives, gradients are late."""
TOGETHER_SHARE: Final = 0.75
"""If one node of the autograd graph produces at least this share of the gradients at the same time, gradients are
late."""
SKIPPED: Final = "the step was skipped, because a gradient was not finite: the weights are as they were"
"""Text for a step without an update."""


@dataclass(frozen=True, kw_only=True)
class UpdateFigures:
    """The figures of one step, or the sums of several steps, in seconds, bytes and parameters.

    stalls: seconds of the update by cause. lanes: bytes and busy seconds of link and paths in the update, by lane.
    ceilings: highest speed of each path lane alone, in bytes per second. updated: parameters by processor.
    recopied: share of the gradient bytes on the host that were copied during the backward and then again.
    first_gradient: share of the backward that had passed when its first gradient arrived.
    together: share of the gradients that one node of the autograd graph gave at the same time, as with torch.compile.
    """

    step_seconds: float
    update_seconds: float
    stalls: Mapping[str, float]
    lanes: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    ceilings: Mapping[str, float] = field(default_factory=dict)
    updated: Mapping[str, int] = field(default_factory=dict)
    paths: Sequence[str] = ()
    recopied: float = 0.0
    first_gradient: float = 0.0
    together: float = 0.0

    @property
    def cause(self) -> tuple[str, float]:
        """The cause with the longest wait of the update, and its seconds; an empty name if there was no long wait."""
        cause, wait = max(self.stalls.items(), key=lambda item: item[1], default=("", 0.0))
        return (cause, wait) if wait >= SMALL_WAIT_SHARE * self.update_seconds else ("", 0.0)

    @property
    def link_full(self) -> bool:
        """Whether a direction of the link was busy for more than 80 % of the update."""
        return any(self.lanes.get(lane, (0, 0.0))[1] > 0.8 * self.update_seconds for lane in LINK_LANES)

    @property
    def paths_uneven(self) -> bool:
        """Whether a path was busy for less than 80 % of the time of another."""
        busy = [sum(self.lanes.get(f"{p}:{way}", (0, 0.0))[1] for way in ("read", "write")) for p in self.paths]
        return min(busy, default=0.0) < 0.8 * max(busy, default=0.0)


@dataclass(frozen=True, slots=True)
class Remedy:
    """A remedy: the kind of cause that it is for, the knob that it turns (NO_KNOB if no knob helps), and its words.

    words: a format string, into which the figures and the knobs of the step are filled. helps: whether the remedy helps
    a step with these figures and knobs.
    """

    kind: str
    knob: str
    words: str
    helps: Callable[[UpdateFigures, EffectiveKnobs], bool] = lambda figures, knobs: True


REMEDIES: Final = (
    Remedy("link", "stride", "raise stride: fewer subgroups cross the link", lambda _, knobs: knobs.stride != OFF),
    Remedy("link", "static_ratio", "raise static_ratio: state that stays on the device is not moved",
           lambda _, knobs: knobs.static_ratio < 1),
    Remedy("path", "tier_split", "set tier_split to auto: some paths are done long before others",
           lambda figures, knobs: knobs.tier_split is not None and figures.paths_uneven),
    Remedy("path", "host_cache", "raise host_cache, or add a path: storage is the slowest part"),
    Remedy("lock", "host_cache", "raise host_cache: other processes of the node use the path, too"),
    # Busy times of the processors are not known: stride and the use of the link tell which of them has too much to do.
    Remedy("compute", "stride", "raise stride: the CPU has nothing to update",
           lambda figures, knobs: device_share(knobs.stride) == 1 and not figures.updated.get("cpu")),
    Remedy("compute", "stride", "lower stride ({knobs.stride} now): the link has room for more updates on the device",
           lambda figures, knobs: device_share(knobs.stride) < 1 and bool(figures.updated.get("cpu"))
           and not figures.link_full),
    Remedy("collective", NO_KNOB, "another rank holds the update up"),
    Remedy("device memory", "static_ratio", "lower static_ratio: state that moves to the host leaves room"),
    Remedy("gradients copied again", NO_KNOB,
           "{figures.recopied:.0%} of the gradients were copied again, because something changed them in place after "
           "the backward: clip with the optimizer's max_grad_norm instead of clip_grad_norm_",
           lambda figures, _: figures.recopied >= COPIED_AGAIN_SHARE),
    Remedy("late gradients", NO_KNOB,
           "{figures.together:.0%} of the gradients came together, when one node of the graph had done its work, too "
           "late to be copied beside the backward: where torch.compile has the whole model, compile its blocks instead",
           lambda figures, _: figures.together >= TOGETHER_SHARE),
    Remedy("late gradients", NO_KNOB,
           "no gradient came before {figures.first_gradient:.0%} of the backward had passed, too late to be copied "
           "beside it: where torch.compile has the whole model, compile its blocks instead",
           lambda figures, _: figures.first_gradient >= LATE_GRADIENT_SHARE),
)  # fmt: skip
"""All remedies. Of those for one kind of cause, the first that helps is named."""
_OF_GRADIENTS: Final = ("gradients copied again", "late gradients")
_KINDS: Final = {"": "compute", **dict.fromkeys(COMPUTE_LANES, "compute"), **dict.fromkeys(LINK_LANES, "link")}


def kind_of(cause: str) -> str:
    """The kind of a stall cause: that of its lane, or the cause itself."""
    return "path" if ":" in cause else _KINDS.get(cause, cause)


def remedy_for(cause: str) -> Remedy:
    """The usual remedy for a cause, where no figures and knobs are at hand; without words if there is none."""
    kind = kind_of(cause)
    return next((remedy for remedy in REMEDIES if remedy.kind == kind), Remedy(kind, NO_KNOB, ""))


def remedies_of(figures: UpdateFigures, knobs: EffectiveKnobs) -> list[str]:
    """What helps a step with these figures and knobs, as clauses: against its longest wait, and for its gradients."""
    found: dict[str, str] = {}
    kinds = (kind_of(figures.cause[0]), *_OF_GRADIENTS)
    for remedy in REMEDIES:
        if remedy.kind in kinds and remedy.helps(figures, knobs):
            found.setdefault(remedy.kind, remedy.words.format(figures=figures, knobs=knobs))
    return list(found.values())


def verdict(figures: UpdateFigures, knobs: EffectiveKnobs | None = None) -> str:
    """The verdict on a step as one sentence without a full stop at its end. `knobs`: the knobs in force; if given, the
    verdict also says what helps."""
    if figures.step_seconds <= 0 or figures.update_seconds <= 0:
        return "no update yet"
    share = figures.update_seconds / figures.step_seconds
    cause, wait = figures.cause
    waited = f"it waited {wait / figures.update_seconds:.0%} of it for {cause}{_speed(figures, cause)}"
    return "; ".join([
        f"the update took {figures.update_seconds:.3g} s, {share:.0%} of the step",
        waited if cause else f"hardly anything held it up{_computed(figures)}",
        *(remedies_of(figures, knobs) if knobs is not None else ()),
    ])  # fmt: skip


def _computed(figures: UpdateFigures) -> str:
    total = sum(figures.updated.values())
    return f", and the device updated {figures.updated.get('device', 0) / total:.0%} of the parameters" if total else ""


def _speed(figures: UpdateFigures, lane: str) -> str:
    """The speed of `lane`, with its highest speed if that is known; empty if it copied nothing."""
    nbytes, seconds = figures.lanes.get(lane, (0, 0.0))
    if not nbytes or seconds <= 0:
        return ""
    ceiling = figures.ceilings.get(lane)
    beside = f" of {_gigabytes(ceiling)}" if ceiling else ""
    return f", which moved {_gigabytes(nbytes / seconds)}{beside}"


def _gigabytes(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"

"""The verdict on a step: one sentence with the main wait of its update, figures, and the knob to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tidegate.knobs.knobs import OFF, device_share
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import COMPUTE_LANES, LINK_LANES

SMALL_WAIT_SHARE: Final = 0.02
"""Smallest wait that the verdict mentions, as a share of the update."""
COPIED_AGAIN_SHARE: Final = 0.5
"""Smallest share of gradients that were copied twice at which the verdict mentions the second copies."""
LATE_GRADIENT_SHARE: Final = 0.75
"""If at least this share of the backward has passed when its first gradient arrives, the verdict mentions that
gradients are late."""
TOGETHER_SHARE: Final = 0.75
"""If one node of the autograd graph produces at least this share of the gradients at the same time, the verdict
mentions it."""

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
        """The cause with the longest wait of the update, and its seconds; an empty name if there was no wait."""
        return max(self.stalls.items(), key=lambda item: item[1], default=("", 0.0))


def verdict(figures: UpdateFigures, knobs: EffectiveKnobs | None = None) -> str:
    """The verdict on a step as one sentence without a full stop at its end. `knobs`: the knobs in force; if given, the
    verdict also says which knob to change."""
    if figures.step_seconds <= 0 or figures.update_seconds <= 0:
        return "no update yet"
    share = figures.update_seconds / figures.step_seconds
    whole = f"the update took {figures.update_seconds:.3g} s, {share:.0%} of the step"
    cause, wait = figures.cause
    remedy = f"; {advice}" if knobs is not None and (advice := remedy_of(figures, knobs)) else ""
    remedy += "".join(f"; {hint}" for hint in _of_gradients(figures))
    if wait < SMALL_WAIT_SHARE * figures.update_seconds:
        return f"{whole}; hardly anything held it up{_computed(figures)}{remedy}"
    waited = f"{wait / figures.update_seconds:.0%} of it for {cause}"
    return f"{whole}; it waited {waited}{_speed(figures, cause)}{remedy}"


def remedy_of(figures: UpdateFigures, knobs: EffectiveKnobs) -> str:
    """The knob to change, derived from the longest wait of the update; empty if no knob would help.

    A rule of thumb; `GET /v1/runs/{run}/advice` gives a prediction of the simulator.
    """
    cause, wait = figures.cause
    if wait < SMALL_WAIT_SHARE * figures.update_seconds:
        return _other_processor(figures, knobs)
    if cause in LINK_LANES:
        return "raise stride: fewer subgroups cross the link" if knobs.stride != OFF else _keep_on_device(knobs)
    if cause in COMPUTE_LANES:
        return _other_processor(figures, knobs)
    if cause.rpartition(":")[0] in figures.paths:
        return _of_paths(figures, knobs)
    return {
        "lock": "raise host_cache: other processes of the node use the path, too",
        "collective": "it is not this rank that holds the update up",
    }.get(cause, "")


def _of_gradients(figures: UpdateFigures) -> Iterator[str]:
    """Hints why copies of gradients did not overlap with the backward."""
    if figures.recopied >= COPIED_AGAIN_SHARE:
        yield (
            f"{figures.recopied:.0%} of the gradients were copied again, because something changed them in place after "
            "the backward: clip with the optimizer's max_grad_norm instead of clip_grad_norm_"
        )
    if figures.together >= TOGETHER_SHARE:
        yield (
            f"{figures.together:.0%} of the gradients came together, when one node of the graph had done its work, too "
            "late to be copied beside the backward: where torch.compile has the whole model, compile its blocks instead"
        )
    elif figures.first_gradient >= LATE_GRADIENT_SHARE:
        yield (
            f"no gradient came before {figures.first_gradient:.0%} of the backward had passed, too late to be copied "
            "beside it: where torch.compile has the whole model, compile its blocks instead"
        )


def _of_paths(figures: UpdateFigures, knobs: EffectiveKnobs) -> str:
    """Advice where storage is the bottleneck: set tier_split to auto if some paths finish long before others, otherwise
    raise host_cache or add a path."""
    busy = [
        figures.lanes.get(f"{p}:read", (0, 0.0))[1] + figures.lanes.get(f"{p}:write", (0, 0.0))[1]
        for p in figures.paths
    ]
    if knobs.tier_split is not None and len(busy) > 1 and min(busy) < 0.8 * max(busy):
        return "set tier_split to auto: some paths are done long before others"
    return "raise host_cache, or add a path: storage sets the pace"


def _keep_on_device(knobs: EffectiveKnobs) -> str:
    return "raise static_ratio: state that stays on the device is not moved" if knobs.static_ratio < 1 else ""


def _other_processor(figures: UpdateFigures, knobs: EffectiveKnobs) -> str:
    """Advice where compute is the bottleneck: to move a share of the updates to the other processor. Empty if there is
    no advice.

    The busy times of the processors are not known. So the present stride and the use of the link decide whether the
    advice is to raise or to lower the stride.
    """
    share = device_share(knobs.stride)
    if not figures.updated.get("cpu"):
        return "raise stride: the CPU has nothing to update" if share == 1 else ""
    if share < 1 and not _is_full(figures):
        return f"lower stride ({knobs.stride} now): the link has room for more updates on the device"
    return ""


def _is_full(figures: UpdateFigures) -> bool:
    """Whether a direction of the link was busy for more than 80 % of the update."""
    return any(figures.lanes.get(lane, (0, 0.0))[1] > 0.8 * figures.update_seconds for lane in LINK_LANES)


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

"""Summary figures of the newest steps of a run, and the verdict on them: for `tidegate status` and the live view. Pure:
the module draws nothing and sends no requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from tidegate import units
from tidegate.timeline.timeline import PHASES
from tidegate.timeline.verdict import UpdateFigures
from tidegate.timeline.verdict import verdict as verdict_on_update
from tidegate.wire.base import Liveness
from tidegate.wire.run import RunView
from tidegate.wire.step import StepReport

MANY_SKIPPED = 0.1
"""Share of skipped steps above which the page warns; a gradient scaler for fp16 skips a few steps normally."""
WINDOW = 20
"""Number of the newest steps from which the figures (medians and means) are computed."""


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """Figures of the newest `steps` steps. Durations are medians in seconds, shares 0 to 1. None: not reported.

    `loss` and `grad_norm` are those of the last step. `skipped` counts the skipped ones of all known steps.
    """

    steps: int
    pace: float | None
    phase_seconds: dict[str, float]
    exposed_seconds: float | None
    stall_share: dict[str, float]
    """Share of the update that waits for each cause, largest first."""
    tokens_per_second: float | None
    loss: float | None
    grad_norm: float | None
    skipped: int
    skipped_lately: int = 0
    """Number of steps among the newest `steps` whose update was skipped, because a gradient was not finite."""

    @property
    def step_count_text(self) -> str:
        """The number of steps in the figures as text: `20 steps`."""
        return units.counted(self.steps, "step")

    @property
    def step_seconds(self) -> float:
        return sum(self.phase_seconds.values())

    @property
    def update_share(self) -> float | None:
        total = self.step_seconds
        return self.phase_seconds.get("update", 0.0) / total if total > 0 else None


def summarize(steps: Sequence[StepReport]) -> StepSummary:
    """The figures of the newest WINDOW of `steps` (oldest first)."""
    recent = list(steps)[-WINDOW:]
    phases = {p: _median(s.phase_seconds.get(p, 0.0) for s in recent) for p in PHASES}
    update_total = sum(s.phase_seconds.get("update", 0.0) for s in recent)
    waits: dict[str, float] = {}
    for row in (row for step in recent for row in step.stalls if row.phase == "update"):
        waits[row.cause] = waits.get(row.cause, 0.0) + row.seconds
    shares = {cause: value / update_total for cause, value in waits.items() if value > 0} if update_total > 0 else {}
    last = recent[-1] if recent else None
    return StepSummary(
        steps=len(recent),
        pace=pace(recent),
        phase_seconds={phase: value for phase, value in phases.items() if value > 0},
        exposed_seconds=_median(sum(s.exposed_seconds.values()) for s in recent)
        if any(s.exposed_seconds for s in recent)
        else None,
        stall_share=dict(sorted(shares.items(), key=lambda item: -item[1])),
        tokens_per_second=tokens_per_second(recent),
        loss=last.loss if last else None,
        grad_norm=last.grad_norm if last else None,
        skipped=sum(step.skipped for step in steps),
        skipped_lately=sum(step.skipped for step in recent),
    )


def last_figures(run: RunView) -> StepSummary:
    """The figures of the last step of the lowest rank that has finished a step. If no rank has finished a step, the
    summary has 0 steps."""
    ranks = sorted(run.ranks, key=lambda rank: rank.rank)
    return summarize([rank.last_step for rank in ranks if rank.last_step is not None][:1])


def pace(steps: Sequence[StepReport]) -> float | None:
    """Median seconds from the end of one step to the end of the next; with only one step, the sum of its phases."""
    gaps = [
        (after.timestamp - before.timestamp) / (after.step - before.step)
        for before, after in pairwise(steps)
        if after.step > before.step and after.timestamp > before.timestamp
    ]
    if gaps:
        return median(gaps)
    return sum(steps[-1].phase_seconds.values()) if steps else None


def tokens_per_second(steps: Sequence[StepReport]) -> float | None:
    """Tokens per second: the tokens of these steps divided by the wall time of their phases. Steps without a number of
    tokens are ignored; None if no steps are left."""
    counted = [step for step in steps if step.tokens is not None]
    elapsed = sum(sum(step.phase_seconds.values()) for step in counted)
    return sum(step.tokens or 0 for step in counted) / elapsed if elapsed > 0 else None


def verdict(run: RunView, figures: StepSummary, now: float) -> str:
    """One sentence on what the run spends its time on, or why that is unknown."""
    if run.liveness == "failed":
        return failure(run)
    if run.liveness == "lost":
        return f"Lost: no message from {_silent(run, 'lost')} for {units.age(now - _last_word(run, 'lost'))}."
    if run.liveness == "stale":
        return f"Late: no message from {_silent(run, 'stale')} for {units.age(now - _last_word(run, 'stale'))}."
    if figures.skipped_lately > MANY_SKIPPED * figures.steps:
        return (
            f"{figures.skipped_lately} of the newest {figures.step_count_text} "
            f"{'was' if figures.steps == 1 else 'were'} skipped, because a gradient was not finite: "
            "the weights stay as they are."
        )
    if figures.steps == 0 or figures.update_share is None:
        return _without_figures(run)
    seconds = figures.phase_seconds.get("update", 0.0)
    stalls = {cause: share * seconds for cause, share in figures.stall_share.items()}
    said = verdict_on_update(UpdateFigures(step_seconds=figures.step_seconds, update_seconds=seconds, stalls=stalls))
    if run.liveness == "finished":
        return f"Finished after {units.integer(run.step)} steps: {said}."
    return f"{said[0].upper()}{said[1:]}."


def failure(run: RunView) -> str:
    """Sentence on a run that an exception has ended: `Failed after 1,391 steps: StateLost on rank 0.`"""
    known = run.breakdown
    if known is None:
        return "Failed."
    steps = f"after {units.integer(known.step)} steps" if known.step else "before its first step"
    return f"Failed {steps}: {known.error} on rank {known.rank}."


def _without_figures(run: RunView) -> str:
    if run.liveness != "finished":
        return "Waiting for the first step to finish."
    if run.step:
        return f"Finished after {units.integer(run.step)} steps; the daemon does not have them any more."
    return "Finished without a step."


def column(steps: Sequence[StepReport], pick: Callable[[StepReport], float | None]) -> tuple[list[int], list[float]]:
    """The numbers of the steps for which `pick` returns a value, and these values. A step with None is left out."""
    pairs = [(step.step, value) for step in steps if (value := pick(step)) is not None]
    return [number for number, _ in pairs], [value for _, value in pairs]


def _silent(run: RunView, state: Liveness) -> str:
    ranks = [str(rank.rank) for rank in run.ranks if rank.liveness == state]
    if len(ranks) < 2:
        return f"rank {ranks[0]}" if ranks else "the run"
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"ranks {', '.join(ranks[:4])}{more}"


def _last_word(run: RunView, state: Liveness) -> float:
    return max((rank.last_seen for rank in run.ranks if rank.liveness == state), default=run.last_seen)


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0

"""Triage of runs: their order, and the suggested next action for each. Pure: it draws nothing and sends no requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tidegate import units
from tidegate.client.step_stats import StepSummary, failure, last_figures
from tidegate.timeline.verdict import NO_KNOB, remedy_for
from tidegate.wire.alert import SEVERITIES, AlertView
from tidegate.wire.prediction import Advice
from tidegate.wire.run import BROKEN_SECONDS, RunView

NOTEWORTHY_WAIT_SHARE: Final = 0.1
"""Share of the step above which waiting leads to a suggestion to change knobs."""
LARGE_UPDATE_SHARE: Final = 0.25
"""Share of the step above which an update leads to a suggestion, if waiting is below `NOTEWORTHY_WAIT_SHARE` and the
model recommends a change of knobs."""
NEARLY_FULL_SHARE: Final = 0.95
"""Used share of device memory above which the memory counts as nearly full."""
LOST, FIRING, FULL, LATE, WAITING, LARGE = 0.0, 1.0, 2.0, 3.0, 4.0, 5.0
"""Urgency of a task; lower is more urgent, and a fraction orders tasks of one kind. A rank is lost or has failed; an
alert fires; the device memory is nearly full; a rank is late (stale; it usually comes back); a run waits for a large
share of its steps; its update is a large share of the step."""
LOOK: Final = "See what holds it up."


@dataclass(frozen=True, kw_only=True)
class Task:
    """A suggested action: its urgency (lower is more urgent), a sentence, and the page where it is done."""

    run: str
    urgency: float
    sentence: str
    page: str
    if_advised: bool = False
    """The task is shown only if the model advises a change of knobs."""


def running(runs: Collection[RunView]) -> list[RunView]:
    """The running runs (any rank is live or stale), newest first."""
    return _newest_first(run for run in runs if run.is_running)


def ended(runs: Collection[RunView]) -> list[RunView]:
    """The runs without live and stale ranks, newest first."""
    return _newest_first(run for run in runs if not run.is_running)


def ordered(runs: Collection[RunView]) -> list[RunView]:
    """The running runs, then the ended runs, each newest first."""
    return running(runs) + ended(runs)


def counted(runs: Iterable[RunView]) -> str:
    """The number of runs by liveness as text: `3 live, 1 finished`."""
    return ", ".join(f"{count} {liveness}" for liveness, count in Counter(r.liveness for r in runs).most_common())


def _newest_first(runs: Iterable[RunView]) -> list[RunView]:
    return sorted(runs, key=lambda run: (-run.started_at, run.run))


def task(run: RunView, alerts: Sequence[AlertView], now: float) -> Task | None:
    """The suggested action for this run now; None if there is none."""
    if run.liveness == "finished" or (run.liveness in ("failed", "lost") and now - run.last_seen > BROKEN_SECONDS):
        return None
    if run.liveness == "failed":
        return Task(run=run.run, urgency=LOST, sentence=f"{failure(run)} Read its log.", page="run")
    if run.liveness in ("lost", "stale"):
        return _silent(run, now)
    return _fires(run.run, alerts) or _full(run) or _slow(run)


def of_no_run(alerts: Sequence[AlertView]) -> Task | None:
    """The suggested action for alerts without a run, as a task whose `run` is empty; None if none of them fires."""
    return _fires("", alerts)


def _fires(run: str, alerts: Sequence[AlertView]) -> Task | None:
    firing = [alert for alert in alerts if alert.state == "firing" and alert.severity in SEVERITIES]
    if not firing:
        return None
    worst = min(firing, key=lambda alert: (SEVERITIES.index(alert.severity), alert.starts_at))
    return Task(run=run, urgency=FIRING + SEVERITIES.index(worst.severity) / 10, sentence=_alert(worst), page="alerts")


def sorted_tasks(tasks: Collection[Task]) -> list[Task]:
    """The tasks, most urgent first."""
    return sorted(tasks, key=lambda task: (task.urgency, task.run))


def with_advice(found: Task, advice: Advice | None) -> Task | None:
    """The task with the model's advice added to its sentence, if the task suggests a change of knobs to shorten waiting
    or the update. Other tasks are returned unchanged.

    If the model recommends no change: None for a task with `if_advised`; else the task points to the page Timeline,
    unless the model could not predict anything. advice: None if it is unknown. The task is then unchanged, or None if
    it has `if_advised`.
    """
    if found.page != "tune" or found.urgency < WAITING:
        return found
    if found.if_advised and not (advice and advice.changes):
        return None
    if advice is None:
        return found
    told = f"{found.sentence} {advice.sentence}"
    if advice.changes or advice.predicted_update_seconds_now is None:
        return replace(found, sentence=told)
    return replace(found, sentence=f"{told} {LOOK}", page="timeline")


def _silent(run: RunView, now: float) -> Task:
    silent = [rank for rank in run.ranks if rank.liveness == run.liveness]
    urgency = LOST if run.liveness == "lost" else LATE
    if not silent:
        return Task(run=run.run, urgency=urgency, sentence="It sends no messages.", page="run")
    one = min(silent, key=lambda rank: rank.last_seen)
    others = f" and {len(silent) - 1} more ranks" if len(silent) > 1 else ""
    what = "Look at" if run.liveness == "lost" else "Late; if it stays so, look at"
    sentence = (
        f"{what} process {one.pid} on {one.host}: rank {one.rank}{others} sent no message "
        f"for {units.duration(max(0.0, now - one.last_seen))}."
    )
    return Task(run=run.run, urgency=urgency, sentence=sentence, page="run")


def _alert(alert: AlertView) -> str:
    knob = f" Turn {alert.knob}." if alert.knob not in ("", NO_KNOB) else ""
    return f"{alert.summary.removeprefix(alert.run).lstrip(': ')}.{knob}".replace("..", ".")


def _full(run: RunView) -> Task | None:
    for rank in run.ranks:
        peaks = rank.last_step.device_memory_peak_bytes if rank.last_step else {}
        if rank.device_memory_bytes and peaks and max(peaks.values()) > NEARLY_FULL_SHARE * rank.device_memory_bytes:
            phase = max(peaks, key=lambda name: peaks[name])
            sentence = (
                f"Device memory of rank {rank.rank} is full to {units.share(peaks[phase] / rank.device_memory_bytes)} "
                f"in the {phase}: {remedy_for('device memory').words}."
            )
            return Task(run=run.run, urgency=FULL, sentence=sentence, page="tune")
    return None


def _slow(run: RunView) -> Task | None:
    figures = last_figures(run)
    cause, wait = next(iter(figures.stall_share.items()), ("", 0.0))
    share = wait * (figures.update_share or 0.0)
    if share < NOTEWORTHY_WAIT_SHARE:
        return _large(run, figures)
    look, page = (f" {LOOK}", "timeline") if remedy_for(cause).knob == NO_KNOB else ("", "tune")
    sentence = f"{units.share(share)} of each step is spent waiting for {cause}.{look}"
    return Task(run=run.run, urgency=WAITING + 1 - share, sentence=sentence, page=page)


def _large(run: RunView, figures: StepSummary) -> Task | None:
    share = figures.update_share or 0.0
    if share < LARGE_UPDATE_SHARE:
        return None
    sentence = f"The update is {units.share(share)} of the step."
    return Task(run=run.run, urgency=LARGE + 1 - share, sentence=sentence, page="tune", if_advised=True)

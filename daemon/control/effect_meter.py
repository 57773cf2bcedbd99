"""Measures the effect of applied generations on the update, from the steps of each run's lead rank."""

from __future__ import annotations

from dataclasses import replace

from tidegate.daemon.control.audit_rows import note
from tidegate.daemon.control.event_applier import EventApplier
from tidegate.daemon.control.run import Clocks, Run
from tidegate.daemon.decisions.knob_effect import WINDOW_STEPS, measure


class EffectMeter:
    """Measures how a change of knobs changed the update time; stores the result and publishes it as an event."""

    def __init__(self, events: EventApplier, clock: Clocks) -> None:
        self._events = events
        self._clock = clock

    def measure(self, run: Run, rank: int) -> None:
        """Measures the effect of the committed generation if `rank`, which has reported, is the lead rank."""
        committed = run.control.committed
        if (
            run.lead is None
            or run.lead[0] != rank
            or (committed.effect and committed.effect.steps_after >= WINDOW_STEPS)
        ):
            return
        member = run.members[rank]
        effect = measure(member.window, member.applied, committed.number)
        if effect is None or effect == committed.effect:
            return
        measured = replace(committed, effect=effect)
        if committed.effect and effect.steps_after < WINDOW_STEPS:  # not stored for each step
            run.control = replace(run.control, committed=measured)
            run.latest = measured if run.latest.number == measured.number else run.latest
            self._events.publish_generation(run, measured)
            return
        before, after = effect.update_seconds_before, effect.update_seconds_after
        counted = f"median of {effect.steps_after} steps, {effect.difference}"
        text = f"update {before:.3f} s before, {after:.3f} s after ({counted})"
        notes = (
            [] if committed.effect else [note(run.name, self._clock.wall(), "daemon", "effect", measured, effect=text)]
        )
        self._events.store_and_publish(run, replace(run.control, committed=measured), [measured], notes)

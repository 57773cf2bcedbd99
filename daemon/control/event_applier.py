"""Applies control events (proposals, votes, ranks that join or leave, passing time) to runs: makes the decisions that
follow, stores them, and then publishes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tidegate.daemon.control import serializers
from tidegate.daemon.control.audit_rows import AUDITED, decision_note, note
from tidegate.daemon.control.registry import RunRegistry
from tidegate.daemon.control.run import Clocks, Run
from tidegate.daemon.decisions.generations import ControlEvent, ControlState, Generation, decide
from tidegate.daemon.decisions.knob_effect import WINDOW_STEPS, measure
from tidegate.daemon.storage.records import AgentRecord, AuditNote
from tidegate.daemon.storage.store import Store


class EventApplier:
    """Applies control events (proposals, votes, ranks that join or leave, passing time) to runs. If the store raises an
    exception, the run in memory is unchanged."""

    def __init__(self, store: Store, registry: RunRegistry, clock: Clocks) -> None:
        self._store = store
        self._registry = registry
        self._clock = clock

    def apply(
        self, run: Run, event: ControlEvent, agents: Sequence[AgentRecord] = (), also: Sequence[AuditNote] = ()
    ) -> None:
        """Applies an event to the run: decides, stores the decisions with `agents` and the audit rows `also` in one
        transaction, and notifies. A vote or a rank's first step with a generation is kept in memory only, unless it
        leads to another decision."""
        before = run.control
        control, decisions = decide(before, event)
        notes = [decision_note(run.name, before, d, self._clock.wall()) for d in decisions if d.kind in AUDITED]
        # Votes are discarded at a restart, and ranks report their generation again: neither is stored for each rank.
        if all(d.kind in ("voted", "rank_applied") for d in decisions):
            run.control = control
            run.latest = next((d.generation for d in decisions if d.generation.number == control.newest), run.latest)
            return
        self.store_and_publish(run, control, [d.generation for d in decisions], [*notes, *also], agents)
        run.directive_notifier.notify_all()

    def store_and_publish(
        self,
        run: Run,
        control: ControlState,
        generations: list[Generation],
        notes: Sequence[AuditNote],
        agents: Sequence[AgentRecord] = (),
    ) -> None:
        """Stores generations, audit rows and agents in one transaction, then makes `control` the state of the run."""
        newest = {g.number: g for g in generations}
        if newest:
            self._store.save(run.name, newest.values(), notes, agents)
        run.control = control
        run.latest = newest.get(control.newest, run.latest)
        for generation in newest.values():
            self.publish_generation(run, generation)

    def measure_effect(self, run: Run, rank: int) -> None:
        """Measures how the committed generation has changed the update time, and publishes each new result as an event.
        Only the first and the final result are stored.

        rank: the rank that has just sent a report. Nothing is measured unless it is the lead rank (the lowest rank that
        is present).
        """
        committed = run.control.committed
        if run.lead is None or run.lead[0] != rank:
            return
        if committed.effect and committed.effect.steps_after >= WINDOW_STEPS:
            return
        member = run.members[rank]
        effect = measure(member.window, member.applied, committed.number)
        if effect is None or effect == committed.effect:
            return
        measured = replace(committed, effect=effect)
        if committed.effect and effect.steps_after < WINDOW_STEPS:  # not stored for each step
            run.control = replace(run.control, committed=measured)
            run.latest = measured if run.latest.number == measured.number else run.latest
            self.publish_generation(run, measured)
            return
        text = (
            f"update {effect.update_seconds_before:.3f} s before, {effect.update_seconds_after:.3f} s after "
            f"(median of {effect.steps_after} steps, {effect.difference})"
        )
        row = note(run.name, self._clock.wall(), "daemon", "effect", measured, effect=text)
        first = committed.effect is None
        self.store_and_publish(run, replace(run.control, committed=measured), [measured], [row] if first else [])

    def publish_generation(self, run: Run, generation: Generation) -> None:
        """Adds an event with the generation to the run's events."""
        self._registry.publish(
            run, "generation", serializers.generation_view(run.name, generation).model_dump(mode="json")
        )

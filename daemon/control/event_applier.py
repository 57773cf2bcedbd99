"""Applies control events (proposals, votes, ranks that join or leave, passing time) to runs: makes the decisions that
follow, stores them, and then publishes them."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.daemon.control import serializers
from tidegate.daemon.control.audit_rows import AUDITED, decision_note
from tidegate.daemon.control.registry import RunRegistry
from tidegate.daemon.control.run import Clocks, Run
from tidegate.daemon.decisions.generations import ControlEvent, ControlState, Generation, decide
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

    def publish_generation(self, run: Run, generation: Generation) -> None:
        """Adds an event with the generation to the run's events."""
        self._registry.publish(
            run, "generation", serializers.generation_view(run.name, generation).model_dump(mode="json")
        )

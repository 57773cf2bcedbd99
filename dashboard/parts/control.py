"""Knobs as they are: desired, applied and effective for each rank, and what became of each generation."""

from __future__ import annotations

import time

import streamlit as st

from tidegate.dashboard import edits, markup, palette, units
from tidegate.dashboard.feed import Snapshot
from tidegate.dashboard.parts.form import filled_on
from tidegate.knobs import OFF, KnobValue
from tidegate.wire import GenerationView, KnobChanges, KnobsView

HISTORY = 12
_BAD = ("refused", "aborted", "superseded")


def knobs(snapshot: Snapshot) -> None:
    """The newest generation's way, and a row for each rank."""
    view = snapshot.knobs
    st.html(markup.title("Knobs", f"newest generation {view.generation}") + acknowledgement(snapshot) + _ranks(view))
    base = filled_on(view.run)
    if base is not None and base < view.generation:
        newest = snapshot.generations[-1] if snapshot.generations else None
        by = f" by {newest.author}" if newest else ""
        sentence = f"The form was filled on generation {base}; generation {view.generation} has been made since{by}."
        st.html(markup.banner(sentence, palette.LIVENESS["stale"]))


def acknowledgement(snapshot: Snapshot) -> str:
    """The newest generation's way from proposed to applied, or where it ended and why."""
    newest = snapshot.knobs.pending or (snapshot.generations[-1] if snapshot.generations else None)
    if newest is None:
        return ""
    live = [rank for rank in snapshot.knobs.ranks if rank.liveness in ("live", "stale")] or list(snapshot.knobs.ranks)
    done = sum(rank.applied_generation >= newest.generation for rank in live)
    applied = f"applied on {done} of {len(live)} ranks"
    good, bad = palette.LIVENESS["live"], palette.LIVENESS["lost"]
    if newest.state in _BAD:
        way: list[markup.Station] = [("proposed", True, None), (newest.state, True, bad)]
        more = newest.outcome
    else:
        reached = newest.state in ("committed", "applied")
        complete = newest.state == "applied" or (reached and done == len(live))
        way = [("proposed", True, None), ("committed", reached, None), (applied, complete, good if complete else None)]
        more = ""
    name = (
        f"Generation {newest.generation}, {edits.describe(newest.changes) if newest.changes else 'start-up settings'}"
    )
    return markup.chain([(name, True, None), *way], more)


def _ranks(view: KnobsView) -> str:
    names = list(view.bounds)
    rows: list[tuple[str, ...]] = [("desired", "", "", *(_desired(view.desired.get(name), name) for name in names), "")]
    rows += [
        (
            f"rank {rank.rank}",
            markup.dot(rank.liveness, palette.LIVENESS.get(rank.liveness, palette.GREY)),
            str(rank.applied_generation),
            *(_desired(rank.effective.get(name), name) for name in names),
            rank.refused or "",
        )
        for rank in view.ranks[:64]
    ]
    columns = ("", "state", "applied", *(f"{name}, effective" for name in names), "refused")
    return markup.table(columns, rows, left=(0, 1, len(columns) - 1), wide=(len(columns) - 1,))


def _desired(value: KnobValue | None, name: str) -> str:
    """A knob's value; a stride also as the share that the device updates."""
    text = units.knob(name, value)
    if name == "stride" and isinstance(value, float | int) and value:
        return f"{text} (device share {units.share(1 / value)})"
    if name == "stride" and value == OFF:
        return f"{text} (device share 0 %)"
    return text


def history(snapshot: Snapshot) -> None:
    """The newest generations, newest first."""
    now = time.time()
    made = list(snapshot.generations)[::-1]
    before: dict[int, KnobChanges] = {view.generation: view.knobs for view in made}
    rows = [
        (
            str(view.generation),
            markup.dot(view.state, _color(view)),
            edits.describe(view.changes, before.get(view.generation - 1)) if view.changes else "start-up settings",
            f"{units.age(now - view.created_at)} ago",
            view.author,
            view.reason,
            _effect(view),
        )
        for view in made[:HISTORY]
    ]
    note = f"newest {HISTORY} of {len(made)}" if len(made) > HISTORY else ""
    columns = ("no.", "state", "change", "when", "by", "reason", "what came of it")
    st.html(markup.title("Generations", note) + markup.table(columns, rows, left=(0, 1, 2, 4, 5, 6), wide=(5, 6)))


def _color(view: GenerationView) -> str:
    return palette.LIVENESS["lost" if view.state in _BAD else "live" if view.state == "applied" else "stale"]


def _effect(view: GenerationView) -> str:
    if view.state in _BAD:
        return view.outcome
    effect = view.measured_effect
    if effect:
        before, after = effect.update_seconds_before, effect.update_seconds_after
        change = f" ({(after - before) / before:+.0%})" if before > 0 else ""
        return f"update {units.seconds(before)} → {units.seconds(after)}{change}, {effect.steps_after} steps after"
    if view.applied:
        ranks = "one rank" if len(view.applied) == 1 else f"{len(view.applied)} ranks"
        return f"on {ranks} since step {units.integer(min(view.applied.values()))}"
    return view.outcome

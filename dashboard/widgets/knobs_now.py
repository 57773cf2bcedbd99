"""Table of the present knobs (desired, effective, applied), and the progress of the newest generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import streamlit as st

from tidegate import units
from tidegate.dashboard.data import knob_edits
from tidegate.dashboard.data.queries import Snapshot
from tidegate.dashboard.session import edit_session
from tidegate.dashboard.style import markup, palette
from tidegate.knobs.knobs import OFF, KnobValue
from tidegate.wire.knobs import GenerationState, GenerationView, KnobsView, RankKnobs

BAD: Final[tuple[GenerationState, ...]] = ("refused", "aborted", "superseded")
MAX_NAMED: Final = 8
"""Largest number of rows in the table of ranks that need attention (see `_odd_ranks`)."""


def knobs_now(snapshot: Snapshot) -> None:
    """Draws a row for each knob, the progress of the newest generation, and a row for each rank that needs attention
    because it is late or lost, has refused knobs, or has older knobs than others."""
    view = snapshot.knobs
    live = present_ranks(view)
    rows = [_row(name, view, live) for name in view.bounds]
    columns = ("knob", "desired", "effective", "bounds", "unit")
    st.html(
        markup.title("Knobs", f"generation {view.generation}; {_applied(view, live)}")
        + markup.table(columns, rows, left=(0, 1, 2, 3, 4), wide=(2, 3))
        + generation_progress(snapshot)
        + _odd_ranks(view, live)
    )
    _newer(view)


def present_ranks(view: KnobsView) -> Sequence[RankKnobs]:
    """The live and stale ranks; all ranks if there are none."""
    return [rank for rank in view.ranks if rank.liveness in ("live", "stale")] or list(view.ranks)


def generation_progress(snapshot: Snapshot) -> str:
    """The progress of the newest generation from proposed to applied, or its end with the reason, as HTML."""
    newest = snapshot.knobs.pending or (snapshot.generations[-1] if snapshot.generations else None)
    if newest is None:
        return ""
    live = present_ranks(snapshot.knobs)
    done = sum(rank.applied_generation >= newest.generation for rank in live)
    applied = f"applied on {done} of {len(live)} ranks"
    good, bad = palette.LIVENESS["live"], palette.LIVENESS["lost"]
    if newest.state in BAD:
        stations: list[markup.Station] = [("proposed", True, None), (newest.state, True, bad)]
        more = newest.outcome
    else:
        reached = newest.state in ("committed", "applied")
        complete = newest.state == "applied" or (reached and done == len(live))
        stations = [("proposed", True, None), ("committed", reached, None)]
        stations.append((applied, complete, good if complete else None))
        more = ""
    text = change(newest, snapshot.generations)
    return markup.chain([(f"Generation {newest.generation}, {text}", True, None), *stations], more)


def change(view: GenerationView, made: Sequence[GenerationView]) -> str:
    """What generation `view` changes, as text, compared with the last earlier generation that was not refused, aborted
    or superseded. made: all generations, oldest first."""
    ran = [earlier for earlier in made if earlier.generation < view.generation and earlier.state not in BAD]
    back = f"back to generation {view.restores}" if view.restores is not None else ""
    text = knob_edits.describe(view.changes, ran[-1].knobs if ran else None) if view.changes else ""
    return ": ".join(part for part in (back, text) if part) or "start-up settings"


def value(name: str, found: KnobValue | None) -> str:
    """A knob's value as text; a stride also with the share of the update that the device does."""
    text = units.knob(name, found)
    if name == "stride" and isinstance(found, float | int) and found:
        return f"{text} (device share {units.share(1 / found)})"
    if name == "stride" and found == OFF:
        return f"{text} (device share 0 %)"
    return text


def _row(name: str, view: KnobsView, live: Sequence[RankKnobs]) -> tuple[str, ...]:
    bound = view.bounds[name]
    return (
        name,
        units.knob(name, view.desired.get(name)),
        _effective(name, live),
        knob_edits.limits(bound),
        bound.unit,
    )


def _effective(name: str, live: Sequence[RankKnobs]) -> str:
    """The effective value if all ranks have the same; else each value with its number of ranks."""
    counted: dict[str, int] = {}
    for rank in live:
        text = value(name, rank.effective.get(name))
        counted[text] = counted.get(text, 0) + 1
    if len(counted) <= 1:
        return next(iter(counted), units.NONE)
    return ", ".join(f"{text} on {number} ranks" for text, number in sorted(counted.items(), key=lambda c: -c[1])[:4])


def _applied(view: KnobsView, live: Sequence[RankKnobs]) -> str:
    numbers = sorted({rank.applied_generation for rank in live})
    if len(numbers) == 1:
        return f"all {len(live)} ranks have applied {numbers[0]}" if len(live) > 1 else f"applied: {numbers[0]}"
    return f"ranks have applied {numbers[0]} to {numbers[-1]}" if numbers else "no rank is running"


def _odd_ranks(view: KnobsView, live: Sequence[RankKnobs]) -> str:
    """An HTML table of the ranks that need attention: stale or lost ranks, ranks that have refused a generation, and
    ranks with an older generation than others. Empty if there are none."""
    newest = max((rank.applied_generation for rank in live), default=0)
    odd = [r for r in view.ranks if r.refused or r.liveness in ("stale", "lost") or r.applied_generation < newest]
    if not odd:
        return ""
    rows = [
        (
            f"rank {rank.rank}",
            markup.dot(rank.liveness, palette.LIVENESS.get(rank.liveness, palette.GREY)),
            str(rank.applied_generation),
            rank.refused or "",
        )
        for rank in odd[:MAX_NAMED]
    ]
    note = f"{MAX_NAMED} of {len(odd)}" if len(odd) > MAX_NAMED else ""
    return markup.title("Ranks to look at", note) + markup.table(
        ("", "state", "applied", "refused, because"), rows, left=(0, 1, 3), wide=(3,)
    )


def _newer(view: KnobsView) -> None:
    """Draws a warning if the run got a newer generation of knobs after the user began to edit knobs."""
    at = edit_session.state_of(view.run)
    if at.draft.edited() and at.generation is not None and at.generation < view.generation:
        st.html(
            markup.banner(
                f"Your edit was begun on generation {at.generation}; generation {view.generation} has been made since.",
                palette.LIVENESS["stale"],
            )
        )

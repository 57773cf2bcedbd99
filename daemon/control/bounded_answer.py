"""Answers limited to a size that clients accept, whatever ranks report: data that does not fit is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from pydantic import BaseModel

from tidegate.wire.knobs import GenerationView, KnobsView
from tidegate.wire.run import RunView

MAX_BYTES: Final = 48 << 20
"""Largest answer in bytes, below the 64 MiB that clients accept. It is enough for 10,000 runs without their ranks."""
REFUSAL_CHARACTERS: Final = 40
"""Number of characters to which refusal reasons are cut in an answer that would be too large. 100,000 ranks with
reasons of this length fit into `MAX_BYTES`."""


def bounded_runs(views: Iterable[RunView], max_bytes: int = MAX_BYTES) -> list[bytes]:
    """Each view in JSON, in the given order, all together at most `max_bytes`. All are complete if that fits.

    Otherwise the last steps and the effective knobs of ranks are left out, first in the run with the most bytes per
    rank, until the answer fits. If that does not suffice, all ranks are left out, first in the largest run.
    """
    given = list(views)
    answers = [_json(view) for view in given]
    answers = _shortened(given, answers, _without_figures, lambda view, size: size / max(1, len(view.ranks)), max_bytes)
    return _shortened(given, answers, _without_ranks, lambda view, size: size, max_bytes)


def bounded_knobs(view: KnobsView, max_bytes: int = MAX_BYTES) -> bytes:
    """The view in JSON, at most `max_bytes`: complete if that fits.

    Otherwise the effective knobs of the ranks are left out. If the view is still too large, the reasons why ranks
    refused a proposal are cut, and if that does not suffice, all ranks are left out.
    """
    answer = _json(view)
    for shorten in (_without_effective_knobs, _with_short_refusals, _without_rank_knobs):
        if len(answer) <= max_bytes:
            break
        view = shorten(view)
        answer = _json(view)
    return answer


def bounded_generations(views: Sequence[GenerationView], max_bytes: int = MAX_BYTES) -> bytes:
    """The newest of these views that fit, as a JSON array of at most `max_bytes`. `views`: the oldest first."""
    answers, size = list[bytes](), 1  # the brackets; the first view has no comma
    for view in reversed(views):
        answer = _json(view)
        size += len(answer) + 1
        if size > max_bytes:
            break
        answers.append(answer)
    return b"[" + b",".join(reversed(answers)) + b"]"


def _shortened(
    views: list[RunView],
    answers: list[bytes],
    shorten: Callable[[RunView], RunView],
    weight: Callable[[RunView, int], float],
    max_bytes: int,
) -> list[bytes]:
    """The answers (the views in JSON), with as many of them shortened as are needed to fit into `max_bytes`.

    shorten: makes a smaller view. weight: a sort key from a view and the bytes of its answer; answers with the largest
    weight are shortened first.
    """
    excess = sum(map(len, answers)) + len(answers) + 1 - max_bytes  # with brackets and commas
    shortened = list(answers)
    order = sorted(range(len(views)), key=lambda number: weight(views[number], len(answers[number])), reverse=True)
    for number in order:
        if excess <= 0:
            break
        shortened[number] = _json(shorten(views[number]))
        excess -= len(answers[number]) - len(shortened[number])
    return shortened


def _json(view: BaseModel) -> bytes:
    return view.__pydantic_serializer__.to_json(view)


def _without_figures(view: RunView) -> RunView:
    ranks = tuple(rank.model_copy(update={"effective": {}, "last_step": None}) for rank in view.ranks)
    return view.model_copy(update={"ranks": ranks, "totals": None})


def _without_ranks(view: RunView) -> RunView:
    return view.model_copy(update={"ranks": (), "totals": None, "paths": ()})


def _without_effective_knobs(view: KnobsView) -> KnobsView:
    return view.model_copy(update={"ranks": tuple(rank.model_copy(update={"effective": {}}) for rank in view.ranks)})


def _with_short_refusals(view: KnobsView) -> KnobsView:
    ranks = tuple(
        rank if rank.refused is None else rank.model_copy(update={"refused": rank.refused[:REFUSAL_CHARACTERS]})
        for rank in view.ranks
    )
    return view.model_copy(update={"ranks": ranks})


def _without_rank_knobs(view: KnobsView) -> KnobsView:
    return view.model_copy(update={"ranks": ()})

"""Views of runs in an answer that clients take, however much ranks tell: what is too much is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from tidegate.wire.run import RunView

ANSWER_BYTES: Final = 48 << 20
"""Clients take 64 MB. 10,000 runs without their ranks fit."""


def bounded(views: Iterable[RunView], most: int = ANSWER_BYTES) -> list[bytes]:
    """Each view in JSON, in the order given, `most` bytes in all: in full where all fit.

    Else those whose ranks tell most are told without what their ranks did last, and where this is still too much, the
    largest without their ranks.
    """
    given = list(views)
    told = [_json(view) for view in given]
    told = _shortened(given, told, _without_figures, lambda view, size: size / max(1, len(view.ranks)), most)
    return _shortened(given, told, _without_ranks, lambda view, size: size, most)


def _shortened(
    views: list[RunView],
    told: list[bytes],
    shorter: Callable[[RunView], RunView],
    weight: Callable[[RunView, int], float],
    most: int,
) -> list[bytes]:
    """As many are told shorter as must be, those of most weight first."""
    left = sum(map(len, told)) + len(told) + 1 - most  # with brackets and commas
    made = list(told)
    for number in sorted(range(len(views)), key=lambda n: weight(views[n], len(told[n])), reverse=True):
        if left <= 0:
            break
        made[number] = _json(shorter(views[number]))
        left -= len(told[number]) - len(made[number])
    return made


def _json(view: RunView) -> bytes:
    made: bytes = view.__pydantic_serializer__.to_json(view)
    return made


def _without_figures(view: RunView) -> RunView:
    ranks = tuple(rank.model_copy(update={"effective": {}, "last_step": None}) for rank in view.ranks)
    return view.model_copy(update={"ranks": ranks, "totals": None})


def _without_ranks(view: RunView) -> RunView:
    return view.model_copy(update={"ranks": (), "totals": None, "paths": ()})

"""The result of the model for a figure that a paper reports."""

from __future__ import annotations

from typing import NamedTuple


class Ours(NamedTuple):
    """The model's result for one row. value: None if the model has no answer, which counts as an error of 1. assumes:
    the assumptions of the row or, without a value, the reason."""

    value: float | None
    assumes: str

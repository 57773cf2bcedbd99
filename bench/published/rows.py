"""A figure as the papers report it, beside what the model says."""

from __future__ import annotations

from typing import NamedTuple


class Ours(NamedTuple):
    """value: None where the model has nothing to say, which counts as an error of 1; `assumes` then says why."""

    value: float | None
    assumes: str

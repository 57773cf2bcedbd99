"""What several ranks move to: each proposes, each judges what was proposed, and the slowest rank counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from tidegate.knobs.knobs import Off
from tidegate.plan.effective_knobs import Effective

MAX_PROPOSALS: Final = 4
"""Every rank simulates all of them: with hundreds of ranks only those that most of them want are looked at."""


class Setting(NamedTuple):
    """What a tuner moves, in words that mean the same on every rank. Bytes of the host cache are each rank's own."""

    stride: float | Off
    alternate: bool
    more_cache: bool
    """As much host cache as this rank has room for now, instead of what it has."""

    @classmethod
    def of(cls, to: Effective, now: Effective) -> Setting:
        """What a rank that runs `now` means by `to`."""
        return cls(to.stride, to.alternate, to.host_cache_bytes > now.host_cache_bytes)

    def on(self, now: Effective, ample_cache_bytes: int) -> Effective:
        """On a rank that runs `now` and has room for so much cache."""
        cache = max(now.host_cache_bytes, ample_cache_bytes) if self.more_cache else now.host_cache_bytes
        return replace(now, stride=self.stride, alternate=self.alternate, host_cache_bytes=cache)


@dataclass(frozen=True)
class Judged:
    """What one rank predicts, in seconds of its update: now, and with each proposal.

    None where a rate is not known, infinite where it cannot be had (memory, a pinned knob).
    """

    now: float | None
    then: tuple[float | None, ...]


def proposals(said: Sequence[Setting | None]) -> list[Setting]:
    """What ranks want, what most of them want first; the same from the same list on every rank."""
    wanted = Counter(setting for setting in said if setting is not None)
    return [setting for setting, _ in wanted.most_common(MAX_PROPOSALS)]


def elected(settings: Sequence[Setting], judged: Sequence[Judged]) -> tuple[Setting, float | None] | None:
    """The proposal with the shortest update of the slowest rank and its gain, or None when none is better than now.

    One that some rank cannot have is out. One that some rank cannot predict is a probe (its gain is None), for when
    nothing else is left.
    """
    present = [one.now for one in judged]
    if None in present:
        return None
    now = max(seconds for seconds in present if seconds is not None)
    best: tuple[float, Setting] | None = None
    probe: Setting | None = None
    for setting, then in zip(settings, zip(*(one.then for one in judged), strict=True), strict=True):
        if math.inf in then:
            continue
        known = [seconds for seconds in then if seconds is not None]
        if len(known) < len(then):
            probe = probe or setting
        elif max(known) < (best[0] if best else now):
            best = max(known), setting
    if best is not None:
        return best[1], 1 - best[0] / now
    return None if probe is None else (probe, None)

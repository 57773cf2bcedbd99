"""Consensus of ranks on a change of knobs: each rank proposes, each predicts all proposals, and the update time of the
slowest rank decides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from tidegate.knobs.knobs import Off
from tidegate.plan.effective_knobs import EffectiveKnobs

MAX_PROPOSALS: Final = 4
"""Largest number of proposals that are simulated. If there are more, the most frequent ones are taken. The number is
limited, because every rank simulates each of them."""


class Setting(NamedTuple):
    """The knobs that a tuner changes, in a form that means the same on every rank. Bytes of the host cache differ
    between ranks, and are not part of it."""

    stride: float | Off
    alternate: bool
    more_cache: bool
    """Whether each rank grows its host cache to the largest size that fits now."""

    @classmethod
    def of(cls, to: EffectiveKnobs, now: EffectiveKnobs) -> Setting:
        """The rank-independent form of a change from `now` to `to`."""
        return cls(to.stride, to.alternate, to.host_cache_bytes > now.host_cache_bytes)

    def on(self, now: EffectiveKnobs, ample_cache_bytes: int) -> EffectiveKnobs:
        """The knobs of this setting on a rank that runs `now` and has room for `ample_cache_bytes` of host cache."""
        cache = max(now.host_cache_bytes, ample_cache_bytes) if self.more_cache else now.host_cache_bytes
        return replace(now, stride=self.stride, alternate=self.alternate, host_cache_bytes=cache)


@dataclass(frozen=True)
class RankPredictions:
    """The predictions of one rank, in seconds of its update: under the present knobs (`now`), and under each proposal
    (`then`).

    None where a rate is not known, infinite where the rank cannot apply the proposal (memory, a pinned knob).
    """

    now: float | None
    then: tuple[float | None, ...]


def proposals(of_ranks: Sequence[Setting | None]) -> list[Setting]:
    """The different proposals of the ranks, the most frequent first, at most MAX_PROPOSALS. In `of_ranks`, None stands
    for a rank without a proposal. The same input gives the same list on every rank."""
    wanted = Counter(setting for setting in of_ranks if setting is not None)
    return [setting for setting, _ in wanted.most_common(MAX_PROPOSALS)]


def elect(settings: Sequence[Setting], judged: Sequence[RankPredictions]) -> tuple[Setting, float | None] | None:
    """Chooses the proposal with the shortest update time of the slowest rank. Returns it with its gain as a share of
    the present update time; None when no proposal is better than the present knobs, or when some rank has no prediction
    for the present knobs.

    settings: the proposals. judged: the predictions of each rank for them. A proposal that some rank cannot apply is
    excluded. A proposal that some rank cannot predict is a probe (an experiment; its gain is None), and is chosen only
    if no other proposal is better.
    """
    present = [of_rank.now for of_rank in judged]
    if None in present:
        return None
    now = max(seconds for seconds in present if seconds is not None)
    best: tuple[float, Setting] | None = None
    probe: Setting | None = None
    for setting, then in zip(settings, zip(*(of_rank.then for of_rank in judged), strict=True), strict=True):
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

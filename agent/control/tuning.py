"""Connects the tuner to the engine: measures updates, searches with the live rates, and applies proposals between
steps. Only knobs on `auto` are changed.

Every rank has a tuner of its own. All tuners receive the same input: the longest update of all ranks, and the search
result that all ranks agreed on. So all tuners make the same proposal before the same step. No rank decides for the
others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from tidegate.agent.control.rank_predictor import rank_predictor
from tidegate.agent.control.step_sync import BoundaryMessage
from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.agent.ranks import Ranks
from tidegate.agent.telemetry.recorder import Recorder
from tidegate.errors import ConfigError
from tidegate.knobs.knobs import AUTO
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.timeline.step_result import StepPhases, StepResult
from tidegate.tuner.consensus import RankPredictions, Setting, elect, proposals
from tidegate.tuner.proposal import find_move, predicted_seconds_or_none
from tidegate.tuner.tuner import Move, Tuner

log = logging.getLogger("tidegate")
T = TypeVar("T")

CACHE_GROWTH = 1.1
"""The search considers a larger host cache only if the largest possible cache is more than this many times as large as
the present one."""


def update_seconds(result: StepResult, phases: StepPhases) -> float | None:
    """Seconds from the call of `step()` to the end of the last op of the update, including ops that overlap with the
    next forward, but without deferred flushes. None for a skipped step."""
    began = next((span.start for span in phases.spans if span.phase == "update"), None)
    if began is None or result.skipped:
        return None
    return max(result.update_end, phases.spans[-1].start) - began


class Tuning:
    """Tuning of the knobs of one attached optimizer. Only the training thread may call it."""

    def __init__(self, optimizer: Optimizer, recorder: Recorder, ranks: Ranks | None = None) -> None:
        self.tuner = Tuner()
        self._optimizer, self._recorder, self._ranks = optimizer, recorder, ranks or Ranks()
        self._last: tuple[EffectiveKnobs, float] | None = None
        """Knob values and seconds of the last update; None if none has finished since the last `between_steps`."""
        self._refused: ConfigError | None = None
        self._recalibrations = self._announced = 0
        """Two counts of permanent changes of this rank's rates: of those that the tuner knows, and of all that there
        were at this rank's last message to the other ranks."""

    def observe(self, result: StepResult, phases: StepPhases) -> None:
        """Stores knobs and duration of a finished update, for the next call of `between_steps`. Does nothing for a
        skipped step."""
        seconds = update_seconds(result, phases)
        if seconds is not None:
            self._last = result.effective, seconds

    def boundary_message(self, generation: int) -> BoundaryMessage:
        """Builds this rank's message for `step_sync.agree`. `generation`: newest generation of knobs that this rank
        knows."""
        self._announced = self._recorder.recalibrations
        return BoundaryMessage(
            generation=generation,
            update_seconds=None if self._last is None else self._last[1],
            wants_search=self.tuner.due(self._current) and bool(self.tunable),
            proposal_applied=self._refused is None,
            rates_changed=self._announced > self._recalibrations,
        )

    def between_steps(self, agreed: BoundaryMessage) -> None:
        """Gives the tuner the duration of the last update, and applies the knobs that the tuner proposes, if any. All
        ranks call it with the same `agreed` values."""
        if self._last is not None and agreed.update_seconds is not None:
            self.tuner.observe(self._last[0], agreed.update_seconds)
        self._last = None
        self._recalibrations = self._announced
        if agreed.rates_changed:
            self.tuner.speeds_changed()
        if not agreed.proposal_applied:
            self._revert()
        elif agreed.wants_search or self.tunable:
            wanted = self.tuner.propose(self._current, self._search if agreed.wants_search else None)
            if wanted is not None:
                self._move(wanted)

    @property
    def tunable(self) -> frozenset[str]:
        """Knobs that the tuner may change: those of `stride`, `order` and `host_cache` that are on `auto`; without
        storage paths only `stride`. Empty for offload policies other than `interleaved`."""
        if self._optimizer.offload.policy != "interleaved":
            return frozenset()
        knobs = self._optimizer.knobs
        auto = {name for name in ("stride", "order", "host_cache") if getattr(knobs, name) == AUTO}
        return frozenset(auto - ({"order", "host_cache"} if self._optimizer.engine.store is None else set()))

    @property
    def _current(self) -> EffectiveKnobs:
        """Knob values in force."""
        return self._optimizer.engine.effective

    def _move(self, wanted: EffectiveKnobs) -> None:
        """Applies a proposal of the tuner. If this rank cannot apply it, the other ranks learn that at the end of the
        next step."""
        refusal = self._apply(wanted)
        if refusal is not None:
            self._refused = refusal
            if self._ranks.count == 1:
                self._revert()

    def _revert(self) -> None:
        """Takes back a proposal that some rank could not apply. All ranks that applied it return to their earlier
        knobs."""
        old = self.tuner.refuse(self._refused or "it does not fit on another rank.")
        # A rank that cannot revert keeps its knobs: the weights are the same with any knobs.
        self._refused = None
        if old is not None and old != self._current and (refusal := self._apply(old)) is not None:
            log.warning("the tuner cannot revert its last change of knobs, this rank keeps its values: %s", refusal)

    def _apply(self, wanted: EffectiveKnobs) -> ConfigError | None:
        """Applies those values whose knobs are on `auto`; pinned knobs are never changed. Returns None on success. If
        the engine refuses the values, nothing is changed and the error is returned."""
        tunable = self.tunable
        try:
            self._optimizer._set_auto(
                stride=wanted.stride if "stride" in tunable else None,
                alternate=wanted.alternate if "order" in tunable else None,
                cache_bytes=wanted.host_cache_bytes if "host_cache" in tunable else None,
            )
        except ConfigError as error:
            return error
        return None

    # ---- searches

    def _search(self) -> Move | None:
        """Searches with the simulator for a change of knobs that makes the update shorter. With several ranks, the
        change is chosen for which the update of the slowest rank is shortest. None if no change is better than the
        present knobs."""
        mine = _or_default(self._best_candidate, None)
        return mine if self._ranks.count == 1 else self._elect(mine)

    def _best_candidate(self) -> Move | None:
        """Finds the change of knobs that is best for this rank according to the simulator. None if no rates are
        measured yet, or if no change is better than the present knobs."""
        if self._recorder.rates is None:
            return None
        ample, current = self._ample_cache(), self._current
        tunable = self.tunable if ample > CACHE_GROWTH * current.host_cache_bytes else self.tunable - {"host_cache"}
        predictor = rank_predictor(self._optimizer, self._recorder)
        return find_move(predictor, current, tunable, cache_bytes=ample, allowed=self._fits)

    def _elect(self, mine: Move | None) -> Move | None:
        """Chooses one change of knobs together with all ranks, in two collectives: first the ranks exchange their
        candidates, then each rank's predictions for all candidates. Returns the same change on all ranks; None if no
        candidate is better than the present knobs.

        mine: candidate of this rank; None if it has none.
        """
        current = self._current
        settings = proposals(self._ranks.all_gather(None if mine is None else Setting.of(mine.to, current)))
        if not settings:
            return None
        ample = _or_default(self._ample_cache, current.host_cache_bytes)
        judged = _or_default(lambda: self._judge(settings, ample), RankPredictions(None, (None,) * len(settings)))
        winner = elect(settings, self._ranks.all_gather(judged))
        return None if winner is None else Move(winner[0].on(current, ample), winner[1])

    def _judge(self, settings: Sequence[Setting], ample_cache: int) -> RankPredictions:
        """Predicts the update time of this rank with the present knobs and with each candidate: None if it cannot be
        predicted, infinity for a candidate that this rank may not or cannot apply.

        settings: the candidates.
        ample_cache: bytes of the largest possible host cache.
        """
        predictor = rank_predictor(self._optimizer, self._recorder)
        choices = [setting.on(self._current, ample_cache) for setting in settings]
        allowed = [self._is_allowed(setting, choice) for setting, choice in zip(settings, choices, strict=True)]
        return RankPredictions(
            predicted_seconds_or_none(predictor, self._current),
            tuple(
                predicted_seconds_or_none(predictor, choice) if can else math.inf
                for choice, can in zip(choices, allowed, strict=True)
            ),
        )

    def _is_allowed(self, setting: Setting, choice: EffectiveKnobs) -> bool:
        """Whether this rank can apply a candidate: it changes only knobs that are on `auto` on this rank, and the rank
        has the memory for it. The host cache must grow exactly if `setting.more_cache` is True, so that the predictions
        of all ranks are for the same change.

        setting: the candidate, in the form that is the same on all ranks.
        choice: the values of the knobs that the candidate gives on this rank.
        """
        current, tunable = self._current, self.tunable
        more_cache = choice.host_cache_bytes > current.host_cache_bytes
        if setting.more_cache != more_cache:
            return False  # ranks must compare the same change
        moves = {"stride": choice.stride != current.stride, "order": choice.alternate != current.alternate}
        wanted = {name for name, differs in {**moves, "host_cache": more_cache}.items() if differs}
        return wanted <= tunable and self._fits(choice)

    def _ample_cache(self) -> int:
        """Bytes of the largest host cache that the free memory allows; 0 when the tuner may not change the host
        cache."""
        return self._optimizer._automatic_cache_bytes() if "host_cache" in self.tunable else 0

    def _fits(self, effective: EffectiveKnobs) -> bool:
        """Whether the engine has the memory for these knobs."""
        try:
            self._optimizer.engine.planner.check(effective, self._optimizer.offload.headroom_bytes)
        except ConfigError:
            return False
        return True


def _or_default(compute: Callable[[], T], default: T) -> T:
    """Returns the result of `compute`. If it raises, the error is logged and `default` is returned, because the other
    ranks wait for this rank's result."""
    try:
        return compute()
    except Exception:
        log.exception("a prediction for the tuner failed; the tuner goes on without it, and so does training")
        return default

"""Lets the tuner move what is `auto`: asks the model with the live rates, applies what it proposes between steps.

Every rank has a tuner of its own, and all of them are told the same: the longest update of all ranks, and what all have
agreed on in a look. So all propose the same before the same step, and no rank decides for the others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from tidegate.agent.control.step_sync import Boundary
from tidegate.agent.engine.engine import StepResult
from tidegate.agent.engine.phases import StepPhases
from tidegate.agent.optimizer.adamw import AdamW
from tidegate.agent.ranks import Ranks
from tidegate.agent.telemetry.recorder import Recorder
from tidegate.errors import ConfigError
from tidegate.knobs.knobs import AUTO
from tidegate.plan.effective_knobs import Effective
from tidegate.simulator.steady_state import Rank
from tidegate.speeds.rate_card import RateCard
from tidegate.tuner.consensus import Judged, Setting, elected, proposals
from tidegate.tuner.proposal import look, promised
from tidegate.tuner.tuner import Move, Tuner

log = logging.getLogger("tidegate")
T = TypeVar("T")

CACHE_GROWTH = 1.1
"""How many times as large the host cache must be able to become, to be looked at."""


def update_seconds(result: StepResult, phases: StepPhases) -> float | None:
    """From the call of `step()` until the last op is done, wherever it goes on meanwhile; None for a skipped step."""
    began = next((span.start for span in phases.spans if span.phase == "update"), None)
    if began is None or result.skipped:
        return None
    ended = max((span.end for span in result.spans), default=began)
    return max(ended, phases.spans[-1].start) - began


class Tuning:
    """One per attachment. Driven by the training thread."""

    def __init__(self, optimizer: AdamW, recorder: Recorder, ranks: Ranks | None = None) -> None:
        self.tuner = Tuner()
        self._optimizer, self._recorder, self._ranks = optimizer, recorder, ranks or Ranks()
        self._last: tuple[Effective, float] | None = None
        """The update that ended since the last boundary."""
        self._refused: ConfigError | None = None
        self._recalibrations = self._told = 0
        """How many recalibrations all ranks know of, and how many this one had when it last said so."""

    def observe(self, result: StepResult, phases: StepPhases) -> None:
        """An update is done."""
        seconds = update_seconds(result, phases)
        if seconds is not None:
            self._last = result.effective, seconds

    def says(self, generation: int) -> Boundary:
        """What this rank tells the others now."""
        self._told = self._recorder.recalibrations
        return Boundary(
            generation=generation,
            update_seconds=None if self._last is None else self._last[1],
            may_look=self.tuner.due(self._now) and bool(self.free),
            is_well=self._refused is None,
            rates_changed=self._told > self._recalibrations,
        )

    def between_steps(self, heard: Boundary) -> None:
        """Moves when the tuner says so. All ranks call it, and have heard the same."""
        if self._last is not None and heard.update_seconds is not None:
            self.tuner.observe(self._last[0], heard.update_seconds)
        self._last = None
        self._recalibrations = self._told
        if heard.rates_changed:
            self.tuner.speeds_changed()
        if not heard.is_well:
            self._take_back()
        elif heard.may_look or self.free:
            wanted = self.tuner.propose(self._now, self._look if heard.may_look else None)
            if wanted is not None:
                self._move(wanted)

    @property
    def free(self) -> frozenset[str]:
        """The knobs that the tuner may move here. The other baselines have no stride to choose."""
        if self._optimizer.offload.policy != "interleaved":
            return frozenset()
        knobs = self._optimizer.knobs
        auto = {name for name in ("stride", "order", "host_cache") if getattr(knobs, name) == AUTO}
        return frozenset(auto - ({"order", "host_cache"} if self._optimizer.engine.store is None else set()))

    @property
    def _now(self) -> Effective:
        return self._optimizer.engine.effective

    def _move(self, wanted: Effective) -> None:
        refusal = self._apply(wanted)
        if refusal is not None:
            self._refused = refusal
            if self._ranks.count == 1:
                self._take_back()

    def _take_back(self) -> None:
        """Some rank could not have what was proposed: all go back to what they had, as far as they left it."""
        old = self.tuner.refuse(self._refused or "it does not fit on another rank.")
        # A rank that cannot go back stays as it is: weights are right whatever it runs.
        self._refused = None
        if old is not None and old != self._now and (refusal := self._apply(old)) is not None:
            log.warning("the tuner cannot go back: %s", refusal)

    def _apply(self, wanted: Effective) -> ConfigError | None:
        """None, or why it cannot be had; then nothing has changed. What is pinned is not what `auto` is to mean."""
        free = self.free
        try:
            self._optimizer.set_auto(
                stride=wanted.stride if "stride" in free else None,
                alternate=wanted.alternate if "order" in free else None,
                cache_bytes=wanted.host_cache_bytes if "host_cache" in free else None,
            )
        except ConfigError as error:
            return error
        return None

    # ---- looks

    def _look(self) -> Move | None:
        """What the model would choose now; of several ranks, what is best for the slowest of them."""
        mine = _sure(self._promising, None)
        return mine if self._ranks.count == 1 else self._together(mine)

    def _promising(self) -> Move | None:
        rates = self._recorder.rates
        if rates is None:
            return None
        ample, now = self._ample_cache(), self._now
        free = self.free if ample > CACHE_GROWTH * now.host_cache_bytes else self.free - {"host_cache"}
        return look(
            self._rank(), now, rates, free,
            cache_bytes=ample, backward_seconds=self._backward_seconds(), allowed=self._fits,
        )  # fmt: skip

    def _together(self, mine: Move | None) -> Move | None:
        """Two rounds of all ranks: what each wants, and what each thinks of what is wanted."""
        now = self._now
        settings = proposals(self._ranks.all_gather(None if mine is None else Setting.of(mine.to, now)))
        if not settings:
            return None
        ample = _sure(self._ample_cache, now.host_cache_bytes)
        judged = _sure(lambda: self._judge(settings, ample), Judged(None, (None,) * len(settings)))
        found = elected(settings, self._ranks.all_gather(judged))
        return None if found is None else Move(found[0].on(now, ample), found[1])

    def _judge(self, settings: Sequence[Setting], automatic_cache_bytes: int) -> Judged:
        rates = self._recorder.rates or RateCard()
        rank, backward = self._rank(), self._backward_seconds()
        choices = [setting.on(self._now, automatic_cache_bytes) for setting in settings]
        may = [self._may(setting, choice) for setting, choice in zip(settings, choices, strict=True)]
        return Judged(
            promised(rank, self._now, rates, backward),
            tuple(
                promised(rank, one, rates, backward) if can else math.inf for one, can in zip(choices, may, strict=True)
            ),
        )

    def _may(self, setting: Setting, choice: Effective) -> bool:
        """Whether it only moves what is `auto` here, all of it moves here, and it fits."""
        now, free = self._now, self.free
        more_cache = choice.host_cache_bytes > now.host_cache_bytes
        if setting.more_cache != more_cache:
            return False  # on this rank it would be another comparison than on the others
        moves = {"stride": choice.stride != now.stride, "order": choice.alternate != now.alternate}
        wanted = {name for name, differs in {**moves, "host_cache": more_cache}.items() if differs}
        return wanted <= free and self._fits(choice)

    def _rank(self) -> Rank:
        engine = self._optimizer.engine
        capacity = engine.residences.capacity if engine.residences is not None else {}
        return Rank(
            engine.subgroups, engine.num_slots, engine.host_slots, engine.gradients.mode, capacity,
            engine.gradient_order, engine.step_at, engine.path_speeds,
        )  # fmt: skip

    def _backward_seconds(self) -> float:
        last = self._recorder.totals.last
        return last.phase_seconds.get("backward", 0.0) if last is not None else 0.0

    def _ample_cache(self) -> int:
        return self._optimizer.automatic_cache_bytes() if "host_cache" in self.free else 0

    def _fits(self, effective: Effective) -> bool:
        try:
            self._optimizer.engine.check(effective, self._optimizer.offload.headroom_bytes)
        except ConfigError:
            return False
        return True


def _sure(answer: Callable[[], T], otherwise: T) -> T:
    """Other ranks wait for an answer, and training goes on, whatever happens to a prediction."""
    try:
        return answer()
    except Exception:
        log.exception("the tuner could not ask the model")
        return otherwise

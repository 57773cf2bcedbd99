"""Trials (canaries) and rollbacks of a run: starts a trial, evaluates it, and rolls a harmful change back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Final

from tidegate.daemon.control import serializers
from tidegate.daemon.control.run import Clocks, Run
from tidegate.daemon.decisions.canary import (
    MIN_STEPS_BEFORE,
    UNCOUNTED_STEPS,
    Canary,
    StepOfAllRanks,
    common_steps,
    judge,
)
from tidegate.daemon.decisions.generations import COMMITTED_STATES, ControlEvent, Generation, NewProposal, TrialJudged
from tidegate.daemon.decisions.step_window import StepFigures
from tidegate.daemon.problems import ProblemError
from tidegate.daemon.storage.store import Store
from tidegate.knobs.knobs import same
from tidegate.wire.base import KnobChanges
from tidegate.wire.canary import CanaryRequest

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0
"""Time in seconds after which a rollback that was not committed is proposed for the second time. The wait before each
further proposal is twice as long, up to `MAX_RETRY_SECONDS`."""
MAX_RETRY_SECONDS: Final = 300.0
"""Longest time between two proposals of the same rollback, in seconds. It is long, because each proposal adds a
generation and two audit rows to the database."""
EVALUATION_INTERVAL_FACTOR: Final = 20.0
"""Pause before the next evaluation of a trial, as a multiple of the time that an evaluation took: an evaluation reads
all steps of all ranks."""
MAX_EVALUATION_PAUSE_SECONDS: Final = 10.0
"""Longest pause between two evaluations of a trial, in seconds. An evaluation that took long because the machine stood
still must not delay the rollback of a harmful change for minutes."""
REPORTS_A_TRIAL: Final = 8
"""Minimum number of reports that each rank is asked to send during a trial. With frequent reports the trial ends soon
after the step that decides it."""
SHORTEST_REPORT_SECONDS: Final = 0.1
"""Shortest interval between two reports of a rank that the daemon requests during a trial."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Predicted seconds of the update before and after a change; None if the simulator cannot predict them."""

    before: float | None = None
    after: float | None = None


class Trials:
    """Starts and evaluates the trials of all runs, and proposes rollbacks.

    advance: function that applies an event to a run: it makes the decisions, stores them and notifies the ranks.
    """

    def __init__(
        self, store: Store, advance: Callable[[Run, ControlEvent], None], clock: Clocks, proposal_seconds: float
    ) -> None:
        self._store = store
        self._apply_event = advance
        self._clock = clock
        self._proposal_seconds = proposal_seconds
        self._next_request: dict[str, tuple[float, float]] = {}
        """Time of the next rollback request, on the monotonic clock, and the wait before it, by run."""
        self._not_before: dict[str, float] = {}
        """Earliest time of the next evaluation, by run; on the monotonic clock."""

    def begin(self, run: Run, request: CanaryRequest, predicted: Predicted) -> Canary:
        """Creates the trial of a change, which compares the steps after the change with the steps before it.

        Raises a 409 problem if no rank is running, if another trial has not ended, or if too few steps have run with
        the committed generation.
        """
        committed = run.control.committed
        if not run.control.present:
            raise ProblemError(
                409,
                "no-baseline",
                "No rank is running, so a trial has no steps to compare with: try again when a rank runs.",
            )
        if committed.canary is not None and committed.canary.open:
            detail = (
                f"Generation {committed.number} is still on trial: wait for its verdict, roll it back, "
                "or make the change without a canary."
            )
            raise ProblemError(409, "canary-running", detail, generation=committed.number)
        steps = self._steps(run, skip=UNCOUNTED_STEPS) if committed.state == "applied" else []
        before = steps[-request.steps :]
        if len(before) < MIN_STEPS_BEFORE:
            detail = (
                f"Only {len(before)} steps ran with generation {committed.number}, {MIN_STEPS_BEFORE} are needed to "
                "compare with: try again in a moment."
            )
            raise ProblemError(409, "no-baseline", detail)
        return Canary(
            base=committed.number,
            steps=request.steps,
            min_effect=request.min_effect,
            min_headroom=request.min_headroom,
            before=tuple(before),
            predicted_before=predicted.before,
            predicted_after=predicted.after,
        )

    def report_seconds(self, run: Run) -> float | None:
        """Time between two reports, in seconds, that the daemon requests from the ranks while the run's trial has no
        verdict; None if there is no such trial."""
        canary = run.control.committed.canary
        if canary is None or canary.state != "waiting":
            return None
        typical = median(step.seconds for step in canary.before)
        return max(SHORTEST_REPORT_SECONDS, canary.steps / REPORTS_A_TRIAL * typical)

    def evaluate(self, run: Run) -> None:
        """Evaluates the run's trial if enough steps have run, and proposes a rollback if the change is harmful. Called
        after each report of a rank and at each tick; does nothing if the last evaluation was a short time ago."""
        committed = run.control.committed
        if committed.canary is None or committed.canary.state != "waiting" or committed.state != "applied":
            return
        began = self._clock.mono()
        if began < self._not_before.get(run.name, began):
            return
        judged = judge(committed.canary, self._steps(run))
        pause = min(EVALUATION_INTERVAL_FACTOR * (self._clock.mono() - began), MAX_EVALUATION_PAUSE_SECONDS)
        self._not_before[run.name] = began + pause
        if judged != committed.canary:
            self._apply_event(run, TrialJudged(committed.number, judged))
            self.tick(run, self._clock.mono())

    def tick(self, run: Run, now: float) -> None:
        """Proposes a rollback while the committed generation is condemned (its trial found it harmful).

        It does nothing while another proposal is pending, so changes of operators have priority. `now` is on the
        monotonic clock.
        """
        committed, canary = run.control.committed, run.control.committed.canary
        if canary is None or canary.state != "condemned":
            self._next_request.pop(run.name, None)
            return
        if run.control.pending is not None:  # it may be the rollback itself, so the time of its request is kept
            return
        due, waited = self._next_request.get(run.name, (now, 0.0))
        if now >= due:
            wait = min(max(RETRY_SECONDS, 2 * waited), MAX_RETRY_SECONDS)
            self._next_request[run.name] = (now + wait, wait)
            base = self._store.generation(run.name, canary.base)
            if base is None:
                log.error(
                    "run %s cannot be rolled back after a harmful trial, because generation %d cannot be read from the "
                    "database: roll back to another generation",
                    run.name,
                    canary.base,
                )
                return
            self._propose(run, base, "daemon", f"Canary of generation {committed.number}: {canary.verdict}")

    def forget(self, run: str) -> None:
        """Drops the state of a deleted run."""
        self._next_request.pop(run, None)
        self._not_before.pop(run, None)

    def roll_back(self, run: Run, to: int | None, author: str, reason: str) -> Generation:
        """Proposes the knobs of generation `to` as a new generation. Raises a problem if that is not possible.

        `to` None: the generation before a running trial, else the newest one committed before the present generation
        whose canary did not find it harmful.
        """
        target = self._target(run, to)
        now = run.control.committed.knobs
        knobs = self._knobs(run, target)
        if run.control.pending is None and all(name in now and same(name, now[name], knobs[name]) for name in knobs):
            detail = f"The run has the knobs of generation {target.number} already."
            raise ProblemError(409, "nothing-to-roll-back", detail)
        return self._propose(run, target, author, reason or f"Back to generation {target.number}.")

    def _target(self, run: Run, to: int | None) -> Generation:
        """The stored generation `to`. None: the generation before a running trial, else the newest one committed before
        the present generation whose canary did not find it harmful. Raises a problem if there is none, or if it cannot
        be read."""
        committed = run.control.committed
        if to is None and committed.canary is not None and committed.canary.open:
            to = committed.canary.base
        if to is None:
            to = self._newest_sound(run.name, below=committed.number)
        if to is None:
            raise ProblemError(409, "nothing-to-roll-back", f"Run {run.name!r} has no earlier generation.")
        if to > run.control.newest:
            detail = f"Run {run.name!r} has no generation {to}; the newest is {run.control.newest}."
            raise ProblemError(404, "unknown-generation", detail)
        target = self._store.generation(run.name, to)
        if target is None:
            detail = f"What is stored of generation {to} of run {run.name!r} cannot be read: choose another one."
            raise ProblemError(409, "generation-damaged", detail)
        if target.state not in COMMITTED_STATES:
            raise ProblemError(
                409, "never-ran", f"Generation {to} was {target.state}: no rank ever ran with it. Choose another one."
            )
        return target

    def _newest_sound(self, run: str, below: int) -> int | None:
        """The newest generation committed before `below` that no canary found harmful; None if there is none."""
        while (number := self._store.newest_of(run, COMMITTED_STATES, below=below)) is not None:
            found = self._store.generation(run, number)
            if found is None or found.canary is None or found.canary.state not in ("condemned", "rolled_back"):
                return number
            below = number
        return None

    def _propose(self, run: Run, target: Generation, author: str, reason: str) -> Generation:
        knobs, before = self._knobs(run, target), run.control.committed.knobs
        changed = {n: v for n, v in knobs.items() if n not in before or not same(n, before[n], v)}
        at, deadline = self._clock.wall(), self._clock.mono() + self._proposal_seconds
        event = NewProposal(
            knobs=knobs, changes=changed, author=author, reason=reason, at=at, deadline=deadline, restores=target.number
        )
        self._apply_event(run, event)
        return run.latest

    def _knobs(self, run: Run, target: Generation) -> KnobChanges:
        """The target's knobs; a `tier_split` that names a storage path that the run no longer has becomes `auto`."""
        return serializers.knobs_of(target).fitted(run.paths).as_dict(paths=bool(run.paths))

    def _steps(self, run: Run, skip: int = 0) -> list[StepOfAllRanks]:
        """Steps that all present ranks ran with the committed generation, without the first `skip` steps.

        A rank that has not reported its first step with the generation is ignored.
        """
        committed = run.control.committed
        firsts: list[int] = []
        ranks: list[tuple[Iterable[StepFigures], int | None]] = []
        for rank in sorted(run.control.present & run.members.keys()):
            member = run.members[rank]
            first = member.applied.get(committed.number, committed.applied.get(rank))
            if first is not None:
                firsts.append(first)
                ranks.append((member.window, member.hello.device_memory_bytes))
        return common_steps(ranks, first=max(firsts, default=0) + skip)

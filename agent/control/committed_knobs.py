"""The daemon's decisions about knobs and this rank's answers to them. Shared by the threads of the link to the daemon
and the training thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tidegate.errors import ConfigError
from tidegate.knobs.knobs import Knobs
from tidegate.logs import event
from tidegate.wire.agent import Applied, Directive, Vote

log = logging.getLogger("tidegate.link")

LONGEST_REASON = 2_000
"""Maximum number of characters of the reason why a generation cannot be used."""


@dataclass(frozen=True)
class CommittedKnobs:
    """Knobs that all live ranks have accepted."""

    generation: int
    knobs: Knobs
    epoch: int = 0
    """Number of times that the daemon has lost its state, after which it counts generations from 0 again."""

    @property
    def decision(self) -> tuple[int, int]:
        """Identifies these knobs: the pair of epoch (how often the daemon has lost its state) and generation. The
        generation alone is not unique, because a daemon that lost its state counts from 0 again."""
        return self.epoch, self.generation


class KnobDecisions:
    """Stores the newest knobs that the daemon has committed (accepted by all ranks), and this rank's answer for the
    next report to the daemon: the knobs were applied, or they cannot be used on this rank.

    run: name of the run, for log messages.
    wake: function that wakes the thread that sends reports.
    """

    def __init__(self, run: str, wake: Callable[[], None]) -> None:
        self.committed: CommittedKnobs | None = None
        """Newest knobs that the daemon has committed and that can be used; the training thread applies them. None
        before the first."""
        self.newest_generation = -1
        """Newest generation that the daemon has named as committed, whether it could be used or not."""
        self.voted: int | None = None
        """Proposed generation to which this rank last answered whether it can use the knobs (its vote). None if it has
        not answered since it registered."""
        self._run, self._wake = run, wake
        self._lock = threading.Lock()
        self._applied: Applied | None = None
        self._unusable: Vote | None = None
        """Message to the daemon that a committed generation cannot be used on this rank, until the message is sent;
        None otherwise."""
        self._reported: set[tuple[int, int]] = set()
        """Generations that were reported as unusable, each with its epoch (how often the daemon has lost its state), so
        that each is reported only once."""

    # ---- what the daemon says

    def take(self, directive: Directive) -> None:
        """Accepts the committed knobs in a response of the daemon, if they are new."""
        with self._lock:
            if directive.committed > self.newest_generation:
                self._accept(directive, self.committed.epoch if self.committed is not None else 0)

    def take_at_registration(self, directive: Directive, known: CommittedKnobs | None) -> None:
        """Accepts the knobs in the daemon's response to a registration message (hello).

        known: the committed knobs that this rank had when the message was built; None if it had none. If it had some,
            an older generation in the response is accepted, too: a daemon that lost its state starts again with this
            rank's knobs.
        """
        with self._lock:
            epoch = known.epoch if known is not None else 0
            starts_over = known is not None and directive.committed < self.newest_generation
            if starts_over or directive.committed >= self.newest_generation:
                self._accept(directive, epoch + starts_over)
            self.voted = None

    def _accept(self, directive: Directive, epoch: int) -> None:
        """Stores the committed knobs of a response in `committed`, from where the training thread applies them. If the
        knobs cannot be used, this is reported to the daemon, and `committed` is unchanged. The caller holds the lock.

        epoch: how often the daemon has lost its state.
        """
        self.newest_generation = directive.committed
        try:
            knobs = Knobs().changed(directive.committed_knobs)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, ConfigError) else str(error)
            if not self.report_unusable((epoch, directive.committed), reason):
                return
            log.error(
                "the knobs of generation %d cannot be used on this rank, the last good knobs stay in force: %s",
                directive.committed, reason,
                extra=event("generation_refused", run=self._run, generation=directive.committed, reason=reason),
            )  # fmt: skip
        else:
            self.committed = CommittedKnobs(directive.committed, knobs, epoch)

    # ---- what the rank answers

    def report_applied(self, generation: int, step: int) -> None:
        """Tells the daemon, with the next report, that `generation` is in force from `step` on."""
        with self._lock:
            self._applied = Applied(generation=generation, step=step)
        self._wake()

    def report_unusable(self, decision: tuple[int, int], reason: str) -> bool:
        """Tells the daemon, right after the next report, that a committed generation cannot be used on this rank.
        `decision`: epoch (how often the daemon has lost its state) and generation. Returns False, and sends nothing, if
        that was reported before."""
        if decision in self._reported:
            return False
        self._reported.add(decision)
        self._unusable = Vote(generation=decision[1], can=False, reason=_shortened(reason))
        self._wake()
        return True

    def take_applied(self) -> Applied | None:
        """Returns the message that knobs were applied, for the next report, and removes it here, so that it is sent
        only once. None if there is no such message."""
        with self._lock:
            applied, self._applied = self._applied, None
        return applied

    def restore_applied(self, applied: Applied | None) -> None:
        """Stores a message of applied knobs that was not delivered, unless a newer message is stored."""
        with self._lock:
            self._applied = self._applied or applied

    def forget_applied(self) -> None:
        """Discards the message of applied knobs that waits for the next report."""
        with self._lock:
            self._applied = None

    def take_unusable(self) -> Vote | None:
        """Returns the message that a committed generation cannot be used on this rank, and removes it here, so that it
        is sent only once. None if there is no such message."""
        unusable, self._unusable = self._unusable, None
        return unusable

    def restore_unusable(self, unusable: Vote) -> None:
        """Stores a message of an unusable generation that was not delivered, unless a newer message is stored."""
        self._unusable = self._unusable or unusable


def _shortened(reason: str) -> str:
    """The reason as valid UTF-8, cut to LONGEST_REASON characters."""
    return reason.encode("utf-8", "replace").decode()[:LONGEST_REASON]

"""Log messages and waiting times of a link while the daemon refuses it, because another agent holds the rank or the
token is wrong."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from tidegate.agent.control.process_identity import is_observable
from tidegate.errors import NotAuthorized, RankTaken
from tidegate.logs import event

log = logging.getLogger("tidegate.link")

TOKEN_PAUSE_SECONDS: Final = 60.0
"""Pause in seconds between two registrations with a token that was refused. It is long, because the daemon slows down
addresses that try many tokens."""
_TRAINING_GOES_ON: Final = "Training goes on, its knobs stay as they are and its metrics are served"


class RefusalLog:
    """Logs each kind of refusal by the daemon once per outage. An outage ends when `accepted` is called."""

    def __init__(self, run: str, rank: int) -> None:
        self.pause: float | None = None
        """Seconds until the next registration; None for the usual back-off."""
        self.refused = ""
        """What the daemon refuses now: the `token`, or the `rank`, which another agent holds. Empty for nothing."""
        self._run, self._rank = run, rank
        self._since: float | None = None
        """Start of the outage, on the monotonic clock; None outside an outage."""
        self._logged: set[str] = set()

    def rank_taken(self, error: RankTaken) -> None:
        """Logs that another agent holds the rank. The message says whether that agent is certainly alive; if it may
        have ended on another host, the message gives the end of its lease."""
        self.refused, now = "rank", time.monotonic()
        self._since = now if self._since is None else self._since
        if is_observable(error.holder) or now - self._since > error.lease_seconds:
            sentence = (
                f"{error} That agent is alive, so this process is not part of the run. {_TRAINING_GOES_ON}. This "
                "process takes the rank when that agent ends."
            )
            self._warn(sentence, event("rank_taken", run=self._run, rank=self._rank, reason=sentence))
        else:
            sentence = (
                f"{error} {_TRAINING_GOES_ON}. If that agent has ended, this process takes the rank when the lease "
                f"ends, within {error.lease_seconds:g} s."
            )
            self._warn(sentence, event("rank_awaited", run=self._run, rank=self._rank, reason=sentence))

    def token_refused(self, error: NotAuthorized) -> None:
        """Logs that the token is refused."""
        self.refused, self.pause = "token", TOKEN_PAUSE_SECONDS
        sentence = f"The daemon refuses this process: {error} {_TRAINING_GOES_ON}."
        self._warn(sentence, event("token_refused", run=self._run, rank=self._rank, reason=sentence))

    def accepted(self) -> None:
        """Ends the outage: the daemon has accepted this process."""
        if self._logged:
            log.info(
                "run %s, rank %d: the daemon accepts this process now, after it had refused it", self._run, self._rank,
                extra=event("rank_held", run=self._run, rank=self._rank),
            )  # fmt: skip
        self.refused, self.pause, self._since = "", None, None
        self._logged.clear()

    def _warn(self, sentence: str, extra: dict[str, Any]) -> None:
        """Logs a warning. Each kind of event (`extra["event"]`) is logged once per outage."""
        if extra["event"] not in self._logged:
            self._logged.add(extra["event"])
            log.warning("%s", sentence, extra=extra)

"""What a link says, and how long it waits, while the daemon will not have it: the rank is held, the token is wrong."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from tidegate.agent.control.process_identity import is_seen
from tidegate.errors import NotAuthorized, RankTaken
from tidegate.logs import event

log = logging.getLogger("tidegate.link")

TOKEN_PAUSE_SECONDS: Final = 60.0
"""Between two hellos with a token that is refused: the daemon makes an address wait that tries many."""
_GOES_ON: Final = "Training goes on, its knobs stay as they are and its metrics are served"


class Refusals:
    """One outage at a time: each thing is said once, until `over`."""

    def __init__(self, run: str, rank: int) -> None:
        self.pause: float | None = None
        """Seconds until the next hello; None for the usual back-off."""
        self._run, self._rank = run, rank
        self._since: float | None = None
        """On the monotonic clock."""
        self._said: set[str] = set()

    def taken(self, error: RankTaken) -> None:
        """Another agent holds the rank. While its lease holds that may be one that has ended elsewhere."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if is_seen(error.holder) or now - self._since > error.lease_seconds:
            sentence = (
                f"{error} That one is alive, so this process is not part of the run. {_GOES_ON}; the rank is taken "
                "when that one ends."
            )
            self._say(sentence, event("rank_taken", run=self._run, rank=self._rank, reason=sentence))
        else:
            sentence = (
                f"{error} {_GOES_ON}; if that one has ended, the rank is taken when its lease has, within "
                f"{error.lease_seconds:g} s."
            )
            self._say(sentence, event("rank_awaited", run=self._run, rank=self._rank, reason=sentence))

    def told(self, error: NotAuthorized) -> None:
        """The token is refused."""
        self.pause = TOKEN_PAUSE_SECONDS
        sentence = f"The daemon refuses this process: {error} {_GOES_ON}."
        self._say(sentence, event("token_refused", run=self._run, rank=self._rank, reason=sentence))

    def over(self) -> None:
        """The daemon has the rank."""
        if self._said:
            log.info(
                "run %s, rank %d: the daemon has this process now", self._run, self._rank,
                extra=event("rank_held", run=self._run, rank=self._rank),
            )  # fmt: skip
        self.pause = self._since = None
        self._said.clear()

    def _say(self, sentence: str, extra: dict[str, Any]) -> None:
        if extra["event"] not in self._said:
            self._said.add(extra["event"])
            log.warning("%s", sentence, extra=extra)

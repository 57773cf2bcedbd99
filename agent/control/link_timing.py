"""Times and limits of the link to the daemon: how often reports are sent, how long answers may take, when to retry.

Code reads these names through the module (`link_timing.REPORT_SECONDS`), so that a test can shorten them.
"""

from __future__ import annotations

import random

REPORT_SECONDS = 1.0
LONGEST_REPORT_SECONDS = 4.0
REPORT_SHARE = 1e-3
"""Largest share of one core that reports may take: the more CPU time a report costs (large plans, a slow machine), the
rarer reports are, between the two bounds. Knobs and votes, which operators wait for, do not wait for a report. While a
canary is judged, the daemon may ask for more reports, within `TRIAL_SHARE`."""
TRIAL_SHARE = 1e-2
"""The same share while a canary is judged, which takes some steps: with `REPORT_SHARE`, harm would last twice as
long."""
SHORTEST_REPORT_SECONDS = 0.1
"""Least pause between two reports, whatever the daemon asks for."""
RESEND_SECONDS = 3.0
"""The daemon writes reports to disk once a second. If it was killed, all reports that arrived in this time before the
newest one are sent again."""
POLL_SECONDS = 20.0
"""How long the daemon may delay the response to a long poll."""
POLLS_AT_ONCE, POLLS_PER_SECOND = 20, 5.0
"""Burst and rate of polls and votes. They limit requests to a daemon that responds to each one at once."""
ANSWER_SECONDS = 5.0
"""Time limit of one exchange with the daemon, in addition to the wait of a long poll. Also the limit of the whole first
hello."""
MAX_ANSWER_BYTES = 1 << 20
"""Limit of a response: a lease or a directive has a few hundred bytes."""
MAX_BACKOFF_SECONDS = 5.0
LONGEST_GOODBYE_SECONDS = 10.0
STRICT_PAUSE_SECONDS = 0.5
"""Pause between two hellos for a rank that is held by another agent, with `strict`."""
STRICT_MARGIN_SECONDS = 1.0
"""Time to wait beyond the lease of an agent that may have ended."""
LONGEST_STRICT_SECONDS = 60.0
"""Limit of the wait for a rank that is held, whatever lease the daemon names."""

_SPREAD = random.SystemRandom()
"""Not the generator of the module `random`: a script may have seeded that."""


def pause_after_report(cpu_seconds: float, wanted: float | None = None) -> float:
    """Seconds until the next report, given the CPU seconds of the last one: the daemon's wish, if the allowed share
    permits it."""
    usual = min(LONGEST_REPORT_SECONDS, max(REPORT_SECONDS, cpu_seconds / REPORT_SHARE))
    return usual if wanted is None else min(usual, max(wanted, SHORTEST_REPORT_SECONDS, cpu_seconds / TRIAL_SHARE))


def backoff(failures: int) -> float:
    """Seconds to wait before the next try: doubled each time, spread so that ranks do not come back all at once."""
    return _SPREAD.uniform(0.5, 1.0) * min(MAX_BACKOFF_SECONDS, 0.25 * 2.0 ** min(failures, 10))

"""Times and limits of the link to the daemon: how often reports are sent, how long answers may take, when to retry.

Code reads these names through the module (`link_timing.REPORT_SECONDS`), so that a test can shorten them.
"""

from __future__ import annotations

import random

REPORT_SECONDS = 1.0
LONGEST_REPORT_SECONDS = 4.0
REPORT_SHARE = 1e-3
"""Share of one core that reports may take: the more CPU time a report costs (large plans, a slow machine), the longer
the pause between reports. It is never longer than LONGEST_REPORT_SECONDS, even if the share is then larger. Knobs and
votes are sent without waiting for a report. During a canary (a trial of new knobs) the daemon may ask for more frequent
reports, within `TRIAL_SHARE`."""
TRIAL_SHARE = 1e-2
"""Share of one core that reports may take during a canary (a trial of new knobs). It is higher than REPORT_SHARE so
that the daemon sees harmful knobs sooner: with REPORT_SHARE they would stay in force twice as long."""
SHORTEST_REPORT_SECONDS = 0.1
"""Least pause between two reports, whatever the daemon asks for."""
RESEND_SECONDS = 3.0
"""When the daemon was unavailable, reports that were delivered within this time before the newest one are sent again: a
daemon that was killed may have lost them, because it writes reports to disk once a second."""
POLL_SECONDS = 20.0
"""Time in seconds for which the daemon may delay the response to a long poll."""
POLLS_AT_ONCE, POLLS_PER_SECOND = 20, 5.0
"""Limits of the rate of polls and votes: the number that may be sent at once, and the average number per second. They
take effect if the daemon responds to every long poll at once."""
ANSWER_SECONDS = 5.0
"""Time limit of one exchange with the daemon, in addition to the wait of a long poll. It is also the limit for each
attempt of the first registration."""
MAX_ANSWER_BYTES = 1 << 20
"""Maximum size of a response. Typical responses have a few hundred bytes."""
MAX_BACKOFF_SECONDS = 5.0
LONGEST_GOODBYE_SECONDS = 10.0
STRICT_PAUSE_SECONDS = 0.5
"""With `attach(strict=True)`: pause between two attempts to register while another agent holds the rank."""
STRICT_MARGIN_SECONDS = 1.0
"""With `attach(strict=True)`: time to wait beyond the end of the lease (for which the daemon reserves the rank) of an
agent that may have ended."""
LONGEST_STRICT_SECONDS = 60.0
"""With `attach(strict=True)`: longest wait for a rank that another agent holds, even if the daemon reserves the rank
for that agent longer."""

_SPREAD = random.SystemRandom()
"""Generator of the random factors in `backoff`. It is not the generator of the module `random`, because a training
script may have seeded that one with the same number on all ranks."""


def pause_after_report(cpu_seconds: float, wanted: float | None = None) -> float:
    """Seconds until the next report. `cpu_seconds`: cost of the last report. `wanted`: pause that the daemon asks for;
    it is used as far as the allowed CPU share permits."""
    usual = min(LONGEST_REPORT_SECONDS, max(REPORT_SECONDS, cpu_seconds / REPORT_SHARE))
    return usual if wanted is None else min(usual, max(wanted, SHORTEST_REPORT_SECONDS, cpu_seconds / TRIAL_SHARE))


def backoff(failures: int) -> float:
    """Seconds to wait before the next attempt: doubled after each failure up to MAX_BACKOFF_SECONDS, times a random
    factor so that ranks do not reconnect at the same time."""
    return _SPREAD.uniform(0.5, 1.0) * min(MAX_BACKOFF_SECONDS, 0.25 * 2.0 ** min(failures, 10))

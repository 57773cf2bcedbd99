"""Names of stall causes in messages: present names, and names of the version before, which are still read."""

from __future__ import annotations

import functools
import logging
from typing import Annotated, Final

from pydantic import AfterValidator

from tidegate.timeline.timeline import DISPATCH
from tidegate.wire.base import Label

FORMER_NAMES: Final = {"scheduler": DISPATCH}
"""The present name of each cause that had another name in the version before."""
log = logging.getLogger(__name__)


def _present_name(cause: str) -> str:
    present = FORMER_NAMES.get(cause)
    if present is None:
        return cause
    _warn(cause, present)
    return present


@functools.cache  # one warning for each name
def _warn(former: str, present: str) -> None:
    log.warning(
        "a process with an earlier version of Tidegate reported the stall cause %r, which is now called %r: install "
        "the same version on all machines, because the next version does not accept the former name",
        former,
        present,
    )


StallCause = Annotated[Label, AfterValidator(_present_name)]
"""A stall cause: one of `STALL_CAUSES` or a lane of a path. A former name is replaced by the present name."""


def with_present_names(report: str) -> str:
    """Replaces former names of stall causes in `report`, a step report in JSON as the earlier version stored it, by the
    present names.

    Only values of the key `cause` are replaced. Text inside of the report cannot look like this key, because JSON
    writes a backslash before each quotation mark in a text. pydantic writes JSON without spaces.
    """
    for former, present in FORMER_NAMES.items():
        report = report.replace(f'"cause":"{former}"', f'"cause":"{present}"')
    return report

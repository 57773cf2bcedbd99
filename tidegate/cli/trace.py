"""`tidegate trace`: writes the newest timeline of a rank to a trace file."""

from __future__ import annotations

from pathlib import Path

from tidegate.errors import TidegateError
from tidegate.timeline.chrome_trace import write_trace
from tidegate.wire.timeline import TimelineView
from tidegate.wire.translation import as_timeline


def write(view: TimelineView, run: str, rank: int, output: Path) -> None:
    try:
        write_trace(output, [as_timeline(view)], rank=rank, process_name=f"{run} rank {rank}")
    except OSError as error:
        raise TidegateError(f"{output} cannot be written: {error.strerror}.") from error

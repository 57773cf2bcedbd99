"""A run that dies and leaves its state on a storage path: so much that little is free. Ends itself with SIGKILL."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tidegate.agent.tiers.scratch import Scratch


def main(directory: Path, left_bytes: int) -> None:
    """left_bytes: what stays free."""
    scratch = Scratch.create(directory, "dead", 0)
    space = os.statvfs(directory)
    with (scratch.directory / "state").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - left_bytes)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""Command line of the modules that write files of the documentation from the code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

USAGE_ERROR = 2


def run(module: str, files: Callable[[], Mapping[Path, str]], arguments: list[str]) -> int:
    """Writes the files whose content has changed; with `--check` only reports them. Returns the exit status: 1 if
    `--check` found a file that is out of date.

    module: name of the calling module, for messages. files: returns the content of each file, by its path.
    """
    if arguments not in ([], ["--check"]):
        print(f"usage: python -m {module} [--check]", file=sys.stderr)
        return USAGE_ERROR
    stale = {path: text for path, text in files().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if arguments:
            print(f"{path} is out of date: run python -m {module}.", file=sys.stderr)
        else:
            path.write_text(text)
            print(f"wrote {path}")
    return 1 if arguments and stale else 0

"""Command line of the modules that write files of the documentation from the code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

USAGE_ERROR = 2


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """The page with each block between its two markers, in place of what is there. ValueError where the page has no
    place for one.

    blocks: the text of each block by its name; `<!-- NAME: begin -->` and `<!-- NAME: end -->` are its markers.
    """
    for name, text in blocks.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"The page must have these two lines once each:\n{begin}{end}")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{text}\n{end}{rest.partition(end)[2]}"
    return page


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

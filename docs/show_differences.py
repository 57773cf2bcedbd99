"""Writes the differences between the examples and the same scripts without Tidegate into `docs/guides/examples.md`.

`python -m docs.show_differences` writes them between their markers; with `--check` it fails where they are not those of
the scripts.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Final

from docs.generated import filled, run

ROOT: Final = Path(__file__).resolve().parent.parent
EXAMPLES: Final = ROOT / "examples"
PAGE: Final = ROOT / "docs" / "guides" / "examples.md"
CONTEXT: Final = 1
"""Number of unchanged lines that are shown around each change."""


def names() -> list[str]:
    """The examples that have the same script without Tidegate beside them, in `examples/plain/`."""
    return sorted(path.name for path in (EXAMPLES / "plain").glob("*.py"))


def difference(name: str) -> list[str]:
    """Lines of a unified diff from the plain script to the example, without the two lines of file names."""
    plain, ours = ((EXAMPLES / folder / name).read_text().splitlines() for folder in ("plain", "."))
    return list(difflib.unified_diff(plain, ours, n=CONTEXT, lineterm=""))[2:]


def changed_lines(name: str) -> int:
    """Number of lines that the example has and the plain script has not, plus the number of those that it lacks."""
    return sum(line.startswith(("+", "-")) for line in difference(name))


def with_differences(page: str) -> str:
    """The page with the differences as they should be. ValueError where it has no place for one."""
    return filled(page, {f"difference of {name}": _block(name) for name in names()})


def _block(name: str) -> str:
    return "\n".join([f"{changed_lines(name)} lines:\n", "```diff", *map(_shown, difference(name)), "```"])


def _shown(line: str) -> str:
    """Where a part of the diff begins, its line numbers are of no use to readers."""
    return "@@" if line.startswith("@@") else line


def main(arguments: list[str]) -> int:
    return run("docs.show_differences", lambda: {PAGE: with_differences(PAGE.read_text())}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

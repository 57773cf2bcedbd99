"""Writes docs/results.md and its plots (docs/images/results/) from the files in bench/results.

python bench/results_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from reporting.page import files

ROOT: Final = Path(__file__).resolve().parents[1]
PLOTS: Final = ROOT / "docs" / "images" / "results"


def main() -> int:
    found = files(ROOT / "bench" / "results")
    PLOTS.mkdir(parents=True, exist_ok=True)
    for stale in {path.relative_to(ROOT).as_posix() for path in PLOTS.iterdir()} - set(found):
        (ROOT / stale).unlink()
    for path, text in found.items():
        (ROOT / path).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

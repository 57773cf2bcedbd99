"""Programs as the documentation has them, so that tests run what readers copy."""

from __future__ import annotations

from tests.services import ROOT

DAEMON = 'daemon="http://127.0.0.1:8790"'


def program(page: str, heading: str) -> str:
    """The first block of Python below a heading of `docs/PAGE.md`. It attaches to no daemon."""
    section = (ROOT / "docs" / f"{page}.md").read_text().partition(f"\n## {heading}\n")[2]
    block = section.partition("```python\n")[2].partition("```")[0]
    assert DAEMON in block, f"{page}.md has no program with {DAEMON} below {heading!r}"
    return block.replace(DAEMON, "daemon=None")

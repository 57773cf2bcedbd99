"""Programs as the documentation has them, so that tests run what readers copy."""

from __future__ import annotations

from tests.services import ROOT

DAEMON = 'daemon="http://127.0.0.1:8790"'


def program(page: str, heading: str) -> str:
    """The first block of Python below a heading of `docs/PAGE.md`. It attaches to no daemon."""
    block = blocks(page, heading)[0]
    assert DAEMON in block, f"{page}.md has no program with {DAEMON} below {heading!r}"
    return block.replace(DAEMON, "daemon=None")


def blocks(page: str, heading: str) -> list[str]:
    """All blocks of Python of that section."""
    section = (ROOT / "docs" / f"{page}.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [rest.partition("```")[0] for rest in section.split("```python\n")[1:]]


def replaced(block: str, line: str, by: str) -> str:
    """`block` with `by` for a line that it has once."""
    assert block.count(line) == 1, f"the program has {line!r} {block.count(line)} times"
    return block.replace(line, by)

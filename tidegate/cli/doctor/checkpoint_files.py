"""`tidegate doctor --checkpoints`: checks whether checkpoints are sound, and removes damaged ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tidegate.cli.doctor.machine import Finding, remove_if_confirmed

if TYPE_CHECKING:
    from tidegate.agent.checkpoints.inspection import Inspected


def inspect_checkpoints(places: Sequence[str | os.PathLike[str]]) -> list[Inspected]:
    """Inspects all checkpoints in these directories; every byte is read. PathUnusable when a directory cannot be
    read."""
    if not places:
        return []
    from tidegate.agent.checkpoints.inspection import inspect

    return [found for place in places for found in inspect(place)]


def findings(places: Sequence[str | os.PathLike[str]], found: Sequence[Inspected]) -> list[Finding]:
    """One finding for each checkpoint; if there are none, one finding that says so."""
    if not found:
        return [Finding("checkpoint", "good", f"no checkpoint in {', '.join(map(str, places))}")]
    return [_finding(checkpoint) for checkpoint in found]


def _finding(found: Inspected) -> Finding:
    what = f"{found.directory}: {found.nbytes / 1e6:,.1f} MB"
    if found.unreadable:
        return Finding("checkpoint", "bad", f"{what}, cannot be read: {found.unreadable}")
    if found.damage is not None:
        remedy = " Remove it with --remove." if found.damage.is_removable else ""
        return Finding("checkpoint", "bad", f"{what}, damaged: {found.damage.reason}{remedy}")
    if not found.is_complete:
        return Finding("checkpoint", "missing", f"{what}, not complete: the next checkpoint of its run removes it")
    return Finding("checkpoint", "good", f"{what}, sound")


def remove_damaged(found: Sequence[Inspected], yes: bool, ask: Callable[[str], bool]) -> list[Finding]:
    """Removes the damaged checkpoints in `found`, as `remove_if_confirmed` does. Other checkpoints are not touched."""
    from tidegate.agent.checkpoints.inspection import remove_damaged as remove

    damaged = [c for c in found if c.damage is not None and c.damage.is_removable]
    if not damaged:
        return [Finding("checkpoint", "good", "nothing to remove: no checkpoint there is damaged")]
    listed = "\n".join(f"  {c.directory}: {c.damage.reason}" for c in damaged if c.damage is not None)
    return remove_if_confirmed("checkpoint", f"{len(damaged)} damaged checkpoints", listed, damaged, remove, yes, ask)

"""`tidegate doctor --path`: lists state that runs have left on storage paths, and removes state of dead processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from tidegate.cli.doctor.machine import Finding, Verdict, remove_if_confirmed

if TYPE_CHECKING:
    from tidegate.agent.tiers.object_scratch import ObjectLeftover
    from tidegate.agent.tiers.scratch import Leftover

    AnyLeftover = Leftover | ObjectLeftover

_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))


def find_leftover_state(places: Sequence[str | os.PathLike[str]], endpoint: str = "") -> list[AnyLeftover]:
    """Finds state on these paths, also of live runs. Paths are directories, or prefixes of the object store at
    `endpoint`.

    PathUnusable when a path cannot be read, ConfigError for an invalid address.
    """
    from tidegate.agent.tiers.scratch import find_leftovers

    found: list[AnyLeftover] = []
    for place in places:
        url = os.fspath(place)
        found += _in_objects(url, endpoint) if "://" in url else find_leftovers(place)
    return found


def _in_objects(url: str, endpoint: str) -> list[ObjectLeftover]:
    from tidegate.agent.tiers.object_scratch import find_object_leftovers
    from tidegate.agent.tiers.object_settings import ObjectSettings

    return find_object_leftovers(ObjectSettings(url=url, endpoint=endpoint))


def findings(places: Sequence[str | os.PathLike[str]], found: Sequence[AnyLeftover]) -> list[Finding]:
    """One finding for each entry of `found` (state of a run on a storage path); if `found` is empty, one finding that
    says so. places: the paths that were searched."""
    if not found:
        return [Finding("path", "good", f"no state of any run in {', '.join(map(str, places))}")]
    return [_finding(leftover) for leftover in found]


def _finding(leftover: AnyLeftover) -> Finding:
    what = f"{leftover.directory}: {leftover.nbytes / 1e6:,.1f} MB, {_age(leftover.age_seconds)} old"
    owner = leftover.owner
    who = f"process {owner.pid} on {owner.host}" if owner else "an unknown process (its owner file cannot be read)"
    by_liveness: dict[str, tuple[Verdict, str]] = {
        "yes": ("good", f"in use by {who}"),
        "no": ("missing", f"left behind by {who}, which is dead: remove it with --remove"),
        "unknown": (
            "missing",
            f"of {who}; it is unknown whether that process is alive: check, then delete the state",
        ),
    }
    verdict, sentence = by_liveness[leftover.alive]
    return Finding("path", verdict, f"{what}, {sentence}")


def remove_dead(found: Sequence[AnyLeftover], yes: bool, ask: Callable[[str], bool]) -> list[Finding]:
    """Removes the state in `found` that dead processes have left on storage paths, as `remove_if_confirmed` does. State
    of live processes, and of processes that may be alive, is not touched."""
    dead = [leftover for leftover in found if leftover.alive == "no"]
    if not dead:
        return [Finding("path", "good", "nothing to remove: no dead run left anything there")]
    listed = "\n".join(f"  {leftover.directory}" for leftover in dead)
    return remove_if_confirmed("path", f"the state of {len(dead)} dead ranks", listed, dead, _remove, yes, ask)


def _remove(leftover: AnyLeftover) -> None:
    """Checks again that the owner is dead, and removes the leftover. StorageError when the owner is not dead, or the
    leftover cannot be removed."""
    from tidegate.agent.tiers.object_scratch import ObjectLeftover, remove_objects
    from tidegate.agent.tiers.scratch import remove

    if isinstance(leftover, ObjectLeftover):
        remove_objects(leftover)
    else:
        remove(leftover)


def _age(seconds: float) -> str:
    return next((f"{seconds / size:.1f} {unit}" for size, unit in _UNITS if seconds >= size), f"{seconds:.0f} s")

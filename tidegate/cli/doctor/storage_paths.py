"""`tidegate doctor --path`: lists state that runs have left on storage paths, and removes state of dead processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from tidegate.cli.doctor.machine import Finding, Verdict
from tidegate.errors import ConfigError, StorageError

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
    """Removes the state in `found` that dead processes have left on storage paths, and returns a finding for each
    removal. State of live processes, and of processes that may be alive, is not touched.

    Unless `yes` is True, `ask(question)` is called first; if it returns False, nothing is removed. ConfigError when the
    user must be asked, but there is no terminal.
    """
    dead = [leftover for leftover in found if leftover.alive == "no"]
    if not dead:
        return [Finding("path", "good", "nothing to remove: no dead run left anything there")]
    total = sum(leftover.nbytes for leftover in dead)
    places = "\n".join(f"  {leftover.directory}" for leftover in dead)
    if not yes and not sys.stdin.isatty():
        raise ConfigError(
            f"Nothing was removed: there is no terminal to ask on. Add --yes to remove the state of {len(dead)} dead "
            f"ranks, {total / 1e6:,.1f} MB:\n{places}"
        )
    if not yes and not ask(f"{places}\nRemove the state of {len(dead)} dead ranks, {total / 1e6:,.1f} MB?"):
        return [Finding("path", "missing", "nothing was removed")]
    done = []
    for leftover in dead:
        try:
            _remove(leftover)
        except StorageError as error:
            done.append(Finding("path", "bad", str(error)))
        else:
            done.append(Finding("path", "good", f"removed {leftover.directory}, {leftover.nbytes / 1e6:,.1f} MB"))
    return done


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

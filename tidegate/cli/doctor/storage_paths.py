"""`tidegate doctor --path`: tries storage paths, lists the state of runs there, and removes state of dead processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from tidegate import units
from tidegate.cli.doctor.machine import Finding, Verdict, remove_if_confirmed
from tidegate.cli.training import needs
from tidegate.errors import StorageError

if TYPE_CHECKING:
    from tidegate.agent.tiers.directory_probe import FileSystem
    from tidegate.agent.tiers.object_scratch import ObjectLeftover
    from tidegate.agent.tiers.scratch import Leftover

    AnyLeftover = Leftover | ObjectLeftover

NEARLY_FULL: Final = 0.1
"""Share of free space below which the alert TidegatePathNearlyFull fires."""
_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))


def examine_paths(places: Sequence[str], endpoint: str = "") -> list[Finding]:
    """Findings for each path: its file system and free space, whether it can be written and read, and the state of runs
    there, also of live ones. A path that fails is a finding, too.

    Paths are directories, or prefixes of the object store at `endpoint`. ConfigError for an invalid address.
    """
    return [finding for place in places for finding in _examine(place, endpoint)]


def _examine(place: str, endpoint: str) -> list[Finding]:
    try:
        found = _leftovers(place, endpoint)
        stored = [_finding(leftover) for leftover in found]
        none = [Finding("path", "good", f"{place}: no state of any run")]
        tried = _try_objects(place, endpoint) if "://" in place else _try_directory(place, found)
    except StorageError as error:
        return [Finding("path", "bad", str(error))]
    return [*tried, *(stored or none)]


def _leftovers(place: str, endpoint: str) -> Sequence[AnyLeftover]:
    with needs("agent"):
        from tidegate.agent.tiers.object_scratch import find_object_leftovers
        from tidegate.agent.tiers.object_settings import ObjectSettings
        from tidegate.agent.tiers.scratch import find_leftovers

    return (
        find_object_leftovers(ObjectSettings(url=place, endpoint=endpoint)) if "://" in place else find_leftovers(place)
    )


def _try_objects(url: str, endpoint: str) -> list[Finding]:
    from tidegate.agent.tiers.object_scratch import probe_objects
    from tidegate.agent.tiers.object_settings import ObjectSettings

    probe_objects(ObjectSettings(url=url, endpoint=endpoint))
    return [Finding("path", "good", f"{url}: an object was put, read back and removed")]


def _try_directory(place: str, found: Sequence[AnyLeftover]) -> list[Finding]:
    from tidegate.agent.tiers.directory_probe import file_system_of, probe_directory

    space = _space(place, file_system_of(place), sum(leftover.nbytes for leftover in found))
    try:
        how = "direct I/O" if probe_directory(place) else "buffered I/O: its file system has no direct I/O"
    except StorageError as error:
        return [space, Finding("path", "bad", str(error))]
    return [space, Finding("path", "good", f"{place}: a file was written, read back and removed, with {how}")]


def _space(place: str, on: FileSystem, state_bytes: int) -> Finding:
    """Finding for the file system of a path: where it is, and its free space with and without the state of runs."""
    free, without = (nbytes / max(1, on.total_bytes) for nbytes in (on.free_bytes, on.free_bytes + state_bytes))
    said = f"{place}: on {on.mount_point} ({on.kind}, {on.device}), size {units.nbytes(on.total_bytes)}, "
    said += f"free {units.nbytes(on.free_bytes)} ({_percent(free)})"
    if state_bytes:
        said += f", {_percent(without)} without the state of runs there"
    if free < NEARLY_FULL:
        said += f"; TidegatePathNearlyFull fires below {_percent(NEARLY_FULL)}"
    if on.mount_point == "/":
        said += ". / is the root file system: is the disk of this path mounted?"
    return Finding("path", "missing" if on.mount_point == "/" or free < NEARLY_FULL else "good", said)


def _percent(share: float) -> str:
    """A share in percent, rounded down: what is below a limit is not shown as the limit."""
    return f"{math.floor(share * 1000 + 1e-9) / 10:.1f} %"


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


def remove_dead(places: Sequence[str], endpoint: str, yes: bool, ask: Callable[[str], bool]) -> list[Finding]:
    """Removes the state that dead processes have left on these paths, as `remove_if_confirmed` does. State of live
    processes, and of processes that may be alive, is not touched. A path that cannot be read is a finding."""
    dead: list[AnyLeftover] = []
    failed: list[Finding] = []
    for place in places:
        try:
            dead += [leftover for leftover in _leftovers(place, endpoint) if leftover.alive == "no"]
        except StorageError as error:
            failed.append(Finding("path", "bad", str(error)))
    if not dead:
        return failed or [Finding("path", "good", "nothing to remove: no dead run left anything there")]
    listed = "\n".join(f"  {leftover.directory}" for leftover in dead)
    removed = remove_if_confirmed("path", f"the state of {len(dead)} dead ranks", listed, dead, _remove, yes, ask)
    return [*failed, *removed]


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

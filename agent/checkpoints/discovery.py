"""Finds the checkpoints in a directory.

A checkpoint is complete when the manifests of all its ranks exist and were written by the same attempt to save it. A
folder that no manifest names was left by an interrupted attempt. Checkpoints are numbered in the order in which they
were saved, and the highest number is the newest: this also holds after resuming from an earlier step. A complete
checkpoint is never written to: a second checkpoint of the same step is named `step-<n>.<number>`.

Damaged checkpoints are left for people to examine: they are listed with the reason, and all other checkpoints stay
usable.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tidegate.agent.checkpoints.checkpoint import Checkpoint, DamagedCheckpoint
from tidegate.agent.checkpoints.manifest import Manifest, file_unreadable_on_error, manifest_path, read_manifest
from tidegate.agent.tiers.plain_files import is_directory, require_directory
from tidegate.agent.tiers.scratch import directory_unusable
from tidegate.errors import DataTruncated, ManifestDamaged, NoCheckpoint, StateFileError
from tidegate.knobs.setting_checks import check_directory
from tidegate.logs import event

log = logging.getLogger("tidegate.tiers")

STEP_NAME: Final = re.compile(r"step-(0|[1-9][0-9]*)(\.[1-9][0-9]*)?")
MANIFEST_NAME: Final = re.compile(r"rank(0|[1-9][0-9]*)\.json")


def find_checkpoints(directory: str | os.PathLike[str], rank: int = 0) -> list[Checkpoint]:
    """Lists all complete checkpoints in `directory`, the newest first, each with the manifest of rank number `rank`.
    The list is empty when there is no directory.

    Checkpoints with a damaged manifest are left out, with a warning: see `find_damaged_checkpoints`. Raises
    PathUnusable when the directory cannot be read, and ConfigError for an address such as s3://….
    """
    return list_checkpoints(existing_path(directory), rank)[0]


def find_damaged_checkpoints(directory: str | os.PathLike[str]) -> list[DamagedCheckpoint]:
    """Lists checkpoints in `directory` with an unusable manifest of any rank, in the order of their names. Damage to
    the data is not detected here: `tidegate doctor --checkpoints` reads the data. Raises PathUnusable when the
    directory cannot be read, and ConfigError for an address such as s3://…."""
    return list_checkpoints(existing_path(directory), 0)[1]


def existing_path(directory: str | os.PathLike[str]) -> Path:
    """The absolute path of a directory of checkpoints. ConfigError for an address, such as s3://bucket/prefix."""
    check_directory("directory", directory, "give the directory that checkpoints were saved to")
    return Path(os.path.abspath(directory))


def list_checkpoints(directory: Path, rank: int) -> tuple[list[Checkpoint], list[DamagedCheckpoint]]:
    """Lists the complete checkpoints, the newest first, and the damaged ones. Each damaged checkpoint is logged once in
    a process."""
    complete, damaged = [], []
    for step in step_entries(directory):
        try:
            manifests = manifests_of(step)
        except FileNotFoundError:  # its run is removing it
            continue
        except StateFileError as reason:
            damaged.append(DamagedCheckpoint(step, reason))
        else:
            if has_all_ranks(manifests):
                complete += [Checkpoint(step, manifest) for manifest in manifests if manifest.rank == rank]
    for checkpoint in damaged:
        warn_damaged(checkpoint)
    return sorted(complete, key=lambda checkpoint: -checkpoint.manifest.number), damaged


def manifests_of(step: Path) -> list[Manifest]:
    """Reads the manifests of all ranks in a checkpoint's directory. `StateFileError` when a manifest cannot be used,
    FileNotFoundError when the checkpoint is removed at the same time."""
    with file_unreadable_on_error(step):
        require_directory(step)
        manifests = []
        for path in sorted(path for path in step.iterdir() if MANIFEST_NAME.fullmatch(path.name)):
            manifest = read_manifest(path)
            if path != manifest_path(step, manifest.rank):
                raise ManifestDamaged(path, f"the manifest of rank {manifest.rank}", path.stem)
            if step.name.partition(".")[0] != f"step-{manifest.step}":
                raise ManifestDamaged(path, f"the manifest of step {manifest.step}", step.name)
            manifests.append(manifest)
        for manifest in manifests if has_all_ranks(manifests) else ():
            folder = step / manifest.folder
            try:
                require_directory(folder)
            except FileNotFoundError as error:
                if not manifest_path(step, manifest.rank).exists():
                    raise
                raise DataTruncated(folder, "no folder", "a folder with the rank's files") from error
    return manifests


def has_all_ranks(manifests: Sequence[Manifest]) -> bool:
    """Whether the manifests were written by the same attempt to save a checkpoint, and are those of all its ranks."""
    if not manifests or len({(manifest.attempt, manifest.ranks) for manifest in manifests}) > 1:
        return False
    return len({manifest.rank for manifest in manifests}) == len(manifests) == manifests[0].ranks


_warned: set[tuple[str, str]] = set()
"""Damaged checkpoints that this process has already logged: directory and reason."""


def warn_damaged(damaged: DamagedCheckpoint) -> None:
    """Logs a damaged checkpoint, once in a process."""
    if (about := (str(damaged.directory), str(damaged.reason))) not in _warned:
        _warned.add(about)
        is_damaged = damaged.is_removable
        log.warning(
            "checkpoint %s is %sskipped: %s `tidegate doctor --checkpoints %s` lists such checkpoints%s.",
            damaged.directory, "damaged and " if is_damaged else "", damaged.reason, damaged.directory.parent,
            ", and with --remove removes them" if is_damaged else "",
            extra=event("checkpoint_damaged", checkpoint=str(damaged.directory), reason=str(damaged.reason)),
        )  # fmt: skip


def choose_checkpoint(directory: str | os.PathLike[str], rank: int, step: int | None) -> Checkpoint:
    """Finds the newest complete checkpoint; with `step`, the newest one of that step. If only damaged checkpoints
    exist, raises the error of the damaged one with the highest step; if there are none at all, NoCheckpoint."""
    where = existing_path(directory)
    complete, damaged = list_checkpoints(where, rank)
    for one in complete:
        if step in (None, one.step):
            return one
    if reasons := [one for one in damaged if step in (None, _step_of(one.directory))]:
        raise max(reasons, key=lambda one: _step_of(one.directory)).reason
    wanted = "No complete checkpoint" if step is None else f"No complete checkpoint of step {step}"
    steps = ", ".join(str(one.step) for one in complete)
    broken = f"; damaged: {', '.join(one.directory.name for one in damaged)}" if damaged else ""
    raise NoCheckpoint(
        f"{wanted} of rank {rank} is in {where}; steps there: {steps or 'none'}{broken}. Give a step and a directory "
        "with a complete checkpoint."
    )


def _step_of(directory: Path) -> int:
    """Number of updates, from the directory's name."""
    return int(directory.name.removeprefix("step-").partition(".")[0])


def step_entries(directory: Path) -> list[Path]:
    """Entries of any type whose names are those of checkpoints, sorted by name. PathUnusable when the directory cannot
    be read."""
    try:
        return sorted(path for path in directory.iterdir() if STEP_NAME.fullmatch(path.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise directory_unusable(directory, error) from error


def step_directories(directory: Path) -> Iterator[Path]:
    """Directories of checkpoints, without symbolic links and unreadable entries."""
    for path in step_entries(directory):
        with suppress(OSError):
            if is_directory(path):
                yield path

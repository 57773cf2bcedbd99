"""A damaged checkpoint is listed with the reason, skipped, kept, and never in the way of good ones."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.agent.checkpoints.refused import descriptors_left, held_to_permissions
from tests.agent.checkpoints.saving import Run, flip, repack, state_files
from tidegate.agent.checkpoints.manifest import read_manifest
from tidegate.errors import FileUnreadable, ManifestDamaged, NewerFormat, PathUnusable


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return tmp_path / "saved"


@pytest.fixture
def only_permitted() -> Iterator[None]:
    with held_to_permissions():
        yield


def three(saved: Path) -> list[tidegate.Checkpoint]:
    """Of steps 1, 2 and 3, the oldest first; the run has ended."""
    with Run() as run:
        made = []
        for step in range(3):
            run.steps(step, step + 1)
            made.append(run.optimizer.save_checkpoint(saved, keep=3))
        return made


def manifest_of(checkpoint: tidegate.Checkpoint) -> Path:
    return checkpoint.directory / "rank0.json"


def newer(checkpoint: tidegate.Checkpoint) -> None:
    repack(manifest_of(checkpoint), version=99)


DAMAGE: dict[str, Callable[[tidegate.Checkpoint], Any]] = {
    "a flipped bit": lambda c: flip(manifest_of(c), 100),
    "empty": lambda c: manifest_of(c).write_bytes(b""),
    "a newer format": newer,
    "no folder": lambda c: shutil.rmtree(c.folder),
    "cannot be listed": lambda c: c.directory.chmod(0),
    "cannot be opened": lambda c: manifest_of(c).chmod(0),
    "another step's": lambda c: shutil.copy(c.directory.parent / "step-3" / "rank0.json", manifest_of(c)),
}


QUICK = ("a flipped bit", "no folder", "cannot be listed", "cannot be opened")


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in DAMAGE]
)
def test_one_damaged_manifest_leaves_every_other_checkpoint_loadable(
    saved: Path, damage: str, caplog: pytest.LogCaptureFixture, only_permitted: None
) -> None:
    first, second, third = three(saved)
    DAMAGE[damage](first)
    assert [found.step for found in tidegate.find_checkpoints(saved)] == [3, 2]
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert str(first.directory) in warning.getMessage()
    assert "tidegate doctor --checkpoints" in warning.getMessage()
    (damaged,) = tidegate.find_damaged_checkpoints(saved)
    assert damaged.directory == first.directory
    assert str(damaged.reason) in warning.getMessage()
    with Run() as run:
        run.steps(0, 2)
        assert run.optimizer.load_checkpoint(saved, step=2).directory == second.directory
        run.steps(2, 3)
        assert run.optimizer.load_checkpoint(saved).directory == third.directory
        with pytest.raises(type(damaged.reason), match="step-1") as caught:
            run.optimizer.load_checkpoint(saved, step=1)
        assert str(caught.value) == str(damaged.reason)
        run.steps(3, 5)
        run.optimizer.save_checkpoint(saved, keep=2)
        run.steps(5, 6)
        run.optimizer.save_checkpoint(saved, keep=2)
    assert [found.step for found in tidegate.find_checkpoints(saved)] == [6, 5], "retention goes on"
    assert first.directory.is_dir(), "it is for people to look at"


def test_a_save_at_the_step_of_a_damaged_checkpoint_leaves_it_alone(saved: Path) -> None:
    """It would have taken the place of its manifest, and its files would have gone with the next one."""
    with Run() as run:
        run.steps(0, 1)
        damaged = run.optimizer.save_checkpoint(saved, keep=2)
        flip(manifest_of(damaged), 100)
        before, manifest = state_files(damaged), manifest_of(damaged).read_bytes()
        again = run.optimizer.save_checkpoint(saved, keep=2)
        more = run.optimizer.save_checkpoint(saved, keep=1)
        assert len({damaged.directory, again.directory, more.directory}) == 3
        assert (state_files(damaged), manifest_of(damaged).read_bytes()) == (before, manifest)
        assert run.optimizer.load_checkpoint(saved, step=1).directory == more.directory, "a good one of that step"


def test_damage_to_the_part_of_one_rank_costs_no_other_rank_its_part(saved: Path) -> None:
    """Rank 0 took a checkpoint whose other manifest it could not read for one that was never completed."""
    old, _, _ = three(saved)
    (old.directory / "rank1.json").write_bytes(b"damaged")
    with Run() as run:
        run.steps(0, 4)
        run.optimizer.save_checkpoint(saved)
    assert manifest_of(old).exists()
    assert old.folder.is_dir()
    assert [found.directory for found in tidegate.find_damaged_checkpoints(saved)] == [old.directory]


def test_damage_is_told_once_by_a_process(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, *_ = three(saved)
    flip(manifest_of(first), 100)
    for _ in range(3):
        tidegate.find_checkpoints(saved)
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_when_all_are_damaged_the_newest_reason_is_told(saved: Path) -> None:
    for checkpoint in three(saved):
        flip(manifest_of(checkpoint), 100)
    with Run() as run, pytest.raises(ManifestDamaged, match="step-3"):
        run.optimizer.load_checkpoint(saved)


def test_what_a_newer_tidegate_wrote_is_not_called_damaged(saved: Path) -> None:
    first, *_ = three(saved)
    newer(first)
    (found,) = tidegate.find_damaged_checkpoints(saved)
    assert isinstance(found.reason, NewerFormat)
    assert not found.is_removable


def test_a_newer_version_whose_checksum_is_elsewhere_is_not_called_damaged(saved: Path) -> None:
    manifest = manifest_of(three(saved)[0])
    values = json.loads(manifest.read_bytes())["checkpoint"] | {"version": 4}
    manifest.write_bytes(json.dumps({"sha256": "0" * 64, "checkpoint": values}).encode())
    (found,) = tidegate.find_damaged_checkpoints(saved)
    assert isinstance(found.reason, NewerFormat)


def test_a_flipped_version_is_damage_and_no_newer_format(saved: Path) -> None:
    manifest = manifest_of(three(saved)[0])
    at = manifest.read_bytes().index(b'"version": 3') + len(b'"version": ')
    for bit in range(8):
        flip(manifest, at, bit)
        (found,) = tidegate.find_damaged_checkpoints(saved)
        assert type(found.reason) is ManifestDamaged, (bit, found)
        assert found.is_removable
        flip(manifest, at, bit)
    assert len(tidegate.find_checkpoints(saved)) == 3


@pytest.mark.parametrize("damage", ["cannot be listed", "cannot be opened"])
def test_what_cannot_be_read_may_be_sound(saved: Path, damage: str, only_permitted: None) -> None:
    first, *_ = three(saved)
    DAMAGE[damage](first)
    (found,) = tidegate.find_damaged_checkpoints(saved)
    assert isinstance(found.reason, FileUnreadable)
    assert (found.reason.errno, found.is_removable) == (errno.EACCES, False)
    first.directory.chmod(0o755)
    manifest_of(first).chmod(0o644)
    assert tidegate.find_damaged_checkpoints(saved) == []
    assert len(tidegate.find_checkpoints(saved)) == 3


def test_without_descriptors_nothing_is_damaged(saved: Path) -> None:
    """A process that has opened all it may learns nothing of its checkpoints."""
    manifest = manifest_of(three(saved)[0])
    with descriptors_left(0):
        with pytest.raises(FileUnreadable, match="Too many open files"):
            read_manifest(manifest)
        with pytest.raises(PathUnusable, match="Too many open files"):
            tidegate.find_checkpoints(saved)
    with descriptors_left(1):
        assert len(tidegate.find_checkpoints(saved)) == 3


def test_nothing_is_listed_where_nothing_is_damaged(saved: Path) -> None:
    assert tidegate.find_damaged_checkpoints(saved) == []
    three(saved)
    assert tidegate.find_damaged_checkpoints(saved) == []
    os.unlink(saved / "step-2" / "rank0.json")
    assert tidegate.find_damaged_checkpoints(saved) == [], "an interrupted one is not complete, and not damaged"

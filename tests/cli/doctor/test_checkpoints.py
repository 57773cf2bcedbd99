"""`tidegate doctor --checkpoints`: each is read to its last byte; damaged ones are named, and removed on request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import tidegate
from tests.agent.checkpoints.refused import descriptors_left, held_to_permissions
from tests.agent.checkpoints.saving import Run, flip, repack, write_manifest
from tests.cli.doctor.test_storage_paths import doctor
from tests.services import ROOT
from tidegate.cli.doctor import checkpoint_files
from tidegate.errors import ConfigError, HeaderDamaged


@pytest.fixture
def saved(tmp_path: Path) -> list[tidegate.Checkpoint]:
    """Of steps 1 to 4."""
    with Run() as run:
        made = []
        for step in range(4):
            run.steps(step, step + 1)
            made.append(
                run.optimizer.save_checkpoint(
                    tmp_path / "saved", keep=4, save_also=lambda at: (at / "model.pt").write_bytes(b"weights")
                )
            )
        return made


@pytest.mark.slow
def test_damage_is_listed_and_removed_and_the_sound_stay(tmp_path: Path, saved: list[tidegate.Checkpoint]) -> None:
    place = tmp_path / "saved"
    flip(saved[0].directory / "rank0.json", 100)
    flip(saved[1].folder / "model.pt", 3)
    flip(saved[2].folder / "000001.tide", 5000)
    code, said = doctor(tmp_path, "--checkpoints", str(place))
    assert code == 1
    for checkpoint, words in zip(
        saved, ("is a damaged manifest", "model.pt has changed since it was saved", "has a damaged block", "MB, sound"),
        strict=True,
    ):  # fmt: skip
        assert str(checkpoint.directory) in said
        assert words in said
    code, said = doctor(tmp_path, "--checkpoints", str(place), "--remove")
    assert (code, "Add --yes to remove 3 damaged checkpoints" in said) == (2, True), said
    assert len(os.listdir(place)) == 4
    code, said = doctor(tmp_path, "--checkpoints", str(place), "--remove", "--yes", "--json")
    assert (code, [found["verdict"] for found in json.loads(said)]) == (0, ["good"] * 3), said
    assert os.listdir(place) == ["step-4"]
    code, said = doctor(tmp_path, "--checkpoints", str(place), "--remove", "--yes")
    assert (code, "nothing to remove" in said, os.listdir(place)) == (0, True, ["step-4"])
    saved[3].verify()


def test_who_says_no_keeps_everything(saved: list[tidegate.Checkpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    place, before = saved[0].directory.parent, sorted(os.listdir(saved[0].directory.parent))
    flip(saved[0].directory / "rank0.json", 100)
    found = checkpoint_files.inspect_checkpoints([place])
    with pytest.raises(ConfigError, match="--yes"):
        checkpoint_files.remove_damaged(found, False, lambda _: True)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert [f.detail for f in checkpoint_files.remove_damaged(found, False, lambda _: False)] == ["nothing was removed"]
    assert sorted(os.listdir(place)) == before
    checkpoint_files.remove_damaged(found, False, lambda _: True)
    assert sorted(os.listdir(place)) == before[1:]


def test_nothing_outside_goes_and_nothing_of_others(tmp_path: Path, saved: list[tidegate.Checkpoint]) -> None:
    """A link goes and what it leads to stays; what somebody else put into a checkpoint keeps it."""
    place, outside = saved[0].directory.parent, tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (place / "step-9").symlink_to(outside)
    os.mkfifo(place / "step-8")
    os.rename(saved[0].folder, outside / "kept")
    saved[0].folder.symlink_to(outside / "kept")
    flip(saved[1].directory / "rank0.json", 100)
    (saved[1].directory / "notes.txt").touch()
    said = checkpoint_files.remove_damaged(checkpoint_files.inspect_checkpoints([place]), True, lambda _: True)
    assert [finding.verdict for finding in said] == ["good", "bad", "good", "good"]
    assert "notes.txt" in said[1].detail
    assert sorted(os.listdir(place)) == ["step-2", "step-3", "step-4"]
    assert sorted(os.listdir(outside)) == ["kept", "precious"]
    assert (outside / "kept" / "model.pt").exists()


def test_nothing_is_removed_while_a_run_saves_there(tmp_path: Path) -> None:
    with Run() as run:
        run.steps(0, 1)
        made = run.optimizer.save_checkpoint(tmp_path, keep=2)
        flip(made.directory / "rank0.json", 100)
        (said,) = checkpoint_files.remove_damaged(
            checkpoint_files.inspect_checkpoints([tmp_path]), True, lambda _: True
        )
        assert (said.verdict, "was not removed" in said.detail) == ("bad", True)
        assert made.directory.exists()
    (said,) = checkpoint_files.remove_damaged(checkpoint_files.inspect_checkpoints([tmp_path]), True, lambda _: True)
    assert said.verdict == "good"


def test_what_is_not_complete_or_newer_stays(saved: list[tidegate.Checkpoint]) -> None:
    place = saved[0].directory.parent
    repack(saved[0].directory / "rank0.json", version=99)
    (saved[1].directory / "rank0.json").unlink()
    found = checkpoint_files.inspect_checkpoints([place])
    assert [one.verdict for one in checkpoint_files.findings([place], found)] == ["bad", "missing", "good", "good"]
    checkpoint_files.remove_damaged(found, True, lambda _: True)
    assert len(os.listdir(place)) == 4
    assert checkpoint_files.findings([place], [])[0].verdict == "good"


@pytest.mark.parametrize("what", ["rank0.json", ".", "folder", "folder/000001.tide", "folder/model.pt"])
def test_what_cannot_be_read_stays(saved: list[tidegate.Checkpoint], what: str) -> None:
    """A file that this user may not read says nothing about the checkpoint, which may be sound."""
    place, first = saved[0].directory.parent, saved[0]
    target = first.directory / what.replace("folder", first.folder.name)
    mode = target.stat().st_mode
    target.chmod(0)
    with held_to_permissions():
        found = checkpoint_files.inspect_checkpoints([place])
        said = checkpoint_files.findings([place], found)
        assert [one.verdict for one in said] == ["bad", "good", "good", "good"]
        assert "cannot be read" in said[0].detail
        assert "damaged" not in said[0].detail
        (done,) = checkpoint_files.remove_damaged(found, True, lambda _: True)
    assert done.verdict == "good"
    target.chmod(mode)
    assert [
        one.verdict for one in checkpoint_files.findings([place], checkpoint_files.inspect_checkpoints([place]))
    ] == ["good"] * 4


def test_nothing_is_removed_where_no_descriptors_are_left(saved: list[tidegate.Checkpoint]) -> None:
    place = saved[0].directory.parent
    flip(saved[1].directory / "rank0.json", 100)
    found = checkpoint_files.inspect_checkpoints([place])
    for left in range(2):
        with descriptors_left(left):
            (done,) = checkpoint_files.remove_damaged(found, True, lambda _: True)
        assert (done.verdict, len(os.listdir(place))) == ("bad", 4), done
        assert "Too many open files" in done.detail
    (done,) = checkpoint_files.remove_damaged(found, True, lambda _: True)
    assert (done.verdict, len(os.listdir(place))) == ("good", 3), done


def test_a_flip_in_the_version_of_a_state_file_is_damage(saved: list[tidegate.Checkpoint]) -> None:
    """It is no newer format, which would stay for ever."""
    place, file = saved[0].directory.parent, saved[0].folder / "000001.tide"
    for byte in range(8, 12):
        for bit in range(8):
            flip(file, byte, bit)
            found, *_ = checkpoint_files.inspect_checkpoints([place])
            assert found.damage is not None
            assert type(found.damage.reason) is HeaderDamaged, (byte, bit, found.damage)
            flip(file, byte, bit)


ESCAPE = "a\x1b[2J"
"""A name that would empty the screen."""


def named_strangely(saved: tidegate.Checkpoint) -> None:
    """What somebody else can put into a checkpoint: a file of such a name, and damage to a file that has one."""
    (saved.directory / ESCAPE).touch()
    flip(saved.directory / "rank0.json", 100)


def with_a_strange_file(place: Path) -> tidegate.Checkpoint:
    with Run() as run:
        run.steps(0, 1)
        made = run.optimizer.save_checkpoint(place, save_also=lambda at: (at / ESCAPE).write_bytes(b"weights"))
    flip(made.folder / ESCAPE, 3)
    return made


def test_no_name_of_a_file_reaches_the_terminal_as_an_order(tmp_path: Path, saved: list[tidegate.Checkpoint]) -> None:
    named_strangely(saved[0])
    with_a_strange_file(tmp_path / "other")
    places = ("--checkpoints", str(tmp_path / "saved"), "--checkpoints", str(tmp_path / "other"))
    for words in (places, (*places, "--remove"), (*places, "--remove", "--yes")):
        _, said = doctor(tmp_path, *words)
        assert "\x1b" not in said
        assert "a\\u001b[2J" in said


def test_a_checkpoint_of_a_format_that_is_not_read_any_more_is_not_removed(tmp_path: Path) -> None:
    made = with_a_strange_file(tmp_path / "old")
    values = json.loads((made.directory / "rank0.json").read_bytes())["checkpoint"]
    del values["files"], values["tensors"]
    write_manifest(made.directory / "rank0.json", values | {"version": 1})
    _, said = doctor(tmp_path, "--checkpoints", str(tmp_path / "old"))
    assert "has a format that this Tidegate does not know" in said
    doctor(tmp_path, "--checkpoints", str(tmp_path / "old"), "--remove", "--yes")
    assert made.directory.exists()
    assert "\x1b" not in said


@pytest.mark.slow
def test_no_question_orders_the_terminal_anything(tmp_path: Path) -> None:
    made = with_a_strange_file(tmp_path / "saved")
    screen, keyboard = os.openpty()
    command = [sys.executable, "-m", "tidegate", "doctor", "--checkpoints", str(tmp_path / "saved"), "--remove"]
    with subprocess.Popen(command, stdin=keyboard, stdout=keyboard, stderr=keyboard, cwd=ROOT):
        os.close(keyboard)
        shown = b""
        while b"[y/N]" not in shown:
            shown += os.read(screen, 4096)
        os.write(screen, b"n\n")
        with suppress(OSError):  # EIO: the other end is closed
            while more := os.read(screen, 4096):
                shown += more
    os.close(screen)
    assert b"a\\u001b[2J" in shown
    assert b"a\x1b[2J" not in shown
    assert b"nothing was removed" in shown
    assert made.directory.exists()

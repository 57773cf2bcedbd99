"""What `save_also` writes: in the manifest with its checksum, and looked at before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.checkpoints.saving import Run, flip
from tidegate.agent.checkpoints import background as draining
from tidegate.agent.checkpoints import manifest as manifests
from tidegate.errors import ConfigError, DataTruncated, FileDamaged, ManifestDamaged, StrangeEntry


def write_some(folder: Path) -> None:
    torch.save({"weight": torch.arange(100.0)}, folder / "model.pt")
    (folder / "more" / "deep").mkdir(parents=True)
    (folder / "more" / "deep" / "random.bin").write_bytes(bytes(range(256)) * 10)
    (folder / "empty").touch()


@pytest.fixture
def saved(tmp_path: Path) -> tidegate.Checkpoint:
    with Run() as run:
        run.steps(0, 1)
        return run.optimizer.save_checkpoint(tmp_path / "saved", save_also=write_some)


def load(checkpoint: tidegate.Checkpoint) -> tidegate.Checkpoint:
    with Run() as run:
        run.steps(0, 1)
        before = run.optimizer.state_dict()
        try:
            return run.optimizer.load_checkpoint(checkpoint.directory.parent)
        finally:
            torch.testing.assert_close(run.optimizer.state_dict(), before, rtol=0, atol=0)


def test_what_was_written_is_known_by_size_and_checksum(saved: tidegate.Checkpoint) -> None:
    assert [(file.file, file.nbytes) for file in saved.manifest.files] == [
        ("empty", 0),
        ("model.pt", (saved.folder / "model.pt").stat().st_size),
        ("more/deep/random.bin", 2560),
    ]
    saved.verify()
    assert load(saved).step == 1


@pytest.mark.parametrize("at", [0, 700, -1])
@pytest.mark.parametrize("name", ["model.pt", "more/deep/random.bin"])
def test_a_flipped_bit_is_found_before_anything_is_loaded(saved: tidegate.Checkpoint, name: str, at: int) -> None:
    flip(saved.folder / name, at)
    with pytest.raises(FileDamaged, match=name):
        saved.verify()
    with pytest.raises(FileDamaged, match=name):
        load(saved)


def test_files_that_are_gone_cut_or_longer_are_found(saved: tidegate.Checkpoint) -> None:
    file = saved.folder / "model.pt"
    whole = file.read_bytes()
    for wrong in (whole[:-1], whole + b"x", b""):
        file.write_bytes(wrong)
        with pytest.raises(FileDamaged, match=f"{len(wrong):,} bytes"):
            load(saved)
    file.unlink()
    with pytest.raises(DataTruncated, match="no file"):
        load(saved)


def test_checksums_are_taken_from_what_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After fsync, a piece at a time: a file of weights can be larger than memory."""
    order: list[str] = []
    sync, checksums = draining.sync_all, draining.checksums_of
    monkeypatch.setattr(draining, "sync_all", lambda *args: (order.append("sync"), sync(*args)))
    monkeypatch.setattr(draining, "checksums_of", lambda *args: (order.append("hash"), checksums(*args))[1])
    with Run() as run:
        run.steps(0, 1)
        run.optimizer.save_checkpoint(tmp_path, save_also=write_some)
    assert order == ["sync", "hash"]


def test_in_the_background_too(tmp_path: Path) -> None:
    with Run() as run:
        run.steps(0, 1)
        made = run.optimizer.begin_checkpoint(tmp_path, save_also=write_some).result()
    assert [file.file for file in made.manifest.files] == ["empty", "model.pt", "more/deep/random.bin"]
    flip(made.folder / "model.pt", 500)
    with pytest.raises(FileDamaged):
        load(made)


def test_a_manifest_names_the_files(saved: tidegate.Checkpoint) -> None:
    """Else nothing would tell that they are not checked."""
    path = saved.directory / "rank0.json"
    values = json.loads(path.read_bytes())["checkpoint"]
    del values["files"]
    for version in (2, 3):
        changed = {**values, "version": version}
        text = json.dumps(changed, sort_keys=True, separators=(",", ":"))
        outer = {"crc32": zlib.crc32(text.encode()), "checkpoint": changed}
        with pytest.raises(ManifestDamaged, match="files"):
            manifests.Manifest.unpack(json.dumps(outer).encode(), path)


def link(folder: Path) -> None:
    (folder / "latest").symlink_to("/etc/hostname")


def link_to_directory(folder: Path) -> None:
    (folder / "latest").symlink_to("/etc")


def fifo(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def no_text(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff")).touch()


def own_name(folder: Path) -> None:
    (folder / "optimizer.pt").write_bytes(b"mine")


@pytest.mark.parametrize(
    ("save_also", "words"),
    [
        (link, "latest is a symbolic link"),
        (link_to_directory, "latest is a symbolic link"),
        (fifo, "pipe is a FIFO"),
        (no_text, "UTF-8"),
        (own_name, "optimizer.pt"),
    ],
)
def test_what_cannot_be_part_of_a_checkpoint_is_refused_when_it_is_saved(
    tmp_path: Path, save_also: Any, words: str
) -> None:
    with Run() as run:
        run.steps(0, 1)
        run.optimizer.save_checkpoint(tmp_path)
        with pytest.raises(ConfigError, match=words):
            run.optimizer.save_checkpoint(tmp_path, save_also=save_also)
        assert [found.step for found in tidegate.find_checkpoints(tmp_path)] == [1]


@pytest.mark.parametrize("strange", [os.mkfifo, lambda path: os.symlink("/etc/hostname", path), os.mkdir])
def test_something_else_in_the_place_of_a_file_is_refused(saved: tidegate.Checkpoint, strange: Any) -> None:
    for name in ("model.pt", "optimizer.pt", "000001.tide"):
        (saved.folder / name).rename(saved.folder / "kept")
        strange(saved.folder / name)
        with pytest.raises(StrangeEntry, match=name):
            load(saved)
        if strange is os.mkdir:
            shutil.rmtree(saved.folder / name)
        else:
            os.unlink(saved.folder / name)
        (saved.folder / "kept").rename(saved.folder / name)
    assert load(saved).step == 1

"""What Tidegate did not make, in a directory of checkpoints: never waited for, never followed, never deleted."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.agent.checkpoints.saving import Run
from tidegate.agent.tiers import path_locks
from tidegate.errors import CheckpointFailed, PathUnusable, StrangeEntry


def listening(path: Path) -> None:
    made = socket.socket(socket.AF_UNIX)
    here = os.open(path.parent, os.O_RDONLY)
    try:
        made.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)
        made.close()


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    made = tmp_path / "outside"
    made.mkdir()
    (made / "precious").write_text("x")
    (made / "precious.json").write_text("y")
    return made


STRANGERS: dict[str, Callable[[Path, Path], Any]] = {
    "a FIFO": lambda at, _: os.mkfifo(at),
    "a socket": lambda at, _: listening(at),
    "a link": lambda at, outside: at.symlink_to(outside),
    "a link to a file": lambda at, outside: at.symlink_to(outside / "precious"),
    "a link to nothing": lambda at, outside: at.symlink_to(outside / "nothing"),
    "a file": lambda at, _: at.write_text("z"),
    "a folder": lambda at, _: at.mkdir(),
    "a device": lambda at, _: os.mknod(at, 0o20600, os.makedev(1, 5)),
}
PLACES = ("step-4", "step-2", "step-1/rank0-x", "step-1/rank0.new", "step-1/rank1.json", "step-1/rank7-y", "step-9.3")


def prepare(kind: str, at: Path, outside: Path) -> None:
    try:
        STRANGERS[kind](at, outside)
    except PermissionError:
        pytest.skip("only root makes devices")


KINDS = [pytest.param(kind, marks=() if kind in ("a FIFO", "a link") else pytest.mark.slow) for kind in STRANGERS]


def unless_read(entry: Path) -> os.stat_result:
    """What the file system says of an entry, without the time of the last read."""
    found = os.lstat(entry)
    return os.stat_result([*found[:7], 0, *found[8:]])


@pytest.mark.parametrize("kind", KINDS)
def test_saves_go_on_around_them(tmp_path: Path, outside: Path, kind: str) -> None:
    saved = tmp_path / "saved"
    with Run() as run:
        run.steps(0, 1)
        run.optimizer.save_checkpoint(saved, keep=2)
        for place in PLACES:
            prepare(kind, saved / place, outside)
        there = {place: unless_read(saved / place) for place in PLACES}
        for step in range(1, 4):
            run.steps(step, step + 1)
            made = run.optimizer.save_checkpoint(saved, keep=2)
            assert made.directory.resolve().parent == saved, "not through a link"
            assert tidegate.find_checkpoints(saved)[0].directory == made.directory
        run.optimizer.load_checkpoint(saved)
        run.steps(4, 5)
    for place, before in there.items():
        if not place.endswith(".new") and kind != "a folder":
            assert unless_read(saved / place) == before, f"{place} is as it was"
    assert sorted(path.name for path in outside.iterdir()) == ["precious", "precious.json"]
    assert (outside / "precious").read_text() == "x"


@pytest.mark.parametrize("kind", [one for one in KINDS if one.values[0] not in ("a folder", "a file")])
@pytest.mark.parametrize("place", ["rank0.json", "folder"])
def test_in_the_place_of_a_manifest_or_a_folder_they_are_damage(tmp_path: Path, kind: str, place: str) -> None:
    saved = tmp_path / "saved"
    with Run() as run:
        run.steps(0, 1)
        made = run.optimizer.save_checkpoint(saved, keep=2)
        target = made.folder if place == "folder" else made.directory / place
        target.rename(tmp_path / "kept")
        prepare(kind, target, tmp_path / "kept")
        (damaged,) = tidegate.find_damaged_checkpoints(saved)
        assert isinstance(damaged.reason, StrangeEntry)
        assert str(target) in str(damaged.reason)
        with pytest.raises(StrangeEntry):
            run.optimizer.load_checkpoint(saved, step=1)
        run.steps(1, 2)
        run.optimizer.save_checkpoint(saved)
        assert [found.step for found in tidegate.find_checkpoints(saved)] == [2]
    assert (tmp_path / "kept").exists()


# ---- where nobody can write


@pytest.mark.parametrize("where", ["/proc/tidegate", "/sys/tidegate", "file", "file/deeper"])
def test_a_target_that_cannot_be_written_is_said(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    with Run() as run:
        run.steps(0, 1)
        for save in (run.optimizer.save_checkpoint, run.optimizer.begin_checkpoint):
            with pytest.raises(CheckpointFailed, match="cannot be written"):
                save(tmp_path / where)
        run.steps(1, 2)


@pytest.mark.parametrize("where", ["file", "file/deeper"])
def test_a_place_that_holds_no_checkpoints_is_said(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PathUnusable, match="is not a directory"):
        tidegate.find_checkpoints(tmp_path / where)


SAVING = """
import sys, torch, tidegate
param = torch.nn.Parameter(torch.ones(600))
with tidegate.AdamW([param], offload=tidegate.Offload(stride="off")) as optimizer:
    param.grad = torch.ones(600)
    optimizer.step()
    optimizer.save_checkpoint(sys.argv[1] + "/saved")
"""
READ_ONLY = """
import sys, torch, tidegate
from pathlib import Path
from tidegate.errors import CheckpointFailed
at, param = Path(sys.argv[1]), torch.nn.Parameter(torch.ones(600))
with tidegate.AdamW([param], offload=tidegate.Offload(stride="off")) as optimizer:
    def step():
        param.grad = torch.ones(600)
        optimizer.step()
    step()
    for save in (optimizer.save_checkpoint, optimizer.begin_checkpoint):
        try:
            save(at / "saved")
        except CheckpointFailed as error:
            print("refused:", error)
    optimizer.load_checkpoint(at / "saved")
    step()
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_read_only_file_system_is_said_and_loads(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SAVING, str(tmp_path)], check=True)
    mounted = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted, str(tmp_path), sys.executable, "-c", READ_ONLY, str(tmp_path)],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("refused: ") == 2, done.stdout
    assert "Read-only file system" in done.stdout


# ---- the directory of lock files


def squatted(runtime: Path) -> None:
    (runtime / "tidegate").mkdir()
    os.chown(runtime / "tidegate", 65534, -1)


def open_to_all(runtime: Path) -> None:
    (runtime / "tidegate").mkdir()
    (runtime / "tidegate").chmod(0o777)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(squatted, "belongs to user 65534", marks=pytest.mark.skipif(os.geteuid() != 0, reason="root")),
        (open_to_all, "mode 0777"),
        (lambda runtime: (runtime / "tidegate").touch(), "File exists"),
    ],
)
def test_lock_files_that_cannot_be_had_do_not_stop_training(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, make: Any, words: str
) -> None:
    (tmp_path / "runtime").mkdir()
    make(tmp_path / "runtime")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    assert path_locks.lock_directory() == tmp_path / "runtime" / "tidegate"
    with Run(paths={"disk": disk}, host_cache=0) as run:
        run.steps(0, 3)
        run.optimizer.save_checkpoint(tmp_path / "saved")
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for part in ("path disk", words, "XDG_RUNTIME_DIR", str(tmp_path / "runtime" / "tidegate")):
        assert part in said

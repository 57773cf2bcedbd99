"""Checkpoints: linked, never written to again, gone only when a newer one is complete."""

from __future__ import annotations

import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.checkpoints.saving import Run, both, files_of, links, names_in, state_files
from tidegate.agent.checkpoints import background as draining
from tidegate.agent.checkpoints import spare_files
from tidegate.agent.checkpoints.discovery import find_checkpoints
from tidegate.agent.checkpoints.inspection import inspect
from tidegate.agent.checkpoints.reader import read_header
from tidegate.errors import CheckpointFailed, ConfigError, PathFull

# ---- files


def test_files_are_linked_where_they_can_be_and_never_written_to_again(
    tmp_path: Path, disk: Path, memory: Path
) -> None:
    with Run(**both(disk, memory)) as run:
        run.steps(0, 2)
        lives = list(run.optimizer.engine.memory.residence)
        first = run.optimizer.save_checkpoint(tmp_path / "saved", keep=3)
        assert {"disk", "memory", "host", "device"} == set(lives)
        assert links(first) == [2 if place == "disk" else 1 for place in lives]
        before = state_files(first)
        run.steps(2, 4)
        second = run.optimizer.save_checkpoint(tmp_path / "saved", keep=3)
        again = run.optimizer.save_checkpoint(tmp_path / "saved", keep=3)
        run.steps(4, 6)
        assert state_files(first) == before
        assert state_files(second) == state_files(again)
        assert again.directory.name == "step-4.3"
        assert run.optimizer.engine.store.last_checkpoint == str(again.directory)
        assert [found.directory for found in find_checkpoints(tmp_path / "saved")] == [
            again.directory, second.directory, first.directory
        ]  # fmt: skip


def test_linked_state_whose_weights_were_edited_is_copied(tmp_path: Path, disk: Path) -> None:
    """The file of an earlier checkpoint holds the same state, but says that it belongs to other weights."""
    with Run(paths={"disk": disk}, host_cache=0) as run:
        run.steps(0, 2)
        first = run.optimizer.save_checkpoint(tmp_path / "saved", keep=2)
        before, touched = state_files(first), [path.stat().st_mtime_ns for path in files_of(first)]
        run.params[0].data.mul_(2)
        second = run.optimizer.save_checkpoint(tmp_path / "saved", keep=2)
        assert state_files(first) == before
        assert [path.stat().st_mtime_ns for path in files_of(first)] == touched, "not even by the same bytes"
        assert min(links(second)) == 1, "those of the edited weight"
        assert max(links(second)) == 3, "the others"
        with Run(like=run) as other:
            other.optimizer.load_checkpoint(tmp_path / "saved")


def test_expired_files_become_spares(tmp_path: Path, disk: Path) -> None:
    """A path needs (1 + kept checkpoints) times its share, whatever the number of checkpoints that were made."""
    with Run(paths={"disk": disk}, host_cache=0) as run:
        inodes, keep = [], 2
        count = len(run.optimizer.engine.layouts)
        for round_ in range(5):
            run.steps(round_, round_ + 1)
            run.optimizer.save_checkpoint(tmp_path / "saved", keep=keep)
            files = [*disk.rglob("*.tide"), *(tmp_path / "saved").rglob("*.tide")]
            inodes.append({path.stat().st_ino for path in files})
        assert [len(some) for some in inodes] == [2 * count, 3 * count, 3 * count, 3 * count, 3 * count]
        assert inodes[2] == inodes[3] == inodes[4]
        assert [found.step for found in find_checkpoints(tmp_path / "saved")] == [5, 4]
        run.steps(5, 7)


def test_scratch_goes_and_the_checkpoint_stays(tmp_path: Path, disk: Path, memory: Path) -> None:
    with Run(**both(disk, memory)) as run:
        run.steps(0, 2)
        made = run.optimizer.save_checkpoint(tmp_path / "saved")
        (_, *_) = disk.iterdir()
    assert list(disk.iterdir()) == [] == list(memory.iterdir())
    assert set(links(made)) == {1}
    header = read_header(made, 0)
    assert header.step == 2


def test_what_the_user_saves_too_belongs_to_the_checkpoint(tmp_path: Path) -> None:
    with Run() as run:
        run.steps(0, 1)
        made = run.optimizer.save_checkpoint(tmp_path, save_also=lambda at: torch.save(run.params, at / "weights.pt"))
        assert (made.folder / "weights.pt").exists()
        assert find_checkpoints(tmp_path)[0].folder == made.folder

        def fail(_: Path) -> None:
            raise RuntimeError("no")

        with pytest.raises(RuntimeError, match="no"):
            run.optimizer.save_checkpoint(tmp_path, save_also=fail)
        assert names_in(tmp_path) == ["step-1"]
        run.steps(1, 2)
        run.optimizer.save_checkpoint(tmp_path)
        assert names_in(tmp_path) == ["step-2"]


@pytest.mark.parametrize("save", ["save_checkpoint", "begin_checkpoint"])
@pytest.mark.parametrize(
    ("address", "shown"), [("s3://bucket/x", "s3://bucket/x"), ("s3://key:hush@bucket/x", "s3://…")]
)
def test_an_address_is_refused_and_no_folder_is_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: str, address: str, shown: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with Run() as run:
        run.steps(0, 1)
        with pytest.raises(ConfigError) as refused:
            getattr(run.optimizer, save)(address)
        assert str(refused.value) == (
            f"directory='{shown}' is an address, not a directory: give a directory that all ranks can access."
        )
        assert list(tmp_path.iterdir()) == []
        run.steps(1, 2)


def test_an_address_is_refused_where_a_directory_is_read() -> None:
    said = r"directory='s3://bucket/x' is an address, not a directory: give the directory that checkpoints were saved"
    with Run() as run:
        finders = (
            tidegate.find_checkpoints,
            tidegate.find_damaged_checkpoints,
            tidegate.find_sound_checkpoint,
            inspect,
        )
        for read in (run.optimizer.load_checkpoint, *finders):
            with pytest.raises(ConfigError, match=said):
                read("s3://bucket/x")  # type: ignore[operator]


# ---- interrupted


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("moment", range(0, 60, 3))
def test_an_interrupted_save_leaves_the_one_before(
    tmp_path: Path, disk: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """As a crash: from some call to the system on, none is made any more, not even to clean up."""
    with Run(**both(disk, memory)) as run:
        run.steps(0, 2)
        run.optimizer.save_checkpoint(tmp_path / "saved")
        middle = [param.detach().clone() for param in run.params], deepcopy(run.plain)
        run.steps(2, 4)
        with monkeypatch.context() as patch:
            calls = iter(range(10_000))
            for module, name in [
                (os, "fsync"),
                (os, "link"),
                (os, "rename"),
                (os, "unlink"),
                (draining.shutil, "rmtree"),
            ]:
                real = getattr(module, name)

                def counted(*args: Any, real: Any = real, **options: Any) -> Any:
                    if next(calls) >= moment:
                        raise Interrupted
                    return real(*args, **options)

                patch.setattr(module, name, counted)
            try:
                run.optimizer.save_checkpoint(tmp_path / "saved")
            except Interrupted:
                newest = find_checkpoints(tmp_path / "saved")[0].step
            else:
                newest = 4
        assert newest in (2, 4)
        run.optimizer._checkpoints.close()  # a crash ends its right to write there
        with Run(like=run, **both(disk, memory)) as other:
            if newest == 2:
                for param, weight in zip(other.params, middle[0], strict=True):
                    param.data.copy_(weight)
                other.plain = deepcopy(middle[1])
            assert other.optimizer.load_checkpoint(tmp_path / "saved").step == newest
            other.steps(newest, 6)
            other.optimizer.save_checkpoint(tmp_path / "saved")
        assert names_in(tmp_path / "saved") == ["step-6"]


def test_all_is_on_the_disk_before_the_manifest_is(
    tmp_path: Path, disk: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no test can cut the power for: every file and directory is synchronised, then the manifest is renamed, then
    its directory is synchronised."""
    order: list[str] = []
    sync, rename = os.fsync, os.rename

    def noted_sync(fd: int) -> None:
        order.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    def noted_rename(source: Any, target: Any) -> None:
        order.append(f"{source} to {target}")
        rename(source, target)

    saved = tmp_path / "saved"
    with Run(**both(disk, memory)) as run:
        run.steps(0, 2)
        monkeypatch.setattr(os, "fsync", noted_sync)
        monkeypatch.setattr(os, "rename", noted_rename)
        made = run.optimizer.save_checkpoint(saved, save_also=lambda at: (at / "mine").write_text("x"))
        monkeypatch.undo()
    new, manifest = made.directory / "rank0.new", made.directory / "rank0.json"
    moment = order.index(f"{new} to {manifest}")
    wanted = {saved, made.directory, made.folder, *made.folder.iterdir(), new}
    assert set(map(Path, order[:moment])) >= wanted
    assert {"mine", "optimizer.pt", "000000.tide"} <= {path.name for path in wanted}
    assert order[moment + 1] == str(made.directory)


def test_a_save_that_fails_changes_nothing(tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Run(paths={"disk": disk}, host_cache=0) as run:
        run.steps(0, 2)
        run.optimizer.save_checkpoint(tmp_path / "saved")
        run.steps(2, 3)

        def refused(*_: Any) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(draining, "publish", refused)
            with pytest.raises(CheckpointFailed, match=r"step-3 cannot be written: .*Input/output error"):
                run.optimizer.save_checkpoint(tmp_path / "saved")
        assert names_in(tmp_path / "saved") == ["step-2"]
        run.steps(3, 5)
        run.optimizer.save_checkpoint(tmp_path / "saved")
        assert names_in(tmp_path / "saved") == ["step-5"]


def test_no_room_is_said_when_it_is_saved(tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Run(paths={"disk": disk}, host_cache=0, stride="off") as run:
        run.steps(0, 2)
        monkeypatch.setattr(spare_files, "free_bytes", lambda _: 100_000)
        with pytest.raises(PathFull, match="100,000 bytes are free") as caught:
            run.optimizer.save_checkpoint(tmp_path / "saved")
        files = len(run.optimizer.engine.layouts)
        # 600 parameters of 8 bytes are two pages, and a header; the last subgroup is smaller.
        assert caught.value.needed_bytes == (files - 1) * 3 * 4096 + 2 * 4096
        assert names_in(tmp_path / "saved") == []
        assert not any(run.optimizer.engine.store.paths["disk"].has_spare(s) for s in range(files))
        run.steps(2, 4)


def test_spares_count_against_the_capacity_of_a_path(tmp_path: Path, disk: Path) -> None:
    settings_ = tidegate.PathSettings(directory=disk, capacity_bytes=300_000)
    with Run(paths={"disk": settings_}, host_cache=0, stride="off") as run:
        run.steps(0, 1)
        with pytest.raises(PathFull, match="on path disk needs 155,648 bytes more, and 144,352 bytes are free"):
            run.optimizer.save_checkpoint(tmp_path / "saved")
        run.steps(1, 2)


FULL_DISK = """
import sys, torch, tidegate
from pathlib import Path
from tidegate.errors import PathFull
at = Path(sys.argv[1])
(at / "tide").mkdir()
params = [torch.nn.Parameter(torch.ones(600_000))]
offload = tidegate.Offload(paths={"tiny": at / "tide"}, host_cache=0, subgroup_numel=100_000, stride="off")
with tidegate.AdamW(params, offload=offload) as optimizer:
    def step():
        params[0].grad = torch.ones(600_000)
        optimizer.step()
    step()
    if sys.argv[2] == "room":
        for _ in range(4):
            optimizer.save_checkpoint(at / "saved")
            step()
            step()
    else:
        try:
            optimizer.save_checkpoint(at / "saved")
        except PathFull as error:
            print("refused:", error)
        else:
            raise SystemExit("there was no room")
        step()
print("done")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(("megabytes", "expected"), [pytest.param(12, "room", marks=pytest.mark.slow), (9, "none")])
def test_on_a_file_system_with_little_room(tmp_path: Path, megabytes: int, expected: str) -> None:
    """4.8 MB of state, and as much for one checkpoint: it goes on for ever in 12 MB, and is refused in 9."""
    mounted = f'mount -t tmpfs -o size={megabytes}m tmpfs "$0" && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted, str(tmp_path),
         sys.executable, "-c", FULL_DISK, str(tmp_path), expected],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("done\n")
    assert ("refused:" in done.stdout) == (expected == "none"), done.stdout

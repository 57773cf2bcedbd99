"""Scratch of runs that live, end, and are killed; and space, on a file system that has little."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing as mp
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.agent.tiers.trainer import trainer
from tidegate.agent.tiers import disk_space
from tidegate.agent.tiers import scratch as scratch_module
from tidegate.agent.tiers.byte_locks import locked_by_other
from tidegate.agent.tiers.disk_space import free_bytes, reserve
from tidegate.agent.tiers.scratch import Leftover, Scratch, find_leftovers, remove
from tidegate.agent.tiers.scratch_owner import Owner
from tidegate.errors import PathFull, PathUnusable, ScratchTaken

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
as_user = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


@pytest.fixture
def dead(tmp_path: Path) -> Leftover:
    """Left behind by a process that was killed."""
    with trainer(tmp_path, "dead", 3) as other:
        other.kill()
    (found,) = find_leftovers(tmp_path)
    return found


def edit_owner(leftover: Leftover, **changes: Any) -> Leftover:
    """The leftover as if its owner file said so."""
    path = leftover.directory / "owner.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return next(found for found in find_leftovers(leftover.directory.parent.parent) if found.run == leftover.run)


def test_a_rank_has_a_private_directory_while_it_lives(tmp_path: Path) -> None:
    with closing(Scratch.create(tmp_path, "llama-7b", 2)) as scratch:
        assert scratch.directory == tmp_path / "tidegate-llama-7b" / "rank2"
        assert scratch.directory.stat().st_mode & 0o777 == 0o700
        assert scratch.directory.parent.stat().st_mode & 0o777 == 0o700
        assert os.listdir(scratch.directory) == ["owner.json"]
        (scratch.directory / "deep").mkdir()
        (scratch.directory / "deep" / "state").write_bytes(b"x")
        (scratch.directory / "link").symlink_to(tmp_path)
    assert os.listdir(tmp_path) == []
    scratch.close()  # again: nothing


def test_the_directory_of_the_run_goes_with_its_last_rank(tmp_path: Path) -> None:
    first, second = Scratch.create(tmp_path, "run", 0), Scratch.create(tmp_path, "run", 1)
    first.close()
    assert os.listdir(tmp_path / "tidegate-run") == ["rank1"]
    second.close()
    assert os.listdir(tmp_path) == []


def test_scratch_that_somebody_has_removed_leaves_no_descriptor(tmp_path: Path) -> None:
    scratch = Scratch.create(tmp_path, "run", 0)
    shutil.rmtree(tmp_path / "tidegate-run")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        scratch.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    scratch.close()  # again: nothing


def test_scratch_that_cannot_be_removed_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    scratch = Scratch.create(tmp_path, "run", 0)
    with monkeypatch.context() as patched:
        patched.setattr(scratch_module, "_remove_tree", refused)
        with pytest.raises(OSError, match="Input/output error"):
            scratch.close()
    (found,) = find_leftovers(tmp_path)
    assert found.alive == "no"
    remove(found)
    assert os.listdir(tmp_path) == []


def test_relative_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with closing(Scratch.create("elsewhere/../elsewhere", "run", 0)) as scratch:
        monkeypatch.chdir("/")
        assert scratch.directory == tmp_path / "elsewhere" / "tidegate-run" / "rank0"
    assert os.listdir(tmp_path / "elsewhere") == []


def test_the_name_of_the_program_may_have_any_bytes(tmp_path: Path) -> None:
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes(b"a \xff) 1 2")
    try:
        with closing(Scratch.create(tmp_path, "run", 0)) as scratch:
            assert scratch.owner.process_start_ticks > 0
            assert Owner.of_this_process("run", 0).process_start_ticks == scratch.owner.process_start_ticks
    finally:
        name.write_bytes(before.strip())


def test_live_scratch_is_seen_and_never_removed(tmp_path: Path) -> None:
    with trainer(tmp_path) as other:
        (found,) = find_leftovers(tmp_path)
        assert (found.run, found.rank, found.alive) == ("llama", 0, "yes")
        assert found.owner == other.owner
        assert 100_000 <= found.nbytes <= 120_000
        assert 0 <= found.age_seconds < 60
        for force in (False, True):
            with pytest.raises(ScratchTaken, match=f"in use by process {other.owner.pid} on "):
                remove(found, force=force)
        with pytest.raises(ScratchTaken, match="in use by process"):
            Scratch.create(tmp_path, "llama", 0)
        with closing(Scratch.create(tmp_path, "llama", 1)):
            assert [leftover.alive for leftover in find_leftovers(tmp_path)] == ["yes", "yes"]
            assert other.look(tmp_path) == ["yes", "yes"]
        assert (found.directory / "state").stat().st_size == 100_000
        other.finish()
    assert os.listdir(tmp_path) == []


def test_looking_at_ones_own_scratch_does_not_drop_its_lock(tmp_path: Path) -> None:
    with trainer(tmp_path, "other") as other, closing(Scratch.create(tmp_path, "own", 0)):
        for _ in range(2):
            assert [(found.run, found.alive) for found in find_leftovers(tmp_path)] == [
                ("other", "yes"),
                ("own", "yes"),
            ]
            own = find_leftovers(tmp_path)[1]
            with pytest.raises(ScratchTaken, match="in use"):
                remove(own, force=True)
            with pytest.raises(ScratchTaken, match="in use"):
                Scratch.create(tmp_path, "own", 0)
            assert other.look(tmp_path) == ["yes", "yes"]


def test_what_a_killed_process_left_is_dead_and_can_be_removed(tmp_path: Path, dead: Leftover) -> None:
    assert (dead.run, dead.rank, dead.alive) == ("dead", 3, "no")
    with pytest.raises(ScratchTaken, match=r"left behind by process .* `tidegate doctor`"):
        Scratch.create(tmp_path, "dead", 3)
    remove(dead)
    assert os.listdir(tmp_path) == []
    assert find_leftovers(tmp_path) == []
    remove(dead)  # gone: nothing
    Scratch.create(tmp_path, "dead", 3).close()


def test_nobody_believes_a_process_id(dead: Leftover) -> None:
    assert edit_owner(dead, pid=os.getpid()).alive == "no"


def test_what_was_there_before_a_reboot_is_dead_on_a_disk_of_the_node_only(dead: Leftover) -> None:
    on_disk = os.major(dead.directory.stat().st_dev) != 0
    assert edit_owner(dead, boot_id="before").alive == ("no" if on_disk else "unknown")


def test_on_memory_nobody_can_tell_another_boot_from_another_node() -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("no /dev/shm")
    run = f"test-{os.getpid()}"
    with trainer(shm, run) as other:
        other.kill()
    (found,) = (leftover for leftover in find_leftovers(shm) if leftover.run == run)
    try:
        assert found.alive == "no"
        assert edit_owner(found, boot_id="before").alive == "unknown"
    finally:
        remove(edit_owner(found, boot_id="before"), force=True)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"host": "node7", "boot_id": "another"}, id="another host"),
        pytest.param({"locked": False}, id="without locks"),
        pytest.param({"pid": "1"}, id="damaged"),
        pytest.param({"extra": 1}, id="of a later version"),
    ],
)
def test_what_may_be_in_use_elsewhere_is_removed_only_by_force(dead: Leftover, changes: dict[str, Any]) -> None:
    found = edit_owner(dead, **changes)
    assert found.alive == "unknown"
    with pytest.raises(ScratchTaken, match="may be in use"):
        remove(found)
    with pytest.raises(ScratchTaken, match="may be in use"):
        Scratch.create(dead.directory.parent.parent, "dead", 3)
    assert found.directory.is_dir()
    remove(found, force=True)
    assert not found.directory.parent.exists()


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_text("{"), lambda path: path.write_text("[]")])
def test_without_an_owner_file_nobody_can_tell(dead: Leftover, spoil: Callable[[Path], None]) -> None:
    spoil(dead.directory / "owner.json")
    (found,) = find_leftovers(dead.directory.parent.parent)
    assert (found.owner, found.alive) == (None, "unknown")
    assert found.age_seconds < 60
    with pytest.raises(ScratchTaken, match="in use by an unknown process"):
        remove(found)
    remove(found, force=True)
    assert not found.directory.exists()


def test_a_new_run_in_the_same_place_is_not_taken_for_the_dead_one(tmp_path: Path, dead: Leftover) -> None:
    remove(dead)
    with trainer(tmp_path, "dead", 3) as other:
        with pytest.raises(ScratchTaken, match="in use"):
            remove(dead)
        other.kill()
        with pytest.raises(ScratchTaken, match="has changed since it was listed"):
            remove(dead, force=True)


def test_an_owner_file_that_is_replaced_meanwhile_saves_the_directory(
    dead: Leftover, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_lock = scratch_module.try_lock

    def replace_first(fd: int, byte: int) -> bool:
        path = dead.directory / "owner.json"
        text = path.read_text()
        path.unlink()
        path.write_text(text)
        return try_lock(fd, byte)

    monkeypatch.setattr(scratch_module, "try_lock", replace_first)
    with pytest.raises(ScratchTaken, match="has changed since it was listed"):
        remove(dead)
    assert dead.directory.is_dir()


def test_two_who_remove_at_once_do_not_disturb_each_other(dead: Leftover) -> None:
    fd = os.open(dead.directory / "owner.json", os.O_RDWR)
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()

    def hold() -> None:
        fcntl.lockf(fd, fcntl.LOCK_EX, 1, 0)
        theirs.send("locked")
        theirs.recv()

    holder = context.Process(target=hold)
    holder.start()
    assert ours.recv() == "locked"
    assert locked_by_other(fd, 0)
    with pytest.raises(ScratchTaken, match="in use"):
        remove(dead)
    holder.kill()
    holder.join()
    os.close(fd)
    remove(dead)


def test_a_forked_child_leaves_its_parents_scratch_alone(tmp_path: Path) -> None:
    with closing(Scratch.create(tmp_path, "run", 0)) as scratch:
        context = mp.get_context("fork")
        ours, theirs = context.Pipe()

        def child() -> None:
            theirs.send([found.alive for found in find_leftovers(tmp_path)])
            scratch.close()

        worker = context.Process(target=child)
        worker.start()
        assert ours.recv() == ["yes"]
        worker.join()
        assert scratch.directory.is_dir()
        with trainer(tmp_path, "zzz") as other:
            assert other.look(tmp_path) == ["yes", "yes"]


def test_what_else_lies_there_is_nobodys_scratch(tmp_path: Path, dead: Leftover) -> None:
    (tmp_path / "tidegate-file").touch()
    (tmp_path / "tidegate-link").symlink_to(dead.directory.parent)
    (tmp_path / "other" / "rank0").mkdir(parents=True)
    (dead.directory.parent / "rank03").mkdir()
    (dead.directory.parent / "notes").mkdir()
    (dead.directory.parent / "rank4").symlink_to(dead.directory)
    assert [found.directory for found in find_leftovers(tmp_path)] == [dead.directory]
    linked = replace(dead, directory=dead.directory.parent / "rank4")
    with pytest.raises(PathUnusable, match="not a directory"):
        remove(linked)
    assert (dead.directory / "state").exists()


def test_links_of_a_checkpoint_are_not_counted_and_survive(tmp_path: Path, dead: Leftover) -> None:
    os.link(dead.directory / "state", tmp_path / "checkpoint")
    (found,) = find_leftovers(tmp_path)
    assert found.nbytes < 10_000 < dead.nbytes
    remove(found)
    assert (tmp_path / "checkpoint").stat().st_size == 100_000


def missing(base: Path) -> Path:
    return base / "nowhere"


def a_file(base: Path) -> Path:
    (base / "file").touch()
    return base / "file"


def below_a_file(base: Path) -> Path:
    return a_file(base) / "deeper"


def with_the_run_as_a_link(base: Path) -> Path:
    (base / "tidegate-run").symlink_to("/tmp")
    return base


def closed(base: Path) -> Path:
    base.chmod(0o500)
    return base


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (missing, "does not exist: create it"),
        (a_file, "is not a directory"),
        (below_a_file, "is not a directory"),
        (with_the_run_as_a_link, "is not a directory"),
        pytest.param(closed, "is not open to user", marks=as_user),
    ],
)
def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path, prepare: Callable[[Path], Path], why: str) -> None:
    directory = prepare(tmp_path)
    with pytest.raises(PathUnusable, match=why) as caught:
        Scratch.create(directory, "run", 0)
    assert str(caught.value).startswith(str(directory))


def test_a_missing_directory_has_no_leftovers_to_look_for(tmp_path: Path) -> None:
    with pytest.raises(PathUnusable, match="does not exist"):
        find_leftovers(tmp_path / "nowhere")


@pytest.mark.parametrize(("run", "rank"), [("", 0), ("../up", 0), (".hidden", 0), ("a" * 65, 0), ("a", -1)])
def test_names_that_are_no_directory_are_refused(tmp_path: Path, run: str, rank: int) -> None:
    with pytest.raises(ValueError, match=r"run is|rank is"):
        Scratch.create(tmp_path, run, rank)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "state", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def test_reserved_space_is_allocated(file: int) -> None:
    os.write(file, b"kept")
    assert reserve(file, 1 << 20)
    found = os.fstat(file)
    assert found.st_size == 1 << 20
    assert found.st_blocks * 512 >= 1 << 20
    assert os.pread(file, 5, 0) == b"kept\0"
    assert reserve(file, 10)
    assert os.fstat(file).st_size == 1 << 20


def test_the_limit_of_the_size_of_files_is_named(file: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(PathFull, match=r"needs 45,056 bytes\. This process may write no file larger") as told:
            reserve(file, 45_056)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "than 10,000 bytes: raise this limit (`ulimit -f`" in str(told.value)
    assert "are free" not in str(told.value)


def test_where_space_cannot_be_reserved_it_is_looked_at(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(disk_space, "allocate_blocks", unsupported)
    assert not reserve(file, 1 << 20)
    assert os.fstat(file).st_size == 1 << 20
    with pytest.raises(PathFull):
        reserve(file, 1 << 60)
    assert os.fstat(file).st_size == 1 << 20


@pytest.fixture
def without_allocation(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system that cannot allocate space for a file, as NFS before version 4.2."""
    image, folder = tmp_path / "image", tmp_path / "ext2"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext2", "-q", image], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no loop device can be mounted: {mounted.stderr}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mkfs.ext2") is None, reason="mounts a file system")
def test_where_space_cannot_be_reserved_nothing_is_written(without_allocation: Path) -> None:
    """glibc would write a byte in each block, which takes minutes on a file system over a network."""
    fd = os.open(without_allocation / "state", os.O_RDWR | os.O_CREAT)
    try:
        assert not reserve(fd, 32 << 20)
        status = os.fstat(fd)
        assert status.st_size == 32 << 20
        assert status.st_blocks == 0
        with pytest.raises(PathFull, match="needs"):
            reserve(fd, 1 << 30)
    finally:
        os.close(fd)


def test_more_than_there_is_leaves_the_file_as_it_was(tmp_path: Path, file: int) -> None:
    os.write(file, b"kept")
    with pytest.raises(PathFull) as caught:
        reserve(file, 1 << 62)
    assert str(caught.value).startswith(f"{tmp_path / 'state'} needs {(1 << 62) - 4:,} bytes more")
    assert caught.value.free_bytes == pytest.approx(free_bytes(tmp_path), rel=0.1)
    assert os.fstat(file).st_size == 4


def test_what_was_allocated_before_space_ran_out_is_given_back(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes // 2)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    os.write(file, b"kept")
    monkeypatch.setattr(disk_space, "allocate_blocks", half)
    with pytest.raises(PathFull, match="quota"):
        reserve(file, 1 << 20)
    assert os.fstat(file).st_size == 4


def test_reserving_nothing_is_a_mistake(file: int) -> None:
    with pytest.raises(ValueError, match="nbytes is 0"):
        reserve(file, 0)


def on_small_file_system(tmp_path: Path, options: str, script: str) -> None:
    """Runs the script with a file system of its own at `tmp_path`, which nobody else sees and which goes with it."""
    mounted = f'mount -t tmpfs -o {options} tmpfs "$0" && exec "$@"'
    prelude = """
        import os, pytest, sys
        from pathlib import Path
        from tidegate.agent.tiers.scratch import *
        from tidegate.agent.tiers.disk_space import reserve, free_bytes
        from tidegate.errors import *
        base = Path(sys.argv[1])
    """
    program = textwrap.dedent(prelude) + textwrap.dedent(script)
    subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted, str(tmp_path), sys.executable, "-c", program, str(tmp_path)],
        check=True,
        timeout=60,
    )


@as_root
def test_a_full_file_system_is_said_with_its_figures(tmp_path: Path) -> None:
    on_small_file_system(
        tmp_path,
        "size=1m",
        """
        scratch = Scratch.create(base, "run", 0)
        fd = os.open(scratch.directory / "state", os.O_RDWR | os.O_CREAT)
        with pytest.raises(PathFull, match="2,000,000 bytes more, 1,044,480 are free"):
            reserve(fd, 2_000_000)
        assert reserve(fd, 500_000)
        free = free_bytes(base)
        with pytest.raises(PathFull, match="No space left") as caught:
            reserve(fd, 1_500_000)
        assert caught.value.needed_bytes == 1_000_000
        assert caught.value.free_bytes == free == free_bytes(base)
        assert os.fstat(fd).st_size == 500_000
        scratch.close()
        """,
    )


@as_root
def test_an_owner_file_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    on_small_file_system(
        tmp_path,
        "size=64k",
        """
        with open(base / "full", "wb", buffering=0) as full:
            full.write(bytes(1 << 20))
        with pytest.raises(PathUnusable, match="No space left"):
            Scratch.create(base, "run", 0)
        assert os.listdir(base) == ["full"]
        """,
    )


@as_root
def test_a_read_only_file_system_is_refused(tmp_path: Path) -> None:
    on_small_file_system(
        tmp_path,
        "ro",
        """
        with pytest.raises(PathUnusable, match="read-only file system: mount it"):
            Scratch.create(base, "run", 0)
        """,
    )


@as_root
def test_directories_of_other_users_are_refused_and_their_scratch_is_left_out() -> None:
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        with trainer(Path(base)):
            program = f"""
                import os, pytest
                from tidegate.agent.tiers.scratch import Scratch, find_leftovers
                from tidegate.errors import PathUnusable
                os.setuid(65534)
                with pytest.raises(PathUnusable, match="is not open to user 65534"):
                    Scratch.create({base!r}, "run", 0)
                assert find_leftovers({base!r}) == []
            """
            subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)
            assert len(find_leftovers(base)) == 1

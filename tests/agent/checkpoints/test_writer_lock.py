"""One run and optimizer writes to a directory of checkpoints: the second is refused, and the first's death frees it."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import multiprocessing as mp
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.agent.checkpoints.refused import held_to_permissions
from tests.agent.checkpoints.saving import Run
from tidegate.agent.checkpoints import writer_lock
from tidegate.errors import CheckpointFailed, CheckpointTaken

FORKS = mp.get_context("forkserver")


def save_and_stay(directory: Path, said: Any, go_on: Any) -> None:
    with Run() as run:
        run.steps(0, 1)
        run.optimizer.save_checkpoint(directory, keep=5)
        said.send(os.getpid())
        go_on.recv()


@pytest.mark.slow
def test_a_second_run_is_refused_until_the_first_dies(tmp_path: Path) -> None:
    mine, theirs = FORKS.Pipe()
    waits, go_on = FORKS.Pipe(duplex=False)
    other = FORKS.Process(target=save_and_stay, args=(tmp_path, theirs, waits))
    other.start()
    assert mine.poll(60)
    pid = mine.recv()
    with Run() as run:
        run.steps(0, 2)
        for save in (run.optimizer.save_checkpoint, run.optimizer.begin_checkpoint):
            with pytest.raises(CheckpointTaken, match=rf"process {pid} on ") as caught:
                save(tmp_path)
            assert "directory of its own" in str(caught.value)
        assert [found.step for found in tidegate.find_checkpoints(tmp_path)] == [1]
        other.kill()
        other.join()
        assert run.optimizer.save_checkpoint(tmp_path, keep=5).step == 2
        assert [found.step for found in tidegate.find_checkpoints(tmp_path)] == [2, 1]
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"], "the lock file went"
    go_on.close()


def test_two_optimizers_of_one_process_do_not_replace_each_others_checkpoints(tmp_path: Path) -> None:
    with Run() as generator, Run() as discriminator:
        generator.steps(0, 1)
        discriminator.steps(0, 1)
        first = generator.optimizer.save_checkpoint(tmp_path)
        with pytest.raises(CheckpointTaken, match="another optimizer of this process"):
            discriminator.optimizer.save_checkpoint(tmp_path)
        assert tidegate.find_checkpoints(tmp_path) == [first]
        discriminator.optimizer.save_checkpoint(tmp_path / "discriminator")
        generator.steps(1, 2)
        generator.optimizer.save_checkpoint(tmp_path)
        generator.optimizer.close()
        assert discriminator.optimizer.save_checkpoint(tmp_path, keep=5).step == 1


def test_other_names_of_the_directory_are_the_same_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "name").symlink_to("real")
    with Run() as one, Run() as two:
        one.optimizer.save_checkpoint(tmp_path / "real")
        with pytest.raises(CheckpointTaken):
            two.optimizer.save_checkpoint(tmp_path / "name")


def test_an_optimizer_that_nobody_holds_any_more_gives_it_up(tmp_path: Path) -> None:
    run = Run()
    run.steps(0, 1)
    run.optimizer.save_checkpoint(tmp_path)
    with Run() as other:
        other.steps(0, 1)
        del run
        gc.collect()
        other.optimizer.save_checkpoint(tmp_path)


def test_a_forked_child_neither_holds_it_nor_gives_it_up(tmp_path: Path) -> None:
    with Run() as run:
        run.steps(0, 1)
        run.optimizer.save_checkpoint(tmp_path)
        mine, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(theirs)
            run.optimizer.close()
            os.read(mine, 1)
            os._exit(0)
        os.close(mine)
        try:
            with Run() as other, pytest.raises(CheckpointTaken):
                other.optimizer.save_checkpoint(tmp_path)
            run.optimizer.close()
            with Run() as other:
                other.optimizer.save_checkpoint(tmp_path)
        finally:
            os.close(theirs)
            os.waitpid(child, 0)


def test_a_lock_file_that_a_killed_run_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / writer_lock.LOCK_FILE).write_text(json.dumps({"pid": os.getpid(), "host": "elsewhere"}))
    with Run() as run:
        run.steps(0, 1)
        run.optimizer.save_checkpoint(tmp_path)
        assert json.loads((tmp_path / writer_lock.LOCK_FILE).read_text())["host"] != "elsewhere"
    assert os.listdir(tmp_path) == ["step-1"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_nothing_can_be_locked_one_process_still_keeps_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """As a parallel file system that is mounted without locks."""

    def refused(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refused)
    with Run() as one, Run() as two:
        one.optimizer.save_checkpoint(tmp_path)
        one.optimizer.save_checkpoint(tmp_path)
        with pytest.raises(CheckpointTaken):
            two.optimizer.save_checkpoint(tmp_path)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "cannot be locked" in said


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/etc/hostname", path), os.mkdir])
def test_something_else_in_its_place_is_named(tmp_path: Path, make: Any) -> None:
    make(tmp_path / writer_lock.LOCK_FILE)
    with Run() as run:
        run.steps(0, 1)
        with pytest.raises(CheckpointFailed, match=writer_lock.LOCK_FILE):
            run.optimizer.save_checkpoint(tmp_path)
        run.steps(1, 2)


# ---- what comes while it is taken


@pytest.fixture
def interrupts_are_heard() -> Iterator[None]:
    """Also where whoever started the tests in the background had SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts_are_heard")
@pytest.mark.parametrize("function", ["flock", "pwrite"])
@pytest.mark.parametrize("what", ["Ctrl-C", "another handler"])
def test_what_interrupts_the_taking_of_the_lock_leaves_a_directory_that_can_be_saved_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, what: str
) -> None:
    module: Any = fcntl if function == "flock" else os
    real = getattr(module, function)

    def interrupted(*given: Any) -> Any:
        result = real(*given)
        if what == "another handler":
            raise SystemExit(5)
        signal.raise_signal(signal.SIGINT)
        return result

    with Run() as run, Run() as other:
        run.steps(0, 1)
        other.steps(0, 1)
        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patched:
            patched.setattr(module, function, interrupted)
            with pytest.raises((KeyboardInterrupt, SystemExit)):
                run.optimizer.save_checkpoint(tmp_path)
        run.optimizer.save_checkpoint(tmp_path)
        assert len(os.listdir("/proc/self/fd")) == before + 1
        with pytest.raises(CheckpointTaken, match="another optimizer of this process"):
            other.optimizer.save_checkpoint(tmp_path)
        run.optimizer.close()
        other.optimizer.save_checkpoint(tmp_path)


# ---- a directory that several users save to


@pytest.fixture(params=["plain", "sticky"])
def shared(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Of another user, whose lock file is in it; this process may write there, and not to that file."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to give files to another user")
    made = tmp_path / "shared"
    made.mkdir()
    (made / writer_lock.LOCK_FILE).write_text(json.dumps({"pid": 4711, "host": "theirs"}))
    os.chown(made / writer_lock.LOCK_FILE, 65534, 65534)
    os.chown(made, 65534, -1)
    made.chmod(0o1777 if request.param == "sticky" else 0o777)
    with held_to_permissions():
        with pytest.raises(PermissionError):
            os.open(made / writer_lock.LOCK_FILE, os.O_RDWR)
        yield made


def test_another_users_run_that_lives_keeps_the_directory(shared: Path) -> None:
    theirs = os.open(shared / writer_lock.LOCK_FILE, os.O_RDONLY)
    fcntl.flock(theirs, fcntl.LOCK_EX)
    try:
        with Run() as run:
            run.steps(0, 1)
            with pytest.raises(CheckpointTaken, match="process 4711 on theirs"):
                run.optimizer.save_checkpoint(shared)
    finally:
        os.close(theirs)


def test_another_users_run_that_died_leaves_it(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Run() as run, Run() as other:
        run.steps(0, 1)
        run.optimizer.save_checkpoint(shared)
        with pytest.raises(BlockingIOError):
            fcntl.flock(os.open(shared / writer_lock.LOCK_FILE, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(CheckpointTaken):
            other.optimizer.save_checkpoint(shared)
    assert [record for record in caplog.records if record.levelname == "WARNING" and "lock" in record.message] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to another user")
def test_a_lock_file_that_nobody_else_may_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / writer_lock.LOCK_FILE).touch(0o600)
    os.chown(tmp_path / writer_lock.LOCK_FILE, 65534, 65534)
    with held_to_permissions(), Run() as run:
        run.steps(0, 1)
        run.optimizer.save_checkpoint(tmp_path)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "it belongs to user 65534" in said


def test_whoever_saves_lets_other_users_see_that_it_is_locked(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with Run() as run:
            run.optimizer.save_checkpoint(tmp_path)
            assert (tmp_path / writer_lock.LOCK_FILE).stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_a_directory_whose_file_system_is_no_longer_mounted_is_refused(tmp_path: Path) -> None:
    disk, below = tmp_path / "disk", Path(tempfile.mkdtemp(dir="/dev/shm"))
    disk.mkdir()
    directory = tmp_path / "checkpoints"
    directory.symlink_to(disk)
    try:
        with Run() as run:
            run.steps(0, 1)
            run.optimizer.save_checkpoint(directory)
            directory.unlink()
            directory.symlink_to(below)
            with pytest.raises(CheckpointFailed, match="is on another file system than at the last checkpoint"):
                run.optimizer.save_checkpoint(directory)
            assert list(below.iterdir()) == []
            directory.unlink()
            directory.symlink_to(disk)
            run.steps(1, 2)
            run.optimizer.save_checkpoint(directory)
            assert [entry.name for entry in disk.glob("step-*")] == ["step-2"]
    finally:
        shutil.rmtree(below)

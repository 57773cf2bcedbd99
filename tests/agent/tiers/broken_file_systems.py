"""What test_faults runs in a process with mounts of its own: file systems that really fail. One function a scenario."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.agent.tiers.faults import Snapshot, lives, store_of, train, training
from tests.agent.tiers.trainer import trainer
from tests.cli.doctor.test_storage_paths import doctor
from tidegate.agent.cgroups import host_available_bytes
from tidegate.agent.engine import memory
from tidegate.agent.tiers import file_path
from tidegate.agent.tiers.directory_probe import file_system_of
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.errors import (
    EngineError,
    LaneStuckError,
    NoPathLeft,
    PathFull,
    PathUnusable,
    StateLost,
    StorageError,
)
from tidegate.kernels import open_direct
from tidegate.knobs.knobs import Knobs

MEGABYTE = 1 << 20
FIRST_WRITES = r"failed to write the state of subgroup [02] after step 1 in "
"""Two are in flight; which of them fails first is up to the system."""


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def tmpfs(at: Path, nbytes: int) -> Path:
    at.mkdir()
    run("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", at)
    return at


def loop_file_system(at: Path, image: Path, nbytes: int = 32 * MEGABYTE) -> Path:
    """An ext4 in a sparse file: what fails in the file fails on the device. The loop device goes with the mount."""
    with image.open("wb") as file:
        file.truncate(nbytes)
    run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", image)
    at.mkdir()
    run("mount", "-o", "loop", image, at)
    return at


def fill(directory: Path) -> None:
    """Until there is no byte left."""
    with (directory / "filler").open("wb", buffering=0) as file:
        for size in (MEGABYTE, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def good(base: Path) -> Path:
    (base / "good").mkdir()
    return base / "good"


def read_error(base: Path) -> None:
    """The device loses what it has: the run ends with names, and goes on from a loaded state on what is left."""
    image = base / "image"
    paths = {"bad": loop_file_system(base / "bad", image), "good": good(base)}
    with training(paths, tier_split="bad:1,good:1") as pair:
        train(pair, 0, 2)
        store = store_of(pair.optimizer)
        saved, store.last_checkpoint = Snapshot.of(pair), "/checkpoints/step-2"
        os.truncate(image, 64 * 1024)
        with pytest.raises(StateLost) as lost:
            train(pair, 2)
        error = lost.value
        assert (error.path, error.step, error.checkpoint) == ("bad", 2, "/checkpoints/step-2")
        for part in (f"subgroup {error.subgroup} ", "step 2", "path bad", "Input/output error", "/checkpoints/step-2"):
            assert part in str(error), (part, str(error))
        assert store.paths["bad"].counters.retries["read"] in {2, 4}  # one read in flight or two
        assert "bad" in store.retired
        for broken in (pair.optimizer.step, pair.optimizer.state_dict):
            for param in pair.params:
                param.grad = param.detach().clone()
            with pytest.raises(EngineError, match="not usable: StateLost"):
                broken()
        pair.optimizer.zero_grad()
        saved.load(pair)
        train(pair, 7, 3)
        assert lives(pair) == {"good"}
        pair.assert_same_state()
    assert not any((base / "good").iterdir())


def full_device(base: Path) -> None:
    """The device below a file system has no room for what the file system has promised: writes fail although their
    space was reserved. Another path takes them, and nothing is lost."""
    backing = tmpfs(base / "backing", 24 * MEGABYTE)
    paths = {"bad": loop_file_system(base / "bad", backing / "image", 64 * MEGABYTE), "good": good(base)}
    with training(paths, tier_split="bad:1,good:1") as pair:
        fill(backing)
        train(pair, 0, 4)
        store = store_of(pair.optimizer)
        assert re.search(FIRST_WRITES, store.retired["bad"])
        assert store.paths["good"].counters.taken_over_bytes > 0
        assert lives(pair) == {"good"}
        pair.assert_same_state()


def late_write_error(base: Path) -> None:
    """Through the page cache the error comes with the synchronisation, while the state is still in memory."""
    file_path.open_direct = lambda name, **how: open_direct(name, **how, direct=False)  # type: ignore[assignment]
    backing = tmpfs(base / "backing", 24 * MEGABYTE)
    paths = {"bad": loop_file_system(base / "bad", backing / "image", 64 * MEGABYTE), "good": good(base)}
    with training(paths, tier_split="bad:1,good:1") as pair:
        fill(backing)
        train(pair, 0, 3)
        assert re.search(FIRST_WRITES, store_of(pair.optimizer).retired["bad"])
        assert lives(pair) == {"good"}
        pair.assert_same_state()


def nowhere_left(base: Path) -> None:
    """The only path takes no more writes and host memory has no room: the step ends with figures."""
    backing = tmpfs(base / "backing", 24 * MEGABYTE)
    with training({"bad": loop_file_system(base / "bad", backing / "image", 64 * MEGABYTE)}) as pair:
        saved = Snapshot.of(pair)
        fill(backing)
        memory.host_available_bytes = lambda: 0  # type: ignore[assignment]
        with pytest.raises(NoPathLeft) as left:
            train(pair, 0)
        error = left.value
        assert (error.path, error.step, error.free_bytes) == ("bad", 1, 0)
        assert error.needed_bytes == 4096 + 40_960
        for part in (f"subgroup {error.subgroup} ", "step 1", "Path bad", f"{error.needed_bytes:,} bytes"):
            assert part in str(error), (part, str(error))
        memory.host_available_bytes = host_available_bytes
        saved.load(pair)
        train(pair, 5, 2)
        assert lives(pair) == {"host"}


def small_path(base: Path) -> None:
    """A path takes what fits, the other one the rest; when it fills up meanwhile, that goes elsewhere, too."""
    small = tmpfs(base / "small", 200_000)
    paths = {"small": PathSettings(directory=small, block_bytes=4096), "good": good(base)}
    with training(paths, tier_split="good:1") as pair:
        pair.optimizer.check_knobs(Knobs(tier_split="small:1,good:2", host_cache=0))
        train(pair, 0)
        fill(small)
        pair.optimizer.apply_knobs(Knobs(stride=2.0, tier_split="small:1,good:1", host_cache=0))
        train(pair, 1, 3)
        assert lives(pair) == {"good"}
        assert not store_of(pair.optimizer).retired


def cannot_start(base: Path) -> None:
    """Each way in which a path cannot work is said at the start, and leaves nothing on the others."""
    other = good(base)
    full, read_only = tmpfs(base / "full", 100_000), tmpfs(base / "read_only", 100_000)
    small = tmpfs(base / "small", 200_000)
    fill(full)
    run("mount", "-o", "remount,ro", read_only)
    (base / "file").touch()
    cases: list[tuple[Path, type[StorageError], str]] = [
        (base / "missing", PathUnusable, "does not exist"),
        (base / "file", PathUnusable, "is not a directory"),
        (full, StorageError, "No space left|needs"),
        (read_only, PathUnusable, "read-only"),
        (small, PathFull, "needs 1,048,576 bytes more"),
    ]
    for directory, kind, says in cases:
        for order in (("good", "bad"), ("bad", "good")):
            paths = {name: {"good": other, "bad": directory}[name] for name in order}
            before = threading.active_count()
            with pytest.raises(kind, match=says), training(paths):
                raise AssertionError(f"started on {directory}")
            assert not any(other.iterdir()), directory
            assert threading.active_count() == before


def hangs(base: Path) -> None:
    """A file system that lets no write through: the watchdog names lane and op, and close() comes back at once."""
    bad = loop_file_system(base / "bad", base / "image")
    paths = {"bad": PathSettings(directory=bad, lock_slots=0), "good": good(base)}
    with training(paths, tier_split="bad:1,good:1", watchdog_seconds=0.5) as pair:
        train(pair, 0)
        held = pair.optimizer.engine.memory
        with frozen(bad):
            with pytest.raises(LaneStuckError, match=r"Lane bad:write is stuck: flush \d+ bad"):
                train(pair, 1)
            with pytest.raises(EngineError, match="stuck"):
                pair.optimizer.state_dict()
            begun = time.monotonic()
            pair.optimizer.close()
            assert time.monotonic() - begun < 5
            assert held.host_slots, "the kernel still reads from them"
            assert not any((base / "good").iterdir())


@contextmanager
def frozen(directory: Path) -> Iterator[None]:
    """Whoever writes there waits. Thawed in any case: a guard does it where this process is killed meanwhile."""
    guard = subprocess.Popen(["sh", "-c", f"sleep 60; fsfreeze -u '{directory}'"], start_new_session=True)
    run("fsfreeze", "-f", directory)
    try:
        yield
    finally:
        run("fsfreeze", "-u", directory)
        os.killpg(guard.pid, signal.SIGTERM)
        guard.wait()


def throttled(base: Path) -> None:
    """The kernel lets one path have a hundredth of its speed: it gets one subgroup, and the results stay right."""
    bad = loop_file_system(base / "bad", base / "image")
    number = os.stat(bad).st_dev
    paths = {"bad": bad, "good": good(base)}
    # Much more than what a throttled device may have at once, unnoticed.
    with training(paths, stride="off", size=20) as pair:
        train(pair, 0, 2)
        before = pair.optimizer.effective_knobs()["tier_split"]
        speeds = store_of(pair.optimizer).speeds["bad"]
        with throttle(f"{os.major(number)}:{os.minor(number)}", 4_000_000):
            train(pair, 2, 6)
            slower = store_of(pair.optimizer).speeds["bad"]
            assert slower.write_bytes_per_second < speeds.write_bytes_per_second / 10, (speeds, slower)
            assert pair.optimizer.effective_knobs()["tier_split"] == "bad:1,good:7", before
        pair.assert_same_state()


@contextmanager
def throttle(device: str, bytes_per_second: int) -> Iterator[None]:
    """This process gets so much of a block device, by a control group of its own. Ends it with SKIP where it cannot."""
    group = Path("/sys/fs/cgroup/blkio", f"tidegate-test-{os.getpid()}")
    if not group.parent.is_dir():
        print("SKIP there is no controller for block I/O (cgroup blkio) on this machine")
        sys.exit(0)
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    home = next(line.split(":")[2] for line in lines if "blkio" in line.split(":")[1].split(","))
    try:
        group.mkdir()
    except OSError as error:
        print(f"SKIP no control group can be made: {error.strerror}")
        sys.exit(0)
    try:
        for direction in ("read", "write"):
            (group / f"blkio.throttle.{direction}_bps_device").write_text(f"{device} {bytes_per_second}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (group.parent / home.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def shut_down(directory: Path) -> None:
    """All reads and writes of this ext4 fail from now on (EXT4_IOC_SHUTDOWN, without writing what is left)."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, 0x8004587D, struct.pack("I", 2))
    finally:
        os.close(fd)


def doctor_after_io_errors(base: Path) -> None:
    """The doctor says which directory fails, how, and what to do; what is good is looked at all the same."""
    bad, other = loop_file_system(base / "bad", base / "image"), good(base)
    with trainer(bad, "killed", 3) as killed:
        killed.kill()
    (bad / "step-1").mkdir()
    (bad / "step-1" / "rank0.json").write_text("{}")
    shut_down(bad)
    failed = f"{bad} cannot be read or written: Input/output error. Find the cause in the kernel's log"
    code, said = doctor(base, "--path", str(bad), "--remove", "--yes")
    assert (code, failed in said) == (1, True), said
    code, said = doctor(base, "--checkpoints", str(bad))
    assert (code, "step-1" in said, "Input/output error" in said) == (1, True, True), said
    code, said = doctor(base, "--path", str(bad), "--path", str(other))
    assert (code, failed in said, f"{other}: a file was written" in said) == (1, True, True), said


def doctor_of_paths_that_take_nothing(base: Path) -> None:
    """The doctor tries a file: a read-only and a full file system are bad. A hidden mount is not the one it names."""
    bad = loop_file_system(base / "bad", base / "image")
    assert file_system_of(bad).kind == "ext4"
    run("mount", "-o", "remount,ro", bad)
    code, said = doctor(base, "--path", str(bad))
    assert (code, "is on a read-only file system: mount it for writing" in said) == (1, True), said
    assert f"{bad}: on {bad} (ext4, /dev/loop" in said, said
    run("mount", "-t", "tmpfs", "-o", "size=100000", "none", bad)
    assert (file_system_of(bad).kind, file_system_of(bad).mount_point) == ("tmpfs", str(bad))
    fill(bad)
    code, said = doctor(base, "--path", str(bad))
    assert (code, "No space left on device" in said, os.listdir(bad)) == (1, True, ["filler"]), said
    assert "free 0 B (0.0 %); TidegatePathNearlyFull fires below 10.0 %" in said, said


SCENARIOS: dict[str, Callable[[Path], None]] = {
    scenario.__name__: scenario
    for scenario in (
        read_error, full_device, late_write_error, nowhere_left, small_path, cannot_start, hangs, throttled,
        doctor_after_io_errors, doctor_of_paths_that_take_nothing,
    )
}  # fmt: skip


if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](Path(sys.argv[2]))

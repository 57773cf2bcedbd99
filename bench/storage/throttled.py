"""Storage paths of chosen speed: loop devices with a file system, throttled by the kernel, outside of their users.

Needs root, loop devices and the blkio controller of cgroup v1. Only processes in the group are throttled.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

from storage.fio import Mix, rate
from storage.group import Group

BLKIO = Path("/sys/fs/cgroup/blkio")


def unavailable() -> str | None:
    """Why paths cannot be throttled here, if they cannot."""
    if os.geteuid() != 0:
        return "throttled paths need root"
    if not (BLKIO / "blkio.throttle.read_bps_device").exists():
        return f"throttled paths need the blkio controller of cgroup v1 in {BLKIO}"
    if not Path("/dev/loop-control").exists():
        return "throttled paths need loop devices"
    return None


class ThrottledPath:
    """A file system of its own on a loop device, whose file lies in `backing`. A context manager; leaves nothing."""

    def __init__(self, group: Group, mount: Path, backing: Path, nbytes: int, bytes_per_second: int) -> None:
        """`bytes_per_second`: of reads, and as many of writes."""
        self._group, self.directory, self._nbytes = group, mount, nbytes
        self._file = backing / f"{mount.name}-{os.getpid()}.img"
        self.bytes_per_second = bytes_per_second
        self._device = ""

    def __enter__(self) -> Self:
        try:
            with self._file.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._nbytes)
            self._device = _call("losetup", "--find", "--show", "--direct-io=on", str(self._file))
            _call("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", self._device)
            self.directory.mkdir()
            _call("mount", self._device, str(self.directory))
            self.throttle(self.bytes_per_second)
        except BaseException:
            self.__exit__()
            raise
        return self

    def throttle(self, bytes_per_second: int) -> None:
        """From now on, each way."""
        self.bytes_per_second = bytes_per_second
        number = os.stat(self._device).st_rdev
        for way in ("read", "write"):
            rule = f"{os.major(number)}:{os.minor(number)} {bytes_per_second}"
            (self._group.folder / f"blkio.throttle.{way}_bps_device").write_text(rule)

    def fio_rate(self, mix: Mix) -> float:
        """What it gives alone: bytes a second, both ways together."""
        file = self.directory / "fio"
        try:
            return rate(file, mix, join=self._group.members)
        finally:
            file.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        for command in (("umount", str(self.directory)), ("losetup", "--detach", self._device)):
            if self._device:
                with suppress(subprocess.CalledProcessError):
                    _call(*command)
        self._file.unlink(missing_ok=True)


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

"""Storage paths of chosen speed: file systems on loop devices, which the kernel throttles. The programs that use the
paths need not be changed for it.

Needs root, loop devices and the blkio controller of cgroup v1. Only processes in the control group are throttled.
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
    """The reason why paths cannot be throttled on this machine; None if they can."""
    if os.geteuid() != 0:
        return "throttled paths need root"
    if not (BLKIO / "blkio.throttle.read_bps_device").exists():
        return f"throttled paths need the blkio controller of cgroup v1 in {BLKIO}"
    if not Path("/dev/loop-control").exists():
        return "throttled paths need loop devices"
    return None


class ThrottledPath:
    """A separate file system on a loop device, whose file is in the folder `backing`. A context manager: everything is
    removed at its end."""

    def __init__(self, group: Group, mount: Path, backing: Path, nbytes: int, bytes_per_second: int) -> None:
        """mount: directory for the file system. nbytes: size. bytes_per_second: limit for reads, and the same for
        writes."""
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
        """Sets a new limit for reads and for writes."""
        self.bytes_per_second = bytes_per_second
        number = os.stat(self._device).st_rdev
        for way in ("read", "write"):
            rule = f"{os.major(number)}:{os.minor(number)} {bytes_per_second}"
            (self._group.folder / f"blkio.throttle.{way}_bps_device").write_text(rule)

    def fio_rate(self, mix: Mix) -> float:
        """Bytes per second of fio on this path alone, reads and writes together."""
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

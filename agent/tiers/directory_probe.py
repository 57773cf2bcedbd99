"""Probes a storage path as a run would use it: its file system, its free space, and whether files can be written and
read there."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tidegate.agent.tiers.scratch import absolute_path, check_usable, directory_unusable
from tidegate.kernels import aligned_buffer, open_direct

PROBE_BYTES: Final = 64 << 10
MOUNTS: Final = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class FileSystem:
    """File system that a directory is on. The byte counts are those of the metrics of a path."""

    mount_point: str
    kind: str
    """As in `mount`: ext4, xfs, nfs4 or another."""
    device: str
    total_bytes: int
    free_bytes: int


def file_system_of(directory: str | os.PathLike[str]) -> FileSystem:
    """The file system of a directory. PathUnusable when it does not answer."""
    base = absolute_path(directory)
    try:
        real, space = os.path.realpath(base, strict=True), os.statvfs(base)
        mounts = [_mount(line) for line in MOUNTS.read_text(errors="surrogateescape").splitlines()]
    except OSError as error:
        raise directory_unusable(base, error) from error
    # Of two mounts on the same directory the later one hides the earlier one.
    above = [mount for mount in mounts if Path(real).is_relative_to(mount[0])]
    where = max(reversed(above), key=lambda mount: len(mount[0]), default=("/", "unknown", "unknown"))
    return FileSystem(*where, space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize)


def _mount(line: str) -> tuple[str, str, str]:
    """Mount point, type and device in a line of /proc/self/mountinfo."""
    head, _, tail = line.partition(" - ")
    kind, device, *_ = tail.split(" ")
    point, device = (
        re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), text) for text in (head.split(" ")[4], device)
    )
    return point, kind, device


def probe_directory(directory: str | os.PathLike[str]) -> bool:
    """Writes a small file in a directory, reads it back from the device, and removes it. Returns whether the file
    system has direct I/O. PathUnusable when any of that fails."""
    base = absolute_path(directory)
    try:
        check_usable(base)
        fd, name = tempfile.mkstemp(prefix=".tidegate-probe-", dir=base)
        try:
            os.close(fd)
            return _write_and_read(name)
        finally:
            os.unlink(name)
    except OSError as error:
        raise directory_unusable(base, error) from error


def _write_and_read(name: str) -> bool:
    """Writes random bytes to a file, reads them back and compares them. Returns whether that was direct I/O."""
    content, memory = os.urandom(PROBE_BYTES), aligned_buffer(PROBE_BYTES)
    memory[:] = np.frombuffer(content, np.uint8)
    fd, direct = open_direct(name, write=True)
    try:
        if os.pwrite(fd, memory.data, 0) < PROBE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # without direct I/O the page cache would answer the read
        memory[:] = 0
        os.preadv(fd, [memory.data], 0)
    finally:
        os.close(fd)
    if memory.tobytes() != content:
        raise OSError(errno.EIO, "a file that was written there is read with another content")
    return direct

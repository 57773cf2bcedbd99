"""Has DeepSpeed compile what the tests use of it: its CPU optimizer, and what ranks of one machine talk through.

DeepSpeed compiles them when they are first used on a machine, which takes minutes; tests should not be what waits.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.services import free_port

ABANDONED_SECONDS = 5.0
"""Seconds without an owner after which a lock counts as abandoned. A compilation closes its lock just before it removes
it, and takes much less time in between."""


def holders(lock: Path) -> list[int]:
    """The processes that have `lock` open: torch keeps it open for as long as it compiles. Processes of other users and
    containers are not seen."""
    return [int(process.name) for process in Path("/proc").glob("[0-9]*") if str(lock) in _open_files(process)]


def _open_files(process: Path) -> Iterator[str]:
    with suppress(OSError):  # The process has ended, or belongs to somebody else.
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):  # It was closed meanwhile, as that of this listing is.
                yield os.readlink(descriptor)


def _file_without_owner(lock: Path) -> int | None:
    """Number of the lock's inode; None if the lock is held, or no longer there."""
    with suppress(FileNotFoundError):
        inode = lock.stat().st_ino
        return None if holders(lock) else inode
    return None


def remove_abandoned_locks(builds: Path) -> None:
    """Removes locks of compilations that were killed: another compilation would wait for them without end."""
    found = {lock: _file_without_owner(lock) for lock in builds.resolve().glob("*/lock")}
    abandoned = {lock: inode for lock, inode in found.items() if inode is not None}
    if abandoned:
        time.sleep(ABANDONED_SECONDS)
    for lock, inode in abandoned.items():
        if _file_without_owner(lock) == inode:
            print(f"A compilation was killed: its lock {lock} is removed.", file=sys.stderr)
            lock.unlink(missing_ok=True)


def keep_removing_abandoned_locks(builds: Path) -> None:
    while True:
        remove_abandoned_locks(builds)
        time.sleep(ABANDONED_SECONDS)


def compile_deepspeed() -> None:
    os.environ |= {
        "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    import deepspeed
    import torch.distributed
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from torch.utils.cpp_extension import _get_build_directory

    builds = Path(_get_build_directory("cpu_adam", verbose=False)).parent
    threading.Thread(target=keep_removing_abandoned_locks, args=(builds,), daemon=True).start()
    CPUAdamBuilder().load(verbose=False)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    compile_deepspeed()

"""Has DeepSpeed compile what the tests use of it: its CPU optimizer, and what ranks of one machine talk through.

DeepSpeed compiles them when they are first used on a machine, which takes minutes; tests should not be what waits.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from tests.services import free_port

ABANDONED_SECONDS = 5.0
"""A compilation closes its lock just before it removes it; it does not take so long in between."""


def holders(lock: Path) -> list[int]:
    """The processes that have `lock` open: torch keeps it open for as long as it compiles."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(fd) == str(lock) for fd in (process / "fd").iterdir()):
                found.append(int(process.name))
        except OSError:  # It has ended, or somebody else started it.
            continue
    return found


def remove_abandoned_locks(builds: Path) -> None:
    """Removes locks of compilations that were killed: another compilation would wait for them without end."""
    held_by_nobody = {}
    for lock in builds.resolve().glob("*/lock"):
        if not holders(lock):
            held_by_nobody[lock] = lock.stat().st_ino
    if held_by_nobody:
        time.sleep(ABANDONED_SECONDS)
    for lock, inode in held_by_nobody.items():
        if lock.exists() and lock.stat().st_ino == inode and not holders(lock):
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

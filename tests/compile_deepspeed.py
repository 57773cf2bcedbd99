"""Has DeepSpeed compile what the tests use of it: its CPU optimizer, and what ranks of one machine talk through.

DeepSpeed compiles them when they are first used on a machine, which takes minutes; tests should not be what waits.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.services import free_port

STALE_SECONDS = 900.0
"""No compilation takes so long."""

os.environ |= {
    "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": str(free_port()),
}  # fmt: skip


def remove_stale_locks(builds: Path) -> None:
    """A compilation that was killed leaves a lock, for which the next one would wait for ever."""
    for lock in builds.glob("*/lock"):
        if time.time() - lock.stat().st_mtime > STALE_SECONDS:
            print(f"A compilation was killed: its lock {lock} is removed.", file=sys.stderr)
            lock.unlink()


if __name__ == "__main__":
    import deepspeed
    import torch.distributed
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from torch.utils.cpp_extension import _get_build_directory

    remove_stale_locks(Path(_get_build_directory("cpu_adam", verbose=False)).parent)
    CPUAdamBuilder().load(verbose=False)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.distributed.destroy_process_group()

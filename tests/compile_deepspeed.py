"""Has DeepSpeed compile what the tests use of it: its CPU optimizer, and what ranks of one machine talk through.

DeepSpeed compiles them when they are first used on a machine, which takes minutes; tests should not be what waits.
"""

from __future__ import annotations

import os

from tests.services import free_port

os.environ |= {
    "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": str(free_port()),
}  # fmt: skip

if __name__ == "__main__":
    import deepspeed
    import torch.distributed
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load(verbose=False)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.distributed.destroy_process_group()

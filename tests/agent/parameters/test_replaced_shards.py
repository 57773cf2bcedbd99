"""Shards that FSDP2 replaces after the optimizer was built. Before pytorch's pull request 163130 (September 2025) it
does so at the first forward and when it loads a state, if ranks have shards of different sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tidegate
from tests.agent.engine.test_exactness import FAST


@pytest.fixture(autouse=True)
def _process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("gradients", ["keep", "release"])
@pytest.mark.parametrize(("dtype", "replaced_at"), [(torch.float32, {0, 3}), (torch.bfloat16, {0})])
def test_the_new_shard_is_trained(
    gradients: Literal["keep", "release"], dtype: torch.dtype, replaced_at: set[int]
) -> None:
    offload = tidegate.Offload(stride=2.0, subgroup_numel=50, emulated=FAST, gradients=gradients)
    torch.manual_seed(0)
    start, inputs = torch.randn(33, 7, dtype=dtype), torch.randn(6, 33, dtype=dtype)
    whole = torch.nn.Parameter(start.clone())
    divided = torch.nn.Parameter(distribute_tensor(start.clone(), init_device_mesh("cpu", (1,)), [Shard(0)]))
    with (
        tidegate.AdamW([whole], lr=0.1, offload=offload) as expected,
        tidegate.AdamW([divided], lr=0.1, offload=offload) as optimizer,
    ):
        for step in range(6):
            if step in replaced_at:  # before its forward
                divided._local_tensor = divided._local_tensor.clone()
            (whole * inputs[step].unsqueeze(1)).sum().backward()
            grad = inputs[step].unsqueeze(1).expand(33, 7)
            (divided * distribute_tensor(grad.clone(), divided.device_mesh, [Shard(0)])).sum().backward()
            for one in (expected, optimizer):
                one.step()
                one.zero_grad()
            assert torch.equal(divided._local_tensor, whole), step
    assert not torch.equal(whole, start)

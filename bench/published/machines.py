"""One rate card for each machine of the papers, from their tables and text. Nothing here is fitted to a result.

`host_bytes_per_second` is in neither paper. An update on the CPU is taken to be as fast as host memory lets it be, so
that memory moves what that update moves: 28 bytes a parameter in DeepSpeed's (weight, both moments, read and written in
fp32, and the fp32 gradient) times its published rate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tidegate.model.machine import GB, GPUS, Machine, StoragePath
from tidegate.model.shapes import PAPER_MODELS, ModelShape

DEEPSPEED_BYTES: Final = 28
"""Bytes a parameter that DeepSpeed's update on the CPU moves in host memory."""
DOWNSCALED_BYTES: Final = DEEPSPEED_BYTES + 6
"""With the new weight read once more and written in 16 bits (DOS 4.2, D_c)."""

JLSE: Final = Machine.of(
    GPUS["h100-80"],
    gpus=4,
    host_memory_bytes=512 * GB,
    cpu_params_per_second=8e9,
    host_bytes_per_second=8e9 * DEEPSPEED_BYTES,
    node_link_bytes_per_second=133e9,
    paths=(
        StoragePath(name="nvme", read_bytes_per_second=6.9e9, write_bytes_per_second=5.3e9),
        StoragePath(name="pfs", read_bytes_per_second=3.6e9, write_bytes_per_second=3.6e9),
    ),
)
"""DOS 5.1, MLP Table 1: 4 H100, 96 cores; CPU updates at 8 G parameters/s in both papers."""
JLSE_DEVICE: Final = 100e9 / 4
"""Parameters a second of one GPU (DOS 1); MLP 4.2 gives 40 G for the node."""
JLSE_COPY: Final = 12e9 / 4 * 2
"""Bytes of new 16-bit weights a second to one GPU, downscaled and copied one after the other (DOS 1)."""
JLSE_GRADIENT: Final = 4e9
"""Bytes of 16-bit gradients a second into fp32 buffers of the host, for one GPU (DOS Table 1, G16 to H32)."""

POLARIS: Final = Machine.of(
    GPUS["a100-40"],
    gpus=4,
    host_memory_bytes=512 * GB,
    cpu_params_per_second=8e9 / 3,
    host_bytes_per_second=8e9 / 3 * DEEPSPEED_BYTES,
    node_link_bytes_per_second=133e9,
    fabric_bytes_per_second=25e9 / 4,
    paths=(
        StoragePath(name="nvme", read_bytes_per_second=13.5e9, write_bytes_per_second=4.8e9),
        StoragePath(name="pfs", read_bytes_per_second=6.9e9, write_bytes_per_second=13.7e9),
    ),
)
"""MLP Table 1. CPU updates by cores: 32 of JLSE's 96. The fabric is not in the paper: two NICs of 12.5 GB/s a node."""

V100: Final = Machine.of(
    GPUS["v100-32"],
    gpus=4,
    host_memory_bytes=192 * GB,
    h2d_bytes_per_second=12e9,
    d2h_bytes_per_second=12e9,
    cpu_params_per_second=2e9,
    host_bytes_per_second=2e9 * DEEPSPEED_BYTES,
)
"""DOS 5.4: 3 G fp32 words/s on the link, CPU updates at 2 G parameters/s, taken as the node's, like JLSE's."""
V100_DEVICE: Final = 35e9 / 4


def shape(name: str) -> ModelShape:
    """The model of the papers' tables. 20B with the 44 blocks that its published 294 GiB of state are, not 48."""
    found = PAPER_MODELS[name]
    return replace(found, layers=44) if name == "20B" else found

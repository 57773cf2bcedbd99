"""One rate card for each machine of the papers, from their tables and text. Nothing is fitted to a result.

Neither paper states `host_bytes_per_second`. It is assumed that host memory limits the update on the CPU, so that the
bandwidth is the published update rate times the bytes of DeepSpeed's update: 28 per parameter (weight and both moments,
read and written in fp32, and the fp32 gradient).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from published.systems import DEEPSPEED_BYTES, JLSE_GRADIENT, Setting
from tidegate.capacity.machine import GB, GPUS, Machine, PlannedPath
from tidegate.capacity.model_shapes import PAPER_MODELS, ModelShape

JLSE: Final = Machine.of(
    GPUS["h100-80"],
    gpus=4,
    host_memory_bytes=512 * GB,
    cpu_params_per_second=8e9,
    host_bytes_per_second=8e9 * DEEPSPEED_BYTES,
    node_link_bytes_per_second=133e9,
    paths=(
        PlannedPath(name="nvme", read_bytes_per_second=6.9e9, write_bytes_per_second=5.3e9),
        PlannedPath(name="pfs", read_bytes_per_second=3.6e9, write_bytes_per_second=3.6e9),
    ),
)
"""The machine JLSE (DOS 5.1, MLP Table 1): 4 H100 and 96 cores. Both papers state CPU updates at 8 G parameters/s."""
POLARIS: Final = Machine.of(
    GPUS["a100-40"],
    gpus=4,
    host_memory_bytes=512 * GB,
    cpu_params_per_second=8e9 / 3,
    host_bytes_per_second=8e9 / 3 * DEEPSPEED_BYTES,
    node_link_bytes_per_second=133e9,
    fabric_bytes_per_second=25e9 / 4,
    paths=(
        PlannedPath(name="nvme", read_bytes_per_second=13.5e9, write_bytes_per_second=4.8e9),
        PlannedPath(name="pfs", read_bytes_per_second=6.9e9, write_bytes_per_second=13.7e9),
    ),
)
"""The machine Polaris (MLP Table 1). The CPU update rate is that of JLSE, scaled from 96 to 32 cores. The fabric is not
in the paper: two network cards of 12.5 GB/s per node are assumed."""

V100: Final = Machine.of(
    GPUS["v100-32"],
    gpus=4,
    host_memory_bytes=192 * GB,
    h2d_bytes_per_second=12e9,
    d2h_bytes_per_second=12e9,
    cpu_params_per_second=2e9,
    host_bytes_per_second=2e9 * DEEPSPEED_BYTES,
)
"""The V100 machine (DOS 5.4): 3 G fp32 words/s on the link. The CPU update rate, 2 G parameters/s, is taken as that of
the whole node, as for JLSE."""
V100_DEVICE: Final = 35e9 / 4


@dataclass(frozen=True, kw_only=True)
class Cards:
    """The rate cards of all machines, and the assumptions that all rows share.

    blocks_of_20b: blocks of the model 20B. 44 blocks give the 294 GiB of state in DOS Table 2; the 48 blocks stated
    there would give 320 GiB. pinned_cache: the host cache keeps the same subgroups in every step, so that all of it
    holds state; if False, the order of updates alternates. gradient: bytes per second of gradients from one GPU to the
    host in DeepSpeed: 4 GB/s in DOS Table 1, 2.5 GB/s in DOS section 4.1.
    """

    jlse: Machine = JLSE
    polaris: Machine = POLARIS
    v100: Machine = V100
    blocks_of_20b: int = 44
    pinned_cache: bool = False
    gradient: float = JLSE_GRADIENT

    def on_jlse(self, model: str) -> Setting:
        return Setting(self._shape(model), self.jlse, gradient=self.gradient, pinned_cache=self.pinned_cache)

    def on_polaris(self, model: str, nodes: int) -> Setting:
        return Setting(self._shape(model), replace(self.polaris, nodes=nodes), pinned_cache=self.pinned_cache)

    def on_v100(self, model: str) -> Setting:
        return Setting(self._shape(model), self.v100, device=V100_DEVICE)

    def _shape(self, model: str) -> ModelShape:
        found = PAPER_MODELS[model]
        return replace(found, layers=self.blocks_of_20b) if model == "20B" else found


def variants() -> dict[str, Cards]:
    """The rate cards with one assumption changed each, by description of the change, to show its influence on the
    errors."""
    base = Cards()

    def everywhere(**changes: float) -> Cards:
        machines = {name: replace(getattr(base, name), **changes) for name in ("jlse", "polaris", "v100")}
        return replace(base, **machines)

    def memory(times: float) -> Cards:
        machines = {
            name: replace(one, host_bytes_per_second=times * one.host_bytes_per_second)
            for name, one in (("jlse", base.jlse), ("polaris", base.polaris), ("v100", base.v100))
        }
        return replace(base, **machines)

    def duplex(machine: Machine) -> Machine:
        return replace(machine, paths=tuple(replace(path, duplex=True) for path in machine.paths))

    return {
        "GPUs at 0.35 of their peak instead of 0.45": everywhere(flop_share=0.35),
        "GPUs at 0.55 of their peak": everywhere(flop_share=0.55),
        "host memory a quarter slower": memory(0.75),
        "host memory a quarter faster": memory(1.25),
        "host memory without limit": memory(1000),
        "paths read and write at once": replace(base, jlse=duplex(base.jlse), polaris=duplex(base.polaris)),
        "20B with 48 blocks": replace(base, blocks_of_20b=48),
        "gradient copies at 2.5 GB/s": replace(base, gradient=2.5e9),
        "the whole cache holds state": replace(base, pinned_cache=True),
    }

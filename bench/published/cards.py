"""One rate card for each machine of the papers, from their tables and text. Nothing here is fitted to a result.

`host_bytes_per_second` is in neither paper. An update on the CPU is taken to be as fast as host memory lets it be, so
that memory moves what that update moves: 28 bytes a parameter in DeepSpeed's (weight, both moments, read and written in
fp32, and the fp32 gradient) times its published rate.
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
"""DOS 5.1, MLP Table 1: 4 H100, 96 cores; CPU updates at 8 G parameters/s in both papers."""
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


@dataclass(frozen=True, kw_only=True)
class Cards:
    """All rate cards, and what else had to be assumed for all rows alike.

    blocks_of_20b: 44 make the 294 GiB of state that DOS Table 2 has for 20B; the 48 of that table would make 320.
    pinned_cache: the cache keeps the same subgroups, so that all of it holds state, instead of alternating. gradient:
    see `Setting`; DOS Table 1 has 4 GB/s, its section 4.1 has 2.5.
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
    """The same with one assumption changed: how much the errors hang on each."""
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

"""The model's results for the figures of MLP-Offload (SC '25)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from published.cards import Cards
from published.rows import Ours
from published.systems import mlp_offload, twinflow, zero3_nvme
from tidegate.capacity.pass_times import passes
from tidegate.plan.tier_split import PathSpeeds, eq1_split

MODELS = ("40B", "52B", "70B", "100B", "120B")
ABLATED = ("40B", "70B", "100B")
STORAGE = (
    "Reads and writes of a path share it; the cache has 90 % of host memory less what the runtime takes (250 to 350 "
    "GB, linear from 40 to 120 G parameters a node) and three subgroups of each process; half of it is for what comes "
    "while the other half leaves."
)


def answers(cards: Cards) -> Iterator[tuple[str, Ours]]:
    """Yields the model's result for each figure of MLP-Offload: the id of the figure's row, and the result with the
    rate cards `cards`."""
    yield from _homes(cards)
    yield from _zero3(cards)
    yield from _speed_ups(cards)
    yield from _input_output(cards)
    yield from _polaris(cards)


def _homes(cards: Cards) -> Iterator[tuple[str, Ours]]:
    s = cards.on_jlse("20B")
    on_gpu = "An update at 100 G parameters/s; whether state of 16 bytes a parameter fits 4 GPUs is not asked."
    yield "mlp_home_gpu", Ours(twinflow(s, 1.0).total, on_gpu)
    twice = "As for DOS, whose own figure for this is about 7.5 s: no rate card gives both."
    yield "mlp_home_host", Ours(twinflow(s).total, twice)
    yield "mlp_home_nvme", Ours(zero3_nvme(s).iteration.total, "All state crosses NVMe, none stays in host memory.")


def _zero3(cards: Cards) -> Iterator[tuple[str, Ours]]:
    found = zero3_nvme(cards.on_jlse("40B"))
    no_loss = "No loss where four processes use one drive at once."
    yield "mlp31_forward", Ours(found.iteration.forward, "Weights are gathered over NVLink beside the computation.")
    yield "mlp31_backward", Ours(found.iteration.backward, "As long as fp32 gradients take to be written to NVMe.")
    yield "mlp31_update", Ours(found.iteration.update, no_loss)
    yield "mlp31_total", Ours(found.iteration.total, no_loss)
    yield "mlp31_read", Ours(found.read, "While reads are in progress, all processes together. " + no_loss)
    yield "mlp31_write", Ours(found.write, "While writes are in progress, all processes together. " + no_loss)


def _speed_ups(cards: Cards) -> Iterator[tuple[str, Ours]]:
    zero3 = {model: zero3_nvme(cards.on_jlse(model)).iteration for model in MODELS}
    both = {model: mlp_offload(cards.on_jlse(model)).iteration for model in MODELS}
    one = {model: mlp_offload(cards.on_jlse(model), paths=("nvme",)).iteration for model in ABLATED}
    updates = [zero3[model].update / both[model].update for model in MODELS]
    yield "mlp42_iteration", Ours(max(zero3[model].total / both[model].total for model in MODELS), STORAGE)
    yield "mlp42_update_low", Ours(min(updates), STORAGE)
    yield "mlp42_update_high", Ours(max(updates), STORAGE)
    yield "mlp46_nvme_only", Ours(max(zero3[model].total / one[model].total for model in ABLATED), STORAGE)
    yield "mlp46_multi_path", Ours(max(one[model].total / both[model].total for model in ABLATED), STORAGE)
    yield "mlp46_together", Ours(max(zero3[model].total / both[model].total for model in ABLATED), STORAGE)
    batches = [replace(cards.on_jlse("40B"), microbatch=8, accumulation=n) for n in (1, 2, 4, 8, 16)]
    least = min(zero3_nvme(s).iteration.total / mlp_offload(s).iteration.total for s in batches)
    yield "mlp45_accumulation", Ours(least, "Micro-batches of 8; fp32 gradients go to NVMe with the last one.")


def _input_output(cards: Cards) -> Iterator[tuple[str, Ours]]:
    zero3 = {model: zero3_nvme(cards.on_jlse(model)).effective_io for model in MODELS}
    ours = {model: mlp_offload(cards.on_jlse(model)).effective_io for model in MODELS}
    counted = "2 x bytes / (read + write time), all processes together"
    yield "mlp43_zero3_io", Ours(zero3["40B"], f"{counted}.")
    multiple = f"{counted}; cached subgroups count with their bytes and no time. " + STORAGE
    yield "mlp43_multiple", Ours(max(ours[model] / zero3[model] for model in MODELS), multiple)
    speeds = {
        path.name: PathSpeeds(
            read_bytes_per_second=path.read_bytes_per_second, write_bytes_per_second=path.write_bytes_per_second
        )
        for path in cards.jlse.paths
    }
    split = eq1_split(1000, speeds)
    yield "mlp43_split", Ours(split["nvme"] / split["pfs"], "MLP Eq. 1, with the rates of its Table 1.")


def _polaris(cards: Cards) -> Iterator[tuple[str, Ours]]:
    sharded = "Sharded over all GPUs, where the paper has tensor parallelism within a node. "
    s = cards.on_polaris("70B", nodes=2)
    yield "mlp44_zero3", Ours(zero3_nvme(s).iteration.total, sharded + "Each node has its own NVMe.")
    without = cards.on_polaris("70B", nodes=20)
    once = passes(without.model, without.machine, without.work)
    gpu_only = once.forward + once.backward + without.of_rank / without.device
    fabric = "The fabric's 25 GB/s a node are not in the paper, nor how its run was parallelised."
    yield "mlp44_gpu_only", Ours(gpu_only, sharded + fabric)
    multiple = mlp_offload(s).iteration.total / gpu_only
    whole = "Each node gets the file system's full rate; both iterations are ours. "
    yield "mlp44_mlp_multiple", Ours(multiple, sharded + whole + STORAGE)

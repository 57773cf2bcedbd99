"""What the model says to every figure of `reported.json`, and what it assumes there beside the machine's rate card."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from published.machines import JLSE, POLARIS, V100, V100_DEVICE, shape
from published.systems import Setting, Stored, deep_optimizer_states, mlp_offload, twinflow, zero3_nvme

from tidegate.model.equations import cpu_to_device_ratio
from tidegate.model.phases import passes
from tidegate.plan.split import PathSpeeds, eq1_split

DOS_MODELS = ("7B", "8.3B", "10B", "13B", "20B")
MLP_MODELS = ("40B", "52B", "70B", "100B", "120B")
ABLATED = ("40B", "70B", "100B")
DOWNSCALE = "The CPU's second pass over new weights costs host memory bandwidth and nothing else."
STORAGE = (
    "Paths are read and written in turns, none is duplex; the cache has 90 % of host memory less what the runtime takes "
    "(250 to 350 GB, linear from 40 to 120 G parameters a node) and three subgroups of each process; half of it holds "
    "what comes while the other half leaves."
)
DEVICE_ONLY = "State stays on the GPUs, whether it fits or not; an update at 100 G parameters/s."


class Ours(NamedTuple):
    """value: None where the model has nothing to say, which scores an error of 1."""

    value: float | None
    assumes: str


def predictions() -> dict[str, Ours]:
    """By the id of the row."""
    return dict([*_dos(), *_v100(), *_mlp_homes(), *_mlp_storage(), *_polaris()])


def jlse(model: str, **changes: int) -> Setting:
    return Setting(shape(model), JLSE, **changes)


def model_tflops(s: Setting, seconds: float) -> float:
    """Of one GPU, without what is computed twice: 6 operations a parameter and token."""
    return 6 * s.model.active_params * s.work.sequence * s.microbatch / seconds / 1e12


def _dos() -> Iterator[tuple[str, Ours]]:
    speed_ups = [twinflow(jlse(m)).total / deep_optimizer_states(jlse(m)).total for m in DOS_MODELS]
    yield "dos7_speedup_low", Ours(min(speed_ups), DOWNSCALE)
    yield "dos7_speedup_high", Ours(max(speed_ups), DOWNSCALE)
    s = jlse("20B")
    zero3, ours = twinflow(s), deep_optimizer_states(s)
    async_only = twinflow(s, gradients_wait=False)
    yield (
        "dos7_async_gradients",
        Ours(zero3.total / async_only.total, "ZeRO-3's update, with gradient copies hidden behind the backward."),
    )
    throughput = [twinflow(jlse(m)).update / deep_optimizer_states(jlse(m)).update for m in DOS_MODELS]
    yield "dos8_update_throughput", Ours(statistics.mean(throughput), DOWNSCALE)
    ratios = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    yield (
        "dos10_update_twinflow",
        Ours(
            min(twinflow(s, r).update / deep_optimizer_states(s, 2, r).update for r in ratios),
            "Static ratios 0 to 0.5.",
        ),
    )
    yield "dos11_dos_0", Ours(ours.total, DOWNSCALE)
    yield "dos11_twinflow_50", Ours(twinflow(s, 0.5).total, "Gradients of residents stay on the GPU.")
    at_20 = [twinflow(jlse(m), 0.2).total / deep_optimizer_states(jlse(m), 2, 0.2).total for m in DOS_MODELS]
    yield "dos12_speedup_low", Ours(min(at_20), DOWNSCALE)
    yield "dos12_speedup_high", Ours(max(at_20), DOWNSCALE)
    batches = [jlse("20B", microbatch=n) for n in (1, 2, 4, 8)]
    by_batch = [twinflow(one).total / deep_optimizer_states(one).total for one in batches]
    yield "dos13_speedup_low", Ours(min(by_batch), "The same share of the GPU's peak at every micro-batch.")
    yield "dos13_speedup_high", Ours(max(by_batch), "The same share of the GPU's peak at every micro-batch.")
    few = replace(s, machine=replace(JLSE, cpu_params_per_second=2e9))
    yield (
        "dos14_few_cores",
        Ours(
            twinflow(few).total / deep_optimizer_states(few).total,
            "A quarter of the cores: 12 CPU threads a GPU, as on the p3dn node that the paper names, and a quarter of the "
            "CPU's rate; host memory and gradient copies as before.",
        ),
    )
    yield from _dos_shares(s)
    yield from _dos_ranks()


def _dos_shares(s: Setting) -> Iterator[tuple[str, Ours]]:
    counted = "Operations without those computed twice: 6 a parameter and token, as 30 and 75 in 7.5 and 3.0 s imply."
    yield "dos15_tflops_0.0", Ours(model_tflops(s, twinflow(s).total), counted + " Share 0 is ZeRO-3.")
    for share, stride in (("0.5", 2), ("0.33", 3), ("0.25", 4)):
        yield f"dos15_tflops_{share}", Ours(model_tflops(s, deep_optimizer_states(s, stride).total), counted)
    half = s.of_rank / 2
    both = half * (12 + 12 + 2)
    one_way = half * (12 + 2)
    update = deep_optimizer_states(s).update
    yield (
        "dos15_pcie",
        Ours(
            both / update / s.machine.h2d_bytes_per_second,
            "Both directions together against the peak of one, as the text reads; the busier direction alone is at "
            f"{one_way / update / s.machine.h2d_bytes_per_second:.2f}.",
        ),
    )
    best = {
        m: min((2, 3, 4), key=lambda stride, m=m: deep_optimizer_states(jlse(m), stride).update) for m in DOS_MODELS
    }
    yield (
        "dos16_best_share",
        Ours(
            statistics.mean(1 / stride for stride in best.values()),
            "Of the shares of figure 15 (0.25, 0.33, 0.5), the mean over models. The model itself would go on to share 1.",
        ),
    )


def _dos_ranks() -> Iterator[tuple[str, Ours]]:
    """Data-parallel degrees 1, 2 and 4 on one node: each rank has its own quarter of the cores, and shares memory."""
    found: dict[int, list[float]] = {1: [], 2: [], 4: []}
    for degree, speed_ups in found.items():
        for m in ("7B", "8.3B", "10B") if degree == 1 else DOS_MODELS:
            machine = replace(JLSE, gpus=degree, cpu_params_per_second=degree * 2e9)
            s = Setting(shape(m), machine)
            speed_ups.append(twinflow(s).total / deep_optimizer_states(s).total)
    same = "Degrees 1 to 4 on one node; each rank has a quarter of the cores, all share the node's memory."
    yield "dos17_speedup_low", Ours(max(found[4]), same)
    yield "dos17_speedup_high", Ours(max(max(speed_ups) for speed_ups in found.values()), same)


def _v100() -> Iterator[tuple[str, Ours]]:
    yield (
        "v100_stride",
        Ours(
            cpu_to_device_ratio(B=3e9, U_c=2e9, U_g=35e9, D_c=8.7e9),
            "The closed form itself, with the paper's rates; the paper runs stride 2, which as a stride is a ratio of 1.",
        ),
    )
    s = Setting(shape("7B"), V100, device=V100_DEVICE)
    for stride in (3, 4, 5):
        rate = s.model.params / deep_optimizer_states(s, stride).update / 1e9
        yield f"v100_rate_{stride}", Ours(rate, "U_c and U_g of the node, B of each GPU. " + DOWNSCALE)


def _mlp_homes() -> Iterator[tuple[str, Ours]]:
    s = jlse("20B")
    yield "mlp_home_gpu", Ours(twinflow(s, 1.0).total, DEVICE_ONLY)
    yield (
        "mlp_home_host",
        Ours(twinflow(s).total, "As for DOS, whose figure for the same thing is about 7.5 s: no rate card gives both."),
    )
    yield "mlp_home_nvme", Ours(_zero3("20B").iteration.total, "All of the state crosses NVMe; nothing stays cached.")


@cache
def _zero3(model: str) -> Stored:
    return zero3_nvme(jlse(model))


@cache
def _mlp(model: str) -> Stored:
    return mlp_offload(jlse(model))


def _mlp_storage() -> Iterator[tuple[str, Ours]]:
    zero3 = _zero3("40B")
    last = zero3.iteration
    gathers = "Weights are gathered over NVLink beside the computation."
    yield "mlp31_forward", Ours(last.forward, gathers)
    yield "mlp31_backward", Ours(last.backward, "As long as fp32 gradients take to be written to NVMe.")
    yield "mlp31_update", Ours(last.update, "No loss where four processes use one drive at once.")
    yield "mlp31_total", Ours(last.total, "No loss where four processes use one drive at once.")
    yield "mlp31_read", Ours(zero3.read, "While a read is under way, all processes together.")
    yield "mlp31_write", Ours(zero3.write, "While a write is under way, all processes together.")
    totals = [_zero3(m).iteration.total / _mlp(m).iteration.total for m in MLP_MODELS]
    updates = [_zero3(m).iteration.update / _mlp(m).iteration.update for m in MLP_MODELS]
    yield "mlp42_iteration", Ours(max(totals), STORAGE)
    yield "mlp42_update_low", Ours(min(updates), STORAGE)
    yield "mlp42_update_high", Ours(max(updates), STORAGE)
    yield "mlp43_zero3_io", Ours(zero3.effective_io, "2 x bytes / (read + write time), all processes together.")
    yield (
        "mlp43_multiple",
        Ours(
            max(_mlp(m).effective_io / _zero3(m).effective_io for m in MLP_MODELS),
            "Cached subgroups count with their bytes and no time; paths at work at once count as often. " + STORAGE,
        ),
    )
    speeds = {
        path.name: PathSpeeds(
            read_bytes_per_second=path.read_bytes_per_second, write_bytes_per_second=path.write_bytes_per_second
        )
        for path in JLSE.paths
    }
    split = eq1_split(1000, speeds)
    yield "mlp43_split", Ours(split["nvme"] / split["pfs"], "MLP Eq. 1, with the rates of its Table 1.")
    runs = (1, 2, 4, 8, 16)
    by_runs = [
        zero3_nvme(s).iteration.total / mlp_offload(s).iteration.total
        for s in (jlse("40B", microbatch=8, accumulation=n) for n in runs)
    ]
    yield "mlp45_accumulation", Ours(min(by_runs), "Micro-batches of 8; fp32 gradients go to NVMe with the last one.")
    yield from _mlp_ablation()


def _mlp_ablation() -> Iterator[tuple[str, Ours]]:
    alone = {m: mlp_offload(jlse(m), paths=("nvme",)).iteration.total for m in ABLATED}
    yield "mlp46_nvme_only", Ours(max(_zero3(m).iteration.total / alone[m] for m in ABLATED), STORAGE)
    yield "mlp46_multi_path", Ours(max(alone[m] / _mlp(m).iteration.total for m in ABLATED), STORAGE)
    yield "mlp46_together", Ours(max(_zero3(m).iteration.total / _mlp(m).iteration.total for m in ABLATED), STORAGE)


def _polaris() -> Iterator[tuple[str, Ours]]:
    s = Setting(shape("70B"), replace(POLARIS, nodes=2))
    fabric = "Sharded over all GPUs, where the paper has tensor parallelism within a node. "
    yield "mlp44_zero3", Ours(zero3_nvme(s).iteration.total, fabric + "Each node has its own NVMe.")
    everywhere = Setting(shape("70B"), replace(POLARIS, nodes=20))
    once = passes(everywhere.model, everywhere.machine, everywhere.work)
    gpu_only = once.forward + once.backward + everywhere.of_rank / everywhere.device
    yield (
        "mlp44_gpu_only",
        Ours(
            gpu_only, fabric + "The fabric's 25 GB/s a node are not in the paper, whose run has pipeline parallelism."
        ),
    )
    yield (
        "mlp44_mlp_multiple",
        Ours(
            mlp_offload(s).iteration.total / gpu_only,
            fabric + "Each node gets the file system's full rate. " + STORAGE,
        ),
    )

"""The model's results for the figures of Deep Optimizer States (Middleware '24)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

from published.cards import Cards
from published.rows import Ours
from published.systems import Setting, deep_optimizer_states, twinflow
from tidegate.simulator.paper_equations import cpu_to_device_ratio

MODELS = ("7B", "8.3B", "10B", "13B", "20B")
ON_ONE_GPU = ("7B", "8.3B", "10B", "13B")
"""Models whose 16-bit weights and gradients fit on one GPU with 80 GB."""
DOWNSCALE = "The CPU's second pass over new weights costs host memory bandwidth and nothing else."


def answers(cards: Cards) -> Iterator[tuple[str, Ours]]:
    """Yields the model's result for each figure of Deep Optimizer States: the id of the figure's row, and the result
    with the rate cards `cards`."""
    yield from _speed_ups(cards)
    yield from _settings(cards)
    yield from _shares(cards)
    yield from _ranks(cards)
    yield from _v100(cards)


def _speed_ups(cards: Cards) -> Iterator[tuple[str, Ours]]:
    settings = [cards.on_jlse(model) for model in MODELS]
    totals = [speed_up(s) for s in settings]
    yield "dos7_speedup_low", Ours(min(totals), DOWNSCALE)
    yield "dos7_speedup_high", Ours(max(totals), DOWNSCALE)
    s = cards.on_jlse("20B")
    alone = twinflow(s).total / twinflow(s, gradients_wait=False).total
    yield "dos7_async_gradients", Ours(alone, "ZeRO-3's update, with gradient copies hidden behind the backward.")
    updates = [twinflow(s).update / deep_optimizer_states(s).update for s in settings]
    yield "dos8_update_throughput", Ours(statistics.mean(updates), DOWNSCALE)
    ratios = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    least = min(twinflow(s, ratio).update / deep_optimizer_states(s, 2, ratio).update for ratio in ratios)
    yield "dos10_update_twinflow", Ours(least, "Static ratios 0 to 0.5.")
    beside = [speed_up(s, 0.2) for s in settings]
    yield "dos12_speedup_low", Ours(min(beside), DOWNSCALE)
    yield "dos12_speedup_high", Ours(max(beside), DOWNSCALE)


def speed_up(s: Setting, ratio: float = 0.0) -> float:
    """Speedup of Deep Optimizer States: iteration time of TwinFlow divided by its iteration time. ratio: static ratio
    of both; with 0, TwinFlow is ZeRO-3."""
    return twinflow(s, ratio).total / deep_optimizer_states(s, 2, ratio).total


def _settings(cards: Cards) -> Iterator[tuple[str, Ours]]:
    s = cards.on_jlse("20B")
    yield "dos11_dos_0", Ours(deep_optimizer_states(s).total, DOWNSCALE)
    yield "dos11_twinflow_50", Ours(twinflow(s, 0.5).total, "Gradients of residents stay on the GPU.")
    batches = [speed_up(replace(s, microbatch=n)) for n in (1, 2, 4, 8)]
    same = "The same share of the GPU's peak at every micro-batch."
    yield "dos13_speedup_low", Ours(min(batches), same)
    yield "dos13_speedup_high", Ours(max(batches), same)
    few = replace(s, machine=replace(s.machine, cpu_params_per_second=2e9))
    quarter = (
        "A quarter of the cores and of the CPU's rate (12 threads a GPU, as on the p3dn node that the paper names); "
        "host memory, gradient copies and stride as before."
    )
    yield "dos14_few_cores", Ours(speed_up(few), quarter)


def _shares(cards: Cards) -> Iterator[tuple[str, Ours]]:
    s = cards.on_jlse("20B")
    counted = "Operations without those done twice, 6 a parameter and token: 30 and 75 at 7.5 and 3.0 s are such."
    yield "dos15_tflops_0.0", Ours(_tflops(s, twinflow(s).total), counted + " Share 0 is ZeRO-3.")
    for share, stride in (("0.5", 2), ("0.33", 3), ("0.25", 4)):
        yield f"dos15_tflops_{share}", Ours(_tflops(s, deep_optimizer_states(s, stride).total), counted)
    peak = deep_optimizer_states(s).update * s.machine.h2d_bytes_per_second
    half = s.of_rank / 2
    to_device, to_host = half * (12 + 2) / peak, half * 12 / peak
    reading = f"Both directions together against one's peak, as the text reads; the busier one has {to_device:.2f}."
    yield "dos15_pcie", Ours(to_device + to_host, reading)
    best = [_best_stride(cards.on_jlse(model)) for model in MODELS]
    offered = "Of the shares of figure 15 (0.25, 0.33, 0.5), the mean over models. Of all, the model would take 1."
    yield "dos16_best_share", Ours(statistics.mean(1 / stride for stride in best), offered)


def _best_stride(s: Setting) -> int:
    return min((2, 3, 4), key=lambda stride: deep_optimizer_states(s, stride).update)


def _tflops(s: Setting, seconds: float) -> float:
    return 6 * s.model.active_params * s.work.sequence * s.microbatch / seconds / 1e12


def _ranks(cards: Cards) -> Iterator[tuple[str, Ours]]:
    found: dict[int, list[float]] = {}
    for degree in (1, 2, 4):
        machine = replace(cards.jlse, gpus=degree, cpu_params_per_second=degree * 2e9)
        models = ON_ONE_GPU if degree == 1 else MODELS
        found[degree] = [speed_up(replace(cards.on_jlse(model), machine=machine)) for model in models]
    same = "Degrees 1 to 4 on one node; each rank has a quarter of the cores, all share the node's memory."
    yield "dos17_speedup_low", Ours(max(found[4]), same)
    yield "dos17_speedup_high", Ours(max(max(speed_ups) for speed_ups in found.values()), same)


def _v100(cards: Cards) -> Iterator[tuple[str, Ours]]:
    ratio = cpu_to_device_ratio(B=3e9, U_c=2e9, U_g=35e9, D_c=8.7e9)
    closed = "The closed form itself with the paper's rates. The paper runs stride 2, which is a ratio of 1."
    yield "v100_stride", Ours(ratio, closed)
    s = cards.on_v100("7B")
    for stride in (3, 4, 5):
        rate = s.model.params / deep_optimizer_states(s, stride).update / 1e9
        yield f"v100_rate_{stride}", Ours(rate, "U_c and U_g of the node, B of each GPU. " + DOWNSCALE)

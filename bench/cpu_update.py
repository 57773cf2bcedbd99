"""Claim: the CPU update runs at the speed of memory, and beats torch's fused AdamW with its casts.

Both sides train bf16 weights from bf16 gradients with an fp32 master. torch needs three passes: gradient to fp32,
fused AdamW on the master, weight back to bf16. Rounds are interleaved, so that a noisy machine hurts all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tidegate import kernels
from tidegate.kernels import GradDtype, ThreadPool, WeightFormat, scalars

BYTES_PER_PARAM = 2 + 2 + 4 + 4 + 2  # weight, remainder, two moments, gradient
HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Run = Callable[[], None]


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def l3_bytes() -> int:
    """Size of the last-level cache that the first core sees; 32 MiB when the system does not say."""
    path = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    text = path.read_text().strip() if path.exists() else "32768K"
    return int(text.rstrip("KM")) * (1 << 20 if text.endswith("M") else 1 << 10)


def torch_run(master: torch.Tensor, grad: torch.Tensor) -> Run:
    """bf16 gradient to fp32, fused AdamW on the master, weight back to bf16."""
    parameter, weight, wide = master.clone(), master.bfloat16(), torch.empty_like(master)
    parameter.grad = wide
    optimizer = torch.optim.AdamW([parameter], fused=True, **HYPER)

    def run() -> None:
        wide.copy_(grad)
        optimizer.step()
        weight.copy_(parameter)

    return run


def native_runs(pool: ThreadPool, master: torch.Tensor, grad: torch.Tensor) -> tuple[Run, Run]:
    """The update in one pass, and the same memory traffic without arithmetic."""
    weight, remainder = master.bfloat16(), torch.zeros_like(master, dtype=torch.int16)
    exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
    addresses = [weight.data_ptr(), WeightFormat.BF16_REMAINDER, remainder.data_ptr()]
    addresses += [exp_avg.data_ptr(), exp_avg_sq.data_ptr(), grad.data_ptr(), GradDtype.BF16]
    keep, step = (weight, remainder, exp_avg, exp_avg_sq, grad), 0

    def update() -> None:
        nonlocal step
        step += 1
        values = scalars(HYPER["lr"], *HYPER["betas"], HYPER["eps"], HYPER["weight_decay"], step)
        kernels.adamw_update(pool, len(keep[0]), *addresses, values)

    return update, lambda: kernels.stream_like(pool, len(keep[0]), *addresses)


def interleaved(runs: dict[str, Run], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Times of each run in seconds, one of each per round, until the rounds or the seconds are used up."""
    for run in runs.values():
        run()
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while len(times["torch"]) < rounds and (time.perf_counter() < end or len(times["torch"]) < 3):
        names = names[1:] + names[:1]  # what the caches hold depends on who ran before: everybody follows everybody
        for name in names:
            begin = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - begin)
    return times


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "quartile_low": round(low, 4), "quartile_high": round(high, 4)}


def measure(num_threads: int, numel: int, rounds: int, seconds: float) -> dict[str, object]:
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(numel, generator=generator) * 0.02
    grad = (torch.randn(numel, generator=generator) * 1e-2).bfloat16()
    with ThreadPool(num_threads) as pool:
        update, stream = native_runs(pool, master, grad)
        times = interleaved({"torch": torch_run(master, grad), "tidegate": update, "stream": stream}, rounds, seconds)
    ours = times["tidegate"]
    return {
        "cpu": cpu_name(),
        "instruction_set": kernels.instruction_set(),
        "num_threads": num_threads,
        "numel": numel,
        "l3_bytes": l3_bytes(),
        "rounds": len(ours),
        "torch_version": torch.__version__,
        "speedup_over_torch_fused": spread([a / b for a, b in zip(times["torch"], ours, strict=True)]),
        "share_of_memory_bandwidth": spread([a / b for a, b in zip(times["stream"], ours, strict=True)]),
        "seconds": {name: spread(values) for name, values in times.items()},
        "params_per_second": round(numel / statistics.median(ours)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--numel", type=int, default=0, help="parameters; 0 for arrays of 8 times the last-level cache")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=40.0, help="stop after this long even if rounds are left")
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    options = parser.parse_args()
    numel = options.numel or -(-8 * l3_bytes() // BYTES_PER_PARAM)
    if not options.json:
        print(f"{numel / 1e6:.1f} M parameters on {options.threads} threads ...", flush=True)
    print(json.dumps(measure(options.threads, numel, options.rounds, options.seconds)))


if __name__ == "__main__":
    main()

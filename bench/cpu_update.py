"""Claim: the CPU update runs at the speed of memory, and is faster than the updates of DeepSpeed and torch with the
dtype conversions that these need.

All implementations train bf16 weights from bf16 gradients with an fp32 master. DeepSpeed (cpu_adam) and torch (fused
AdamW) need three passes: gradient to fp32, update of the master, weight back to bf16. `deepspeed_without_upcast` gets
an fp32 gradient, so that only the weight is cast. `stream` reads and writes the same memory as Tidegate's update,
without arithmetic. Rounds are interleaved, so that other load on the machine affects all implementations alike.
DeepSpeed compiles cpu_adam at its first use.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))  # before OpenMP is loaded
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

from tidegate import kernels
from tidegate.agent.devices.base import UpdateRun
from tidegate.kernels import GradDtype, ThreadPool, WeightFormat, _native
from tidegate.kernels.adamw import IMPLEMENTATION
from tidegate.kernels.adamw.scalars import scalars

BYTES_PER_PARAM = {"weight": 2, "remainder": 2, "exp_avg": 4, "exp_avg_sq": 4, "gradient": 2}
PEAK_BYTES_PER_PARAM = 56  # of all sides together
TIMES_CACHE = 8
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
PAUSE_SECONDS = 0.005  # OpenMP's idle threads spin for a while and would slow down whoever is next
RATIOS = {
    "ratio_vs_deepspeed": "deepspeed",
    "ratio_vs_deepspeed_without_upcast": "deepspeed_without_upcast",
    "ratio_vs_torch_fused": "torch_fused",
    "share_of_memory_bandwidth": "stream",
}
Run = Callable[[], None]


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def last_level_cache_bytes() -> int:
    """Size of the last level cache of the first core, in bytes; 32 MiB if the system does not report it."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes), default=32 << 20)


def default_numel() -> int:
    """Default number of parameters. With enough memory, each fp32 array is 8 times as large as the last level cache.
    If memory is short, the number is smaller, but all arrays of Tidegate's update together are still 8 times as
    large as the cache."""
    cache = last_level_cache_bytes()
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) << 10
    least = -(-TIMES_CACHE * cache // sum(BYTES_PER_PARAM.values()))
    return max(least, min(TIMES_CACHE * cache // 4, available // 2 // PEAK_BYTES_PER_PARAM))


def torch_run(master: torch.Tensor, grad: torch.Tensor) -> Run:
    """Returns a function that makes one update with torch: bf16 gradient to fp32, fused AdamW on the fp32 master, new
    weight to bf16."""
    parameter, weight, wide = torch.nn.Parameter(master.clone()), master.bfloat16(), torch.empty_like(master)
    parameter.grad = wide
    optimizer = torch.optim.AdamW([parameter], LR, BETAS, EPS, WEIGHT_DECAY, fused=True)

    def run() -> None:
        wide.copy_(grad)
        optimizer.step()
        weight.copy_(parameter.detach())

    return run


def deepspeed_runs(master: torch.Tensor, grad: torch.Tensor) -> dict[str, Run]:
    """Returns two functions that make one update with DeepSpeed's cpu_adam. `deepspeed`: bf16 gradient to fp32, update
    of the fp32 master, new weight to bf16. `deepspeed_without_upcast`: the gradient is fp32 already."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter, weight, wide = torch.nn.Parameter(master.clone()), master.bfloat16(), grad.float()
    parameter.grad = wide
    optimizer = DeepSpeedCPUAdam([parameter], LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, adamw_mode=True)

    def without_upcast() -> None:
        optimizer.step()
        weight.copy_(parameter.detach())

    def full() -> None:
        wide.copy_(grad)
        without_upcast()

    return {"deepspeed": full, "deepspeed_without_upcast": without_upcast}


def native_runs(pool: ThreadPool, master: torch.Tensor, grad: torch.Tensor) -> dict[str, Run]:
    """Returns two functions: `tidegate` makes one update with Tidegate's CPU kernel, and `stream` reads and writes the
    same memory without arithmetic."""
    weight, remainder = master.bfloat16(), torch.zeros_like(master, dtype=torch.int16)
    exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
    arrays = (weight, remainder, exp_avg, exp_avg_sq, grad)  # held by the closures
    step = 1

    def run() -> UpdateRun:
        w, aux, *tensors, g = (array.data_ptr() for array in arrays)
        values = scalars(LR, *BETAS, EPS, WEIGHT_DECAY, step)
        return UpdateRun(
            len(weight), w, WeightFormat.BF16_REMAINDER, aux, tuple(tensors), g, GradDtype.BF16, values, IMPLEMENTATION
        )

    def update() -> None:
        nonlocal step
        run().apply(pool)
        step += 1

    def stream() -> None:
        """Reads and writes the same memory without arithmetic: the limit that the memory sets for the update."""
        one = run()
        first, second = one.tensors
        _native.stream_like(
            pool._native, one.numel, one.weight, one.weight_format, one.aux, first, second, one.grad, one.grad_dtype
        )

    return {"tidegate": update, "stream": stream}


def interleaved(runs: dict[str, Run], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Measures each function of `runs` and returns its times in seconds, by name. Each round calls every function once,
    in random order. Stops after `rounds` rounds or, after at least three of them, when `seconds` have passed."""
    for run in runs.values():
        run()
    names, times = list(runs), {name: [] for name in runs}
    shuffle, end = random.Random(0).shuffle, time.perf_counter() + seconds
    while len(times["tidegate"]) < rounds and (time.perf_counter() < end or len(times["tidegate"]) < 3):
        shuffle(names)  # what the caches hold depends on who ran before: everybody follows everybody
        for name in names:
            time.sleep(PAUSE_SECONDS)
            begin = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - begin)
    return times


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 5), "quartile_low": round(low, 5), "quartile_high": round(high, 5)}


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def all_runs(pool: ThreadPool, numel: int) -> tuple[dict[str, Run], str | None]:
    """Returns the functions to measure (each makes one update) by name, and the reason why DeepSpeed is not among them;
    None if it is."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(numel, generator=generator) * 0.02
    grad = (torch.randn(numel, generator=generator) * 1e-2).bfloat16()
    runs, note = native_runs(pool, master, grad) | {"torch_fused": torch_run(master, grad)}, None
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # its compiler talks
            runs |= deepspeed_runs(master, grad)
    except (ImportError, RuntimeError) as error:
        note = f"DeepSpeed was not measured: {type(error).__name__}: {error}"
    return runs, note


def measure(num_threads: int, numel: int, rounds: int, seconds: float) -> dict[str, object]:
    torch.set_num_threads(num_threads)
    with ThreadPool(num_threads) as pool:
        runs, note = all_runs(pool, numel)
        times = interleaved(runs, rounds, seconds)
    ours, cache = times["tidegate"], last_level_cache_bytes()
    ratios = {
        key: spread([theirs / own for theirs, own in zip(times[name], ours, strict=True)])
        for key, name in RATIOS.items()
        if name in times
    }
    moved = 2 * sum(BYTES_PER_PARAM.values()) - BYTES_PER_PARAM["gradient"]  # the gradient is not written back
    return {
        **{key: ratios[key]["median"] if key in ratios else None for key in RATIOS},
        "spread": ratios,
        "seconds": {name: spread(values) for name, values in times.items()},
        "params_per_second": round(numel / statistics.median(ours)),
        "bytes_per_second": round(moved * numel / statistics.median(ours)),
        "cpu": cpu_name(),
        "instruction_set": kernels.instruction_set(),
        "num_threads": num_threads,
        "numel": numel,
        "last_level_cache_bytes": cache,
        "times_last_level_cache": {
            "all_arrays": round(sum(BYTES_PER_PARAM.values()) * numel / cache, 1),
            "each_fp32_array": round(4 * numel / cache, 1),
            "each_16_bit_array": round(2 * numel / cache, 1),
        },
        "rounds": len(ours),
        "versions": {name: version(name) for name in ("torch", "deepspeed", "tidegate")},
        "note": note,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--numel", type=int, default=0, help="parameters; 0 for fp32 arrays of 8 times the cache")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=90.0, help="stop after this long even if rounds are left")
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # DeepSpeed's OpenMP is loaded later than torch's
    numel = options.numel or default_numel()
    if not options.json:
        print(f"{numel / 1e6:.1f} M parameters on {options.threads} threads ...", file=sys.stderr, flush=True)
    print(json.dumps(measure(options.threads, numel, options.rounds, options.seconds)))


if __name__ == "__main__":
    main()

"""Measures iterations of one training (a side of the comparison) in this process; prints JSON as the last line of
stdout.

    python -m bench.gpu.iteration '{"side": "tidegate", "shape": "1b", "dry": false}' --steps 6

`iteration_seconds` is measured over blocks of iterations without a synchronization in between. The seconds of phases
are from other iterations, in which the process waits for the GPU after each phase, which prevents overlap between
phases.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.gpu.calibration import calibrated_card
from bench.gpu.shapes import SHAPES
from bench.gpu.sides import Ask, Training, build, cap_memory
from bench.gpu.target import Target, spread
from tidegate.simulator.steady_state import Rank
from tidegate.simulator.what_if import what_if

TRACEBACK_LINES = 40
ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt)\b")
WARM_UP = 3
BLOCK = 2


def measure(ask: Ask, steps: int, seconds: float) -> dict[str, Any]:
    """Builds the training `ask` and measures it in two ways: first blocks of iterations (`steps` iterations), then the
    phases of single iterations (`steps` / 2). When `seconds` have passed it stops early, but measures at least one
    block and one single iteration. Returns the result of the side as a dict."""
    cap = cap_memory(ask)
    training = build(ask)
    finish = (lambda: None) if ask.dry else torch.cuda.synchronize
    for _ in range(WARM_UP):
        training.iteration()
    finish()
    if not ask.dry:
        torch.cuda.reset_peak_memory_stats()
    blocks, phases = [], []
    end = time.monotonic() + seconds
    while len(blocks) * BLOCK < steps and (not blocks or time.monotonic() < end):
        start = time.monotonic()
        for _ in range(BLOCK):
            training.iteration()
        finish()
        blocks.append((time.monotonic() - start) / BLOCK)
    while len(phases) < max(1, steps // 2) and (not phases or time.monotonic() < end):
        phases.append(_phases(training, finish))
    known = training.peak_device_bytes
    peak = known() if known is not None else 0 if ask.dry else torch.cuda.max_memory_allocated()
    result = {
        "side": ask.side,
        "numel": sum(getattr(p, "ds_numel", p.numel()) for p in training.model.parameters()),
        "iteration_seconds": spread(blocks),
        **{f"{name}_seconds": spread([row[i] for row in phases]) for i, name in enumerate(PHASES)},
        "peak_device_bytes": peak,
        "device_bytes_allowed": cap,
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        **{name: note() if callable(note) else note for name, note in training.notes.items()},
    }
    card = calibrated_card(Target(ask.dry, Path(ask.results))) if ask.results else None
    if card is not None and training.optimizer is not None:
        engine, backward = training.optimizer.engine, result["backward_seconds"]["median"]
        rank = Rank(engine.subgroups, engine.num_slots)
        predicted = what_if(rank, engine.effective, card, backward_seconds=backward)
        result["predicted_update_seconds"] = predicted.update_seconds
    training.close()
    return result


PHASES = ("forward", "backward", "update")


def _phases(training: Training, finish: Any) -> list[float]:
    times = [time.monotonic()]
    loss = training.forward()
    for act in (lambda: None, lambda: training.backward(loss), training.update):
        act()
        finish()
        times.append(time.monotonic())
    return [after - before for before, after in pairwise(times)]


def run_side(
    target: Target, side: str, shape: str, *, steps: int = 6, seconds: float = 60.0, limit: float = 240.0, **more: Any
) -> dict[str, Any]:
    """Measures one training (side) in its own process, and returns its result as a dict. If it cannot be measured, the
    dict has "side" and "not_measured" (the reason).

    seconds: time for the measurement. limit: seconds after which the process is killed; the dict then also has
    "lacked_seconds", with the limit as its value. If the process fails, the dict also has its "traceback", and its
    stderr is written to stderr of this process.
    """
    ask = {
        "side": side,
        "shape": "toy" if target.dry else shape,
        "dry": target.dry,
        "results": str(target.results),
        **more,
    }
    command = [sys.executable, "-m", "bench.gpu.iteration", json.dumps(ask), "--steps", str(steps)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    if target.dry:
        environment["DS_ACCELERATOR"] = "cpu"
    try:
        done = subprocess.run(
            [*command, "--seconds", str(seconds)], env=environment, capture_output=True, text=True, timeout=limit,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        _pass_on(side, error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or "")
        return {"side": side, "not_measured": f"not done after {limit:.0f} s", "lacked_seconds": limit}
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == 0:
        with contextlib.suppress(ValueError):
            return dict(json.loads(last))
    _pass_on(side, done.stderr)
    lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
    # Libraries warn while the process ends, behind the error that ended it.
    why = next((line for line in reversed(lines) if ERROR.match(line)), lines[-1])
    return {"side": side, "not_measured": why[:500], "traceback": lines[-TRACEBACK_LINES:]}


def _pass_on(side: str, said: str) -> None:
    if said.strip():
        print(f"---- {side} said:\n{said.rstrip()}\n----", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ask", help="what to train, as JSON")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    asked = json.loads(args.ask)
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed writes there, too
        result = measure(Ask(**{**asked, "shape": SHAPES[asked["shape"]]}), args.steps, args.seconds)
    print(json.dumps(result), flush=True)
    os._exit(0)  # DeepSpeed's own shutdown waits for collectives


if __name__ == "__main__":
    main()

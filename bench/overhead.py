"""Claim: telemetry and control of a training run cost less than 0.5 % of the time of its steps.

The run reports to a real daemon, and another process scrapes it as Prometheus would. There are two measurements:

* `overhead_ratio`: CPU seconds of recorder, phase clock, tuner, exporter, link and hooks, divided by the wall time of
  an attached run. The parts are measured while they run; hooks are too short for that and are measured in separate
  steps.
* `paired_ratio`: how much longer a step of an attached run takes. One process attaches, trains a block of steps,
  detaches (which removes recorder, hooks, exporter and link), trains the next block, and so on in the order ABBA. So
  both sides have the same weights in the same memory, and other load on the machine affects both. Each step is compared
  with the step at the same place in the other block; the interval is a bootstrap interval (95 %) of the median over
  pairs of blocks. The daemon runs on the same machine, so that its use of the cores is included. The stride is fixed,
  because the tuner starts again at each attach; the cost of the tuner is part of `overhead_ratio`.

The device is emulated, so that the results say nothing about the speed of a real one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
import types
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tidegate
from tidegate.agent.control.phase_hooks import PhaseHooks
from tidegate.agent.engine.phases import PhaseRecorder
from tidegate.demo.services import Service
from tidegate.timeline.step_result import StepPhases, StepResult

TARGET = 0.005
STEP_SECONDS = 0.3
"""Intended time of a step, for which the batch size is chosen. It is short, because telemetry takes a larger share of
the time of a short step, but above the least time of a step in this bench, 0.2 s."""
SCRAPE_SECONDS = 5.0
WARM_UP_STEPS = 64
BLOCK_STEPS = 10
WIDTH, LAYERS, HEADS, WINDOW = 256, 4, 4, 128
PROMETHEUS = {
    "Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
}


Attach = Callable[[], tidegate.Attachment]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        heads = self.qkv(self.before(x)).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        wide: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.between(x))))
        return x + wide


class Transformer(torch.nn.Module):
    """A small transformer on bytes. Its forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(256, WIDTH)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.embedding(tokens)))
        loss: torch.Tensor = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return loss


class Training:
    def __init__(self) -> None:
        torch.set_num_threads(1)  # the other core is for the lanes
        self.model = Transformer()
        self.optimizer = tidegate.AdamW(
            self.model.parameters(),
            max_grad_norm=1.0,
            offload=tidegate.Offload(
                subgroup_numel=100_000,
                cpu_threads=1,
                device="emulated",
                emulated=tidegate.EmulatedRates(
                    h2d_bytes_per_second=5e8, d2h_bytes_per_second=5e8, update_params_per_second=2e8
                ),
            ),
        )
        self.optimizer.observers.append(self._note_plan)
        self.rows = 4
        self.ops = 0
        self.clock_seconds = 0.0
        self._steps = 0

    def _note_plan(self, result: StepResult, phases: StepPhases) -> None:
        self.ops = len(result.plan.ops)
        self.clock_seconds += phases.clock_cpu_seconds

    def step(self) -> float:
        """Trains one step, and returns its seconds."""
        tokens = torch.randint(0, 256, (self.rows, WINDOW), generator=torch.Generator().manual_seed(self._steps))
        began = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.log(loss=loss.item(), tokens=tokens.numel())
        self.optimizer.step()
        self._steps += 1
        return time.perf_counter() - began

    def size(self) -> None:
        """Chooses the batch size with which a step takes about STEP_SECONDS. In two rounds, because a part of a step,
        the update, takes as long with any batch size."""
        for _ in range(2):
            seconds = statistics.median(self.step() for _ in range(10))
            self.rows = max(1, math.ceil(self.rows * STEP_SECONDS / seconds))

    def hooks_seconds(self, steps: int) -> float:
        """CPU seconds of Tidegate's hooks in one step, without the phase clock. Hooks of gradients are measured in
        `steps` training steps, hooks of the model in repeated calls of a tiny module.

        For each measured step there is a second one, in which the stopwatch measures empty calls at the same places;
        this subtracts the cost of the stopwatch.
        """
        phases, optimizer = self.optimizer.phases, self.optimizer
        watch = Stopwatch(phases)
        began, exposed, blocked = optimizer._backward_began, phases.exposed, phases.blocked
        timed = types.MethodType(lambda *_: watch.either(began), optimizer)  # hooks hold methods weakly
        optimizer._backward_began = timed  # type: ignore[method-assign]
        phases.exposed = lambda: Timed(watch, exposed())  # type: ignore[method-assign,return-value,assignment]
        phases.blocked = lambda seconds: watch.either(lambda: blocked(seconds))  # type: ignore[method-assign]
        for step in range(2 * steps):
            watch.sign = -1 if step % 2 else 1
            self.step()
        del optimizer._backward_began, phases.exposed, phases.blocked
        return watch.seconds / steps + self._model_hooks_seconds()

    def _model_hooks_seconds(self, calls: int = 500) -> float:
        module, tensor = torch.nn.Identity(), torch.zeros(1, requires_grad=True)
        watch = Stopwatch(self.optimizer.phases)

        def once() -> None:
            module(tensor * 1.0).sum().backward()

        for sign in (-1, 1):
            watch.sign = sign
            hooks = PhaseHooks(self.optimizer)
            handles = hooks.on(module) if sign > 0 else []
            for _ in range(calls):
                watch.around(once)
            for handle in handles:
                handle.remove()
        self.optimizer.phases.end_step()
        return watch.seconds / calls


class Stopwatch:
    """Measures calls and sums their CPU time in `seconds`, without the time of the phase clock. If `sign` is -1, the
    time is subtracted instead of added."""

    def __init__(self, phases: PhaseRecorder) -> None:
        self._phases = phases
        self._inside = False
        self.seconds, self.sign = 0.0, 1

    def around(self, call: Callable[[], object]) -> None:
        before, began = self._phases.cpu_seconds, time.thread_time()
        call()
        self.seconds += self.sign * (time.thread_time() - began - (self._phases.cpu_seconds - before))

    def either(self, call: Callable[[], object]) -> None:
        """Makes the call. If `sign` is 1, adds the time of the call. If `sign` is -1, subtracts the time of an empty
        call instead. A call within another measured call counts as a part of that one."""
        if self._inside:
            call()
            return
        self._inside = True
        if self.sign < 0:
            call()
        self.around(call if self.sign > 0 else int)
        self._inside = False


class Timed:
    """Wraps a context manager, and measures the CPU time of its `__enter__` and `__exit__`, without the block between
    them."""

    def __init__(self, watch: Stopwatch, inner: contextlib.AbstractContextManager[Any]) -> None:
        self._watch, self._inner = watch, inner

    def __enter__(self) -> None:
        self._watch.either(self._inner.__enter__)

    def __exit__(self, *_: object) -> None:
        self._watch.either(lambda: self._inner.__exit__(None, None, None))


@contextlib.contextmanager
def daemon_at(folder: Path) -> Iterator[tuple[str, str]]:
    """Starts a daemon for this measurement. Yields its address and its agent token."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tidegate", "daemon", "--port", str(port), "--state-dir", str(folder)]
    service = Service("The daemon", command, folder / "daemon.log")
    try:
        service.wait_until(lambda: _get(f"{url}/readyz") is not None)
        yield url, (folder / "agent.token").read_text().strip()
    finally:
        service.stop()


class Scrapes:
    """Results of the scraping process: number of answers, their seconds in total, and number of series in the last
    answer."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.answered, self.seconds, self.series = context.Value("i", 0), context.Value("d", 0.0), context.Value("i", 0)

    def as_dict(self) -> dict[str, Any]:
        answered = self.answered.value
        milliseconds = round(1e3 * self.seconds.value / answered, 3) if answered else None
        return {"scrapes": answered, "scrape_milliseconds": milliseconds, "series": self.series.value}


@contextlib.contextmanager
def scraper(port: int, seconds: float) -> Iterator[Scrapes]:
    """Starts a process that scrapes /metrics at this port every `seconds`, until the context ends."""
    found = Scrapes()
    url = f"http://127.0.0.1:{port}/metrics"
    process = multiprocessing.get_context("spawn").Process(
        target=_scrape, args=(url, seconds, found.answered, found.seconds, found.series), daemon=True
    )
    process.start()
    try:
        yield found
    finally:
        process.kill()
        process.join()


def _scrape(url: str, pause: float, answered: Any, seconds: Any, series: Any) -> None:
    while True:
        time.sleep(pause)
        began = time.perf_counter()
        if (text := _get(url)) is not None:
            seconds.value += time.perf_counter() - began
            answered.value += 1
            series.value = sum(bool(line) and not line.startswith(b"#") for line in text.splitlines())


def _get(url: str) -> bytes | None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, headers=PROMETHEUS), timeout=10.0) as answer:
            content: bytes = answer.read()
            return content
    except OSError:
        return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


# ---- the two measurements


def counted(training: Training, attached: Attach, port: int, repeats: int, steps: int) -> dict[str, Any]:
    """Measures the overhead ratio: CPU seconds of all parts of telemetry and control, divided by wall time. It is
    measured `repeats` times over `steps` steps; returns median, least and largest ratio, and further figures."""
    windows: list[dict[str, float]] = []
    seconds: list[float] = []
    with attached() as attachment, scraper(port, SCRAPE_SECONDS) as scrapes:
        for _ in range(WARM_UP_STEPS):
            training.step()
        training.size()
        for _ in range(repeats):
            before, began = _parts(training, attachment), time.perf_counter()
            seconds += [training.step() for _ in range(steps)]
            after, wall = _parts(training, attachment), time.perf_counter() - began
            windows.append({"wall": wall, **{part: after[part] - before[part] for part in after}})
        seen = scrapes.as_dict()
        hooks = training.hooks_seconds(20)
    parts = {part: [window[part] for window in windows] for part in windows[0] if part != "wall"}
    parts["hooks"] = [hooks * steps] * repeats
    ratios = [sum(values) / window["wall"] for *values, window in zip(*parts.values(), windows, strict=True)]
    return {
        "overhead_ratio": round(statistics.median(ratios), 5),
        "overhead_ratio_low": round(min(ratios), 5),
        "overhead_ratio_high": round(max(ratios), 5),
        "repeats": repeats,
        "steps_per_repeat": steps,
        **seen,
        "milliseconds_per_step": {part: round(1e3 * statistics.mean(v) / steps, 4) for part, v in parts.items()},
        "step_seconds": spread(seconds),
    }


def _parts(training: Training, attachment: tidegate.Attachment) -> dict[str, float]:
    found = attachment.overhead
    # The recorder's figure contains the clock's.
    return {
        **found,
        "recorder": found["recorder"] - training.clock_seconds,
        "phase_clock": training.clock_seconds,
    }


def paired(training: Training, attached: Attach, port: int, blocks: int) -> dict[str, Any]:
    """The paired ratio: compares blocks of steps with and without an attachment, in the order ABBA."""
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    # Half of the time nobody answers.
    with scraper(port, SCRAPE_SECONDS / 2):
        for block in range(blocks):
            for watched in (True, False) if block % 2 else (False, True):
                with attached() if watched else contextlib.nullcontext():
                    # The first steps after a change are for the caches.
                    found[watched].append([training.step() for _ in range(BLOCK_STEPS + 2)][2:])
    plain, watched_steps = np.array(found[False]), np.array(found[True])
    differences, typical = watched_steps - plain, float(np.median(plain))
    draws = np.random.default_rng(0).choice(blocks, (5000, blocks))
    low, high = np.quantile(np.median(differences[draws].reshape(5000, -1), axis=1), (0.025, 0.975))
    return {
        "pairs": differences.size,
        "plain_step_seconds": spread(plain.ravel().tolist()),
        "paired_ratio": {
            "median": round(float(np.median(differences)) / typical, 5),
            "low": round(float(low) / typical, 5),
            "high": round(float(high) / typical, 5),
        },
        "contradicts": bool(low / typical > TARGET),
    }


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "quartile_low": round(low, 4), "quartile_high": round(high, 4)}


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def measure(repeats: int, steps: int, blocks: int, say: Callable[[str], None]) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        daemon, token = stack.enter_context(daemon_at(folder))
        training, port = Training(), free_port()
        stack.callback(training.optimizer.close)

        def attached() -> tidegate.Attachment:
            return tidegate.attach(
                training.optimizer, training.model, run="overhead", daemon=daemon, token=token, metrics_port=port,
                reset_knobs=True,
            )  # fmt: skip

        say(f"{repeats} times {steps} steps of an attached run ...")
        found = counted(training, attached, port, repeats, steps)
        say(f"{blocks} pairs of blocks of {BLOCK_STEPS} steps ...")
        knobs = training.optimizer.knobs.changed({"stride": training.optimizer.effective_knobs()["stride"]})
        training.optimizer.apply_knobs(knobs)
        found |= paired(training, attached, port, blocks)
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "device": "emulated",
        "torch_version": torch.__version__,
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "ops": training.ops,
        **found,
        "meets_target": found["overhead_ratio"] < TARGET and not found["contradicts"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=64, help="steps of one repeat: the tuner looks at most that often")
    parser.add_argument("--blocks", type=int, default=24, help=f"pairs of blocks of {BLOCK_STEPS} compared steps")
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    options = parser.parse_args()

    def say(line: str) -> None:
        if not options.json:
            print(line, flush=True)

    print(json.dumps(measure(options.repeats, options.steps, options.blocks, say)))


if __name__ == "__main__":
    main()

"""A training that test_kill kills: it resumes from the newest checkpoint, steps, saves, and logs what it is inside of.

Each life cuts, places and divides the state in another way; every other one lets checkpoints be drained. A line of the
log is one write to a file opened for appending: what was written before a SIGKILL stays written.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tidegate
from tests.agent.plain_adamw import PlainAdamW, array
from tidegate.agent.checkpoints import background as draining
from tidegate.agent.checkpoints.background import PendingCheckpoint

SHAPES = (((60, 100), torch.float32), ((4001,), torch.bfloat16), ((77,), torch.bfloat16), ((90, 90), torch.float32))
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "max_grad_norm": 3.0}
STEPS_PER_CHECKPOINT = 3
LIVES = (
    {"stride": 2.0, "subgroup_numel": 1500, "tier_split": "disk:2,memory:1", "host_cache": 0},
    {"stride": "off", "subgroup_numel": 4000, "tier_split": "disk:1,memory:2", "host_cache": 40_000},
    {"stride": 3.0, "subgroup_numel": 999, "static_ratio": 0.2, "host_cache": 20_000, "order": "alternate"},
    {"stride": 1.0, "subgroup_numel": 2500, "host_cache": 0, "gradients": "release"},
)
DRAINED_LIVES = (1, 2)
"""Of four; their states lie on both paths, in memory and on the device."""
SECONDS_PER_DRAINED_FILE = 0.004
"""As if there were more to copy: a drain lasts as long as some steps."""


@dataclass(frozen=True)
class Places:
    """Where a life leaves things."""

    disk: Path
    """A path, in a directory of the file system that checkpoints are on."""
    memory: Path
    """A path in memory, another file system."""
    checkpoints: Path
    runtime: Path
    """For lock files."""
    log: Path


def fresh_params() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape, dtype in SHAPES]


def backward(params: list[torch.nn.Parameter], step: int) -> None:
    """Gradients that depend on step and weights, by element-wise operations alone: they are the same everywhere."""
    generator = torch.Generator().manual_seed(step)
    for param in params:
        (param - torch.randn(param.shape, generator=generator).to(param.dtype)).square().sum().backward()


def fingerprint(params: list[torch.nn.Parameter]) -> str:
    return f"{zlib.crc32(b''.join(array(param).tobytes() for param in params)):08x}"


def uninterrupted() -> Iterator[str]:
    """Fingerprints after each step, from step 0 on, of the oracle."""
    params = fresh_params()
    defaults = {"betas": (0.9, 0.999), "eps": 1e-8, **OPTIONS}
    plain = PlainAdamW([{**defaults, "params": params}], OPTIONS["max_grad_norm"])
    step = 0
    while True:
        yield fingerprint(params)
        backward(params, step)
        plain.step([param.grad for param in params])
        for param, known in zip(params, plain.params, strict=True):
            bits = torch.int16 if param.dtype == torch.bfloat16 else torch.int32
            param.data = (
                torch.from_numpy(known.weight.view(f"i{bits.itemsize}").copy()).view(param.dtype).view_as(param)
            )
            param.grad = None
        step += 1


class Log:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def say(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())

    @contextmanager
    def inside(self, what: str) -> Iterator[None]:
        self.say(f"+ {what}")
        yield
        self.say(f"- {what}")

    def wrapped(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def logged(*args: Any) -> Any:
            with self.inside(what):
                return call(*args)

        return logged


def live(places: Places, life: int, until: int) -> None:
    """Trains up to step number `until`."""
    os.environ["XDG_RUNTIME_DIR"] = str(places.runtime)
    torch.set_num_threads(1)
    log, params = Log(places.log), fresh_params()
    drained = life % len(LIVES) in DRAINED_LIVES
    watch_drains(log)
    offload = tidegate.Offload(
        cpu_threads=1, paths={"disk": places.disk, "memory": places.memory}, **LIVES[life % len(LIVES)]
    )
    found = tidegate.find_checkpoints(places.checkpoints)
    if found:
        for param, weight in zip(params, torch.load(found[0].folder / "weights.pt"), strict=True):
            param.data.copy_(weight)
    with tidegate.AdamW(params, offload=offload, **OPTIONS) as optimizer:
        if found:
            optimizer.load_checkpoint(places.checkpoints)
        assert optimizer.engine.store is not None
        for path in optimizer.engine.store.paths.values():
            path.write = log.wrapped("flush", path.write)  # type: ignore[method-assign]
        log.say(f"resumed {optimizer.num_steps} {fingerprint(params)}")
        for step in range(optimizer.num_steps, until):
            backward(params, step)
            with log.inside("update"):
                optimizer.step()
            optimizer.zero_grad()
            log.say(f"step {step + 1} {fingerprint(params)}")
            if (step + 1) % STEPS_PER_CHECKPOINT == 0:
                save = optimizer.begin_checkpoint if drained else optimizer.save_checkpoint
                with log.inside("checkpoint"):
                    save(
                        places.checkpoints,
                        save_also=lambda folder: torch.save([p.data for p in params], folder / "weights.pt"),
                    )
                if not drained:
                    log.say(f"saved {step + 1}")
    log.say("done")


def watch_drains(log: Log) -> None:
    """Logs what is inside a drain, and each checkpoint that one has completed before anybody is told."""
    drain, complete, write = PendingCheckpoint._drain, PendingCheckpoint._complete, draining.write_state

    def drained(self: PendingCheckpoint) -> None:
        with log.inside("drain"):
            drain(self)

    def completed(self: PendingCheckpoint, made: tidegate.Checkpoint) -> None:
        complete(self, made)
        log.say(f"saved {self._part.manifest.step}")

    def written(*args: Any) -> None:
        time.sleep(SECONDS_PER_DRAINED_FILE)
        write(*args)

    PendingCheckpoint._drain, PendingCheckpoint._complete = drained, completed  # type: ignore[method-assign]
    draining.write_state = written

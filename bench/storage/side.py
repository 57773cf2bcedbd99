"""A training in its own process that makes one step at a time, so that several trainings can alternate on one
machine."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, Self

from storage.fio import HUGE_PAGES

ENVIRONMENT = {
    **HUGE_PAGES,
    # Where others use the machine too, threads of OpenMP that spin at barriers cost more than they gain.
    "OMP_WAIT_POLICY": "PASSIVE",
    "DS_ACCELERATOR": "cpu",
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of equal linear layers with `width`² weights each. Every layer is one subgroup of `DeepSpeed`, which
    never splits a layer."""

    layers: int
    width: int
    batch: int = 8
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        return self.layers * self.width**2


class Training(Protocol):
    """Interface of a training in its process: the phases of one iteration, called in this order, and figures about
    it."""

    def forward(self) -> None: ...

    def backward(self) -> None: ...

    def update(self) -> None: ...

    def told(self, backward_began: float) -> dict[str, Any]:
        """Figures about the last step in addition to times and bytes, by name; empty if there are none. backward_began:
        start of the step's backward, on the monotonic clock."""

    def close(self) -> None: ...


Build = Callable[..., Training]


class Side:
    """A process that trains one step on request. A context manager: the process ends with the context."""

    def __init__(self, build: Build, *, join: str | None = None, **settings: Any) -> None:
        """Starts the process, which builds the training by `build(**settings)`, and waits until that is done.

        join: file of a control group, to which the process adds its id before it builds the training.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        before = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)  # read when the process begins
        try:
            self._process = context.Process(target=_serve, args=(other, build, join, settings), daemon=True)
            self._process.start()
        finally:
            _restore(before)
        other.close()
        self._answer()

    def step(self) -> dict[str, Any]:
        """Runs two iterations, one after the other, and measures the second. Returns the seconds of its phases, the
        bytes that the process has read from and written to disks, and the figures of `Training.told`."""
        self._pipe.send("step")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise SystemExit("the process of a training ended unexpectedly: see its error message on stderr") from None
        if isinstance(answer, str):
            raise SystemExit(answer)
        return dict(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(timeout=30)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _serve(pipe: Connection, build: Build, join: str | None, settings: dict[str, Any]) -> None:
    if join is not None:
        Path(join).write_text(str(os.getpid()))
    os.dup2(2, 1)  # the result of the bench is alone on stdout
    try:
        training = build(**settings)
        pipe.send({"peak_resident_bytes": _peak_resident_bytes()})
        while True:
            pipe.recv()
            pipe.send(_iteration(training))
    except (EOFError, BrokenPipeError):
        training.close()
    except Exception as error:
        pipe.send(f"{build.__name__}: {type(error).__name__}: {error}")
        raise


def _iteration(training: Training) -> dict[str, Any]:
    for phase in (training.forward, training.backward, training.update):
        phase()
    # A step may leave writes that go on beside the next forward. The iteration that is measured follows at once: it has
    # those of the iteration before, and leaves its own.
    before, times = _disk_bytes(), [time.monotonic()]
    for phase in (training.forward, training.backward, training.update):
        phase()
        times.append(time.monotonic())
    after = _disk_bytes()
    forward, backward, update = (end - start for start, end in pairwise(times))
    return {
        "forward": forward,
        "backward": backward,
        "update": update,
        "backward_and_update": backward + update,
        "iteration": forward + backward + update,
        "read_bytes": after[0] - before[0],
        "written_bytes": after[1] - before[1],
        "peak_resident_bytes": _peak_resident_bytes(),
        **training.told(times[1]),
    }


def _disk_bytes() -> tuple[int, int]:
    """Bytes that this process has read from disks and written to disks since its start. Reads from the page cache are
    not counted."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["read_bytes"]), int(rows["write_bytes"])


def _peak_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

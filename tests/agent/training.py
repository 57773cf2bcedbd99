"""A real training run in a thread of the test: a small network, the engine on, measured from outside as well."""

from __future__ import annotations

import resource
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import tidegate
from tidegate.agent.devices.base import Copy, Event
from tidegate.agent.devices.emulated import EmulatedDevice
from tidegate.agent.engine.op_runner import StepInputs
from tidegate.agent.tiers.file_path import StoragePath
from tidegate.agent.tiers.prepared_transfer import PreparedTransfer
from tidegate.agent.tiers.transfers import Transfer
from tidegate.timeline.step_result import StepPhases, StepResult
from tidegate.timeline.timeline import PhaseSpan

RATES = tidegate.EmulatedRates(h2d_bytes_per_second=4e8, d2h_bytes_per_second=4e8, update_params_per_second=1e8)
WIDTH = 1024
PAGE = 4096
ROWS = 64
"""Of a batch: few, as what is looked at is the update, not the network."""
NUM_LAYERS = 3


def offload(**changes: Any) -> tidegate.Offload:
    settings: dict[str, Any] = {
        "stride": 2.0, "static_ratio": 0.0, "subgroup_numel": 400_000, "num_slots": 2, "cpu_threads": 1,
        "emulated": tidegate.EmulatedRates(**vars(RATES)),
    }  # fmt: skip
    return tidegate.Offload(**{**settings, **changes})


class Network(torch.nn.Module):
    """Returns its loss, as transformers do."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        first, *others = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)]
        self.layers = torch.nn.Sequential(first, *(each for linear in others for each in (torch.nn.Tanh(), linear)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(inputs).square().mean()
        return loss


def batch(step: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


@dataclass
class Outside:
    """What a phase cost as seen by the loop itself: the independent truth that metrics are held against."""

    cpu_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    link_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By lane and phase: from when each copy began and ended, and when the recorder says that the phases did."""
    longer_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By phase: how much longer it is by the recorder's boundaries than by those of the loop."""
    lane_bytes: Counter[str] = field(default_factory=Counter)
    """Of link and paths, whatever the phase."""
    lane_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """In which at least one copy was in progress."""
    memory_bytes: dict[str, int] = field(default_factory=dict)
    copies: list[tuple[str, int, float, float]] = field(default_factory=list)
    phases: list[PhaseSpan] = field(default_factory=list)
    planned_bytes: Counter[str] = field(default_factory=Counter)
    planned_params: list[Counter[str]] = field(default_factory=list)
    residents: list[int] = field(default_factory=list)

    def divide_copies(self) -> None:
        """Bytes of the step's copies by the phase in which they moved; all lanes are at rest."""
        busy_until: dict[str, float] = {}
        for lane, nbytes, start, end in sorted(self.copies, key=lambda copy: copy[2]):
            self.lane_bytes[lane] += nbytes
            since = max(start, busy_until.get(lane, start))
            busy_until[lane] = max(since, end)
            self.lane_seconds[lane] += busy_until[lane] - since
            for span in self.phases:
                inside = max(0.0, min(end, span.end) - max(start, span.start))
                self.link_bytes[lane, span.phase] += round(nbytes * inside / (end - start))
        self.copies.clear()
        self.phases.clear()


class Training:
    """Steps until told to stop; `steps` counts them. Everything that the engine copies is noted at the device."""

    def __init__(self, rows: int = ROWS, num_layers: int = NUM_LAYERS, **changes: Any) -> None:
        """rows: of a batch."""
        self.rows = rows
        self.model = Network(num_layers)
        self.optimizer = tidegate.AdamW(self.model.parameters(), lr=1e-3, offload=offload(**changes))
        self.device = self.optimizer.device
        assert isinstance(self.device, EmulatedDevice)
        self.outside = Outside()
        self.steps = 0
        self.failed: BaseException | None = None
        self._note_copies()
        self._note_transfers()
        self._time_update()
        self.optimizer.observers.append(self._note_step)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="training")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop after its step; everything stays attached."""
        self._stop.set()
        self._thread.join(60)
        if self.failed is not None:
            raise self.failed

    def step(self) -> None:
        optimizer, step = self.optimizer, self.steps
        optimizer.zero_grad()
        inputs = batch(step, self.rows)
        with self._phase("forward"):
            loss = self.model(inputs)
        with self._phase("backward"):
            loss.backward()
        optimizer.step()
        self.outside.divide_copies()
        self.steps += 1

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.step()
        except BaseException as error:
            self.failed = error

    def _time_update(self) -> None:
        """torch's own wrappers around step(), and our observers after it, are not the update."""
        step, settle = self.optimizer.engine.step, self.optimizer.engine.wait_for_update
        update = self._phase("update")

        def begun(inputs: StepInputs) -> tuple[int, ...]:
            update.__enter__()
            return step(inputs)

        def settled() -> StepResult | None:
            result = settle()
            if result is not None:
                update.__exit__()
            return result

        self.optimizer.engine.step = begun  # type: ignore[method-assign]
        self.optimizer.engine.wait_for_update = settled  # type: ignore[method-assign]

    def _phase(self, name: str) -> _Phase:
        return _Phase(self, name)

    def _note_step(self, result: StepResult, phases: StepPhases) -> None:
        self.outside.phases.extend(phases.spans)
        for phase, seconds in phases.seconds().items():
            self.outside.longer_seconds[phase] += seconds
        for lane in ("h2d", "d2h"):
            self.outside.planned_bytes[lane] += result.plan.link_bytes(lane)
        self.outside.planned_params.append(
            Counter({where: result.plan.updated_params(where) for where in ("cpu", "device")})  # type: ignore[arg-type]
        )
        self.outside.residents.append(sum(p.after == "device" for p in result.plan.placements))

    def _note_copies(self) -> None:
        copy = self.device.copy

        def noted(lane: str, copies: Sequence[Copy]) -> Event:
            event = copy(lane, copies)
            start, end = event.span()
            self.outside.copies.append((lane, sum(c.nbytes for c in copies), start, end))
            return event

        self.device.copy = noted  # type: ignore[method-assign]
        self.device.copy_task = lambda *_: None  # type: ignore[method-assign]  # all copies are noted

    def _note_transfers(self) -> None:
        """What goes to and from storage paths: whole pages of each state, counted here, as copies on lanes."""
        engine = self.optimizer.engine
        pages = [-(-s.nbytes("state") // PAGE) * PAGE for s in engine.subgroups]
        for name, path in engine.store.paths.items() if engine.store is not None else ():
            for operation in ("read", "write"):
                self._note_transfer(path, operation, f"{name}:{operation}", pages)

    def _note_transfer(self, path: StoragePath, operation: str, lane: str, pages: Sequence[int]) -> None:
        move = getattr(path, operation)

        def noted(subgroup: int, *more: int) -> Transfer:
            begins_with_zeros = operation == "read" and path.states[subgroup].step < 0
            moved: Transfer = move(subgroup, *more)
            if not begins_with_zeros:
                self.outside.copies.append((lane, pages[subgroup], moved.start, moved.end))
            return moved

        prepare = getattr(path, f"prepare_{operation}")

        def noted_task(subgroup: int, *more: int) -> PreparedTransfer | None:
            prepared: PreparedTransfer | None = prepare(subgroup, *more)
            if prepared is None:
                return None

            def completed() -> None:
                ticket = prepared.task.ticket
                assert ticket is not None
                self.outside.copies.append((lane, pages[subgroup], ticket.start, ticket.end))
                prepared.completed()

            return PreparedTransfer(prepared.task, completed)

        setattr(path, operation, noted)
        setattr(path, f"prepare_{operation}", noted_task)


@dataclass
class _Phase:
    training: Training
    name: str

    def __enter__(self) -> None:
        self._cpu, self._since = _cpu_seconds(), time.monotonic()

    def __exit__(self, *_: object) -> None:
        outside, now = self.training.outside, time.monotonic()
        outside.cpu_seconds[self.name] += _cpu_seconds() - self._cpu
        outside.memory_bytes[self.name] = self.training.device.in_use_bytes
        outside.longer_seconds[self.name] -= now - self._since


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

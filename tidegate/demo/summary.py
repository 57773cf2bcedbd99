"""Summary at the end of a run: phases, stalls, bytes and updates; as a table, as summary.json and as trace.json."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tidegate.agent.control.attachment import Attachment
from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.timeline.chrome_trace import write_trace
from tidegate.timeline.step_result import StepPhases, StepResult
from tidegate.timeline.timeline import Timeline

TRACED_STEPS = 5
LOSS_WINDOW = 5
_PLACES = {"host": "in host memory", "device": "in device memory"}
_DONE = {"read": "read", "write": "written"}


class Summary:
    """Collects figures during training. Figures named `planned` come from plans, the others from measurements."""

    def __init__(self, run: str, optimizer: Optimizer, attachment: Attachment) -> None:
        self.run = run
        self._optimizer = optimizer
        self._attachment = attachment
        self._started = time.monotonic()
        self._losses: list[float] = []
        self._tokens = 0
        self._planned_params: Counter[str] = Counter()
        self._planned_bytes: Counter[str] = Counter()
        self._timelines: deque[Timeline] = deque(maxlen=TRACED_STEPS)

    def record_plan(self, result: StepResult, _: StepPhases) -> None:
        """Adds the planned parameters and bytes of one step."""
        if result.skipped:
            return
        for processor in ("cpu", "device"):
            self._planned_params[processor] += result.plan.updated_params(processor)
        for lane in ("h2d", "d2h"):
            self._planned_bytes[lane] += result.plan.link_bytes(lane)

    def record_step(self, loss: float, tokens: int) -> None:
        """Adds one finished step."""
        self._losses.append(loss)
        self._tokens += tokens
        timeline = self._attachment.recorder.timeline
        if timeline is not None:
            self._timelines.append(timeline)

    def as_dict(self) -> dict[str, Any]:
        recorder = self._attachment.recorder
        totals = recorder.totals
        wall = time.monotonic() - self._started
        link: Counter[str] = Counter()
        for (direction, _, _), nbytes in recorder.rows("tidegate_link_bytes_total").items():
            link[direction] += int(nbytes)
        return {
            "run": self.run,
            "steps": totals.steps,
            "tokens": self._tokens,
            "loss_first": self._losses[0] if self._losses else None,
            "loss_last": sum(self._losses[-LOSS_WINDOW:]) / max(1, len(self._losses[-LOSS_WINDOW:])),
            "device": self._optimizer.device.kind,
            "seconds": wall,
            "phase_seconds": _flat(recorder.seconds("tidegate_phase_seconds")),
            "stall_seconds": _nested(recorder.rows("tidegate_stall_seconds_total")),
            "exposed_seconds": _flat(recorder.rows("tidegate_exposed_seconds_total")),
            "generations": [{"generation": g, "first_step": step} for g, step in self._attachment.applied_at],
            "knobs": self._optimizer.knobs.as_dict(paths=self._optimizer.engine.store is not None),
            "effective": self._optimizer.effective_knobs(),
            "agent_overhead_ratio": self._attachment.overhead_seconds / wall if wall else 0.0,
            "update_params": _flat(recorder.rows("tidegate_update_params_total")),
            "planned_update_params": dict(self._planned_params),
            "subgroups": dict(totals.last.subgroups) if totals.last is not None else {},
            "link_bytes": dict(link),
            "paths": self._paths(),
            "planned_link_bytes": dict(self._planned_bytes),
        }

    def _paths(self) -> dict[str, dict[str, Any]]:
        """For each storage path: the bytes read and written, and the bytes written per day, extrapolated from this
        run."""
        last = self._attachment.recorder.totals.last
        return {
            state.path: {"bytes": dict(state.bytes), "written_bytes_per_day": state.written_bytes_per_day}
            for state in (last.path_states if last is not None else ())
        }

    def write(self, folder: Path) -> None:
        (folder / "summary.json").write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        write_trace(folder / "trace.json", list(self._timelines), rank=self._attachment.rank, process_name=self.run)

    def show(self, console: Console, folder: Path) -> None:
        result = self.as_dict()
        table = Table(title=f"{result['steps']} steps in {result['seconds']:.1f} s", title_justify="left")
        for column in ("phase", "seconds", "share", "exposed"):
            table.add_column(column, justify="left" if column == "phase" else "right")
        total = sum(result["phase_seconds"].values()) or 1.0
        for phase, seconds in result["phase_seconds"].items():
            exposed = result["exposed_seconds"].get(phase, 0.0)
            table.add_row(phase, f"{seconds:.2f}", f"{seconds / total:.1%}", f"{exposed:.2f}")
        console.print(table)
        stalls = {cause: s for cause, s in result["stall_seconds"].get("update", {}).items() if s >= 0.01}
        waits = ", ".join(f"{cause} {s:.2f} s" for cause, s in sorted(stalls.items(), key=lambda row: -row[1]))
        params = result["update_params"]
        console.print(f"update waited for: {waits or 'nothing'}")
        console.print(f"updated: {params['cpu']:,} parameters on the CPU, {params['device']:,} on the device")
        console.print("link: " + ", ".join(f"{lane} {n / 1e6:,.0f} MB" for lane, n in result["link_bytes"].items()))
        where = ", ".join(f"{count} {_PLACES.get(at, f'on {at}')}" for at, count in result["subgroups"].items())
        console.print(f"state of {sum(result['subgroups'].values())} subgroups lives: {where}")
        for name, path in result["paths"].items():
            moved = ", ".join(f"{path['bytes'][op] / 1e6:,.0f} MB {done}" for op, done in _DONE.items())
            wear = path["written_bytes_per_day"]
            console.print(f"{name}: {moved}" + (f"; {wear / 1e12:,.2f} TB a day at this pace" if wear else ""))
        console.print(f"loss {result['loss_first']:.3f} → {result['loss_last']:.3f}")
        console.print(f"wrote {folder / 'summary.json'} and {folder / 'trace.json'} (open it in ui.perfetto.dev)")


def _flat(rows: dict[tuple[str, ...], float]) -> dict[str, float]:
    return {label: value for (label,), value in rows.items()}


def _nested(stalls: dict[tuple[str, ...], float]) -> dict[str, dict[str, float]]:
    nested: dict[str, dict[str, float]] = {}
    for (phase, cause), seconds in ((labels, seconds) for labels, seconds in stalls.items() if seconds):
        nested.setdefault(phase, {})[cause] = seconds
    return nested

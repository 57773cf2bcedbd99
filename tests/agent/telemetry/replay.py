"""A recorded run: what the recorder was given, as JSON, and the figures that it must make of it.

`python -m tests.agent.telemetry.replay` records anew: four steps of a real training on two storage paths, one of
them skipped, and a moment in the fifth, in which a read hangs. What such a run does not have is put in by hand:
faults, NVML, an update that goes on in the next forward.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tidegate.agent.telemetry import step_metrics
from tidegate.agent.telemetry.exposition import Exposition
from tidegate.agent.telemetry.gpu import GpuFigures
from tidegate.agent.telemetry.metric_store import MetricStore
from tidegate.agent.telemetry.report import report_of
from tidegate.agent.telemetry.scrape_snapshot import CurrentPath, CurrentState, read_current_state, update_metrics
from tidegate.agent.tiers.transfers import PathCounters, Transfer
from tidegate.metrics.family import Metric
from tidegate.plan import OpKind, Plan
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.timeline.step_record import FinishedStep, PathSample
from tidegate.timeline.step_result import StepPhases, StepResult
from tidegate.timeline.timeline import PhaseSpan, Span

FOLDER = Path(__file__).with_name("recorded")
PATHS = ("nvme", "pfs")
STEPS = 4
GPU = GpuFigures(
    source="fields",
    utilization_ratio=0.5,
    pcie_bytes={"h2d": 5_000_000, "d2h": 4_000_000},
    pcie_bytes_per_second={"h2d": 1e6, "d2h": 2e6},
    discrepancy={"h2d": 0.02, "d2h": -0.01},
)
Values = dict[str, float]
"""Of one family, by sample name and labels as Prometheus writes them."""


def replay(meter: MetricStore) -> MetricStore:
    """All that was recorded, told to `meter`."""
    run = json.loads((FOLDER / "run.json").read_text())
    step_metrics.initialize(meter, 0, PATHS)
    predicted: dict[str, float] = {}
    for step in run["steps"]:
        finished = _finished(step)
        step_metrics.add_step(meter, finished, report_of(finished), predicted)
        seconds = step["predicted_seconds"]
        predicted = {} if seconds is None else {"update": seconds}
        step_metrics.set_forecast(meter, predicted)
    update_metrics(meter, _present(run["present"]))
    return meter


def values(meter: MetricStore, metric: Metric) -> Values:
    """What /metrics says of one family."""
    exposition = Exposition(has_paths=True)
    exposition._families = [metric]
    return {
        "{}{{{}}}".format(sample.name, ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition.text(meter, openmetrics=False).decode())
        for sample in family.samples
    }


def expected() -> dict[str, Values]:
    found: dict[str, Values] = json.loads((FOLDER / "values.json").read_text())
    return found


def recorded_steps() -> list[FinishedStep]:
    return [_finished(step) for step in json.loads((FOLDER / "run.json").read_text())["steps"]]


def _finished(row: Mapping[str, Any]) -> FinishedStep:
    spans = tuple(Span(**{**span, "kind": OpKind(span["kind"])}) for span in row["spans"])
    phases = {**row["phases"], "spans": _phase_spans(row["phases"]["spans"]), "tail": ()}
    nothing = Plan(policy="interleaved", subgroups=(), placements=(), num_slots=2, ops=())
    result = StepResult(
        nothing, spans, row["skipped"], row["grad_norm"], EffectiveKnobs("off", 0.0, None, 0, False), row["stepped"]
    )
    return FinishedStep(
        number=row["number"],
        result=result,
        phases=StepPhases(**phases),
        deps={int(op): tuple(deps) for op, deps in row["deps"].items()},
        host_bytes=row["host_bytes"],
        subgroups=row["subgroups"],
        paths=tuple(_note(note) for note in row["paths"]),
        timestamp=row["timestamp"],
    )


def _note(row: Mapping[str, Any]) -> PathSample:
    return PathSample(**{**row, "moves": _moves(row["moves"])})


def _moves(rows: list[Any]) -> tuple[tuple[str, Transfer], ...]:
    return tuple((operation, Transfer(**transfer)) for operation, transfer in rows)


def _phase_spans(rows: list[Any]) -> tuple[PhaseSpan, ...]:
    return tuple(PhaseSpan(**row) for row in rows)


def _present(row: Mapping[str, Any]) -> CurrentState:
    paths = {name: _path_now(path) for name, path in row["paths"].items()}
    gpu = GpuFigures(**row["gpu"])
    return CurrentState(**{**row, "phases": _phase_spans(row["phases"]), "paths": paths, "gpu": gpu})


def _path_now(row: Mapping[str, Any]) -> CurrentPath:
    counters = PathCounters(**{name: row["counters"][name] for name in ("retries", "errors", "bytes")})
    counters.lock_wait_seconds = row["counters"]["lock_wait_seconds"]
    counters.taken_over_bytes = row["counters"]["taken_over_bytes"]
    counters.moves.extend(_moves(row["counters"]["moves"]))
    counters.under_way = {i: tuple(at) for i, at in enumerate(row["counters"]["under_way"])}
    return CurrentPath(**{**row, "counters": counters})


# ---- recording


def record() -> None:
    """A real run, to run.json; what the replay makes of it, to values.json. Look at what has changed there."""
    from tests.agent.training import Training
    from tidegate.agent.control import attach

    with tempfile.TemporaryDirectory() as folder:
        for name in PATHS:
            Path(folder, name).mkdir()
        paths = {name: Path(folder, name) for name in PATHS}
        made = Training(paths=paths, host_cache=0, tier_split="nvme:2,pfs:1", subgroup_numel=800_000)
        with made.optimizer as optimizer, attach.attach(optimizer, made.model, run="recorded") as attachment:
            steps = []
            for number in range(STEPS):
                optimizer.log(loss=1.5, tokens=512)
                _step(made, bad=number == 1)
                recorder = attachment.recorder
                predicted = recorder.totals.predicted_update_seconds
                assert recorder.last_step is not None
                steps.append(_step_row(recorder.last_step, predicted))
            presents: list[dict[str, Any]] = []
            _look_in_a_read(optimizer, lambda: presents.append(_present_row(_moment(optimizer, attachment))))
            _step(made)
    last = steps[-1]
    last["spans"][-1]["end"] = last["phases"]["spans"][-1]["end"] + 0.125
    run = {"steps": steps, "present": presents[0]}
    (FOLDER / "run.json").write_text(json.dumps(run) + "\n")
    from tidegate.metrics.catalogue import METRICS

    meter = replay(MetricStore())
    found = {metric.name: values(meter, metric) for metric in METRICS}
    (FOLDER / "values.json").write_text(json.dumps(found, indent=1) + "\n")


def _step(made: Any, bad: bool = False) -> None:
    from tests.agent.training import batch

    made.optimizer.zero_grad()
    made.model(batch(1)).backward()
    if bad:
        next(made.model.parameters()).grad.view(-1)[0] = float("inf")
    made.optimizer.step()


def _moment(optimizer: Any, attachment: Any) -> CurrentState:
    seen = read_current_state(
        optimizer, attachment.recorder.path_capacities, 2, {"recorder": 0.25, "sampler": 0.5}, GPU, 2, "token"
    )
    # As if the read had begun two seconds before.
    late = seen.now + 2.0
    last = dataclasses.replace(seen.phases[-1], end=late)
    return dataclasses.replace(seen, now=late, phases=(*seen.phases[:-1], last))


def _look_in_a_read(optimizer: Any, take: Callable[[], None]) -> None:
    path = optimizer.engine.store.paths["nvme"]
    moved, seen = path._mover._transfer, []

    def looking(*of: Any) -> Any:
        ticket = moved(*of)
        # Some transfers of the step have ended.
        if path.counters.moves and not seen and "read" in dict(path.counters.under_way.values()):
            seen.append(1)
            take()
        return ticket

    path._mover._transfer = looking
    path._mover.prepare = lambda *_: None


def _step_row(step: FinishedStep, predicted: float | None) -> dict[str, Any]:
    phases = dataclasses.asdict(step.phases)
    return {
        "number": step.number,
        "timestamp": step.timestamp,
        "predicted_seconds": predicted,
        "skipped": step.result.skipped,
        "grad_norm": step.result.grad_norm if not step.result.skipped else None,
        "stepped": step.result.stepped,
        "spans": [span._asdict() for span in step.result.spans],
        "phases": phases,
        "deps": step.deps,
        "host_bytes": step.host_bytes,
        "subgroups": step.subgroups,
        "paths": [
            {**dataclasses.asdict(note), "written_bytes_per_day": 86_400.0 * (i + 1)}
            for i, note in enumerate(step.paths)
        ],
    }


def _present_row(present: CurrentState) -> dict[str, Any]:
    row = {f.name: getattr(present, f.name) for f in dataclasses.fields(present)}
    return {
        **row,
        "phases": [dataclasses.asdict(span) for span in present.phases],
        "paths": {name: _path_row(path) for name, path in present.paths.items()},
        "gpu": dataclasses.asdict(present.gpu),
    }


def _path_row(path: CurrentPath) -> dict[str, Any]:
    counters = path.counters
    return {
        "counters": {
            "bytes": counters.bytes,
            "lock_wait_seconds": counters.lock_wait_seconds,
            "moves": [[operation, dataclasses.asdict(moved)] for operation, moved in counters.moves],
            "under_way": list(counters.under_way.values()),
            "retries": {"read": 1, "write": 2},
            "errors": {"read": 3, "write": 4},
            "taken_over_bytes": 40_960,
        },
        "lock_slots": path.lock_slots,
        "lock_timeouts": 5,
        "retired": True,
        "capacity_bytes": path.capacity_bytes,
        "wear_bytes_per_day": 4_000_000_000_000,
    }


if __name__ == "__main__":
    record()

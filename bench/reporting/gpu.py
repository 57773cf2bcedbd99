"""What the runs of bench/gpu.sh have measured, one column for each kind of GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from reporting import plots
from reporting.figures import COUNT, PERCENT, RATIO, Bound, Unit, markdown_table
from reporting.gantt import gantt
from reporting.lines import Line, Value, hardware, of_spread, value

GIGABYTES: Final = Unit(1e-9, 1, " GB/s")
BILLIONS: Final = Unit(1e-9, 1, " · 10⁹ a second")
SECONDS: Final = Unit(digits=3, name=" s")
MEMORY: Final = Unit(1e-9, 1, " GB")
SIDES: Final = {
    "tidegate": "Tidegate",
    "tidegate_static": "Tidegate with 20 % resident",
    "tidegate_overlap": "Tidegate with the update over the forward",
    "all_cpu": "Tidegate with all updates on the CPU",
    "zero3_cpu": "DeepSpeed ZeRO-3 with CPU offload",
    "superoffload": "SuperOffload",
    "twinflow_static": "TwinFlow",
    "torchao": "torchao",
    "resident": "all state on the GPU",
}
"""Sides of the stage iterations-1b, and what the page calls them."""


@dataclass(frozen=True)
class Gpu:
    """The results of one kind of GPU: `files` has the content of each file of its folder, by its name."""

    folder: Path
    files: Mapping[str, Any]

    @property
    def name(self) -> str:
        return hardware(self.folder.name.removeprefix("gpu-"))

    def figure(self, file: str, path: str, unit: Unit) -> str:
        return unit.show(value(self.files.get(file, {}), path))


def gpus(results: Path) -> list[Gpu]:
    return [
        Gpu(folder, {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))})
        for folder in sorted(results.glob("gpu-*"))
    ]


Cell = Callable[[Gpu], str]

ROWS: Final[tuple[tuple[str, Cell], ...]] = (
    ("checks of `tidegate doctor --gpu` that are good", lambda gpu: _doctor(gpu)),
    ("tests that need a GPU", lambda gpu: f"{gpu.figure('tests', 'counts.passed', COUNT)} passed"),
    ("weights that differ from the oracle's (bound: at most 0)", lambda gpu: _parity(gpu)),
    ("copies to the GPU, alone", lambda gpu: gpu.figure("links", "alone.h2d", GIGABYTES)),
    ("copies from the GPU, alone", lambda gpu: gpu.figure("links", "alone.d2h", GIGABYTES)),
    ("copies to the GPU, both ways at once", lambda gpu: gpu.figure("links", "both_at_once.h2d", GIGABYTES)),
    ("copies from the GPU, both ways at once", lambda gpu: gpu.figure("links", "both_at_once.d2h", GIGABYTES)),
    ("parameters updated on the GPU", lambda gpu: gpu.figure("links", "device_update_params_per_second", BILLIONS)),
    ("parameters updated on the CPU", lambda gpu: gpu.figure("links", "cpu_update_params_per_second", BILLIONS)),
    ("copies both ways at once in an update, by CUPTI", lambda gpu: _overlap(gpu, "kineto", "h2d+d2h")),
    ("the same, by the engine's events", lambda gpu: _overlap(gpu, "ours", "h2d+d2h")),
    ("CPU time of the agent, as a share of a step (bound: at most 0.5 %)", lambda gpu: _watching(gpu)),
    ("60 steps of `tidegate demo`", lambda gpu: gpu.figure("demo-summary", "seconds", SECONDS)),
)


def paragraphs(gpu: Gpu) -> Iterator[str]:
    """The tables of one kind of GPU below the common one."""
    if "updates" in gpu.files:
        yield f"### Updates on {gpu.name}"
        yield _updates(gpu)
        yield f"![Update time by stride on {gpu.name}](images/results/{gpu.folder.name}-strides.svg)"
        yield markdown_table(
            ["static ratio", "stride", "update", "predicted", "error"], _settings(gpu.files["updates"])
        )
    if "iterations-1b" in gpu.files:
        yield f"### Iterations on {gpu.name}"
        yield from _iterations(gpu)
    if "timeline-llama-1b" in gpu.files:
        yield f"### One iteration on {gpu.name}"
        yield (
            f"The timeline of one iteration with stride {gpu.files['timeline-llama-1b']['stride']:g}. A bar is one "
            "operation. Its number is the number of its subgroup. The row of the GPU has Tidegate's operations alone: "
            "forward and backward are in the row of phases."
        )
        yield f"![Gantt chart of one iteration on {gpu.name}](images/results/{gpu.folder.name}-timeline.svg)"
    yield _origin(gpu)


def status(gpu: Gpu) -> str:
    """The bounds of the stages `parity`, `iterations-1b` and `watching` in a few words."""
    ratio = gpu.files.get("iterations-1b", {}).get("speedup", {}).get("zero3_cpu", {}).get("iteration_seconds")
    held = [] if ratio is None else [Bound("above", 1).holds(ratio)]
    if (parity := gpu.files.get("parity")) is not None:
        held.append(_is_equal(parity))
    if (watching := gpu.files.get("watching")) is not None:
        held.append(_is_watched_cheaply(watching))
    if all(held):
        return f"{gpu.name}: within all bounds"
    return f"{gpu.name}: **misses {held.count(False)} of {len(held)} bounds**"


def drawings(gpu: Gpu) -> dict[str, str]:
    """The plots of one kind of GPU, by name."""
    found = {}
    if "updates" in gpu.files:
        found[f"{gpu.folder.name}-strides"] = plots.strides(gpu.files["updates"]["settings"])
    if "timeline-llama-1b" in gpu.files:
        found[f"{gpu.folder.name}-timeline"] = gantt(gpu.files["timeline-llama-1b"])
    return found


def _doctor(gpu: Gpu) -> str:
    verdicts = [check["verdict"] for check in gpu.files.get("doctor", [])]
    return f"{verdicts.count('good')} of {len(verdicts)}"


def _is_equal(parity: Line) -> bool:
    return Bound("at most", 0).holds(parity["weights_unlike_the_oracle"])


def _parity(gpu: Gpu) -> str:
    found = gpu.files.get("parity")
    if found is None:
        return "not measured"
    text = f"{found['weights_unlike_the_oracle']:,} of {found['numel']:,}, after {found['steps']} steps"
    return text if _is_equal(found) else f"**{text}, missed**"


def _is_watched_cheaply(watching: Line) -> bool:
    return Bound("at most", watching["target"]).holds(watching["overhead_ratio"])


def _watching(gpu: Gpu) -> str:
    found = gpu.files.get("watching")
    if found is None:
        return "not measured"
    text = f"{100 * found['overhead_ratio']:.1f} % of steps of {found['step_seconds']:.2f} s"
    return text if _is_watched_cheaply(found) else f"**{text}, missed**"


def _overlap(gpu: Gpu, side: str, pair: str) -> str:
    share = gpu.files.get("trace", {}).get(side, {}).get("overlap", {}).get(pair)
    return PERCENT.show(None if share is None else Value(share))


def _updates(gpu: Gpu) -> str:
    found = gpu.files["updates"]
    rows = [row for row in found["settings"] if row["static_ratio"] == 0]
    best = min(rows, key=lambda row: row["update_seconds"]["median"])
    alone = next(row for row in rows if row["stride"] == "off")
    faster = alone["update_seconds"]["median"] / best["update_seconds"]["median"]
    errors = [abs(_error(row)) for row in found["settings"]]
    source = {
        "calibration": "a calibration of the same machine (`tidegate calibrate`)",
        "links": "the speed of each lane alone, without the slowdown by other lanes",
    }[found["predicted_from"]]
    return (
        f"One update of {found['numel'] / 1e9:g} · 10⁹ parameters, without a backward. The fastest stride is "
        f"{best['stride']:g}: {SECONDS.show(of_spread(best['update_seconds']))}. That is {RATIO.number(faster)} times "
        f"as fast as all updates on the CPU. The prediction uses {source}. Its error is "
        f"{PERCENT.number(median(errors))} % in the median, and at most {PERCENT.number(max(errors))} %."
        + _later_predictions(gpu)
    )


def _later_predictions(gpu: Gpu) -> str:
    """The error of predictions of the same updates that were made later, from the calibration of another machine."""
    found = gpu.files.get("predictions")
    if found is None:
        return ""
    return (
        " With the committed calibration, which is newer and of another machine of the same kind, the error is "
        f"{PERCENT.number(found['error_median'])} % in the median, and at most {PERCENT.number(found['error_most'])} % "
        "(`python -m bench.gpu.predictions`)."
    )


def _settings(found: Line) -> Iterator[list[str]]:
    for row in found["settings"]:
        yield [
            f"{row['static_ratio']:g}", str(row["stride"]).removesuffix(".0"),
            SECONDS.show(of_spread(row["update_seconds"])), SECONDS.show(Value(row["predicted_seconds"])),
            f"{100 * _error(row):+.0f} %",
        ]  # fmt: skip


def _error(row: Line) -> float:
    return float(row["predicted_seconds"] / row["update_seconds"]["median"] - 1)


def _iterations(gpu: Gpu) -> Iterator[str]:
    found = gpu.files["iterations-1b"]
    yield (
        "Whole iterations of a Llama with 1.1 · 10⁹ parameters. **Claim.** They are more than 1.00 times as fast as "
        "those of DeepSpeed ZeRO-3 with CPU offload."
    )
    yield from _sides(found)
    ratio = found["speedup"].get("zero3_cpu", {}).get("iteration_seconds")
    if ratio:
        verdict = "within the bound" if ratio > 1 else "**the bound is missed**"
        yield f"Tidegate's iteration is {RATIO.number(ratio)} times as fast: {verdict}."
    others = gpu.files.get("iterations-1b-other-sides")
    if others:
        yield "On another machine of the same kind, with other sides:"
        yield from _sides(others)
    other = gpu.files.get("iterations-1b-another-machine")
    if other:
        first = next(iter(other["rows"].values()))
        yield (
            f"On a third machine of the same kind the iteration of {SIDES[first['side']]} took "
            f"{SECONDS.show(of_spread(first['iteration_seconds']))}."
        )


def _sides(found: Line) -> Iterator[str]:
    """The table of the sides of one run of a stage, and which sides were not measured."""
    heads = ["side", "turns", "iteration", "update", "peak of GPU memory", "of host memory"]
    rows: list[list[str]] = []
    missing: dict[str, list[str]] = {}
    for side, turns in found["rounds"].items():
        measured = [turn for turn in turns if "iteration_seconds" in turn]
        name = SIDES.get(side, side)
        if not measured:
            missing.setdefault(turns[-1]["not_measured"], []).append(name)
            continue
        last = measured[-1]
        times = [SECONDS.show(of_spread(last[f"{key}_seconds"])) for key in ("iteration", "update")]
        peaks = [MEMORY.show(Value(last[f"peak_{key}_bytes"])) for key in ("device", "host")]
        rows.append([name, str(len(measured)), *times, *peaks])
    yield markdown_table(heads, rows)
    if missing:
        said = [f"{', '.join(names)} ({reason})" for reason, names in missing.items()]
        yield f"Not measured: {'; '.join(said)}."


def _origin(gpu: Gpu) -> str:
    about = gpu.files["about"]
    commits = "; ".join(f"{files}: {commit}" for files, commit in about["commits"].items())
    return (
        f"**Machine.** {about['machine']}. **Measured** {about['measured']}. **Commits.** {commits}. "
        f"**Files.** [{gpu.folder.name}](../bench/results/{gpu.folder.name}/about.json)."
    )

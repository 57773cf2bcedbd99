"""Draws the pictures of `docs/concepts.md` from simulated timelines of plans that Tidegate itself makes.

`python -m docs.draw_plans` writes them to `docs/images/`; with `--check` it fails where a file is not what the code
gives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from docs.generated import run
from docs.svg import GREY, INK, arrow, badge, drawing, line, rect, text
from tidegate.dashboard.style.palette import KIND, KIND_NAME, LANE, PHASE
from tidegate.knobs.knobs import OFF, Off
from tidegate.plan import Policy, Subgroup, make_plan, place_subgroups, steady_placements
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.simulator.simulate import simulate
from tidegate.simulator.steady_state import Rank, steady_steps
from tidegate.speeds.rate_card import PathRates, RateCard
from tidegate.timeline.timeline import Span, Timeline

IMAGES: Final = Path(__file__).resolve().parent / "images"

H200: Final = RateCard(
    h2d_bytes_per_second=42.1e9, d2h_bytes_per_second=38.6e9, cpu_params_per_second=2.05e9,
    device_params_per_second=124e9, norm_params_per_second=22.1e9,
    op_seconds={"cpu": 1e-4, "h2d": 1.9e-4, "d2h": 3.6e-4, "device": 7e-4},
    keeps={
        "cpu": {"h2d": 0.897, "d2h": 0.964, "device": 0.92}, "h2d": {"cpu": 0.763, "d2h": 0.874},
        "d2h": {"cpu": 0.814, "h2d": 0.87}, "device": {"cpu": 0.484, "h2d": 0.924, "d2h": 0.945},
    },
)  # fmt: skip
"""What `tidegate calibrate` measured on a machine with an NVIDIA H200, the CPU with 4 threads (as where several GPUs
share its cores): a part of bench/results/gpu-nvidia-h200/calibration.json."""
H200_CARD: Final = "Speeds: as measured by tidegate calibrate on an NVIDIA H200 machine, the CPU with 4 threads."
TWO_PATHS: Final = replace(
    H200,
    paths={
        "nvme": PathRates(read_bytes_per_second=6.9e9, write_bytes_per_second=5.3e9),
        "pfs": PathRates(read_bytes_per_second=3.6e9, write_bytes_per_second=3.6e9),
    },
    keeps={**H200.keeps, "nvme:read": {"nvme:write": 0.5}, "nvme:write": {"nvme:read": 0.5}},
)
"""The same with the storage of the H100 machine of MLP-Offload (Table 1); reads and writes share the NVMe drive."""
NUMEL: Final = 100_000_000
FORWARD: Final = 0.06
BACKWARD: Final = 0.12
"""Seconds; stated, not simulated."""
WIDTH: Final = 900.0
LEFT: Final = 96.0
ROW: Final = 20.0


def subgroups(count: int) -> list[Subgroup]:
    """Of 100 million bf16 parameters each."""
    return [Subgroup(i, NUMEL, weight_bytes=2, grad_bytes=2, state_bytes=10) for i in range(count)]


def arrivals(count: int, backward: float) -> dict[int, float]:
    """When each gradient is made: evenly over the backward, the last subgroup first."""
    return {i: backward * (count - i) / count for i in range(count)}


def update(stride: float | Off, static_ratio: float, policy: Policy, count: int = 8) -> Timeline:
    """The simulated timeline of one step without storage paths."""
    placements = steady_placements(place_subgroups(count, stride=stride, static_ratio=static_ratio))
    plan = make_plan(subgroups(count), placements, num_slots=2, policy=policy, rates=H200)
    return simulate(plan, H200, step_at=BACKWARD, gradient_ready=arrivals(count, BACKWARD))


def seconds(timeline: Timeline) -> float:
    """The length of the update."""
    begin, end = timeline.window("update") or (0.0, 0.0)
    return end - begin


# ---- lanes


class Panel:
    """Lanes with the spans of one timeline, below a heading."""

    def __init__(self, timeline: Timeline, lanes: Sequence[str], top: float, scale: float) -> None:
        self.timeline, self.lanes, self.top, self.scale = timeline, lanes, top, scale

    @property
    def bottom(self) -> float:
        return self.top + 26 + ROW * len(self.lanes)

    def x(self, time: float) -> float:
        return LEFT + time * self.scale

    def parts(self, heading: str) -> Iterator[str]:
        begin, end = self.timeline.window("update") or (0.0, 0.0)
        yield text(12, self.top + 14, heading, bold=True)
        yield rect(self.x(0), self.top + 22, begin * self.scale, self.bottom - self.top - 22, "#EEF3F8", radius=0)
        for row, lane in enumerate(self.lanes):
            y = self.top + 24 + row * ROW
            yield text(LEFT - 8, y + 13, lane, size=12, anchor="end", fill=GREY)
            yield line(LEFT, y + ROW - 1, WIDTH - 12, y + ROW - 1)
            yield from (self._span(span, y) for span in self.timeline.spans if span.lane == lane)
        for at in (begin, end):
            yield line(self.x(at), self.top + 20, self.x(at), self.bottom, stroke=INK, dash="4 3")
        yield text(self.x(end) + 5, self.bottom - 5, f"update: {1e3 * (end - begin):.0f} ms", size=12, bold=True)

    def _span(self, span: Span, y: float) -> str:
        width = span.seconds * self.scale
        bar = rect(self.x(span.start), y + 1, max(width, 1.5), ROW - 4, KIND[span.kind])
        if span.subgroup < 0 or width < 11:
            return bar
        dark = span.kind in ("grad_d2h", "grad_h2d", "cpu_update", "state_h2d", "norm")
        middle = self.x(span.start) + width / 2
        return bar + text(middle, y + 13, str(span.subgroup), size=11, anchor="middle", fill="#FFFFFF" if dark else INK)


def legend(kinds: Iterable[str], y: float) -> Iterator[str]:
    """The colours of kinds of ops, in one row."""
    x = 12.0
    for kind in kinds:
        yield rect(x, y - 10, 12, 12, KIND[kind])
        yield text(x + 17, y, KIND_NAME[kind], size=12, fill=GREY)
        x += 29 + 6.4 * len(KIND_NAME[kind])


# ---- the pictures


def interleaved_update() -> str:
    """The same update in four plans."""
    shown = (
        ("All on the CPU, one op after the other", update(OFF, 0.0, "sequential")),
        ("A static split as TwinFlow makes it: 2 of 8 subgroups stay on the GPU", update(OFF, 0.25, "twinflow")),
        ("Interleaved: stride 2", update(2.0, 0.0, "interleaved")),
        ("Interleaved: stride 2, and 2 of 8 subgroups stay on the GPU", update(2.0, 0.25, "interleaved")),
    )
    lanes = ("h2d", "d2h", "cpu", "device")
    scale = (WIDTH - LEFT - 120) / max(BACKWARD + seconds(timeline) for _, timeline in shown)
    parts, top = [], 10.0
    for heading, timeline in shown:
        panel = Panel(timeline, lanes, top, scale)
        parts += panel.parts(heading)
        top = panel.bottom + 12
    parts += legend(kinds_of(timeline for _, timeline in shown), top + 8)
    parts += footer(top + 30, "Shaded: the backward, until step(). Numbers: subgroups of 100 million parameters.")
    return drawing(WIDTH, top + 60, "One update, in four plans", parts)


def tiers() -> str:
    """A step whose state is in the host cache and on two paths."""
    count, backward = 12, 0.6
    rank = Rank(subgroups(count), 2, host_slots={"nvme": 3, "pfs": 3})
    knobs = EffectiveKnobs(stride=4.0, static_ratio=0.0, host_cache_bytes=3 * NUMEL * 10 + 100_000)
    (step,) = steady_steps(rank, knobs, TWO_PATHS)
    plan = step.plan(TWO_PATHS, backward)
    timeline = simulate(plan, TWO_PATHS, step_at=backward, gradient_ready=arrivals(count, backward))
    parts = list(residences([(p.after, p.processor) for p in plan.placements], 12.0))
    lanes = ("nvme:read", "nvme:write", "pfs:read", "pfs:write", "h2d", "d2h", "cpu", "device")
    panel = Panel(timeline, lanes, 92, (WIDTH - LEFT - 130) / (backward + seconds(timeline)))
    parts += panel.parts("One step")
    parts += legend(kinds_of([timeline]), panel.bottom + 20)
    parts += footer(
        panel.bottom + 42, "Paths read and write 6.9 and 5.3 GB/s (nvme), 3.6 and 3.6 GB/s (pfs). stride 4."
    )
    return drawing(WIDTH, panel.bottom + 72, "A step with state on two storage paths", parts)


def residences(places: Sequence[tuple[str, str]], y: float) -> Iterator[str]:
    """A box for each subgroup, with the place of its state between steps and the processor that updates it."""
    fill = {"host": LANE["cpu"], "device": LANE["device"], "nvme": KIND["fetch"], "pfs": "#F5D78E"}
    name = {"host": "cache"}
    width = (WIDTH - LEFT - 12) / len(places)
    yield text(12, y + 8, "Where the state of each subgroup is between steps", bold=True)
    for label, row in (("state in", 30.0), ("updated by", 50.0)):
        yield text(LEFT - 8, y + row, label, size=12, anchor="end", fill=GREY)
    for i, (place, processor) in enumerate(places):
        x = LEFT + i * width
        yield rect(x, y + 16, width - 3, 20, fill[place])
        yield text(x + width / 2, y + 30, f"{i}: {name.get(place, place)}", size=10, anchor="middle",
                   fill="#FFFFFF" if place == "host" else INK)  # fmt: skip
        yield text(x + width / 2, y + 50, processor, size=11, anchor="middle", fill=GREY)


def knob_change() -> str:
    """The messages of a change of `stride` from an operator to the step from which all ranks use it."""
    old, new = seconds(update(OFF, 0.0, "interleaved")), seconds(update(2.0, 0.0, "interleaved"))
    rows = {"operator": 50.0, "daemon": 110.0, "rank 0": 170.0, "rank 1": 230.0}
    begins = [0.0]
    for length in (old, old, new, new):
        begins.append(begins[-1] + FORWARD + BACKWARD + length)
    scale = (WIDTH - LEFT - 12) / begins[-1]
    parts = [text(12, 22, "How a change of a knob reaches all ranks: stride from off to 2", bold=True)]
    for name, y in rows.items():
        parts += [text(LEFT - 8, y + 4, name, size=12, anchor="end", fill=GREY), line(LEFT, y, WIDTH - 12, y)]
    for rank in ("rank 0", "rank 1"):
        for step, length in enumerate((old, old, new, new)):
            parts += bars(LEFT + begins[step] * scale, rows[rank], length, scale, 7 + step)
    for number, (way, time) in enumerate(messages(begins), start=1):
        for place, (start, end) in enumerate(way):
            x = LEFT + time * scale + 16 * place
            down = 1 if rows[end] > rows[start] else -1
            parts.append(arrow(x, rows[start] + down * edge(start), x, rows[end] - down * edge(end)))
        ends = sorted(rows[name] for name in way[0])
        parts.append(badge(LEFT + time * scale, ends[0] + (30 if number == 5 else 0), number))
    agreed = LEFT + begins[2] * scale
    parts += [line(agreed, 140, agreed, 262, stroke=INK, width=2, dash="4 3")]
    parts += [text(agreed + 6, 276, "from here on: stride 2, on all ranks", size=12, bold=True)]
    parts += phases(LEFT, 300)
    parts += footer(322, "The length of updates is simulated; the times of messages are only an example.")
    return drawing(WIDTH, 352, "The way of a knob", parts)


def bars(x: float, y: float, length: float, scale: float, step: int) -> Iterator[str]:
    """One step of a rank: forward, backward and update."""
    for name, time in (("forward", FORWARD), ("backward", BACKWARD), ("update", length)):
        yield rect(x, y - 11, time * scale - 1, 22, PHASE[name])
        if name == "update":
            yield text(x + time * scale / 2, y + 4, f"step {step}", size=11, anchor="middle")
        x += time * scale


def messages(begins: Sequence[float]) -> list[tuple[list[tuple[str, str]], float]]:
    """Who tells whom, and when; in the order of the numbers below the drawing."""
    ranks = ("rank 0", "rank 1")
    return [
        ([("operator", "daemon")], 0.08),
        ([("daemon", rank) for rank in ranks], 0.2),
        ([(rank, "daemon") for rank in ranks], 0.32),
        ([("daemon", rank) for rank in ranks], begins[1] + 0.1),
        ([ranks], begins[2] - 0.02),
        ([(rank, "daemon") for rank in ranks], begins[3] + 0.12),
    ]


def edge(name: str) -> float:
    """How far the edge of a row is from its middle: ranks have bars, the others a line."""
    return 12 if name.startswith("rank") else 2


def phases(x: float, y: float) -> Iterator[str]:
    for name in ("forward", "backward", "update"):
        yield rect(x, y - 10, 12, 12, PHASE[name])
        yield text(x + 17, y, name, size=12, fill=GREY)
        x += 100


def kinds_of(timelines: Iterable[Timeline]) -> list[str]:
    found = {span.kind.value for timeline in timelines for span in timeline.spans}
    return [kind for kind in KIND if kind in found]


def footer(y: float, words: str) -> Iterator[str]:
    """What is drawn, and with which speeds."""
    yield text(12, y, f"Simulated. {words}", size=12, fill=GREY)
    yield text(12, y + 17, H200_CARD, size=12, fill=GREY)


PICTURES: Final = {"interleaved-update": interleaved_update, "tiers": tiers, "knob-change": knob_change}


def files() -> dict[Path, str]:
    """The content of each picture, by its path."""
    return {IMAGES / f"{name}.svg": draw() for name, draw in PICTURES.items()}


def main(arguments: list[str]) -> int:
    return run("docs.draw_plans", files, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

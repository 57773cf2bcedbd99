"""When each alert fires and when it must not: what differs from the recorded scrape, and what comes of it.

Series are those of `recorded.prom`, standing still at what was recorded, at intervals of 15 s. A case replaces the
values of some, in promtool's notation: `0+8x80` begins at 0 and grows by 8 eighty times; `_x80` is not there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tidegate.timeline.timeline import STALL_CAUSES
from tidegate.timeline.verdict import remedy_for

RANK: Final = {"run": "llama", "rank": "0", "host": "host-1", "device_kind": "emulated"}
PLACE: Final = {"run": "llama", "host": "host-1", "device_kind": "emulated", "path": "nvme"}


@dataclass(frozen=True, kw_only=True)
class Case:
    alert: str
    why: str
    series: dict[str, str]
    """Values by selector; a selector that no recorded series answers to is an error."""
    beside: dict[str, str] = field(default_factory=dict)
    """Values of series that the recorded run, a short one, does not have: labels that differ from a recorded series of
    the family."""
    at: str = "12m"
    interval: str = "15s"
    summary: str = ""
    """What it says; empty: it must not fire."""
    labels: dict[str, str] = field(default_factory=dict)
    knob: str | None = None
    """Where the rule's own depends on labels."""
    second_rank: bool = False
    """Every series of the rank is there twice, as rank 0 and rank 1."""


def _update(seconds: float = 8) -> dict[str, str]:
    """So many seconds of update in 15."""
    return {'tidegate_phase_seconds_sum{phase="update"}': f"0+{seconds}x400", "tidegate_steps_total": "0+1x400"}


def _stalled(cause: str) -> str:
    return f'tidegate_stall_seconds_total{{phase="update",cause="{cause}"}}'


def _stall(cause: str, values: str) -> dict[str, str]:
    return {**_update(), _stalled(cause): values}


_RECORDED: Final = ("h2d", "d2h", "cpu", "device", "dispatch")
"""Causes that the recorded run has; it shares no path, and is the only rank."""


_NVME_READ: Final = 'path="nvme",operation="read",phase="update"'
_CEILING: Final = 'tidegate_path_ceiling_bytes_per_second{path="nvme",operation="read"}'
_FREE, _CAPACITY = 'tidegate_path_free_bytes{path="nvme"}', 'tidegate_path_capacity_bytes{path="nvme"}'
_WRITTEN, _LIMIT = 'tidegate_path_written_bytes_per_day{path="nvme"}', "tidegate_path_wear_limit_bytes_per_day"
_HUNG: Final = {
    'tidegate_phase_seconds_sum{phase="update"}': "0+15x40 600x400",
    "tidegate_steps_total": "0+1x40 40x400",
}
"""Steps of 15 s, the last one after ten minutes."""
SLOW_STEPS: Final = " ".join(f"{n}x19" for n in range(100))
"""One in five minutes."""


def _path(busy: float, nbytes: float, wait: float = 1) -> dict[str, str]:
    """Reads of path nvme: seconds and bytes in 15 s, with a ceiling of 1 GB/s, and seconds for which the update waits
    for writes."""
    return {
        **_update(),
        f"tidegate_path_busy_seconds_total{{{_NVME_READ}}}": f"0+{busy}x400",
        f"tidegate_path_bytes_total{{{_NVME_READ}}}": f"0+{nbytes:.0f}x400",
        _CEILING: "1000000000x400",
        _stalled("nvme:write"): f"0+{wait}x400",
    }


CASES: Final[tuple[Case, ...]] = (
    # ---- steps that are skipped
    Case(
        alert="TidegateStepsSkipped",
        why="every second step has gradients that are not finite",
        series={"tidegate_steps_total": "0+2x400", "tidegate_skipped_steps_total": "0+1x400"},
        labels=RANK,
        at="40m",
        summary="llama rank 0: 120 steps were skipped lately, because a gradient was not finite",
    ),
    Case(
        alert="TidegateStepsSkipped",
        why="all of twelve steps, on every rank",
        series={"tidegate_steps_total": "0x20 0+1x12 12x300", "tidegate_skipped_steps_total": "0x20 0+1x12 12x300"},
        labels=RANK,
        summary="llama rank 0: 12 steps were skipped lately, because a gradient was not finite",
    ),
    Case(
        alert="TidegateStepsSkipped",
        why="a step takes five minutes, and every one is skipped",
        series={"tidegate_steps_total": SLOW_STEPS, "tidegate_skipped_steps_total": SLOW_STEPS},
        labels=RANK,
        at="70m",
        summary="llama rank 0: 14 steps were skipped lately, because a gradient was not finite",
    ),
    Case(
        alert="TidegateStepsSkipped",
        why="a step takes five minutes, and every one is skipped for hours",
        series={"tidegate_steps_total": SLOW_STEPS, "tidegate_skipped_steps_total": SLOW_STEPS},
        labels=RANK,
        at="8h",
        summary="llama rank 0: 24 steps were skipped lately, because a gradient was not finite",
    ),
    Case(
        alert="TidegateStepsSkipped",
        why="a step takes five minutes, and the second of twelve was not skipped",
        series={
            "tidegate_steps_total": SLOW_STEPS,
            "tidegate_skipped_steps_total": " ".join(f"{max(0, n - 1)}x19" for n in range(100)),
        },
        at="60m",
    ),
    Case(
        alert="TidegateStepsSkipped",
        why="a scaler of fast steps that finds its scale, until now",
        series={"tidegate_steps_total": "0+1x6 6x400", "tidegate_skipped_steps_total": "0+1x6 6x400"},
        at="4m",
    ),
    Case(
        alert="TidegateStepsSkipped",
        why="a scaler that finds its scale skips a few",
        series={"tidegate_steps_total": "0+1x400", "tidegate_skipped_steps_total": "0+1x6 6x400"},
    ),
    Case(
        alert="TidegateStepsSkipped",
        why="a few of thousands",
        series={"tidegate_steps_total": "0+40x400", "tidegate_skipped_steps_total": "0+1x400"},
        at="40m",
    ),
    # ---- the update
    Case(
        alert="TidegateUpdateStalled",
        why="half of the update waits for reads of a path",
        series=_stall("nvme:read", "0+4x400"),
        labels={**RANK, "cause": "nvme:read"},
        summary="llama rank 0: the update waits 50% of its time for nvme:read",
        knob=remedy_for("nvme:read").knob,
    ),
    *(
        Case(
            alert="TidegateUpdateStalled",
            why=f"waiting for {cause} is the business of the knob that verdicts name",
            series=_stall(cause, "0+6x400") if cause in _RECORDED else _update(),
            beside={} if cause in _RECORDED else {_stalled(cause): "0+6x400"},
            labels={**RANK, "cause": cause},
            summary=f"llama rank 0: the update waits 75% of its time for {cause}",
            knob=remedy_for(cause).knob,
        )
        for cause in STALL_CAUSES
    ),
    Case(
        alert="TidegateUpdateStalled",
        why="under the limit",
        series=_stall("h2d", "0+2.3x400"),
    ),
    Case(
        alert="TidegateUpdateStalled",
        why="two thirds of an update that is a hundredth of the step",
        series={
            **_update(0.15),
            _stalled("dispatch"): "0+0.1x400",
            'tidegate_phase_seconds_sum{phase="forward"}': "0+14x400",
        },
    ),
    Case(
        alert="TidegateUpdateStalled",
        why="half of an update that is a fifth of the step",
        series={
            **_update(3),
            _stalled("dispatch"): "0+1.5x400",
            'tidegate_phase_seconds_sum{phase="forward"}': "0+12x400",
        },
        labels={**RANK, "cause": "dispatch"},
        summary="llama rank 0: the update waits 50% of its time for dispatch",
        knob=remedy_for("dispatch").knob,
    ),
    Case(
        alert="TidegateUpdateStalled",
        why="stalls of another phase",
        series={**_update(), 'tidegate_stall_seconds_total{phase="backward"}': "0+6x400"},
    ),
    Case(
        alert="TidegateUpdateStalled",
        why="a slow first minute is pending and never fires",
        series=_stall("h2d", "0+8x2 16x400"),
        at="3m",
    ),
    Case(
        alert="TidegateUpdateStalled",
        why="one bad minute between good ones does not flap",
        series=_stall("h2d", "0x16 8+8x3 32x400"),
        at="6m",
    ),
    Case(
        alert="TidegateUpdateStalled",
        why="a share without updates is no share",
        series={},
    ),
    Case(
        alert="TidegateUpdateStalled",
        why="while every other update stalls it stays on",
        series=_stall("d2h", "0 7 7 14 14 21 21 28 28 35 35 42 42 49 49 56 56 63 63 70 70 77 77 84 84 91 91 98 98 105"),
        at="6m15s",
        labels={**RANK, "cause": "d2h"},
        summary="llama rank 0: the update waits 43.75% of its time for d2h",
        knob="stride",
    ),
    Case(
        alert="TidegateUpdateStalled",
        why="once the cause is gone it resolves",
        series=_stall("h2d", "0+4x40 160x400"),
        at="19m",
    ),
    # ---- the step
    Case(
        alert="TidegateStepOverdue",
        why="three times the usual step of 15 s, and a minute, have passed",
        series={
            "tidegate_step_timestamp_seconds": "0+15x40 600x400",
            **_HUNG,
            "tidegate_step_open_seconds": "5x40 15+15x400",
        },
        at="13m",
        labels=RANK,
        summary="llama rank 0: no step has ended for 3m 0s",
    ),
    Case(
        alert="TidegateStepOverdue",
        why="Prometheus has seen no step end: three times the mean of the process, and a minute",
        series={
            "tidegate_step_timestamp_seconds": "0x400",
            "tidegate_step_open_seconds": "0+15x400",
        },
        at="3m",
        labels=RANK,
        summary="llama rank 0: no step has ended for 3m 0s",
    ),
    Case(
        alert="TidegateStepOverdue",
        why="long after, when no median of six hours is left",
        series={
            "tidegate_step_timestamp_seconds": "0+60x10 600x500",
            'tidegate_phase_seconds_sum{phase="update"}': "0+60x10 600x500",
            "tidegate_steps_total": "0+4x10 40x500",
            "tidegate_step_open_seconds": "5x10 60+60x500",
        },
        interval="1m",
        at="8h",
        labels=RANK,
        summary="llama rank 0: no step has ended for 7h 50m 0s",
    ),
    Case(
        alert="TidegateStepOverdue",
        why="over the limit of a minute and 45 seconds, for 15 seconds only",
        series={
            "tidegate_step_timestamp_seconds": "0+15x40 600x400",
            **_HUNG,
            "tidegate_step_open_seconds": "5x40 15+15x400",
        },
        at="12m15s",
    ),
    Case(
        alert="TidegateStepOverdue",
        why="a checkpoint may take what it takes",
        series={
            "tidegate_step_timestamp_seconds": "0+15x40 600x400",
            **_HUNG,
            'tidegate_phase_open_seconds{phase="checkpoint"}': "0x40 15+15x400",
        },
        at="30m",
    ),
    Case(
        alert="TidegateStepOverdue",
        why="an evaluation of eight minutes between two steps",
        series={
            "tidegate_step_timestamp_seconds": "0+15x40 600x400",
            **_HUNG,
            'tidegate_phase_open_seconds{phase="other"}': "0x40 15+15x400",
        },
        at="18m",
    ),
    Case(
        alert="TidegateStepOverdue",
        why="but not one that has ended in a data loader that hangs",
        series={
            "tidegate_step_timestamp_seconds": "0+15x40 600x400",
            **_HUNG,
            'tidegate_phase_open_seconds{phase="other"}': "0x40 15+15x400",
        },
        at="25m",
        labels=RANK,
        summary="llama rank 0: no step has ended for 15m 0s",
    ),
    Case(
        alert="TidegateStepOverdue",
        why="the step after a checkpoint of five minutes has just begun",
        series={
            "tidegate_step_timestamp_seconds": " ".join(f"{60 * n}x3" for n in range(10)) + " 600x400",
            'tidegate_phase_seconds_sum{phase="update"}': "0+15x40 600x400",
            "tidegate_steps_total": " ".join(f"{n}x3" for n in range(10)) + " 10x400",
            "tidegate_step_open_seconds": "5x60 15+15x400",
        },
        at="15m45s",
    ),
    Case(
        alert="TidegateStepOverdue",
        why="steps take three minutes, and the second has not ended",
        series={
            "tidegate_step_timestamp_seconds": "_x12 180x11 360x400",
            'tidegate_phase_seconds_sum{phase="update"}': "0x12 180x11 360x400",
            "tidegate_steps_total": "0x12 1x11 2x400",
            "tidegate_step_open_seconds": "0+15x12 0+15x11 0+15x400",
        },
        at="5m30s",
    ),
    Case(
        alert="TidegateStepOverdue",
        why="the first step hangs",
        series={"tidegate_step_timestamp_seconds": "_x400", "tidegate_step_open_seconds": "0+15x400"},
        at="40m",
        labels=RANK,
        summary="llama rank 0: no step has ended for 40m 0s",
    ),
    Case(
        alert="TidegateStepOverdue",
        why="the data of the first step never come",
        series={
            "tidegate_step_timestamp_seconds": "_x400",
            "tidegate_step_open_seconds": "0x400",
            'tidegate_phase_open_seconds{phase="other"}': "0+15x400",
        },
        at="40m",
        labels=RANK,
        summary="llama rank 0: no step has ended for 40m 0s",
    ),
    Case(
        alert="TidegateStepOverdue",
        why="the first step compiles for 25 minutes",
        series={"tidegate_step_timestamp_seconds": "_x400", "tidegate_step_open_seconds": "0+15x400"},
        at="25m",
    ),
    # ---- link and model
    Case(
        alert="TidegateLinkSaturated",
        why="copies for 95 % of the update",
        series={
            **_update(),
            'tidegate_link_busy_seconds_total{direction="h2d",phase="update"}': "0+7.6x400",
        },
        at="17m",
        labels={**RANK, "direction": "h2d"},
        summary="llama rank 0: the link is busy h2d for 95% of the update",
    ),
    Case(
        alert="TidegateLinkSaturated",
        why="85 % leaves something to gain elsewhere",
        series={**_update(), 'tidegate_link_busy_seconds_total{direction="h2d",phase="update"}': "0+6.8x400"},
        at="17m",
    ),
    Case(
        alert="TidegatePredictionDrift",
        why="off by 40 %",
        series={**_update(), "tidegate_prediction_error_ratio": "0.4x400"},
        at="40m",
        labels=RANK,
        summary="llama rank 0: the predicted update is off by 40% on average",
    ),
    Case(
        alert="TidegatePredictionDrift",
        why="off by 40 % of an update that is a tenth of the step",
        series={
            **_update(1.5),
            'tidegate_phase_seconds_sum{phase="forward"}': "0+13.5x400",
            "tidegate_prediction_error_ratio": "0.4x400",
        },
        at="40m",
    ),
    Case(
        alert="TidegatePredictionDrift",
        why="one step in ten is off by far",
        series={
            **_update(),
            "tidegate_prediction_error_ratio": " ".join(["0.1 0.1 0.1 0.1 0.1 0.1 0.1 0.1 0.1 1.2"] * 40),
        },
        at="40m",
    ),
    Case(
        alert="TidegatePredictionDrift",
        why="forward and backward vary, the update is as predicted",
        series={
            **_update(),
            "tidegate_prediction_error_ratio": "0.9x400",
            'tidegate_prediction_error_ratio{phase="update"}': "0.1x400",
        },
        at="40m",
    ),
    # ---- storage paths
    Case(
        alert="TidegatePathSlow",
        why="200 MB/s where 1 GB/s was possible, for a quarter of the update",
        series=_path(busy=2, nbytes=4e8),
        labels={**PLACE, "operation": "read"},
        summary="llama on host-1: reads of path nvme reach 20% of what it can do",
    ),
    Case(
        alert="TidegatePathSlow",
        why="as slow, but in use for a twentieth of the update only",
        series=_path(busy=0.4, nbytes=8e7),
    ),
    Case(
        alert="TidegatePathSlow",
        why="as slow and as busy, but the update waits for it for a fiftieth of the step only",
        series=_path(busy=2, nbytes=4e8, wait=0.15),
    ),
    Case(
        alert="TidegatePathSlow",
        why="five minutes after its repair: small operations stay under the ceiling, and nobody waits",
        series={**_path(busy=2, nbytes=4e8), _stalled("nvme:write"): "0+1x40 40x400"},
        at="21m",
    ),
    Case(
        alert="TidegatePathSlow",
        why="two ranks that take turns are together as slow as each",
        series=_path(busy=2, nbytes=4e8),
        second_rank=True,
        labels={**PLACE, "operation": "read"},
        summary="llama on host-1: reads of path nvme reach 20% of what it can do",
    ),
    Case(
        alert="TidegatePathSlow",
        why="two ranks that may use the path at once share what it can do",
        series={**_path(busy=2, nbytes=4e8), 'tidegate_path_lock_slots{path="nvme"}': "2x400"},
        second_rank=True,
    ),
    Case(
        alert="TidegatePathSlow",
        why="two ranks share what the path can do, without exclusive access",
        series={**_path(busy=2, nbytes=4e8), 'tidegate_path_lock_slots{path="nvme"}': "_x400"},
        second_rank=True,
    ),
    Case(
        alert="TidegatePathSlow",
        why="eight ranks may use the path at once, and one does",
        series={**_path(busy=2, nbytes=4e8), 'tidegate_path_lock_slots{path="nvme"}': "8x400"},
        labels={**PLACE, "operation": "read"},
        summary="llama on host-1: reads of path nvme reach 20% of what it can do",
    ),
    Case(
        alert="TidegatePathSlow",
        why="half of the ceiling is what a mix of reads and writes gives",
        series=_path(busy=2, nbytes=1e9),
    ),
    Case(
        alert="TidegatePathLockWait",
        why="half of the update waits for others, reads and writes together",
        series={
            **_update(),
            'tidegate_path_lock_wait_seconds_total{path="nvme",operation="read"}': "0+3x400",
            'tidegate_path_lock_wait_seconds_total{path="nvme",operation="write"}': "0+1x400",
        },
        labels={**RANK, "path": "nvme"},
        summary="llama rank 0: waits for others to leave path nvme for 50% of the update",
    ),
    Case(
        alert="TidegatePathLockWait",
        why="two thirds of an update that is a fiftieth of the step",
        series={
            **_update(0.3),
            'tidegate_phase_seconds_sum{phase="forward"}': "0+14x400",
            'tidegate_path_lock_wait_seconds_total{path="nvme",operation="read"}': "0+0.2x400",
        },
    ),
    Case(
        alert="TidegatePathLockWait",
        why="a fifth of the update",
        series={**_update(), 'tidegate_path_lock_wait_seconds_total{path="nvme",operation="read"}': "0+1.6x400"},
    ),
    Case(
        alert="TidegatePathNearlyFull",
        why="5 % are left",
        series={_FREE: "5e7x400", _CAPACITY: "1e9x400"},
        labels=PLACE,
        summary="llama on host-1: path nvme has 5% of its space left",
    ),
    Case(
        alert="TidegatePathNearlyFull",
        why="nothing at all is left",
        series={_FREE: "0x400", _CAPACITY: "1e9x400"},
        labels=PLACE,
        summary="llama on host-1: path nvme has 0% of its space left",
    ),
    Case(
        alert="TidegatePathNearlyFull",
        why="a fifth is left",
        series={_FREE: "2e8x400", _CAPACITY: "1e9x400"},
    ),
    Case(
        alert="TidegatePathNearlyFull",
        why="the path is retired: nothing of it is free, and nobody uses it",
        series={_FREE: "0x400", _CAPACITY: "1e9x400", 'tidegate_path_retired{path="nvme"}': "1x400"},
    ),
    Case(
        alert="TidegatePathRetired",
        why="its directory is gone",
        series={'tidegate_path_retired{path="nvme"}': "0x20 1x400"},
        labels=PLACE,
        summary="llama on host-1: ranks that have retired path nvme: 1",
    ),
    Case(
        alert="TidegatePathRetired",
        why="no path failed",
        series={'tidegate_path_retired{path="nvme"}': "0x400"},
    ),
    Case(
        alert="TidegatePathErrors",
        why="one write failed seven minutes ago",
        series={'tidegate_path_errors_total{path="nvme",operation="write"}': "0x20 1x400"},
        labels={**PLACE, "operation": "write"},
        summary="llama on host-1: failed writes of path nvme in 10 minutes: 1",
    ),
    Case(
        alert="TidegatePathErrors",
        why="an error of an hour ago",
        series={'tidegate_path_errors_total{path="nvme",operation="write"}': "0x8 1x400"},
        at="30m",
    ),
    Case(
        alert="TidegateSsdWear",
        why="two ranks write more together than the path's settings allow",
        series={_WRITTEN: "3e12x400", f'{_LIMIT}{{path="nvme"}}': "4e12x400"},
        at="32m",
        second_rank=True,
        labels=PLACE,
        summary="llama on host-1: 6TB a day are written to path nvme",
    ),
    Case(
        alert="TidegateSsdWear",
        why="one of them alone does not",
        series={_WRITTEN: "3e12x400", f'{_LIMIT}{{path="nvme"}}': "4e12x400"},
        at="32m",
    ),
    Case(
        alert="TidegateSsdWear",
        why="25 TB a day where the settings say nothing",
        series={_WRITTEN: "25e12x400", _LIMIT: "_x400"},
        at="32m",
        labels=PLACE,
        summary="llama on host-1: 25TB a day are written to path nvme",
    ),
    Case(
        alert="TidegateSsdWear",
        why="15 TB a day where the settings say nothing",
        series={_WRITTEN: "15e12x400", _LIMIT: "_x400"},
        at="32m",
    ),
    # ---- memory
    Case(
        alert="TidegateDeviceMemoryLow",
        why="the peak of the backward leaves 3 %",
        series={
            'tidegate_device_memory_peak_bytes{phase="backward"}': "97e9x400",
            "tidegate_device_memory_capacity_bytes": "100e9x400",
        },
        labels=RANK,
        summary="llama rank 0: 3% of the device's memory is left at the peak of a step",
    ),
    Case(
        alert="TidegateDeviceMemoryLow",
        why="the peak of the backward leaves 10 %",
        series={
            'tidegate_device_memory_peak_bytes{phase="backward"}': "90e9x400",
            "tidegate_device_memory_capacity_bytes": "100e9x400",
        },
    ),
    # ---- control
    Case(
        alert="TidegateGenerationNotAcknowledged",
        why="the rank stays at generation 2 while the daemon wants 4",
        series={"tidegate_generation": "2x400", "tidegate_desired_generation": "2x8 4x400"},
        labels=RANK,
        summary="llama rank 0: generations behind the knobs that were set: 2",
    ),
    Case(
        alert="TidegateGenerationNotAcknowledged",
        why="it takes two minutes, as long as a step",
        series={"tidegate_generation": "2x16 4x400", "tidegate_desired_generation": "2x8 4x400"},
        at="3m30s",
    ),
    Case(
        alert="TidegateGenerationNotAcknowledged",
        why="a rank that has gone has nothing to acknowledge",
        series={"tidegate_generation": "2x8 _x400", "tidegate_desired_generation": "2x8 4x400"},
    ),
    Case(
        alert="TidegateAgentLost",
        why="one of two ranks is lost",
        series={'tidegate_agents{state="live"}': "2x20 1x400", 'tidegate_agents{state="lost"}': "0x20 1x400"},
        labels={"run": "llama"},
        summary="llama: ranks that say nothing any more and have not said goodbye: 1",
    ),
    Case(
        alert="TidegateAgentLost",
        why="all are lost, and no rank has a series of its own any more",
        series={
            'tidegate_agents{state="live"}': "2x20 0x400",
            'tidegate_agents{state="lost"}': "0x20 2x400",
            '{job="tidegate-agent"}': "_x400",
        },
        labels={"run": "llama"},
        summary="llama: ranks that say nothing any more and have not said goodbye: 2",
    ),
    Case(
        alert="TidegateAgentLost",
        why="a rank that has said goodbye is finished",
        series={'tidegate_agents{state="live"}': "2x20 1x400", 'tidegate_agents{state="finished"}': "0x20 1x400"},
    ),
    Case(
        alert="TidegateAgentLost",
        why="a run that was lost before anybody watched is no news",
        series={
            'tidegate_agents{state="live"}': "0x400",
            'tidegate_agents{state="stale"}': "0x400",
            'tidegate_agents{state="lost"}': "2x400",
        },
    ),
    Case(
        alert="TidegateAllAgentsLost",
        why="both are lost, and no rank has a series of its own any more",
        series={
            'tidegate_agents{state="live"}': "2x20 0x400",
            'tidegate_agents{state="stale"}': "0x400",
            'tidegate_agents{state="lost"}': "0x20 2x400",
            'tidegate_run_broken{state="lost"}': "0x20 1x400",
            '{job="tidegate-agent"}': "_x400",
        },
        labels={"run": "llama"},
        summary="llama: no rank was left, and no step has ended since; now lost are 2 of 2",
    ),
    Case(
        alert="TidegateAllAgentsLost",
        why="they were started again and are live, but have not done a step",
        series={
            'tidegate_agents{state="live"}': "2x20 0x8 2x400",
            'tidegate_agents{state="stale"}': "0x400",
            'tidegate_agents{state="lost"}': "0x20 2x8 0x400",
            'tidegate_run_broken{state="lost"}': "0x20 1x400",
        },
        labels={"run": "llama"},
        summary="llama: no rank was left, and no step has ended since; now lost are 0 of 2",
    ),
    Case(
        alert="TidegateAllAgentsLost",
        why="they were started again, and a step has ended",
        series={
            'tidegate_agents{state="live"}': "2x20 0x8 2x400",
            'tidegate_agents{state="lost"}': "0x20 2x8 0x400",
            'tidegate_run_broken{state="lost"}': "0x20 1x10 0x400",
        },
    ),
    Case(
        alert="TidegateAllAgentsLost",
        why="one of two is still there",
        series={'tidegate_agents{state="live"}': "2x20 1x400", 'tidegate_agents{state="lost"}': "0x20 1x400"},
    ),
    Case(
        alert="TidegateRunFailed",
        why="an exception has ended a rank",
        series={'tidegate_agents{state="failed"}': "0x20 1x400", 'tidegate_run_broken{state="failed"}': "0x20 stale"},
        beside={'tidegate_run_broken{state="failed",error="StateLost"}': "_x20 1x400"},
        labels={"run": "llama"},
        summary="llama: the training has failed with StateLost",
    ),
    Case(
        alert="TidegateRunFailed",
        why="it was started again, and has failed before its first step",
        series={'tidegate_agents{state="failed"}': "0x20 1x400", 'tidegate_run_broken{state="failed"}': "0x20 stale"},
        beside={
            'tidegate_run_broken{state="failed",error="StateLost"}': "_x20 1x16 stale",
            'tidegate_run_broken{state="failed",error="KeyError"}': "_x37 1x400",
        },
        at="9m30s",
        labels={"run": "llama"},
        summary="llama: the training has failed with KeyError",
    ),
    Case(
        alert="TidegateRunFailed",
        why="the launcher has started it again at once",
        series={'tidegate_run_broken{state="failed"}': "0x20 stale _x1 0x400"},
        beside={'tidegate_run_broken{state="failed",error="OutOfMemoryError"}': "_x20 1x1 stale"},
        at="5m30s",
    ),
    Case(
        alert="TidegateRunFailed",
        why="a rank that has said goodbye is finished",
        series={'tidegate_agents{state="live"}': "2x20 1x400", 'tidegate_agents{state="finished"}': "0x20 1x400"},
    ),
    Case(
        alert="TidegateAgentRefused",
        why="two hosts have a token that the daemon does not know",
        series={'tidegate_refused_agents{reason="wrong-token"}': "0x20 2x400"},
        labels={"reason": "wrong-token"},
        summary="Hosts with agents that the daemon refuses (wrong-token): 2",
    ),
    Case(
        alert="TidegateAgentRefused",
        why="a job was started with a wrong token, and again with the right one",
        series={'tidegate_refused_agents{reason="no-token"}': "0x20 1x4 0x400"},
        at="6m",
    ),
    Case(
        alert="TidegateRankNotScraped",
        why="its address is one that Prometheus does not reach",
        series={'up{job="tidegate-agent"}': "0x400"},
        labels=RANK,
        summary="llama rank 0 on host-1: Prometheus has got no metrics from it for 5 minutes",
    ),
    Case(
        alert="TidegateRankNotScraped",
        why="the rank has died, and the daemon lists it for half a minute more",
        series={'up{job="tidegate-agent"}': "1x20 0x1 stale"},
    ),
    Case(
        alert="TidegateRankNotScraped",
        why="four minutes without an answer, on a busy host",
        series={'up{job="tidegate-agent"}': "1x20 0x15 1x400"},
        at="9m15s",
    ),
    Case(
        alert="TidegateDaemonDown",
        why="its target does not answer",
        series={'up{job="tidegate-daemon"}': "1x20 0x400", "tidegate_agents": "_x400"},
        labels={"job": "tidegate-daemon", "instance": "DAEMON"},
        summary="The Tidegate daemon at DAEMON has not answered Prometheus for a minute",
    ),
    Case(
        alert="TidegateDaemonDown",
        why="Prometheus has no such target at all",
        series={'up{job="tidegate-daemon"}': "_x400"},
        labels={"job": "tidegate-daemon"},
        summary="The Tidegate daemon has not answered Prometheus for a minute",
    ),
    Case(
        alert="TidegateDaemonDown",
        why="one scrape that failed",
        series={'up{job="tidegate-daemon"}': "1x20 0 1x400"},
        at="5m15s",
    ),
)

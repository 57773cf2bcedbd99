"""The claims of the benches whose results are lines of bench/results: what each promises, and where its figures are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from reporting import plots
from reporting.chart import Level
from reporting.figures import (
    COUNT,
    FINE_PERCENT,
    MILLISECONDS,
    PERCENT,
    RATIO,
    SECONDS,
    THOUSANDTHS,
    UNSCALED_MILLISECONDS,
    Bound,
    Figure,
)  # fmt: skip
from reporting.lines import Line
from reporting.plots import Plot


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of one bench: one section of the results page.

    statement: the claim with its bound. spread: what the brackets in the table mean. kind: returns the kind of run of a
    line, which the page writes after the hardware; None leaves the line out. device: emulated or real, if it is the
    same for all lines; otherwise each line has it. plot: draws all hardware in one plot, or one plot per hardware if
    `plot_each`. plot_caption: what the plot shows.
    """

    script: str
    statement: str
    figures: tuple[Figure, ...]
    spread: str = "the quartiles"
    kind: Callable[[Line], str | None] = lambda line: ""
    device: str = ""
    plot: Plot | None = None
    plot_caption: str = ""
    plot_each: bool = False
    notes: tuple[str, ...] = ()
    """Sentences below the table, for those who read it."""

    @property
    def prefix(self) -> str:
        return self.script.removesuffix(".py").replace("_", "-")

    def device_of(self, line: Line) -> str:
        if self.device:
            return self.device
        device = str(line["device"])
        return device.replace("emulated", "emulated GPU") if "emulated" in device else f"real: {device}"


def _at_least_five_minutes(line: Line) -> str | None:
    return "5 minutes" if line["seconds"] >= 300 else "less than 5 minutes"


def _subgroups(line: Line) -> str:
    """The size of a subgroup, as a part of a layer."""
    return f"subgroups of 1/{line.get('subgroups_per_layer', 2)} layer"


def _half_an_hour(line: Line) -> str | None:
    return "30 minutes" if line["minutes"] >= 30 else "less than 30 minutes"


def _present_form(line: Line) -> str | None:
    if "emulated_rates" not in line:
        return None
    return "gradients released" if any(row.get("gradients") == "release" for row in line["table"]) else ""


CPU_UPDATE: Final = Claim(
    script="cpu_update.py",
    statement="The update on the CPU is as fast as memory allows, and faster than those of DeepSpeed and torch. The "
    "bounds: at least the speed of a kernel that reads and writes the same memory without arithmetic, and more than "
    "1.00 times the speed of each of the two.",
    device="real CPU",
    figures=(
        Figure("times as fast as DeepSpeed", "spread.ratio_vs_deepspeed", bound=Bound("above", 1)),
        Figure(
            "the same without DeepSpeed's upcast", "spread.ratio_vs_deepspeed_without_upcast", bound=Bound("above", 1)
        ),
        Figure("times as fast as torch", "spread.ratio_vs_torch_fused", bound=Bound("above", 1)),
        Figure(
            "speed relative to the kernel without arithmetic", "spread.share_of_memory_bandwidth",
            bound=Bound("at least", 1),
        ),
    ),
    plot=plots.over_runs(
        {"DeepSpeed": "spread.ratio_vs_deepspeed", "torch": "spread.ratio_vs_torch_fused"},
        "times as fast as", RATIO, [Level("bound: equal", 1)],
    ),
    plot_caption="how many times as fast as DeepSpeed and torch the update was in each committed run",
)  # fmt: skip


OVERHEAD: Final = Claim(
    script="overhead.py",
    statement="Telemetry and control of a training run cost less than 0.5 % of the time of its steps.",
    spread="least and most of the repeats; of the longer step, the 95 % interval",
    figures=(
        Figure("CPU time of all parts, share of a step", "overhead_ratio", FINE_PERCENT, Bound("below", 0.005)),
        Figure("a step is longer by", "paired_ratio", FINE_PERCENT),
        Figure("step", "step_seconds", SECONDS),
    ),
    plot=plots.over_runs(
        {"CPU time of all parts": "overhead_ratio"}, "CPU time of all parts, % of a step", PERCENT,
        [Level("bound: 0.5 %", 0.005)],
    ),
    plot_caption="the share of a step in each committed run",
    notes=(
        "The cost is near its bound. The same code is within it on one day and over it on another.",
        "*A step is longer by* compares steps with and without telemetry. Its interval is wide, so it can only "
        "contradict the claim.",
    ),
)  # fmt: skip

SCRAPE: Final = Claim(
    script="scrape.py",
    statement="A scrape of a rank with four storage paths takes less than 10 ms while the rank rests, and gives at "
    "most 600 series.",
    device="emulated GPU",
    spread="not shown",
    figures=(
        Figure("at rest, median", "at_rest.milliseconds.median", UNSCALED_MILLISECONDS, Bound("below", 10)),
        Figure("at rest, 95th percentile", "at_rest.milliseconds.p95", UNSCALED_MILLISECONDS),
        Figure("in training, median", "in_training.milliseconds.median", UNSCALED_MILLISECONDS),
        Figure("in training, 95th percentile", "in_training.milliseconds.p95", UNSCALED_MILLISECONDS),
        Figure("series", "series", COUNT, Bound("at most", 600)),
    ),
    notes=("In training a scrape waits for a core and for the Python interpreter. There is no bound for that wait.",),
)

TIERED_UPDATE: Final = Claim(
    script="tiered_update.py",
    statement="With state on one disk and the same host memory, backward and update are at least 1.7 times as fast as "
    "DeepSpeed's. The goal is 2.5 times.",
    figures=(
        Figure(
            "times as fast as DeepSpeed", "spread.ratio_vs_deepspeed",
            bound=Bound("at least", 1.7), goal=Bound("at least", 2.5),
        ),
        Figure("whole iteration", "spread.iteration_ratio"),
        Figure(
            "disk throughput in the update, divided by fio's", "spread.share_of_disk_bandwidth", THOUSANDTHS,
            goal=Bound("at least", 0.9),
        ),
        Figure(
            "disk throughput in the update, divided by our own direct I/O's", "spread.share_of_io_layer", THOUSANDTHS,
            goal=Bound("at least", 0.95),
        ),
        Figure("our own direct I/O's throughput, divided by fio's", "spread.io_layer_share_of_fio", THOUSANDTHS),
        Figure("the same without checksums", "spread.without_checksums_share_of_fio", THOUSANDTHS),
        Figure("that in 8 MiB of memory, as fio has", "spread.in_little_memory_share_of_fio", THOUSANDTHS),
        Figure("share of the update in which a fetch or a flush is in progress", "spread.disk_busy", THOUSANDTHS),
        Figure("overlap of fetch, update and flush", "spread.overlap"),
        Figure(
            "how much lower it is than in the simulator", "spread.overlap_behind_simulated",
            goal=Bound("at most", 0.02),
        ),
        Figure(
            "bf16: disk throughput, divided by fio's", "bf16.spread.share_of_disk_bandwidth", THOUSANDTHS,
            goal=Bound("at least", 0.9),
        ),
    ),
    plot=plots.over_runs(
        {"backward and update": "spread.ratio_vs_deepspeed"}, "times as fast as DeepSpeed", RATIO,
        [Level("bound: 1.7", 1.7), Level("goal: 2.5", 2.5), Level("both at the disk's speed, 1/2 layer: 2.27", 2.273)],
    ),
    plot_caption="how many times as fast as DeepSpeed backward and update were in each committed run",
    kind=_subgroups,
    notes=(
        "DeepSpeed moves more bytes than Tidegate: 2.27 times as many with subgroups of half a layer, 2.44 with "
        "quarters and 2.53 with eighths of a layer, because smaller slots leave more memory to the cache (2.41 with "
        "quarters and 2.47 with eighths in an earlier run, which had four and six host slots instead of three; 2.22, "
        "2.27 and 2.33 before that, when cached subgroups had mirrors of their weights, too). That is the ratio if "
        "both run at the speed of the disk. It can be higher where DeepSpeed does not reach this speed, and because "
        "some of Tidegate's flushes go on beside the next forward.",
        "In runs with a figure for the simulator, each round makes two iterations and measures the second. fio and our "
        "direct I/O have the share of reads of Tidegate's update; before, they read as much as they wrote, and no "
        "flush was deferred. A deferred flush overlaps with no update, so that the overlap is lower.",
        "In fio, no CPU core touches the transferred data. An update reads and writes all of it, and is not expected "
        "to be faster. Our direct I/O alone reached 0.81 to 0.97 of fio, whatever the size of subgroups; without "
        "checksums, so that no CPU core touches the data either, 0.83 to 1.05.",
        "Results on this virtual machine differ from run to run. Before flushes were deferred, Tidegate was 2.54, 2.40 "
        "and 1.93 times as fast in three runs with halves of a layer. Its backward took 0.18 s, 0.16 s and 0.28 s.",
        "The first two runs had no limit on the memory of a process.",
    ),
)  # fmt: skip

ITERATION: Final = Claim(
    script="iteration_vs_deepspeed.py",
    statement="An iteration of DeepSpeed ZeRO-3 is faster with Tidegate in it than with DeepSpeed's own offload, to "
    "NVMe and to host memory. The bound is more than 1.00 times as fast.",
    figures=(
        Figure("NVMe: iteration", "spread.iteration_ratio_nvme", bound=Bound("above", 1)),
        Figure("NVMe: update", "spread.update_ratio_nvme"),
        Figure("host memory: iteration", "spread.iteration_ratio_cpu", bound=Bound("above", 1)),
        Figure("host memory: update", "spread.update_ratio_cpu"),
    ),
    plot=plots.over_runs(
        {"NVMe": "spread.iteration_ratio_nvme", "host memory": "spread.iteration_ratio_cpu"},
        "iteration: times as fast as DeepSpeed", RATIO, [Level("bound: equal", 1)],
    ),
    plot_caption="how many times as fast as DeepSpeed an iteration was in each committed run",
    kind=_subgroups,
    notes=(
        "Both sum the squares of gradients as they arrive. In older runs Tidegate did so in its update.",
        "With storage, some of Tidegate's flushes go on beside the next forward. So each round makes two iterations, "
        "and measures the second: it has the flushes of the one before it. In older runs no flush was deferred.",
    ),
)  # fmt: skip

MULTIPATH: Final = Claim(
    script="multipath.py",
    statement="Several storage paths together have at least 0.95 of the sum of their speeds. The tier split is at most "
    "one subgroup off the best one. After a change of speed the update is within 10 % of the best after at most 5 "
    "steps.",
    figures=tuple(
        figure
        for count in ("2", "3")
        for figure in (
            Figure(
                f"{count} paths: speed, divided by the sum of their speeds",
                f"{count}_paths.constant.spread.aggregate_share",
                bound=Bound("at least", 0.95),
            ),
            Figure(
                f"{count} paths: subgroups off the best split",
                f"{count}_paths.constant.split_off_by",
                COUNT,
                Bound("at most", 1),
            ),
            Figure(
                f"{count} paths: steps to adapt", f"{count}_paths.slowed.steps_to_adapt", COUNT, Bound("at most", 5)
            ),
        )
    ),
    plot=plots.adaptation,
    plot_caption="the update time in each step after the fastest path became four times slower (newest run)",
    notes=(
        "The kernel limits the paths: 200, 100 and 50 MB/s each way.",
        "The first run did not measure the change of speed. In the second run, `steps_to_adapt` was a stricter figure.",
    ),
)  # fmt: skip

ABLATION: Final = Claim(
    script="ablation_tiers.py",
    statement="Each feature of the storage tiers makes the update shorter: without it, the update takes more than 1.00 "
    "times as long.",
    figures=tuple(
        Figure(name, f"variants.{key}.slower_by", bound=Bound("above", 1)) for key, name in plots.ABLATIONS.items()
    ),
    plot=plots.ablation,
    plot_caption="how much longer the update takes without each feature (newest run)",
    notes=(
        "Weights with 16 bits need a remainder beside them: 18.3 bytes a parameter are moved, and 14.7 with fp32.",
        "This virtual disk serves several processes at once better than one. On such a disk exclusive access does not "
        "pay.",
    ),
)

DAEMON_LOAD: Final = Claim(
    script="daemon_load.py",
    statement="One daemon serves 512 ranks that report every second. It answers 99 of 100 reports within 100 ms. A "
    "change of knobs reaches 99 of 100 ranks within 1 s. Its memory grows by less than 5 % in 5 minutes.",
    device="real; simulated ranks",
    kind=_at_least_five_minutes,
    spread="not shown",
    figures=(
        Figure("report, median", "report_p50_seconds", MILLISECONDS),
        Figure("report, 99th percentile", "report_p99_seconds", MILLISECONDS, Bound("below", 0.1)),
        Figure("change, median", "patch_p50_seconds", SECONDS),
        Figure("change, 99th percentile", "patch_p99_seconds", SECONDS, Bound("below", 1)),
        Figure("growth of memory", "rss_slope", PERCENT, Bound("below", 0.05)),
    ),
    notes=(
        "The claim is about a quiet machine. Most of the shorter runs had other programs beside them, so that the "
        "daemon waited for a core.",
    ),
)

INTERLEAVING: Final = Claim(
    script="interleaving.py",
    statement="The stride that `auto` finds is as fast as the best fixed one: it takes at most 1.00 of its time. With "
    "the same residents, TwinFlow's static split takes more than 1.00 times as long.",
    spread="the 95 % intervals",
    figures=(
        Figure("time of auto, divided by the best fixed stride's", "auto_by_best_fixed", bound=Bound("at most", 1)),
        Figure("time of TwinFlow, divided by that of auto", "twinflow_by_auto_same_residents", bound=Bound("above", 1)),
        Figure("auto: times as fast as all on the CPU", "speedup_over_cpu.auto"),
    ),
    plot=plots.interleaving,
    plot_caption="the update time by stride (newest run)",
    notes=(
        "All lanes are slowed down to stated rates, so these figures say nothing about a GPU.",
        "`auto` may choose a stride between the whole numbers, such as 2.25. So it can be faster than each fixed one.",
    ),
)

TUNER: Final = Claim(
    script="tuner.py",
    statement="The tuner starts at the slowest stride. 20 steps later an update takes at most 5 % longer than with the "
    "best stride, and again after the link became half as fast. If the speeds vary by ±20 %, the tuner changes the "
    "stride at most once in 50 steps. The bench runs in real time.",
    spread="not measured",
    figures=(
        Figure(
            "20 steps after the slowest stride: over the best by",
            "from_worst.off_best",
            PERCENT,
            Bound("at most", 0.05),
        ),
        Figure("near the best from step", "from_worst.near_from_step", COUNT),
        Figure("after the link halved: over the best by", "after_halving.off_best", PERCENT, Bound("at most", 0.05)),
        Figure("changes in the noisy steps", "with_noise.changes", COUNT, Bound("at most", 4)),
        Figure("noisy steps", "with_noise.steps", COUNT),
        Figure("after the noisy steps: over the best by", "with_noise.off_best", PERCENT),
    ),
    plot=plots.strides_of_the_tuner,
    plot_caption="the update time of each fixed stride, which the tuner does not know (newest run)",
    notes=(
        "All lanes are slowed down to stated rates, so these figures say nothing about a GPU.",
        "The link has its whole speed again 40 steps before the noisy steps begin. There is no bound for how far the "
        "last stride is off the best one then.",
    ),
)

OBJECT_STORE: Final = Claim(
    script="object_store.py",
    statement="A path in an object store moves as many bytes a second as its client library does alone: at least 1.00 "
    "of its speed.",
    device="emulated GPU; server on the same cores",
    figures=(
        Figure("writes: speed, divided by the client library's", "share.write", bound=Bound("at least", 1)),
        Figure("reads: speed, divided by the client library's", "share.read", bound=Bound("at least", 1)),
        Figure("whole steps: speed, divided by the client library's", "share.step", bound=Bound("at least", 1)),
    ),
    notes=(
        "No real object store was measured. The server and both clients share two cores. The signature of each request "
        "over http takes about half of the CPU time of writes.",
    ),
)

PREDICTION: Final = Claim(
    script="prediction.py",
    statement="The time of an update under other knobs is predicted from one calibration. The median error is at most "
    "10 %, and 95 of 100 errors are at most 25 %. The configuration with the best prediction is at most 5 % slower "
    "than the fastest one.",
    device="emulated GPU; real CPU and disk",
    kind=_present_form,
    spread="not measured",
    figures=(
        Figure("median error", "median_abs_error", PERCENT, Bound("at most", 0.10)),
        Figure("95 of 100 errors", "p95_abs_error", PERCENT, Bound("at most", 0.25)),
        Figure("predicted best: slower than the fastest by", "pick_regret", PERCENT, Bound("at most", 0.05)),
        Figure("median error if the mean is predicted", "mean_median_abs_error", PERCENT),
        Figure("median error of the papers' equations", "equation_median_abs_error", PERCENT),
        Figure("median error, emulated lanes", "emulated_lanes.median_abs_error", PERCENT),
    ),
    plot=plots.predictions,
    plot_caption="predicted and measured update times (newest run)",
    plot_each=True,
    notes=(
        "Older lines of the file have no `emulated_rates`. They are of another emulated device and are not counted. "
        "From line 20 of the file on, rounds of the calibration and of the measurement take turns. Before, the "
        "calibration came first.",
    ),
)

SOAK: Final = Claim(
    script="soak.py",
    statement="The live view can stay open with 8 ranks. Memory of its server and of the browser grows by less than 5 "
    "%, and 95 of 100 refreshes take less than 0.5 s.",
    device="real; simulated ranks",
    kind=_half_an_hour,
    spread="not shown",
    figures=(
        Figure("server", "server_slope", PERCENT, Bound("below", 0.05)),
        Figure("browser", "browser_slope", PERCENT, Bound("below", 0.05)),
        Figure("JavaScript heap", "heap_slope", PERCENT, Bound("below", 0.05)),
        Figure("refresh, median", "refresh_median_seconds", SECONDS),
        Figure("refresh, 95th percentile", "refresh_p95_seconds", SECONDS, Bound("below", 0.5)),
    ),
    plot=plots.memory,
    plot_caption="memory over time (newest run of the first row)",
    notes=("The shorter runs had other programs beside them.",),
)

FIRST_PAINT: Final = Claim(
    script="first_paint.py",
    statement="With 100 runs the live view shows its first cards in less than 2 s.",
    device="real; simulated runs",
    spread="least and most of ten pages",
    figures=(
        Figure("first card", "first_card_seconds", SECONDS, Bound("below", 2)),
        Figure("first paint", "paint_seconds", SECONDS),
        Figure("whole page", "all_seconds", SECONDS),
        Figure("first card after the server's start", "after_start.first_card_seconds", SECONDS),
    ),
)

DISPATCH: Final = Claim(
    script="dispatch.py",
    statement="To hand an op to its lane and to note its end takes at most 10 µs of wall time.",
    device="real; ops that do nothing",
    spread="the quartiles of three turns",
    figures=(
        Figure("µs an op, with ops that may begin on each lane", "now.free", bound=Bound("at most", 10.0)),
        Figure("µs an op, each after one of another lane", "now.chain"),
        Figure("µs between two threads of two processes", "now.handover"),
        Figure("a loop in Python beside it is slower by", "now.loop_slowed_by", PERCENT, Bound("at most", 0.02)),
        Figure("µs an op in Python", "now.free_in_python"),
        Figure("µs an op in Python, each after one of another lane", "now.chain_in_python"),
        Figure("a loop in Python is slower by, ops in Python", "now.loop_slowed_by_python", PERCENT),
    ),
    notes=(
        "Ops are tasks, which lanes run without the interpreter: updates on the CPU, transfers from and to files, and "
        "copies of the emulated device. Ops *in Python* are the others: copies of kept gradients before the step, the "
        "gradient norm, and everything on a GPU.",
        "With two cores, the loop has a core of its own only while the lanes need no more than the other one.",
    ),
)

THREAD_PLACEMENT: Final = Claim(
    script="thread_placement.py",
    statement="An update on the CPU takes hardly longer than with lanes that are bound to cores by hand: with these it "
    "takes at least 0.95 of the time.",
    device="emulated GPU",
    figures=(
        Figure("without paths", "kinds.without_paths.share_of_bound", bound=Bound("at least", 0.95)),
        Figure("all state in a path's host cache", "kinds.with_a_path.share_of_bound", bound=Bound("at least", 0.95)),
        Figure("update without paths, ms", "kinds.without_paths.update_milliseconds.free", UNSCALED_MILLISECONDS),
        Figure("update with a path, ms", "kinds.with_a_path.update_milliseconds.free", UNSCALED_MILLISECONDS),
    ),
    notes=("The kernel of this virtual machine wakes threads on cores that are busy, although others are idle.",),
)  # fmt: skip

CLAIMS: Final = (
    CPU_UPDATE, THREAD_PLACEMENT, OVERHEAD, SCRAPE, TIERED_UPDATE, ITERATION, MULTIPATH, ABLATION, DAEMON_LOAD,
    INTERLEAVING, TUNER, OBJECT_STORE, PREDICTION, DISPATCH, SOAK, FIRST_PAINT,
)  # fmt: skip
"""In the order of the page."""

"""The dashboard "Run": time per phase of one run, causes of stalls in its update, and the effect of changes of
knobs."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tidegate.grafana.dashboards.frame import RANK, frame, section, selectors
from tidegate.grafana.dashboards.panels import CEILING, PanelOptions, Query, heat, lines, number

_STEPS = f"sum(rate(tidegate_steps_total{{{RANK}}}[$window]))"
_UPDATE = f'sum(rate(tidegate_phase_seconds_sum{{{RANK},phase="update"}}[$window]))'
_STALLS = f'sum by (cause) (rate(tidegate_stall_seconds_total{{{RANK},phase="update"}}[$window]))'


def _rate(metric: str, by: str, more: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{RANK}{more}}}[$window]))"


def _a_step(metric: str, by: str, more: str = "") -> str:
    """PromQL for the mean increase of `metric` in one step of one rank. by: labels that the result keeps. more:
    additional label matchers, beginning with a comma."""
    return f"{_rate(metric, by, more)} / on () group_left () ({_STEPS} > 0)"


def dashboard() -> Dashboard:
    made = frame("run", "Tidegate / Run", "Where the time of one run goes, and what turning its knobs did.")
    selectors(made, one_run=True)
    for add in (_now, _phases, _stalls, _knobs, _memory, _training):
        add(made)
    return made


def _now(made: Dashboard) -> None:
    section(
        made,
        "Now",
        number(
            PanelOptions(title="Last step", unit="s", width=3, height=4,
                 why="How long ago the rank that is furthest behind ended a step."),
            Query(f"max(time() - tidegate_step_timestamp_seconds{{{RANK}}})", "age"),
            limits=((300, "orange"), (900, "red")), decimals=0,
        ),
        number(
            PanelOptions(title="Seconds a step", unit="s", width=3, height=4,
                 why="Wall time of a step, mean of the ranks."),
            Query(f"sum(rate(tidegate_phase_seconds_sum{{{RANK}}}[$window])) / ({_STEPS} > 0)", "step"),
            spark=True,
        ),
        number(
            PanelOptions(title="Update's share", unit="percentunit", width=3, height=4,
                 why="Of the step. It is the part that Tidegate can do something about."),
            Query(f"{_UPDATE} / (sum(rate(tidegate_phase_seconds_sum{{{RANK}}}[$window])) > 0)", "update"),
            limits=((0.3, "yellow"), (0.5, "orange")), spark=True,
        ),
        number(
            PanelOptions(title="Verdict: the update waits most for", unit="percentunit", width=6, height=4,
                 why="The largest cause of stalls and its share of the update. h2d and d2h: the link; a path's name: "
                 "storage; lock: another process of the node; collective: another rank; dispatch: threads of the "
                 "update that did not run. Runbook: TidegateUpdateStalled."),
            Query(f"topk(1, {_STALLS} / on () group_left () ({_UPDATE} > 0))", "{{cause}}"),
            limits=((0.1, "yellow"), (0.3, "orange"), (0.6, "red")), named=True,
        ),
        number(
            PanelOptions(title="Prediction off by", unit="percentunit", width=3, height=4,
                 why="|predicted - measured| / measured of the last update. While it is large, neither previews of "
                 "knobs nor the tuner are to be trusted. Runbook: TidegatePredictionDrift."),
            Query(f'max(tidegate_prediction_error_ratio{{{RANK},phase="update"}})', "error"),
            limits=((0.25, "orange"),),
        ),
        number(
            PanelOptions(title="Generation", unit="none", width=3, height=4,
                 why="Of the knobs that all ranks run with. 0 are the start-up settings."),
            Query(f"min(tidegate_generation{{{RANK}}})", "generation"), decimals=0,
        ),
        number(
            PanelOptions(title="Steps", unit="none", width=3, height=4,
                 why="Number of the last step. A run that goes on from a checkpoint counts on."),
            Query(f"max(tidegate_step{{{RANK}}})", "steps"), decimals=0,
        ),
    )  # fmt: skip


def _phases(made: Dashboard) -> None:
    section(
        made,
        "Phases",
        lines(
            PanelOptions(title="Wall time of a step, by phase", unit="s", width=8,
                 why="The phases on top of each other are the step. `other` is what lies between: data, evaluation, "
                 "logging."),
            Query(_a_step("tidegate_phase_seconds_sum", "phase"), "{{phase}}"), stacked=True,
        ),
        lines(
            PanelOptions(title="Time that training is blocked, by phase", unit="s", width=8,
                 why="What the user pays in a step: seconds in step() and in hooks. What overlaps with training is not "
                 "in it."),
            Query(_a_step("tidegate_exposed_seconds_total", "phase"), "{{phase}}"), stacked=True,
        ),
        heat(
            PanelOptions(title="How long updates take", unit="s", width=8,
                 why="One narrow band is a steady run. Two bands are two kinds of step, or two kinds of rank; a "
                 "smear is a machine that is shared."),
            f'sum by (le) (increase(tidegate_phase_seconds_bucket{{{RANK},phase="update"}}[$__rate_interval]))',
        ),
        lines(
            PanelOptions(title="CPU time of a step, by phase", unit="s", width=8,
                 why="CPU seconds of the training process in a step. More than wall time times cores cannot be: then "
                 "the cores are what limits."),
            Query(_a_step("tidegate_cpu_seconds_total", "phase"), "{{phase}}"), stacked=True,
        ),
        lines(
            PanelOptions(title="Update beyond step()", unit="s", width=8,
                 why="Seconds of a step in which an update went on after step() had returned, while the next forward "
                 "ran (overlap_forward). 0 without it."),
            Query(f"{_rate('tidegate_update_spill_seconds_total', 'rank')} / on (rank) "
                  f"({_rate('tidegate_steps_total', 'rank')} > 0)", "rank {{rank}}"),
        ),
        lines(
            PanelOptions(title="What watching costs", unit="percentunit", width=8,
                 why="CPU time of recorder, tuner, exporter and link as a share of wall time. The line is the budget: "
                 "half a percent."),
            Query(
                f"{_rate('tidegate_agent_overhead_seconds_total', 'part')} / on () group_left () "
                f"(sum(rate(tidegate_phase_seconds_sum{{{RANK}}}[$window])) > 0)", "{{part}}",
            ), stacked=True, limits=((0.005, "orange"),),
        ),
    )  # fmt: skip


def _stalls(made: Dashboard) -> None:
    section(
        made,
        "Verdict: what the update waits for, and whether we expected it",
        lines(
            PanelOptions(title="Stalls of the update, by cause", unit="percentunit", width=12, height=9,
                 why="Share of the update in which no parameter was being updated, by what it waited for. The line is "
                 "the limit of TidegateUpdateStalled for one cause. What is left to 100 % is work."),
            Query(f"{_STALLS} / on () group_left () ({_UPDATE} > 0)", "{{cause}}"),
            stacked=True, limits=((0.3, "orange"),), maximum=1,
        ),
        lines(
            PanelOptions(title="Update: predicted and measured", unit="s", width=6, height=9,
                 why="What the simulator expects of the plan that runs, and what it took. Measured well above "
                 "predicted: something outside of the plan is in the way."),
            Query(_a_step("tidegate_phase_seconds_sum", "phase", ',phase="update"'), "measured"),
            Query(f'avg(tidegate_predicted_phase_seconds{{{RANK},phase="update"}})', f"{CEILING}: predicted"),
        ),
        lines(
            PanelOptions(title="Prediction error", unit="percentunit", width=6, height=9,
                 why="|predicted - measured| / measured of each rank's last step, by phase; the line is the limit of "
                 "TidegatePredictionDrift for the update."),
            Query(f"tidegate_prediction_error_ratio{{{RANK}}}", "{{phase}}, rank {{rank}}"), limits=((0.25, "orange"),),
        ),
    )  # fmt: skip


def _knobs(made: Dashboard) -> None:
    section(
        made,
        "Knobs: blue marks are generations",
        lines(
            PanelOptions(title="Shares: effective and desired", unit="percentunit", width=8,
                 why="device_share is 1 / stride; alternate_order is 1 while the order alternates. A desired value is "
                 "absent while the knob is auto: the tuner has it."),
            Query(f'avg by (knob, state) (tidegate_knob{{{RANK},knob!="host_cache_bytes"}})', "{{knob}} {{state}}"),
            steps=True, maximum=1,
        ),
        lines(
            PanelOptions(title="Tier split: effective and desired", unit="percentunit", width=8,
                 why="Share of the stored subgroups that each path gets. Effective lags desired: state moves when it "
                 "is next flushed."),
            Query(f"avg by (path, state) (tidegate_tier_share{{{RANK}}})", "{{path}} {{state}}"),
            steps=True, maximum=1,
        ),
        lines(
            PanelOptions(title="Generation, by rank", unit="none", width=8,
                 why="All ranks change between the same two steps. A rank below the line runs with old knobs."),
            Query(f"tidegate_generation{{{RANK}}}", "rank {{rank}}"),
            Query('max by (run) (tidegate_desired_generation{run=~"$run"})', f"{CEILING}: desired"),
            steps=True,
        ),
        lines(
            PanelOptions(title="Subgroups, by where their state lives", unit="short", width=8,
                 why="Between updates. What lives on the device costs no transfer; what lives on a path costs two."),
            Query(f"sum by (residence) (tidegate_subgroups{{{RANK}}})", "{{residence}}"), stacked=True, steps=True,
        ),
        lines(
            PanelOptions(title="Parameters updated in a step, by processor", unit="short", width=8,
                 why="How CPU and device divide the work. The best stride lets both end together."),
            Query(_a_step("tidegate_update_params_total", "processor"), "{{processor}}"), stacked=True,
        ),
        lines(
            PanelOptions(title="Host cache: effective and desired", unit="bytes", width=8,
                 why="Host memory that holds state of storage between steps: every byte in it is not read and not "
                 "written."),
            Query(f'avg by (state) (tidegate_knob{{{RANK},knob="host_cache_bytes"}})', "{{state}}"), steps=True,
        ),
    )  # fmt: skip


def _memory(made: Dashboard) -> None:
    section(
        made,
        "Memory",
        lines(
            PanelOptions(title="Device memory, peak by phase", unit="bytes", width=12,
                 why="Highest use in the last such phase, of the rank that uses most. The dashed line is what there "
                 "is; raising static_ratio spends what is left below it. Runbook: TidegateDeviceMemoryLow."),
            Query(f"max by (phase) (tidegate_device_memory_peak_bytes{{{RANK}}})", "{{phase}}"),
            Query(f"min(tidegate_device_memory_capacity_bytes{{{RANK}}})", f"{CEILING}: capacity"),
        ),
        lines(
            PanelOptions(title="Host memory that Tidegate holds", unit="bytes", width=12,
                 why="Of all chosen ranks together: state, staging slots, gradients and the mirror of the weights."),
            Query(f"sum by (kind) (tidegate_host_memory_bytes{{{RANK}}})", "{{kind}}"), stacked=True,
        ),
    )  # fmt: skip


def _training(made: Dashboard) -> None:
    section(
        made,
        "Training",
        lines(
            PanelOptions(title="Loss", unit="none", width=6,
                 why="As told by optimizer.log(). Knobs never change it: results are exact, whatever the plan."),
            Query(f"avg(tidegate_loss{{{RANK}}})", "loss"), minimum=None,
        ),
        lines(
            PanelOptions(title="Gradient norm", unit="none", width=6, why="Before clipping. The same on all ranks."),
            Query(f"max(tidegate_grad_norm{{{RANK}}})", "norm"),
        ),
        lines(
            PanelOptions(title="Tokens a second", unit="short", width=6,
                 why="As told by optimizer.log(), all ranks together."),
            Query(f"sum(rate(tidegate_tokens_total{{{RANK}}}[$window]))", "tokens"),
        ),
        lines(
            PanelOptions(title="Steps skipped", unit="short", width=6,
                 why="Because of non-finite gradients. A few while a loss scale settles are normal; a row of them is "
                 "a run that diverges."),
            Query(f"max by (run) (increase(tidegate_skipped_steps_total{{{RANK}}}[$__rate_interval]))", "skipped"),
        ),
    )  # fmt: skip

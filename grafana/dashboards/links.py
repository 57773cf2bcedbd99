"""The dashboard "Links and tiers": speeds of PCIe and of each storage path compared with their ceilings, and the stalls
that they cause."""

from __future__ import annotations

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard

from tidegate.grafana.dashboards.frame import RANK, frame, section, selectors
from tidegate.grafana.dashboards.panels import CEILING, PanelOptions, Query, heat, lines

_PATH = f'{RANK},path=~"$path"'
_WALL = f"(sum(rate(tidegate_phase_seconds_sum{{{RANK}}}[$window])) > 0)"


def _rate(metric: str, by: str, selector: str = RANK) -> str:
    return f"sum by ({by}) (rate({metric}{{{selector}}}[$window]))"


def _busy_speed(bytes_total: str, busy_total: str, by: str, selector: str) -> str:
    """PromQL for the speed while busy, in bytes per second: bytes divided by busy seconds.

    by: labels that the result keeps. selector: label matchers of both metrics.
    """
    return f"{_rate(bytes_total, by, selector)} / ({_rate(busy_total, by, selector)} > 0)"


def _link_speed() -> str:
    """PromQL for the speed of the links while busy, by direction, summed over the ranks."""
    each = _busy_speed(
        "tidegate_link_bytes_total", "tidegate_link_busy_seconds_total", "direction, run, rank, host", RANK
    )
    return f"sum by (direction) ({each})"


def _path_speed(selector: str) -> str:
    """PromQL for the speed of the paths while busy, summed over the ranks that use a path at the same time: as many as
    its `lock_slots` say, or all without exclusive access. `selector`: label matchers."""
    place = "path, operation, run, host"
    each = _busy_speed("tidegate_path_bytes_total", "tidegate_path_busy_seconds_total", f"{place}, rank", selector)
    together = f"sum by ({place}) ({each})"
    slots = f"max by (path, run, host) (tidegate_path_lock_slots{{{RANK}}})"
    at_once = f"clamp_max({slots} / on (path, run, host) group_right () count by ({place}) ({each}), 1)"
    return f"sum by (path, operation) ({together} * on ({place}) {at_once} or {together})"


def dashboard() -> Dashboard:
    made = frame("links", "Tidegate / Links and tiers", "PCIe and storage paths against what they can do.")
    selectors(made, one_run=True, path=True)
    for add in (_stalls, _link, _paths, _heat, _trouble, _room):
        add(made)
    return made


def _stalls(made: Dashboard) -> None:
    section(
        made,
        "Who waits",
        lines(
            PanelOptions(title="Stalls in a step, by cause", unit="s", width=12,
                 why="All phases. A lane that never shows up here is not worth making faster, however slow it is "
                 "below."),
            Query(f"{_rate('tidegate_stall_seconds_total', 'cause')} / on () group_left () "
                  f"(sum(rate(tidegate_steps_total{{{RANK}}}[$window])) > 0)", "{{cause}}"),
            stacked=True,
        ),
        lines(
            PanelOptions(title="Share of the time in use", unit="percentunit", width=12,
                 why="A lane at 100 % is the limit of the step: only fewer bytes make it shorter. Mean of the ranks."),
            Query(f"{_rate('tidegate_link_busy_seconds_total', 'direction')} / on () group_left () {_WALL}",
                  "{{direction}}"),
            Query(f"{_rate('tidegate_path_busy_seconds_total', 'path, operation', _PATH)} "
                  f"/ on () group_left () {_WALL}", "{{path}}:{{operation}}"),
            maximum=1, limits=((0.9, "orange"),),
        ),
    )  # fmt: skip


def _link(made: Dashboard) -> None:
    section(
        made,
        "Link between host and device",
        lines(
            PanelOptions(title="Speed while busy, against its ceiling", unit="Bps", width=8,
                 why="All ranks together. Dashed: the best that large copies reached in this run. Far below it the "
                 "copies are small, or something else uses the link."),
            Query(_link_speed(), "{{direction}}"),
            Query(f"sum by (direction) (tidegate_link_ceiling_bytes_per_second{{{RANK}}})",
                  f"{CEILING} {{{{direction}}}}"),
        ),
        lines(
            PanelOptions(title="Bytes a second, by phase", unit="Bps", width=8,
                 why="When the link is used: gradients during backward, state and weights during the update."),
            Query(_rate("tidegate_link_bytes_total", "phase, direction"), "{{phase}} {{direction}}"), stacked=True,
        ),
        lines(
            PanelOptions(title="Bytes a second, by content", unit="Bps", width=8,
                 why="What crosses it: state is what stride and static_ratio decide."),
            Query(_rate("tidegate_link_bytes_total", "content, direction"), "{{content}} {{direction}}"), stacked=True,
        ),
    )  # fmt: skip


def _paths(made: Dashboard) -> None:
    section(
        made,
        "Storage paths",
        _speed_of_paths("read"),
        _speed_of_paths("write"),
        lines(
            PanelOptions(title="Bytes a second", unit="Bps", width=8,
                 why="What really moves, pauses included. tier_split should make all paths end together."),
            Query(_rate("tidegate_path_bytes_total", "path, operation", _PATH), "{{path}}:{{operation}}"), stacked=True,
        ),
    )  # fmt: skip


def _speed_of_paths(operation: str) -> timeseries.Panel:
    chosen = f'{_PATH},operation="{operation}"'
    return lines(
        PanelOptions(title=f"{operation.capitalize()} speed while busy, against its ceiling", unit="Bps", width=8,
             why="Ranks that use the path at the same time, together. Dashed: what the path did alone when the run "
             "began, per host. Below a third of it while it matters is TidegatePathSlow: someone else uses it, or it "
             "throttles."),
        Query(_path_speed(chosen), "{{path}}"),
        Query(f"sum by (path) (max by (path, host) (tidegate_path_ceiling_bytes_per_second{{{chosen}}}))",
              f"{CEILING} {{{{path}}}}"),
    )  # fmt: skip


def _heat(made: Dashboard) -> None:
    section(
        made,
        "I/O time",
        *(
            heat(
                PanelOptions(title=f"How long {operation}s take", unit="s", width=8,
                     why=f"Every {operation} of a subgroup's state on the chosen paths. A second band far above the "
                     "first is a path that sometimes hangs; choose one path at a time to see which."),
                f'sum by (le) (increase(tidegate_path_operation_seconds_bucket{{{_PATH},operation="{operation}"}}'
                "[$__rate_interval]))",
            )
            for operation in ("read", "write")
        ),
        lines(
            PanelOptions(title="Slowest reads and writes", unit="s", width=8,
                 why="99 % took less. The slowest one decides when an update ends, not the mean."),
            Query("histogram_quantile(0.99, sum by (le, path, operation) "
                  f"(rate(tidegate_path_operation_seconds_bucket{{{_PATH}}}[$window])))",
                  "{{path}}:{{operation}}"),
        ),
    )  # fmt: skip


def _trouble(made: Dashboard) -> None:
    section(
        made,
        "Trouble on paths",
        lines(
            PanelOptions(title="Waits for the lock", unit="percentunit", width=6,
                 why="Share of the time in which a read or write waits for other processes of the node to leave the "
                 "path. Runbook: TidegatePathLockWait."),
            Query(f"{_rate('tidegate_path_lock_wait_seconds_total', 'path, operation', _PATH)} "
                  f"/ on () group_left () {_WALL}", "{{path}}:{{operation}}"),
            limits=((0.3, "orange"),),
        ),
        lines(
            PanelOptions(title="Errors", unit="short", width=6,
                 why="Reads and writes that failed, those that were repeated included. One is one too many. Runbook: "
                 "TidegatePathErrors."),
            Query(f"sum by (path, operation) (increase(tidegate_path_errors_total{{{_PATH}}}[$__rate_interval]))",
                  "{{path}}:{{operation}}"),
            limits=((1, "red"),),
        ),
        lines(
            PanelOptions(title="The read or write in progress", unit="s", width=6,
                 why="How long it has lasted, the longest of the ranks. A line that climbs is one that hangs."),
            Query(f"max by (path, operation) (tidegate_path_open_seconds{{{_PATH}}})", "{{path}}:{{operation}}"),
        ),
        lines(
            PanelOptions(title="Taken over for others", unit="bytes", width=6,
                 why="Bytes written here because the path that was planned had failed or was full."),
            Query(f"sum by (path) (tidegate_path_taken_over_bytes_total{{{_PATH}}})", "{{path}}"),
        ),
    )  # fmt: skip


def _room(made: Dashboard) -> None:
    section(
        made,
        "Room and wear",
        lines(
            PanelOptions(title="Room left", unit="percentunit", width=12,
                 why="Free, as a share of the path's size, on the host where it is least. State that is there has its "
                 "room; the next checkpoint may not. Runbook: TidegatePathNearlyFull."),
            Query(f"min by (path, host) (tidegate_path_free_bytes{{{_PATH}}} "
                  f"/ (tidegate_path_capacity_bytes{{{_PATH}}} > 0))", "{{path}} on {{host}}"),
            limits=((0.1, "orange"),), maximum=1,
        ),
        lines(
            PanelOptions(title="Written in a day, at this pace", unit="bytes", width=12,
                 why="All ranks of a host together: what wears out an SSD. Compare it with what the drive's makers "
                 "guarantee in a day. Runbook: TidegateSsdWear."),
            Query(f"sum by (path, host) (tidegate_path_written_bytes_per_day{{{_PATH}}})", "{{path}} on {{host}}"),
        ),
    )  # fmt: skip

"""The dashboard "Node": machines on which runs train. With node_exporter and dcgm-exporter it also shows other load on
them."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tidegate.grafana.dashboards.frame import RANK, frame, section, selectors
from tidegate.grafana.dashboards.panels import PanelOptions, Query, lines

_NODE = '* on (instance) group_left (nodename) node_uname_info{nodename=~"$host"}'
"""PromQL suffix that selects and names node_exporter's series by host name, as Tidegate's label `host`. node_exporter
itself only has the address (`instance`)."""


def dashboard() -> Dashboard:
    made = frame(
        "node", "Tidegate / Node", "The machines under the runs, and what else happens on them.", one_run=False
    )
    selectors(made, one_run=False)
    for add in (_ranks, _nvml, _node_exporter, _dcgm):
        add(made)
    return made


def _ranks(made: Dashboard) -> None:
    section(
        made,
        "Tidegate's ranks on the node",
        lines(
            PanelOptions(title="Ranks", unit="short", width=6,
                 why="Ranks of these runs that Prometheus reaches, by host."),
            Query(f"count by (host) (tidegate_steps_total{{{RANK}}})", "{{host}}"), steps=True,
        ),
        lines(
            PanelOptions(title="CPU cores in use by training", unit="short", width=6,
                 why="CPU seconds a second of all ranks of the host. Near the number of cores, updates on the CPU "
                 "fight the data loaders."),
            Query(f"sum by (host, phase) (rate(tidegate_cpu_seconds_total{{{RANK}}}[$window]))",
                  "{{host}} {{phase}}"),
            stacked=True,
        ),
        lines(
            PanelOptions(title="Host memory that Tidegate holds", unit="bytes", width=6,
                 why="All ranks of the host together; some of it is pinned and cannot be swapped."),
            Query(f"sum by (host) (tidegate_host_memory_bytes{{{RANK}}})", "{{host}}"),
        ),
        lines(
            PanelOptions(title="Storage paths in use, all ranks", unit="Bps", width=6,
                 why="Bytes a second that the ranks of a host read and write on each path: what they share."),
            Query(f"sum by (host, path) (rate(tidegate_path_bytes_total{{{RANK}}}[$window]))",
                  "{{host}} {{path}}"),
        ),
    )  # fmt: skip


def _nvml(made: Dashboard) -> None:
    section(
        made,
        "GPU, as NVML says (where there is one)",
        lines(
            PanelOptions(title="GPU utilization", unit="percentunit", width=8, requires="nvml",
                 why="Share of time in which some kernel ran. Low in the update is why Tidegate gives the GPU work."),
            Query(f"tidegate_gpu_utilization_ratio{{{RANK}}}", "{{host}} rank {{rank}}"), maximum=1,
        ),
        lines(
            PanelOptions(title="PCIe: NVML's figure", unit="Bps", width=8, requires="nvml",
                 why="Whoever moved the bytes. The source says how it was measured; single samples are 20 ms long."),
            Query(f"sum by (host, direction, source) (tidegate_gpu_pcie_bytes_per_second{{{RANK}}})",
                  "{{host}} {{direction}} ({{source}})"),
        ),
        lines(
            PanelOptions(title="PCIe: share that is not Tidegate's", unit="percentunit", width=8, requires="nvml",
                 why="Bytes that NVML saw and Tidegate did not move, as a share of the former: what else uses the "
                 "link."),
            Query(f"max by (host, direction) (tidegate_gpu_pcie_discrepancy_ratio{{{RANK}}})",
                  "{{host}} {{direction}}"), minimum=None,
        ),
    )  # fmt: skip


def _node_exporter(made: Dashboard) -> None:
    section(
        made,
        "The machine, as node_exporter says",
        lines(
            PanelOptions(title="CPU in use", unit="percentunit", width=6, requires="node_exporter",
                 why="All processes. High while training's own share is low: someone else is on the node."),
            Query(f'1 - avg by (nodename) (rate(node_cpu_seconds_total{{mode="idle"}}[$__rate_interval]) {_NODE})',
                  "{{nodename}}"), maximum=1,
        ),
        lines(
            PanelOptions(title="Memory available", unit="bytes", width=6, requires="node_exporter",
                 why="What host_cache could still take, page cache counted as free."),
            Query(f"sum by (nodename) (node_memory_MemAvailable_bytes {_NODE})", "{{nodename}}"),
        ),
        lines(
            PanelOptions(title="Disks in use", unit="percentunit", width=6, requires="node_exporter",
                 why="Share of time with I/O in progress, by device. A busy disk on which Tidegate moves little is "
                 "shared with someone."),
            Query(f'sum by (nodename, device) (rate(node_disk_io_time_seconds_total{{device!~"loop.*|ram.*"}}'
                  f"[$__rate_interval]) {_NODE})", "{{nodename}} {{device}}"), maximum=1,
        ),
        lines(
            PanelOptions(title="Waiting for I/O", unit="percentunit", width=6, requires="node_exporter",
                 why="Pressure: share of time in which some task of the node waited for I/O."),
            Query(f"sum by (nodename) (rate(node_pressure_io_waiting_seconds_total[$__rate_interval]) {_NODE})",
                  "{{nodename}}"), maximum=1,
        ),
    )  # fmt: skip


def _dcgm(made: Dashboard) -> None:
    section(
        made,
        "The GPUs, as dcgm-exporter says",
        lines(
            PanelOptions(title="GPU utilization", unit="percent", width=6, requires="dcgm",
                 why="All processes on the GPU."),
            Query('avg by (Hostname, gpu) (DCGM_FI_DEV_GPU_UTIL{Hostname=~"$host"})', "{{Hostname}} GPU {{gpu}}"),
            maximum=100,
        ),
        lines(
            PanelOptions(title="GPU memory in use", unit="decmbytes", width=6, requires="dcgm",
                 why="All processes. Above Tidegate's peak: someone else has memory on this GPU."),
            Query('sum by (Hostname, gpu) (DCGM_FI_DEV_FB_USED{Hostname=~"$host"})', "{{Hostname}} GPU {{gpu}}"),
        ),
        lines(
            PanelOptions(title="Power", unit="watt", width=6, requires="dcgm",
                 why="A GPU that waits for its update draws little."),
            Query('sum by (Hostname, gpu) (DCGM_FI_DEV_POWER_USAGE{Hostname=~"$host"})', "{{Hostname}} GPU {{gpu}}"),
        ),
        lines(
            PanelOptions(title="PCIe replays", unit="short", width=6, requires="dcgm",
                 why="Retries on the bus. More than a few an hour is a bad riser, cable or slot: the link's ceiling "
                 "falls with it."),
            Query('sum by (Hostname, gpu) (increase(DCGM_FI_DEV_PCIE_REPLAY_COUNTER{Hostname=~"$host"}[1h]))',
                  "{{Hostname}} GPU {{gpu}}"),
        ),
    )  # fmt: skip

"""`tidegate demo`: trains a small model on text with all features enabled, and shows the live view."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tidegate.knobs.knobs import Order, Stride


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The options of `tidegate demo` and `tidegate train`.

    text: a folder of text to train on; None for the source files of Python's standard library.
    run: name of the run; None for a name made from the time. seconds: stop after so many seconds, 0 for no limit.
    headless: do not open a browser, and do not wait at the end; None: headless if no terminal is attached.
    port, dashboard_port: ports of daemon and live view; a daemon that already answers at `port` is used.
    emulated: use the emulated device even if there is a GPU.
    paths: storage paths (directories, or addresses of object stores) by name; None for two directories in the run's
        folder.
    tier_split, host_cache, order: knobs of these paths. By default the cache holds about half of the state, so that
    both host memory and the paths hold a part.
    view: whether to start the live view (`train` does not).
    daemon: address of a daemon that runs elsewhere; then no daemon is started, and `port` is ignored.
    metrics_bind, metrics_port, advertise_host: the address of /metrics, and this machine's name for Prometheus.
    """

    text: Path | None = None
    steps: int = 280
    run: str | None = None
    seconds: float = 0.0
    headless: bool | None = None
    port: int = 8790
    dashboard_port: int = 8501
    emulated: bool = False
    stride: Stride = "auto"
    static_ratio: float = 0.125
    subgroup_numel: int = 200_000
    paths: tuple[tuple[str, Path | str], ...] | None = None
    tier_split: str = "auto"
    host_cache: int | str = 12_000_000
    order: Order = "auto"
    reset_knobs: bool = False
    view: bool = True
    daemon: str | None = None
    metrics_bind: str = "127.0.0.1"
    metrics_port: int = 0
    advertise_host: str | None = None


def run_demo(options: DemoOptions) -> int:
    """Runs the demo, and returns the exit status of the process. TidegateError if an option cannot be used."""
    from tidegate.demo.session import Session

    return Session(options).run()

"""`tidegate demo`: trains a real model on real text with everything on, and shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What `tidegate demo` and `tidegate train` take.

    text: a folder of text to train on; None for the standard library's own source files.
    run: name of the run; None makes one from the time. seconds: stop after this many, 0 for no limit.
    headless: no live view, and no waiting at the end; None decides by whether a terminal is attached.
    port, dashboard_port: of daemon and live view; a daemon that answers at `port` is used as it is.
    emulated: use the emulated device even where there is a GPU.
    paths: directories, or addresses of object stores, by name; None for two of its own in the run's folder.
    tier_split, host_cache, order: knobs of these paths. The cache holds about half of the state, so that both the host
        and the paths have some.
    view: start the live view at all (`train` does not).
    daemon: address of a daemon that runs elsewhere; then none is started, and `port` says nothing.
    metrics_bind, metrics_port, advertise_host: where /metrics listens, and how Prometheus reaches it from elsewhere.
    """

    text: Path | None = None
    steps: int = 280
    run: str | None = None
    seconds: float = 0.0
    headless: bool | None = None
    port: int = 8790
    dashboard_port: int = 8501
    emulated: bool = False
    stride: float | str = "auto"
    static_ratio: float = 0.125
    subgroup_numel: int = 200_000
    paths: tuple[tuple[str, Path | str], ...] | None = None
    tier_split: str = "auto"
    host_cache: int | str = 12_000_000
    order: str = "auto"
    reset_knobs: bool = False
    view: bool = True
    daemon: str | None = None
    metrics_bind: str = "127.0.0.1"
    metrics_port: int = 0
    advertise_host: str | None = None


def run_demo(options: DemoOptions) -> int:
    """Runs it; the exit status. Errors a user can meet are raised as TidegateError."""
    from tidegate.demo.session import Session

    return Session(options).run()

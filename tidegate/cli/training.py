"""The commands `tidegate train` and `tidegate demo`: their options, which are passed to `tidegate.demo`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from tidegate.cli.options import named_places, utf8
from tidegate.demo import DemoOptions, run_demo
from tidegate.errors import TidegateError
from tidegate.knobs.knobs import Knobs, spec
from tidegate.logs import VARIABLE, LogFormat, configure

_DEFAULT: Final = DemoOptions()
_EXTRAS: Final = {
    "daemon": ("alembic", "fastapi", "starlette", "uvicorn", "sqlalchemy", "prometheus_client"),
    "dashboard": ("streamlit", "plotly", "pandas", "altair"),
    "agent": ("torch", "numpy", "psutil"),
    "demo": ("transformers",),
}


@contextlib.contextmanager
def needs(extra: str = "") -> Iterator[None]:
    """Context manager that converts the error of a missing package into a TidegateError with the pip command to run.

    extra: the extra of Tidegate that contains the package; empty: looked up by the package's name. An error of a
    package in no extra is raised unchanged.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if (error.name or "").startswith("tidegate.kernels."):
            raise TidegateError("The native kernels are not built for this Python: run `pip install .`.") from error
        named = extra or next((name for name, packages in _EXTRAS.items() if missing in packages), "")
        if not named or missing == "tidegate":
            raise
        raise TidegateError(f"This needs {missing}: pip install 'tidegate[{named}]'.") from error


def _paths(words: Sequence[str]) -> tuple[tuple[str, Path | str], ...] | None:
    """The storage paths given by `--path NAME=DIR` or NAME=s3://…; None if there are none."""
    return tuple((n, at if "://" in at else Path(at)) for n, at in named_places(words).items()) or None


def _cache(text: str) -> int | str:
    value = spec("host_cache").parse(text)
    return value if isinstance(value, str) else int(value)


def training_command(*, view: bool) -> Callable[..., None]:
    """Makes the function of a command: `tidegate demo` (with the live view) if `view` is True, else
    `tidegate train`."""

    def command(
        text: Annotated[Path | None, typer.Option(help="Folder of text; default: Python's own source.")] = None,
        steps: Annotated[int, typer.Option(help="Optimizer steps.", min=1)] = _DEFAULT.steps,
        run: Annotated[
            str | None, typer.Option(help="Name of the run; default: made from the time.", callback=utf8)
        ] = None,
        seconds: Annotated[float, typer.Option(help="Stop after this time; 0: no limit.", min=0)] = _DEFAULT.seconds,
        headless: Annotated[
            bool | None, typer.Option(help="Exit at the end; else serve until Ctrl-C. Default: where no terminal.")
        ] = None,
        port: Annotated[int, typer.Option(help="Port of the daemon.", min=1, max=65_535)] = _DEFAULT.port,
        dashboard_port: Annotated[int, typer.Option(help="Port of the live view.", min=1, max=65_535)] = (
            _DEFAULT.dashboard_port
        ),
        emulated: Annotated[bool, typer.Option("--emulated", help="Use the emulated device even with a GPU.")] = False,
        stride: Annotated[str, typer.Option(help="auto, off, or a number of at least 1.")] = str(_DEFAULT.stride),
        static_ratio: Annotated[float, typer.Option(help="Share of subgroups that stay on the device.")] = (
            _DEFAULT.static_ratio
        ),
        subgroup_numel: Annotated[int, typer.Option(help="Parameters per subgroup.", min=1)] = _DEFAULT.subgroup_numel,
        path: Annotated[
            list[str] | None,
            typer.Option(
                metavar="NAME=DIR",
                help="A storage path, also NAME=s3://…; repeat it. Default: two in the run's folder.",
            ),
        ] = None,
        tier_split: Annotated[str, typer.Option(help="What each path gets: nvme:2,pfs:1; or auto.")] = (
            _DEFAULT.tier_split
        ),
        host_cache: Annotated[str, typer.Option(help="Host memory for state, as in 12MB; or auto.")] = str(
            _DEFAULT.host_cache
        ),
        order: Annotated[str, typer.Option(help="pinned, alternate or auto.")] = _DEFAULT.order,
        reset_knobs: Annotated[bool, typer.Option("--reset-knobs", help="Forget the run's earlier knobs.")] = False,
        daemon: Annotated[
            str | None, typer.Option(help="Address of a daemon elsewhere; none is started then.", callback=utf8)
        ] = None,
        metrics_bind: Annotated[
            str, typer.Option(help="Address on which /metrics listens.", callback=utf8)
        ] = _DEFAULT.metrics_bind,
        metrics_port: Annotated[int, typer.Option(help="Port of /metrics; 0 takes a free one.", min=0, max=65_535)] = (
            _DEFAULT.metrics_port
        ),
        advertise_host: Annotated[
            str | None, typer.Option(help="This machine's name for Prometheus.", callback=utf8)
        ] = None,
        log_format: Annotated[
            LogFormat | None, typer.Option(help="Log all events to stderr in this format; default: only warnings.")
        ] = None,
    ) -> None:
        if log_format is not None:
            os.environ[VARIABLE] = log_format  # the daemon that is started as a child process uses this format, too
            configure(log_format)
        wanted = {"stride": stride, "static_ratio": static_ratio, "tier_split": tier_split, "order": order}
        knobs = Knobs().changed(wanted)
        options = DemoOptions(
            text=text,
            steps=steps,
            run=run,
            seconds=seconds,
            headless=headless,
            port=port,
            dashboard_port=dashboard_port,
            emulated=emulated,
            stride=knobs.stride,
            static_ratio=knobs.static_ratio,
            subgroup_numel=subgroup_numel,
            paths=_paths(path or []),
            tier_split=knobs.tier_split,
            host_cache=_cache(host_cache),
            order=knobs.order,
            reset_knobs=reset_knobs,
            view=view,
            daemon=daemon,
            metrics_bind=metrics_bind,
            metrics_port=metrics_port,
            advertise_host=advertise_host,
        )
        with needs("demo"):
            status = run_demo(options)
        sys.exit(status)

    command.__doc__ = (
        "Train a small model with everything on, live view included, to see all of it at once."
        if view
        else "Train a small model with daemon and metrics, without the live view."
    )
    return command

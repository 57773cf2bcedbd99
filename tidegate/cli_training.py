"""The commands `train` and `demo`: their options, handed to `tidegate.demo`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from tidegate.demo import DemoOptions, run_demo
from tidegate.errors import TidegateError
from tidegate.knobs import spec

_DEFAULT: Final = DemoOptions()
_EXTRAS: Final = {
    "daemon": ("fastapi", "starlette", "uvicorn", "sqlalchemy", "prometheus_client"),
    "dashboard": ("streamlit", "plotly", "pandas", "altair"),
    "agent": ("torch", "numpy", "psutil"),
    "demo": ("transformers",),
}


@contextlib.contextmanager
def needs(extra: str = "") -> Iterator[None]:
    """Turns a package that is not installed into a sentence that names the extra to install."""
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


def training_command(*, view: bool) -> Callable[..., None]:
    """The command with or without the live view."""

    def command(
        text: Annotated[Path | None, typer.Option(help="Folder of text; default: Python's own source.")] = None,
        steps: Annotated[int, typer.Option(help="Optimizer steps.", min=1)] = _DEFAULT.steps,
        run: Annotated[str | None, typer.Option(help="Name of the run; default: made from the time.")] = None,
        seconds: Annotated[float, typer.Option(help="Stop after so many; 0: no limit.", min=0)] = _DEFAULT.seconds,
        headless: Annotated[bool | None, typer.Option(help="Do not wait at the end; default: as the terminal.")] = None,
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
        reset_knobs: Annotated[bool, typer.Option("--reset-knobs", help="Forget the run's earlier knobs.")] = False,
    ) -> None:
        options = DemoOptions(
            text=text,
            steps=steps,
            run=run,
            seconds=seconds,
            headless=headless,
            port=port,
            dashboard_port=dashboard_port,
            emulated=emulated,
            stride=spec("stride").parse(stride),
            static_ratio=float(spec("static_ratio").parse(static_ratio)),
            subgroup_numel=subgroup_numel,
            reset_knobs=reset_knobs,
            view=view,
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

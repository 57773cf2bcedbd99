"""`tidegate calibrate`: measures this machine, saves the result, and prints it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tidegate import units
from tidegate.cli.options import named_places
from tidegate.cli.training import needs
from tidegate.client.discovery import state_dir
from tidegate.speeds.saved_calibration import Calibration, calibration_file, load_calibration, save_calibration
from tidegate.terminal import say


def calibrate(
    path: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="NAME=DIR of a path to measure, as in nvme=/nvme/tide; repeat it."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure even if this hardware was measured before.")] = False,
    seconds: Annotated[float, typer.Option(help="Of each measurement.", min=0.01, max=60)] = 0.15,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Measure the speeds of this machine (updates, copies, storage paths): each alone, then several at the same time.
    Paths must be directories: a run measures its object stores when it begins. The result is saved for this
    hardware."""
    paths = named_places(path or [])
    with needs():
        from tidegate.agent.calibration import calibrate as measure
        from tidegate.agent.calibration.hardware import hardware as hardware_of
    hardware = hardware_of(paths)
    file = calibration_file(state_dir(), hardware["host"], paths)
    found = None if again else load_calibration(file, hardware)
    fresh = found is None
    if found is None:
        found = measure.calibrate(paths, seconds=seconds, progress=_print_progress)
        save_calibration(file, found)
    if as_json:
        say(json.dumps({**found.to_dict(), "file": str(file), "measured_now": fresh}))
        return
    _print(found, file, fresh)


def _print_progress(measurement: str) -> None:
    """Prints the present measurement to stderr, so that stdout has only the result."""
    say(f"measuring: {measurement}", file=sys.stderr, flush=True)


def _print(found: Calibration, file: Path, fresh: bool) -> None:
    from tidegate.cli.tables import table

    say(", ".join(f"{name} {value}" for name, value in found.hardware.items()))
    no_device = found.card.h2d_bytes_per_second is None
    table(("lane", "alone" if no_device else "alone, as in steps", "beside others it keeps"), _rows(found))
    when = "now" if fresh else units.moment(found.measured_at)
    say(f"Measured {when}, kept in {file}." + ("" if fresh else " --again measures anew."))
    if no_device:
        say("No GPU here: copies and updates on a device are not measured.")


def _rows(found: Calibration) -> Iterator[tuple[str, str, str]]:
    card = found.card
    for threads, params in sorted(found.cpu_threads.items()):
        measured_beside = threads == found.card_threads
        shares = _shares(found, "cpu") if measured_beside else ""
        yield f"cpu, {threads} thread{'s' * (threads > 1)}", f"{params / 1e9:.3f} G params/s", shares
    for lane, measured in (("device", card.device_params_per_second), ("norm", card.norm_params_per_second)):
        if measured is not None:
            yield lane, f"{measured / 1e9:.3f} G params/s", _shares(found, lane)
    for lane, rate in (("h2d", card.h2d_bytes_per_second), ("d2h", card.d2h_bytes_per_second)):
        if rate is not None:
            yield lane, f"{rate / 1e9:.2f} GB/s", _shares(found, lane)
    for name, speeds in card.paths.items():
        for way, speed in (("read", speeds.read_bytes_per_second), ("write", speeds.write_bytes_per_second)):
            yield f"{name}:{way}", f"{(speed or 0) / 1e9:.2f} GB/s", _shares(found, f"{name}:{way}")


def _shares(found: Calibration, lane: str) -> str:
    return "  ".join(f"{other} {share:.0%}" for other, share in found.card.keeps.get(lane, {}).items())

"""Rate card of a run before its first step, loaded from the calibration that `tidegate calibrate` saved for this
machine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tidegate.agent.calibration.hardware import hardware
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.agent.tiers.object_settings import ObjectSettings
from tidegate.logs import event
from tidegate.plan.tier_split import PathSpeeds
from tidegate.speeds.rate_card import RateCard
from tidegate.speeds.saved_calibration import Calibration, calibration_file, load_calibration
from tidegate.wire.base import DeviceKind

log = logging.getLogger("tidegate")


def saved_rate_card(
    folder: Path,
    settings: Mapping[str, PathSettings | ObjectSettings],
    speeds: Mapping[str, PathSpeeds],
    *,
    device: DeviceKind,
    cpu_threads: int,
) -> RateCard | None:
    """Loads the rate card for this hardware from the calibrations saved in `folder`. A calibration with these paths is
    preferred; otherwise the calibration without paths is used. None if there is neither.

    settings: settings of the run's paths, by name.
    speeds: speeds of the paths, as the run measured them at its start; used for paths that were not calibrated.
    device: kind of the run's device. An emulated device gets no rates of a GPU, because they do not apply to it.
    cpu_threads: number of threads with which the run updates on the CPU. If the calibration has measured this number,
        the rate card has the CPU rate of this number.
    """
    paths = {name: path for name, path in settings.items() if isinstance(path, PathSettings)}
    calibration = _load(folder, paths) or _load(folder, {})
    if calibration is None:
        return None
    card = calibration.card
    card = replace(card, cpu_params_per_second=calibration.cpu_threads.get(cpu_threads, card.cpu_params_per_second))
    if device == "emulated":
        card = replace(
            card,
            h2d_bytes_per_second=None,
            d2h_bytes_per_second=None,
            device_params_per_second=None,
            norm_params_per_second=None,
        )
    return card.with_paths({name: speed for name, speed in speeds.items() if name not in card.paths})


def _load(folder: Path, paths: Mapping[str, PathSettings]) -> Calibration | None:
    """The saved calibration for this hardware with these paths; None when there is none."""
    here = hardware(paths)
    file = calibration_file(folder, here["host"], {name: path.directory for name, path in paths.items()})
    calibration = load_calibration(file, here)
    if calibration is not None:
        log.info(
            "the speeds of this machine are read from %s, where a calibration saved them", file,
            extra=event("calibration_used", file=str(file)),
        )  # fmt: skip
    return calibration

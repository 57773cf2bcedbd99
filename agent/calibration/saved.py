"""The rate card of a run before its first step: what `tidegate calibrate` has kept of this machine."""

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
from tidegate.speeds.saved_calibration import Calibration, file_of, kept
from tidegate.wire.base import DeviceKind

log = logging.getLogger("tidegate")


def kept_card(
    folder: Path,
    settings: Mapping[str, PathSettings | ObjectSettings],
    speeds: Mapping[str, PathSpeeds],
    *,
    device: DeviceKind,
    cpu_threads: int,
) -> RateCard | None:
    """None when nothing is kept in `folder` for this hardware: with these paths, or else without any.

    speeds: of the paths, as the run measured them when it began; they count where paths were not calibrated. An
    emulated device gets no rates: a GPU's would be none of its own.
    """
    paths = {name: path for name, path in settings.items() if isinstance(path, PathSettings)}
    found = _kept(folder, paths) or _kept(folder, {})
    if found is None:
        return None
    card = found.card
    card = replace(card, cpu_params_per_second=found.cpu_threads.get(cpu_threads, card.cpu_params_per_second))
    if device == "emulated":
        card = replace(
            card,
            h2d_bytes_per_second=None,
            d2h_bytes_per_second=None,
            device_params_per_second=None,
            norm_params_per_second=None,
        )
    return card.with_paths({name: speed for name, speed in speeds.items() if name not in card.paths})


def _kept(folder: Path, paths: Mapping[str, PathSettings]) -> Calibration | None:
    here = hardware(paths)
    file = file_of(folder, here["host"], {name: path.directory for name, path in paths.items()})
    found = kept(file, here)
    if found is not None:
        log.info("speeds of this machine: as in %s", file, extra=event("calibration_used", file=str(file)))
    return found

"""The saved result of `tidegate calibrate`: one file per host and set of paths, valid until the hardware changes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tidegate.errors import ConfigError
from tidegate.speeds.rate_card import RateCard

VERSION: Final = 2


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The rate card of one machine, with the conditions of its measurement. Lanes without hardware have no rate.

    hardware: description of the measured hardware, as texts by name; it differs for another machine or other paths.
    cpu_threads: speed of the update on the CPU in parameters per second, by number of threads. card_threads: number of
    CPU threads with which the rate card was measured. measured_at: seconds since the epoch.
    """

    card: RateCard
    hardware: Mapping[str, str]
    cpu_threads: Mapping[int, float]
    card_threads: int
    measured_at: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "measured_at": self.measured_at,
            "hardware": dict(self.hardware),
            "cpu_params_per_second_by_threads": {str(n): rate for n, rate in self.cpu_threads.items()},
            "card_threads": self.card_threads,
            "rates": self.card.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibration:
        """The inverse of `to_dict`. ConfigError if `values` are not those of a calibration, or have another format
        version."""
        try:
            version = values["version"]
            if version != VERSION:
                raise ConfigError(
                    f"The calibration has version {version!r}, and this Tidegate reads only version {VERSION}. Run "
                    "`tidegate calibrate` again."
                )
            return cls(
                card=RateCard.from_dict(values["rates"]),
                hardware=dict(values["hardware"]),
                cpu_threads={int(n): float(r) for n, r in values["cpu_params_per_second_by_threads"].items()},
                card_threads=int(values["card_threads"]),
                measured_at=float(values["measured_at"]),
            )
        except ConfigError:  # it is a ValueError, too
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"The calibration is not valid: {what}. Run `tidegate calibrate` again.") from error


def calibration_file(folder: Path, host: str, paths: Mapping[str, str | os.PathLike[str]]) -> Path:
    """The file of a calibration in `folder`. Each host and each set of paths (directories by name) has its own file, so
    that a new measurement of one set does not overwrite another."""
    places = sorted((name, str(Path(directory).resolve())) for name, directory in paths.items())
    which = f"-{hashlib.sha256(json.dumps(places).encode()).hexdigest()[:12]}" if places else ""
    return folder / f"calibration-{host or 'host'}{which}.json"


def load_calibration(file: Path, hardware: Mapping[str, str]) -> Calibration | None:
    """Loads the calibration in `file`; None if the file is missing, not valid, or of other hardware."""
    try:
        calibration = Calibration.from_dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        return None
    return calibration if dict(calibration.hardware) == dict(hardware) else None


def save_calibration(file: Path, calibration: Calibration) -> None:
    """Saves `calibration` to `file`, completely or not at all. ConfigError when the file cannot be written."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(calibration.to_dict(), indent=1) + "\n")
        temporary.replace(file)
    except OSError as error:
        raise ConfigError(
            f"The calibration cannot be saved to {file}: {error.strerror}. Its folder must be writable, with "
            "free space."
        ) from error

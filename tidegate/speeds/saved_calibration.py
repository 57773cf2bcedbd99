"""What `tidegate calibrate` has measured, kept for this host until its hardware changes."""

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
    """The rate card of one machine. Lanes that it has no hardware for have no rate.

    hardware: what was measured, as texts by name; another machine, or other paths, have another one.
    cpu_threads: parameters per second of the update on the CPU by number of threads; the card has that of
    `card_threads`, beside which everything else was measured.
    measured_at: seconds since the epoch.
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
        """What `to_dict` gave. ConfigError for anything else."""
        try:
            if values["version"] != VERSION:
                raise ConfigError(f"A calibration of version {values['version']!r} is not known here.")
            return cls(
                card=RateCard.from_dict(values["rates"]),
                hardware=dict(values["hardware"]),
                cpu_threads={int(n): float(r) for n, r in values["cpu_params_per_second_by_threads"].items()},
                card_threads=int(values["card_threads"]),
                measured_at=float(values["measured_at"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"This is no calibration: {error}. Run `tidegate calibrate --again`.") from error


def file_of(folder: Path, host: str, paths: Mapping[str, str | os.PathLike[str]]) -> Path:
    """One for each set of paths (directories by name) on each host: measuring one leaves what is kept of another."""
    places = sorted((name, str(Path(directory).resolve())) for name, directory in paths.items())
    which = f"-{hashlib.sha256(json.dumps(places).encode()).hexdigest()[:12]}" if places else ""
    return folder / f"calibration-{host or 'host'}{which}.json"


def kept(file: Path, hardware: Mapping[str, str]) -> Calibration | None:
    """What is kept in `file`, if it is of this hardware; None when there is nothing to be used."""
    try:
        found = Calibration.from_dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        return None
    return found if dict(found.hardware) == dict(hardware) else None


def keep(file: Path, calibration: Calibration) -> None:
    """Writes it to `file`, whole or not at all. ConfigError when it cannot be written."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(calibration.to_dict(), indent=1) + "\n")
        beside.replace(file)
    except OSError as error:
        raise ConfigError(f"The calibration cannot be kept in {file}: {error.strerror}.") from error

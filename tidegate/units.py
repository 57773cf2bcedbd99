"""Formats numbers and times for display: three significant digits and a unit; times in UTC."""

from __future__ import annotations

import time

from tidegate.knobs import knobs
from tidegate.knobs.knobs import KnobValue

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
NONE = "–"


def significant(value: float, digits: int = 3) -> str:
    """`value` with `digits` significant digits and no exponent: 0.0123, 1.23, 12.3, 123, 1230."""
    if value == 0:
        return "0"
    value = float(f"{value:.{digits - 1}e}")
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else _leading_zeros(value)
    return f"{value:.{min(9, max(0, digits - whole))}f}"


def _leading_zeros(value: float) -> int:
    return int(f"{abs(value):e}".split("e")[1]) + 1


def seconds(value: float | None) -> str:
    """Seconds as text: `1.23 s`, `45.6 ms`, `789 µs`, `2 min 5 s`."""
    if value is None:
        return NONE
    if value >= 99.95:
        return duration(value)
    if value >= 0.9995:
        return f"{significant(value)} s"
    if value >= 0.0009995:
        return f"{significant(value * 1e3)} ms"
    return f"{value * 1e6:.0f} µs" if value else "0 ms"


def duration(value: float) -> str:
    """A long time or an age in whole seconds as text: `42 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`."""
    whole = round(value)
    for size, unit, rest, rest_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // rest} {rest_unit}"
    return f"{whole} s"


def age(value: float) -> str:
    """An age: with tenths of a second below 10 s, else as `duration`."""
    value = max(0.0, value)
    return f"{value:.1f} s" if value < 9.95 else duration(value)


def moment(seconds_since_epoch: float) -> str:
    """A time in UTC as text: `2026-11-26 09:17:05Z`."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds_since_epoch))


def nbytes(value: float | None) -> str:
    return NONE if value is None else _scaled(value, _BYTES, "B")


def rate(bytes_per_second: float | None) -> str:
    return NONE if bytes_per_second is None else f"{nbytes(bytes_per_second)}/s"


def count(value: float | None) -> str:
    """A number with a decimal prefix as text: `12`, `345`, `1.23 M`, `45.6 G`."""
    return NONE if value is None else _scaled(value, _COUNTS, "").rstrip()


def counted(value: int, what: str) -> str:
    """A number of things as text: `1 step`, `20 steps`."""
    return f"{integer(value)} {what}{'' if value == 1 else 's'}"


def integer(value: int) -> str:
    """An integer as text with narrow no-break spaces: `1 234 567`."""
    return f"{value:,}".replace(",", "\u202f")


def _scaled(value: float, scales: tuple[tuple[float, str], ...], base: str) -> str:
    for scale, unit in scales:
        if abs(value) >= scale * 0.9995:
            return f"{significant(value / scale)} {unit}"
    return f"{value:.0f} {base}"


def share(value: float | None) -> str:
    """A share in percent as text: 0.123 → `12 %`; 0.004 → `0.4 %`."""
    if value is None:
        return NONE
    return f"{value * 100:.1f} %" if 0 < abs(value) < 0.0095 else f"{value * 100:.0f} %"


def change(value: float) -> str:
    """A relative change in percent as text: 0.123 → `+12 %`; -0.24 → `−24 %`."""
    return f"{value * 100:+.0f} %".replace("-", "\u2212")


def knob(name: str, value: KnobValue | None) -> str:
    """A knob's value as text: words unchanged, numbers without trailing zeros, sizes with a unit."""
    return NONE if value is None else knobs.show(name, value)

"""The committed Prometheus and Alertmanager configuration in faster time: every duration divided, nothing else changed.

A duration is what stands in `[…]` of an expression, and the value of `for`, `keep_firing_for`, `group_wait`,
`group_interval` and `repeat_interval`. Plain numbers are not: 60 in `60 + 3 * …` stays a minute. Intervals of scrapes,
evaluations and discovery become a second.
"""

from __future__ import annotations

import re
from pathlib import Path

SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
DIVISOR = 60
_RANGE = re.compile(r"\[(\d+)([smhd])\]")
_SETTING = re.compile(r"(\b(?:for|keep_firing_for|group_wait|group_interval|repeat_interval): )(\d+)([smhd])\b")
_INTERVAL = re.compile(r"(\b(?:scrape_interval|scrape_timeout|evaluation_interval|refresh_interval): )\d+[smhd]\b")
MIN_RANGE_SECONDS = 5
"""`rate` needs some scrapes in its window."""


def scaled(text: str, divisor: int = DIVISOR) -> str:
    """The text of a rule file or a configuration, its durations divided."""
    text = _RANGE.sub(lambda m: f"[{max(MIN_RANGE_SECONDS * 1000, _ms(m[1], m[2], divisor))}ms]", text)
    text = _SETTING.sub(lambda m: f"{m[1]}{_ms(m[2], m[3], divisor)}ms", text)
    return _INTERVAL.sub(r"\g<1>1s", text)


def copy_scaled(source: Path, target: Path, replace: dict[str, str], divisor: int = DIVISOR) -> None:
    """Writes the scaled text of `source`, with addresses replaced, to `target`."""
    text = scaled(source.read_text(), divisor)
    for old, new in replace.items():
        text = text.replace(old, new)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def _ms(number: str, unit: str, divisor: int) -> int:
    return int(number) * SECONDS[unit] * 1000 // divisor

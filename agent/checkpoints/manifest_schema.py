"""Reads the JSON of a manifest: every name, type and bound is looked at, and all must be true together.

What is wrong is `WrongManifestError`, whatever it is; `Manifest.unpack` names the file.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any, Final, NoReturn, TypeVar

from tidegate.agent.parameters.subgroups import Segment
from tidegate.kernels import WeightFormat

T = TypeVar("T")

MOST: Final = 2**63 - 1
"""The largest number of parameters, bytes or steps."""
MOST_CHECKSUM: Final = 2**32 - 1
ATTEMPT: Final = re.compile(r"[0-9a-f]{1,32}")
RUN_ID: Final = re.compile(r"[0-9a-f]{32}")
RULE: Final = re.compile(r"[ -~]{1,16}")
DTYPE: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
SHA256: Final = re.compile(r"[0-9a-f]{64}")
SHOWN: Final = 60
"""Characters of a wrong value that are shown."""


class WrongManifestError(Exception):
    """A manifest that was not written by Tidegate in this form. `found` and `expected` say what and why."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found, expected)
        self.found, self.expected = found, expected


class Fields:
    """The values of one JSON object, each taken by its name."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            _wrong(where, values, "an object")
        self._values, self._where = dict(values), where

    def number(self, name: str, least: int = 0, most: int = MOST) -> int:
        found = self._take(name)
        if type(found) is not int or not least <= found <= most:
            _wrong(self._at(name), found, f"a whole number from {least} to {most}")
        return found

    def text(self, name: str, form: re.Pattern[str]) -> str:
        found = self._take(name)
        if type(found) is not str or not form.fullmatch(found):
            _wrong(self._at(name), found, f"text like {form.pattern}")
        return found

    def path(self, name: str) -> str:
        """Of a file below the folder."""
        found = self._take(name)
        if type(found) is not str or not is_below(found):
            _wrong(self._at(name), found, "the path of a file below the folder")
        return found

    def numbers(self, name: str) -> tuple[int, ...]:
        """None negative."""
        found = self._take(name)
        if not isinstance(found, list) or not all(type(one) is int and 0 <= one <= MOST for one in found):
            _wrong(self._at(name), found, "a list of whole numbers")
        return tuple(found)

    def each(self, name: str, read: Callable[[Fields], T]) -> tuple[T, ...]:
        found = self._take(name)
        if not isinstance(found, list):
            _wrong(self._at(name), found, "a list")
        return tuple(_read(read, one, f"{self._at(name)}[{index}]") for index, one in enumerate(found))

    def end(self) -> None:
        """No other value may be there."""
        for name in self._values:
            _wrong(self._where or "the manifest", name, "no other name")

    def _take(self, name: str) -> Any:
        if name not in self._values:
            raise WrongManifestError(f"no {self._at(name)}", "one")
        return self._values.pop(name)

    def _at(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name


def canonical(values: Any) -> str:
    """The text that the checksum of a manifest is taken of."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def parse(data: bytes) -> Any:
    """The JSON in `data`. WrongManifestError when it is none that can be read."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WrongManifestError(f"{len(data):,} bytes that cannot be read", "a manifest") from error


def read_segment(fields: Fields) -> Segment:
    return Segment(
        param=fields.number("param"), offset=fields.number("offset"), start=fields.number("start"),
        numel=fields.number("numel", 1),
    )  # fmt: skip


def is_below(path: str) -> bool:
    """Whether a path, with `/` between its parts, leads to something below where it begins and nowhere else."""
    parts = PurePosixPath(path).parts
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    usable = bool(parts) and ".." not in parts and "\0" not in path and not path.startswith("/")
    return usable and str(PurePosixPath(path)) == path


def check_subgroup(index: int, file: str, numel: int, state_bytes: int, fmt: int, segments: Sequence[Segment]) -> None:
    """WrongManifestError when a subgroup cannot be number `index`, or its segments are not one run of its elements."""
    where, aux = f"subgroups[{index}]", list(WeightFormat)[fmt].aux_bytes
    if file != f"{index:06d}.tide":
        _wrong(f"{where}.file", file, f"{index:06d}.tide")
    if state_bytes != 8 + aux:
        _wrong(f"{where}.state_bytes", state_bytes, str(8 + aux))
    filled = 0
    for segment in segments:
        if segment.start != filled:
            _wrong(f"a segment of {where}", f"one that begins at {segment.start}", f"one that begins at {filled}")
        filled += segment.numel
    if filled != numel:
        _wrong(f"{where}.numel", numel, f"{filled}, which its segments have")


def check_all_there(shapes: Sequence[Sequence[int]], segments: Sequence[Segment]) -> None:
    """WrongManifestError when the segments of all subgroups do not have every element of every parameter once."""
    parts: defaultdict[int, list[Segment]] = defaultdict(list)
    for segment in segments:
        parts[segment.param].append(segment)
    if parts and max(parts) >= len(shapes):
        _wrong("a segment", f"parameter {max(parts)}", f"one of {len(shapes)} parameters")
    for index, shape in enumerate(shapes):
        known = 0
        for segment in sorted(parts[index], key=lambda one: one.offset):
            if segment.offset != known:
                break
            known += segment.numel
        else:
            if known == math.prod(shape):
                continue
        raise WrongManifestError(
            f"{known:,} elements of parameter {index} in a row", f"its {math.prod(shape):,}, each of them once"
        )


def _read(read: Callable[[Fields], T], values: Any, where: str) -> T:
    fields = Fields(values, where)
    made = read(fields)
    fields.end()
    return made


def _wrong(where: str, found: object, expected: str) -> NoReturn:
    raise WrongManifestError(f"{where} {shown(found)}", expected)


def shown(found: object) -> str:
    """A value for people, whatever it is."""
    if isinstance(found, int) and not -MOST <= found <= MOST:
        return "a number that is too large"
    text = ascii(found) if isinstance(found, str | int | float | None) else f"a {type(found).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"

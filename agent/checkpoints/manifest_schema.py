"""Strict validation of a manifest's JSON: names, types and bounds of all values, and their consistency.

Every fault raises `WrongManifestError`; `Manifest.unpack` adds the name of the file.
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
from tidegate.rules.rule import DTYPE_BYTES

T = TypeVar("T")

MAX_NUMBER: Final = 2**63 - 1
"""Largest number that a manifest may contain, for parameters, bytes and steps."""
MAX_CHECKSUM: Final = 2**32 - 1
ATTEMPT: Final = re.compile(r"[0-9a-f]{1,32}")
RUN_ID: Final = re.compile(r"[0-9a-f]{32}")
RULE: Final = re.compile(r"[ -~]{1,16}")
DTYPE: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
TENSOR: Final = re.compile(r"[!-~]{1,64}")
TENSOR_DTYPE: Final = re.compile("|".join(DTYPE_BYTES))
SHA256: Final = re.compile(r"[0-9a-f]{64}")
MAX_SHOWN_CHARACTERS: Final = 60
"""Maximum number of characters of a wrong value that an error shows."""


class WrongManifestError(Exception):
    """Fault in a manifest's content. `found` and `expected` describe the value and what it should be."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found, expected)
        self.found, self.expected = found, expected


class Fields:
    """Reads the values of one JSON object by name, each once, and checks them. WrongManifestError for a missing or
    wrong value."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            _raise_wrong(where, values, "an object")
        self._values, self._where = dict(values), where

    def number(self, name: str, least: int = 0, most: int = MAX_NUMBER) -> int:
        """Reads a whole number from `least` to `most`."""
        value = self._take(name)
        if type(value) is not int or not least <= value <= most:
            _raise_wrong(self._at(name), value, f"a whole number from {least} to {most}")
        return value

    def text(self, name: str, form: re.Pattern[str]) -> str:
        """Reads a string that matches `form` completely."""
        value = self._take(name)
        if type(value) is not str or not form.fullmatch(value):
            _raise_wrong(self._at(name), value, f"text like {form.pattern}")
        return value

    def path(self, name: str) -> str:
        """Reads the relative path of a file below the rank's folder."""
        value = self._take(name)
        if type(value) is not str or not is_below(value):
            _raise_wrong(self._at(name), value, "the path of a file below the folder")
        return value

    def numbers(self, name: str) -> tuple[int, ...]:
        """Reads a list of whole numbers, none negative."""
        value = self._take(name)
        if not isinstance(value, list) or not all(type(one) is int and 0 <= one <= MAX_NUMBER for one in value):
            _raise_wrong(self._at(name), value, "a list of whole numbers")
        return tuple(value)

    def each(self, name: str, read: Callable[[Fields], T]) -> tuple[T, ...]:
        """Reads a list of objects; the function `read` converts each of them."""
        value = self._take(name)
        if not isinstance(value, list):
            _raise_wrong(self._at(name), value, "a list")
        return tuple(_read(read, one, f"{self._at(name)}[{index}]") for index, one in enumerate(value))

    def require_no_more(self) -> None:
        """Raises WrongManifestError when the object has values that were not read."""
        for name in self._values:
            where = f"in {self._where}" if self._where else "at its top"
            raise WrongManifestError(f"an unknown name, {short_text(name)}, {where}", "only names that Tidegate writes")

    def _take(self, name: str) -> Any:
        """Returns a value and marks it as read. WrongManifestError when it is missing or was already read."""
        if name not in self._values:
            raise WrongManifestError(f"no value of {self._at(name)}", "a value")
        return self._values.pop(name)

    def _at(self, name: str) -> str:
        """Full name of a value in the manifest, for errors."""
        return f"{self._where}.{name}" if self._where else name


def canonical(values: Any) -> str:
    """Canonical JSON text, from which the checksum of a manifest is computed."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def parse(data: bytes) -> Any:
    """Parses JSON. WrongManifestError when `data` is not valid JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WrongManifestError(f"{len(data):,} bytes that are not valid JSON", "a manifest") from error


def read_segment(fields: Fields) -> Segment:
    """Reads a segment: a range of one parameter's elements, and its place in the subgroup."""
    return Segment(
        param=fields.number("param"), offset=fields.number("offset"), start=fields.number("start"),
        numel=fields.number("numel", 1),
    )  # fmt: skip


def is_below(path: str) -> bool:
    """Whether `path` is a normalised relative path, with `/` as separator, that does not lead out of its start
    directory."""
    parts = PurePosixPath(path).parts
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    usable = bool(parts) and ".." not in parts and "\0" not in path and not path.startswith("/")
    return usable and str(PurePosixPath(path)) == path


def check_subgroup(
    index: int, file: str, numel: int, state_bytes: int, fmt: int, segments: Sequence[Segment], tensor_bytes: int
) -> None:
    """Checks one subgroup of a manifest. File name and sizes must match its `index`, weight format (`fmt`), number of
    elements and `tensor_bytes` (bytes per parameter of the rule's tensors), and its segments must fill it without gaps.
    WrongManifestError otherwise."""
    where, expected = f"subgroups[{index}]", tensor_bytes + list(WeightFormat)[fmt].aux_bytes
    if file != f"{index:06d}.tide":
        _raise_wrong(f"{where}.file", file, f"{index:06d}.tide")
    if state_bytes != expected:
        _raise_wrong(f"{where}.state_bytes", state_bytes, str(expected))
    filled = 0
    for segment in segments:
        if segment.start != filled:
            raise WrongManifestError(
                f"a segment of {where} that begins at element {segment.start:,}",
                f"one that begins at element {filled:,}",
            )
        filled += segment.numel
    if filled != numel:
        _raise_wrong(f"{where}.numel", numel, f"{filled}, which its segments have")


def check_all_elements(shapes: Sequence[Sequence[int]], segments: Sequence[Segment]) -> None:
    """Checks that the segments of all subgroups contain every element of every parameter exactly once. Raises
    WrongManifestError."""
    parts: defaultdict[int, list[Segment]] = defaultdict(list)
    for segment in segments:
        parts[segment.param].append(segment)
    if parts and max(parts) >= len(shapes):
        raise WrongManifestError(
            f"a segment of parameter {max(parts)} (counted from 0)", f"segments of the {len(shapes)} listed parameters"
        )
    for index, shape in enumerate(shapes):
        numel, covered = math.prod(shape), 0
        expected = f"each of its {numel:,} elements exactly once"
        for segment in sorted(parts[index], key=lambda one: one.offset):
            if segment.offset != covered:
                fault = "a gap" if segment.offset > covered else "a repetition"
                raise WrongManifestError(f"{fault} after {covered:,} elements of parameter {index}", expected)
            covered += segment.numel
        if covered != numel:
            raise WrongManifestError(f"{covered:,} elements of parameter {index}", expected)


def _read(read: Callable[[Fields], T], values: Any, where: str) -> T:
    """Converts one JSON object with the function `read`. WrongManifestError when `read` leaves values unread. `where`:
    name of the object for errors."""
    fields = Fields(values, where)
    result = read(fields)
    fields.require_no_more()
    return result


def _raise_wrong(where: str, found: object, expected: str) -> NoReturn:
    raise WrongManifestError(f"{where} {short_text(found)}", expected)


def short_text(found: object) -> str:
    """A wrong value of any kind as short text for errors."""
    if isinstance(found, int) and not -MAX_NUMBER <= found <= MAX_NUMBER:
        return "a number that is too large"
    text = ascii(found) if isinstance(found, str | int | float | None) else f"a {type(found).__name__}"
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"

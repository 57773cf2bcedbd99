"""Strict validation of a manifest's JSON: names, types and bounds of all values, and their consistency.

Every fault raises `WrongManifestError`; `Manifest.unpack` adds the name of the file.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, NoReturn

from pydantic import AfterValidator, Field, ValidationError

from tidegate.agent.parameters.subgroups import Segment
from tidegate.kernels import WeightFormat

MAX_NUMBER: Final = 2**63 - 1
"""Largest number that a manifest may contain, for parameters, bytes and steps."""
ATTEMPT: Final = "[0-9a-f]{1,32}"
MAX_SHOWN_CHARACTERS: Final = 60
"""Maximum number of characters of a wrong value that an error shows."""


class WrongManifestError(Exception):
    """Fault in a manifest's content. `found` and `expected` describe the value and what it should be."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found, expected)
        self.found, self.expected = found, expected


def canonical(values: Any) -> str:
    """Canonical JSON text, from which the checksum of a manifest is computed."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def parse(data: bytes) -> Any:
    """Parses JSON. WrongManifestError when `data` is not valid JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WrongManifestError(f"{len(data):,} bytes that are not valid JSON", "a manifest") from error


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


def _below(path: str) -> str:
    """Returns the path. ValueError when it is not a normalised relative path inside the rank's folder."""
    if not is_below(path):
        raise ValueError("the relative path of a file inside the rank's folder")
    return path


Number = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Count = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
PathBelow = Annotated[str, AfterValidator(_below)]


def fault_of(error: ValidationError) -> WrongManifestError:
    """Converts the first fault that pydantic found in a manifest to a WrongManifestError."""
    first = error.errors(include_url=False)[0]
    *outer, name = ("", *first["loc"])
    where = _place(outer)
    if first["type"] == "unexpected_keyword_argument":
        where = f"in {where}" if where else "at its top"
        return WrongManifestError(f"an unknown name, {short_text(name)}, {where}", "only names that Tidegate writes")
    if first["type"] == "missing":
        return WrongManifestError(f"no value of {_place(first['loc'])}", "a value")
    expected = re.sub("^(Input should be|Value error,) ", "", first["msg"])
    expected = expected.replace("String should match", "text that matches the")
    return WrongManifestError(f"{_place(first['loc'])} {short_text(first['input'])}", expected)


def _place(names: Sequence[str | int]) -> str:
    """Full name of a value in the manifest, as in `subgroups[3].file`."""
    return "".join(f".{name}" if isinstance(name, str) else f"[{name}]" for name in names).lstrip(".")


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


def _raise_wrong(where: str, found: object, expected: str) -> NoReturn:
    raise WrongManifestError(f"{where} {short_text(found)}", expected)


def short_text(found: object) -> str:
    """A wrong value of any kind as short text for errors."""
    if isinstance(found, int) and not -MAX_NUMBER <= found <= MAX_NUMBER:
        return "a number that is too large"
    text = ascii(found) if isinstance(found, str | int | float | None) else f"a {type(found).__name__}"
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"

"""Checks of settings that are no knobs: whole numbers, numbers, flags, texts, words of a closed set and directories.

Each function takes the name of the setting and the given value, and most return the value in its normal form.
ConfigError names the setting, the value and what is accepted.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence

from tidegate.errors import ConfigError
from tidegate.knobs.kinds import number_of


def check_whole(name: str, value: object, minimum: int, *, of: str = "", multiple_of: int = 1) -> int:
    """The value as an int. `1e9` is accepted as 1000000000.

    minimum: the smallest value that is accepted.
    of: text for the error after name and value, such as " of a path", that names the owner of the setting.
    multiple_of: a number that divides each value that is accepted.
    """
    number = _whole(value)
    if number is None:
        raise ConfigError(f"{name}={value!r}{of} is not a whole number: give one of at least {minimum}.")
    if number < minimum:
        raise ConfigError(f"{name}={number}{of} is out of range: at least {minimum} is needed.")
    if number % multiple_of:
        raise ConfigError(f"{name}={number}{of} must be a multiple of {multiple_of}.")
    return number


def check_number(name: str, value: object, *, above: float | None = None, of: str = "") -> float:
    """The value as a float; ConfigError if it is not a number or too small. Infinity is accepted.

    above: the value must be greater than this number; None: it must be at least 0.
    of: text for the error after name and value, such as " of a path", that names the owner of the setting.
    """
    bound = "at least 0" if above is None else f"more than {above:g}"
    if isinstance(value, bool | str | bytes) or math.isnan(number := number_of(value)):
        raise ConfigError(f"{name}={value!r}{of} is not a number: give one of {bound}.")
    if not (number >= 0 if above is None else number > above):
        raise ConfigError(f"{name}={value}{of} is out of range: {bound} is needed.")
    return number


def check_flag(name: str, value: object) -> bool:
    """Returns `value` if it is True or False; ConfigError if not."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not a flag: give True or False.")
    return value


def check_text(name: str, value: object, example: str, *, of: str = "") -> str:
    """Returns `value` if it is a string; ConfigError if not. `example`: a valid value for the error message."""
    if not isinstance(value, str):
        raise ConfigError(f"{name}={value!r}{of} is not a string: give one such as {example!r}.")
    return value


def check_word(name: str, value: object, words: Sequence[str]) -> str:
    """Returns `value` if it is one of `words`; ConfigError if not."""
    if not isinstance(value, str) or value not in words:
        *others, last = map(repr, words)
        raise ConfigError(f"{name}={value!r} is unknown: use {', '.join(others)} or {last}.")
    return value


def check_kind(name: str, value: object, kind: type | tuple[type, ...], example: str, *, of: str = "") -> None:
    """Checks that `value` is an instance of `kind` (a class or several classes); ConfigError if not. `example`: a
    valid value for the error message, as users write it."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name}={value!r}{of} is a {type(value).__name__}: give {example}.")


def check_directory(name: str, value: str | os.PathLike[str], remedy: str) -> None:
    """Checks that `value` is no address, such as s3://bucket/prefix; ConfigError if it is one. An address that may hold
    credentials is not quoted. `remedy`: what to do instead, for the error message."""
    text = os.fspath(value)
    if "://" in text:
        shown = text if "@" not in text else f"{text.partition('://')[0]}://…"
        raise ConfigError(f"{name}={shown!r} is an address, not a directory: {remedy}.")


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None

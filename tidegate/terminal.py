"""What people read in a terminal: texts from elsewhere cannot move its cursor, colour it or hide what stands there."""

from __future__ import annotations

import sys
import unicodedata
from typing import Final, TextIO

from tidegate.errors import ConfigError

_KEPT: Final = "\n\t"
_TURNS: Final = frozenset("\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""They turn the direction of writing, or break a line."""


def visible(text: str) -> str:
    """The text with its control characters as `\\u001b`; newlines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def say(*words: object, file: TextIO | None = None, flush: bool = False) -> None:
    """Prints them to stdout, or to `file`, so that everything in them is visible."""
    print(visible(" ".join(map(str, words))), file=file or sys.stdout, flush=flush)


def confirm(question: str) -> bool:
    """Asks whoever is at the terminal, so that everything in the question is visible. No is the default."""
    import typer  # not where training is: it needs no command line

    return typer.confirm(visible(question))


def encodable(text: str, what: str) -> str:
    """The text. ConfigError naming `what` when it can be neither stored nor sent: its bytes were no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} {text!a} is not UTF-8: write it in characters that are.") from error
    return text


def _shown(character: str) -> str:
    hidden = unicodedata.category(character) in ("Cc", "Cs") or character in _TURNS
    return f"\\u{ord(character):04x}" if hidden and character not in _KEPT else character

"""Terminal output with control characters escaped, so that text from other sources cannot move the cursor, set colours
or hide other text."""

from __future__ import annotations

import sys
import unicodedata
from typing import Final, TextIO

from tidegate.errors import ConfigError

_UNESCAPED: Final = "\n\t"
_DIRECTION_MARKS: Final = frozenset(
    "\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)
"""Characters that change the direction of writing, or break a line."""


def visible(text: str) -> str:
    """The text with control characters escaped, as in `\\u001b`; newlines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(character) for character in text)


def say(*words: object, file: TextIO | None = None, flush: bool = False) -> None:
    """Prints the words to stdout, or to `file`, with control characters escaped."""
    print(visible(" ".join(map(str, words))), file=file or sys.stdout, flush=flush)


def confirm(question: str) -> bool:
    """Asks the user at the terminal a yes/no question, with control characters escaped. The default is no."""
    import typer  # imported here because training does not need the command line

    return typer.confirm(visible(question))


def encodable(text: str, what: str) -> str:
    """Returns `text` if it can be encoded as UTF-8; otherwise ConfigError that names `what`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} {text!a} has characters that are not valid UTF-8: use others.") from error
    return text


def _escaped(character: str) -> str:
    hidden = unicodedata.category(character) in ("Cc", "Cs") or character in _DIRECTION_MARKS
    return f"\\u{ord(character):04x}" if hidden and character not in _UNESCAPED else character

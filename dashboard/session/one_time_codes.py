"""One-time codes: a code gives one browser a session of the live view, once, within ten minutes.

A code is stored as a file in a private folder; the file's name is the code's digest. Redeeming a code removes its file,
so only one request can succeed. Each user's codes are in that user's state directory, next to the tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import os
import secrets
import time
from pathlib import Path
from typing import Final

from tidegate.client.discovery import state_dir
from tidegate.client.state_files import home_of

LIFE_SECONDS: Final = 600.0
LONGEST: Final = 128
"""Longest code, in characters."""


def folder() -> Path:
    """The folder in which one-time codes of this user are stored."""
    return home_of(state_dir()) / "codes"


def mint(where: Path | None = None) -> str:
    """Creates a one-time code, with which a browser can open a session of the live view. Returns the code.

    where: the folder in which codes are stored; None: this user's folder. OSError if it cannot be written.
    """
    where = where or folder()
    where.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    where.mkdir(exist_ok=True, mode=0o700)
    where.chmod(0o700)
    _remove_old(where)
    code = secrets.token_urlsafe(32)
    _write_private(where / digest(code), "")
    return code


def redeem(code: str, where: Path | None = None) -> bool:
    """Uses up a one-time code of the live view. Returns whether the code was valid, unused, and not older than
    `LIFE_SECONDS` (ten minutes).

    where: the folder in which codes are stored; None: this user's folder.
    """
    if not 0 < len(code) <= LONGEST:
        return False
    kept = (where or folder()) / digest(code)
    try:
        made_at = kept.stat().st_mtime
        kept.unlink()  # of several requests at the same time one succeeds
    except OSError:
        return False
    return time.time() - made_at <= LIFE_SECONDS


def redirect_file(link: str, where: Path | None = None) -> Path:
    """Writes an HTML file that only this user can read and that redirects a browser to `link`. Returns its path.

    The browser is started with this path as argument. It is not started with the link itself, because the link has a
    one-time code, and other users of the machine can see the arguments of a program.

    where: the folder for the file; None: this user's folder of one-time codes.
    """
    path = (where or folder()) / f"open-{secrets.token_hex(8)}.html"
    address = html.escape(link, quote=True)
    _write_private(
        path, f'<!doctype html><meta http-equiv="refresh" content="0; url={address}"><title>Tidegate</title>'
    )
    return path


def digest(code: str) -> str:
    """SHA-256 of a code or of a session's cookie, in hex: these secrets themselves are not stored."""
    return hashlib.sha256(code.encode("utf-8", "surrogateescape")).hexdigest()


def _write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _remove_old(where: Path) -> None:
    for kept in where.iterdir():
        with contextlib.suppress(OSError):  # another process has removed it
            if time.time() - kept.stat().st_mtime > LIFE_SECONDS:
                kept.unlink()

"""The daemon's state directory: made, checked, and held by one daemon; files in it are private and never links."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import pwd
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tidegate.client.daemon_proof import KEY_FILE
from tidegate.client.state_files import OWN_FOLDER, home_of, read_no_link
from tidegate.errors import DaemonError

_OTHERS: Final = 0o077
_DATABASE: Final = "tidegate.db"
_MOVED: Final = (
    f"{_DATABASE}-wal", f"{_DATABASE}-shm", "read.token", "operate.token", "agent.token", "alert.token", _DATABASE,
)  # fmt: skip
"""The database comes last: as long as it is where it was, the rest is looked for there."""
log = logging.getLogger(__name__)


def prepare(state_dir: Path) -> Path:
    """Makes the folder that holds the state, of mode 0700 and ours, and gives it; DaemonError where that cannot be.

    It is `state_dir` itself where that is ours and closed to others, or not there yet. Else (a volume of root's, of
    mode 0777) it is a folder of our own in it, into which what an earlier version left beside it is moved.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = state_dir.stat()
        own = state_dir / OWN_FOLDER
        if home_of(state_dir) == state_dir and _is_private(found) and not _is_there(own):
            return state_dir
        with contextlib.suppress(FileExistsError):
            own.mkdir(mode=0o700)
        _check(own)
        _move_here(state_dir, own)
    except OSError as error:
        raise DaemonError(f"The state directory {state_dir} cannot be made: {unwritable(error)}.") from error
    return own


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _check(own: Path) -> None:
    """DaemonError unless it is a folder that only we can enter."""
    found = own.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise DaemonError(f"{own} is not a folder, so it cannot hold the daemon's state: remove it.")
    if found.st_uid != os.geteuid():
        raise DaemonError(
            f"{own} belongs to user {_user(found.st_uid)}, so it cannot hold the state of a daemon of user "
            f"{_user(os.geteuid())}: start the daemon as its owner, remove it, or choose another --state-dir."
        )
    if found.st_mode & _OTHERS:
        raise DaemonError(
            f"{own} has mode {stat.S_IMODE(found.st_mode):04o}: other users may have changed or read the daemon's "
            f"state. Look whether its files are yours and as they should be, then chmod 700 {own}."
        )


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _move_here(state_dir: Path, own: Path) -> None:
    """Moves what an earlier version left beside our folder into it, once; DaemonError where it is not ours."""
    left = [name for name in _MOVED if _is_there(state_dir / name)]
    if not left or _is_there(own / _DATABASE):
        return
    with exclusive(state_dir):
        for name in left:
            found = (state_dir / name).lstat()
            if not (stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1):
                raise DaemonError(
                    f"{state_dir / name} is a link or belongs to user {_user(found.st_uid)}, so the state in "
                    f"{state_dir} is not moved to {own}: start the daemon as the user whose state it is, or remove it."
                )
        for name in left:
            (state_dir / name).rename(own / name)
    log.warning("the state in %s is in %s from now on: others may enter %s", state_dir, own, state_dir)


@contextlib.contextmanager
def exclusive(home: Path) -> Iterator[None]:
    """Holds the folder: two daemons on one would decide against each other. Freed at death."""
    try:
        # The folder itself is locked: no lock file is left behind, whatever ends this process.
        descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise DaemonError(f"The state directory {home} cannot be used: {error.strerror}.") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            why = f"Another daemon (process {_pid(home)}) uses {home}."
            raise DaemonError(f"{why} Stop it, or choose another --state-dir.") from error
        yield
    finally:
        os.close(descriptor)


def _pid(home: Path) -> str:
    try:
        return str(json.loads(read_no_link(home / "daemon.json")[0])["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"


def read_private(path: Path) -> str:
    """The text of our file; empty where there is none. One that others could read is written anew.

    DaemonError for a link, and for a file of somebody else.
    """
    if path.is_symlink():
        raise DaemonError(
            f"{path} is a symbolic link, which the daemon does not follow: remove it. (Tokens that are made elsewhere: "
            "--token-dir.)"
        )
    try:
        text, status = read_no_link(path)
    except FileNotFoundError:
        return ""
    if status.st_uid != os.geteuid():
        raise DaemonError(
            f"{path} belongs to user {_user(status.st_uid)}, not to the daemon's ({_user(os.geteuid())}): remove it, "
            "or start the daemon as its owner."
        )
    text = text.strip()
    if status.st_mode & _OTHERS:
        log.warning("%s could be read by others: its mode is now 0600. Delete it to get a new one.", path)
        write_private(path, text)
    return text


def write_private(path: Path, text: str) -> None:
    """Never readable by others, not for a moment; complete or not there. What is at `path`, a link too, is replaced."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(draft, flags, 0o600), "w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def unwritable(error: OSError) -> str:
    """Why the system refused a file of the state; of a full disk also what to do. It ends without a full stop."""
    why = error.strerror or str(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{why}. Make room on its disk, then start the daemon again" if full else why


def proof_key(home: Path) -> str:
    """The secret with which this daemon proves itself; made where there is none."""
    path = home / KEY_FILE
    try:
        if not (key := read_private(path)):
            write_private(path, key := secrets.token_hex(32))
    except OSError as error:
        raise DaemonError(f"The file {path} cannot be used: {unwritable(error)}.") from error
    return key

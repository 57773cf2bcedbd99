"""The daemon's state directory: created, checked, and locked by one daemon. Its files are private and never links."""

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
"""Files that are moved from an earlier version's state directory, in this order. The database is moved last: while it
is at its old place, an interrupted move is repeated at the next start."""
log = logging.getLogger(__name__)


def prepare(state_dir: Path) -> Path:
    """Creates and returns the folder of the state: owned by this user, mode 0700. DaemonError if that is impossible.

    It is `state_dir` itself where that is owned by this user and closed to others, or does not exist yet. Otherwise
    (for example a volume owned by root with mode 0777) it is a folder of this user inside `state_dir`. The files that
    an earlier version left in `state_dir` are moved into that folder.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = state_dir.stat()
        own = state_dir / OWN_FOLDER
        private = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS
        if home_of(state_dir) == state_dir and private and not _is_there(own):
            return state_dir
        with contextlib.suppress(FileExistsError):
            own.mkdir(mode=0o700)
        _check(own)
        _move_here(state_dir, own)
    except OSError as error:
        raise DaemonError(f"The state directory {state_dir} cannot be made: {unwritable(error)}.") from error
    return own


def _is_there(path: Path) -> bool:
    """Whether there is anything at the path, a broken link included."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _check(own: Path) -> None:
    """DaemonError unless `own` is a folder that only this user can enter."""
    status = own.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise DaemonError(f"{own} is not a folder, so it cannot hold the daemon's state: remove it.")
    if status.st_uid != os.geteuid():
        raise DaemonError(
            f"{own} belongs to user {_user(status.st_uid)}, so it cannot hold the state of a daemon of user "
            f"{_user(os.geteuid())}: start the daemon as its owner, remove it, or choose another --state-dir."
        )
    if status.st_mode & _OTHERS:
        raise DaemonError(
            f"{own} has mode {stat.S_IMODE(status.st_mode):04o}: other users may have changed or read the daemon's "
            f"state. Check that its files belong to you and are unchanged, then chmod 700 {own}."
        )


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _move_here(state_dir: Path, own: Path) -> None:
    """Moves the files of an earlier version from `state_dir` into `own`, once.

    DaemonError for a file that is a link or belongs to another user.
    """
    old_files = [name for name in _MOVED if _is_there(state_dir / name)]
    if not old_files or _is_there(own / _DATABASE):
        return
    with exclusive(state_dir):
        for name in old_files:
            status = (state_dir / name).lstat()
            if not (stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1):
                raise DaemonError(
                    f"{state_dir / name} is a link or belongs to user {_user(status.st_uid)}, so the state in "
                    f"{state_dir} is not moved to {own}: start the daemon as the owner of the file, or remove the file."
                )
        for name in old_files:
            (state_dir / name).rename(own / name)
    log.warning("the state in %s was moved to %s, because other users may enter %s", state_dir, own, state_dir)


@contextlib.contextmanager
def exclusive(home: Path) -> Iterator[None]:
    """Context manager that locks the folder, so that only one daemon uses the state in it. DaemonError if another
    daemon holds the lock. The lock ends with the process at the latest."""
    try:
        # The folder itself is locked, so no lock file can be left behind.
        descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise DaemonError(
            f"The state directory {home} cannot be used: {error.strerror}. Check that it is a directory that this "
            "user can read, or choose another --state-dir."
        ) from error
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
    """Process id of the daemon that uses the folder, for messages; `unknown` if it cannot be read."""
    try:
        return str(json.loads(read_no_link(home / "daemon.json")[0])["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"


def read_private(path: Path) -> str:
    """The text of a private file of this user; empty where there is no file.

    A file that other users could read is replaced by one with mode 0600. DaemonError for a link, and for a file of
    another user.
    """
    if path.is_symlink():
        raise DaemonError(
            f"{path} is a symbolic link, which the daemon does not follow: remove it. To use token files from another "
            "folder, give that folder with --token-dir."
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
        log.warning("%s could be read by other users: its mode is now 0600. Delete it to get a new secret.", path)
        write_private(path, text)
    return text


def write_private(path: Path, text: str) -> None:
    """Writes a file atomically with mode 0600, so that others can never read it. Replaces a file or link at `path`."""
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
    """The reason of a failed file operation as text without a final full stop; for a full disk with the remedy."""
    why = error.strerror or str(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{why}. Make room on its disk, then start the daemon again" if full else why


def proof_key(home: Path) -> str:
    """The secret key of the daemon's identity proof (`/v1/proof`); created if it does not exist."""
    path = home / KEY_FILE
    try:
        if not (key := read_private(path)):
            write_private(path, key := secrets.token_hex(32))
    except OSError as error:
        raise DaemonError(f"The file {path} cannot be used: {unwritable(error)}.") from error
    return key

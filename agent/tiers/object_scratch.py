"""What a run leaves in an object store while it lives: `<prefix>/tidegate-<run>/rank<k>/`, and how to tell it is dead.

There are no locks in an object store. Each rank has a lease: an object `owner.json`, which says who it is and is
written again every LEASE_SECONDS. Whether it lives is told like this, and in this order:

- From where its process can be seen (same boot of the same kernel, same namespace of process ids): by the process
  itself, its id together with the moment at which it began. That is certain, whatever the lease says.
- From anywhere else: by the age of the lease, by the clock of the store. Younger than ALIVE_SECONDS: it lives. Older
  than DEAD_SECONDS: it is dead. Between, or without a readable owner: nobody can tell.

So a run that was stopped, or cut off from its store, for longer than DEAD_SECONDS can be taken for dead on another
machine. It is never wrong then, but it ends: its next fetch finds no object, which is an error that says so. Clocks may
differ by 15 minutes, the most that S3 lets a request differ, before anything here changes.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self

from tidegate.agent.tiers.object_client import Client, Refused, connect, unusable
from tidegate.agent.tiers.object_settings import ObjectSettings
from tidegate.agent.tiers.scratch import OWNER, PREFIX, RANK_NAME, RUN_NAME, Alive
from tidegate.errors import ScratchTaken

log = logging.getLogger("tidegate.tiers")

LEASE_SECONDS: Final = 60.0
ALIVE_SECONDS: Final = 1200.0
"""The lease is renewed within 60 s; 15 minutes for clocks, the rest for a store that is away for a while."""
DEAD_SECONDS: Final = 6 * 3600.0
OWNER_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class ObjectOwner:
    """Whose scratch it is, as its lease says."""

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    process_start_ticks: int
    run: str
    rank: int
    created_at: float
    """Unix seconds."""

    @classmethod
    def me(cls, run: str, rank: int) -> Self:
        return cls(
            host=socket.gethostname(), boot_id=_boot_id(), pid_namespace=_pid_namespace(), pid=os.getpid(),
            process_start_ticks=_start_ticks(os.getpid()), run=run, rank=rank, created_at=time.time(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ObjectLeftover:
    """One rank's scratch that was found under a prefix."""

    directory: str
    """Its prefix, as a URL."""
    run: str
    rank: int
    nbytes: int
    age_seconds: float
    owner: ObjectOwner | None
    """None when the lease is missing or damaged."""
    alive: Alive
    settings: ObjectSettings = field(repr=False)


class ObjectScratch:
    """One rank's prefix, for as long as its process lives, with a thread that renews the lease."""

    def __init__(self, settings: ObjectSettings, client: Client, run: str, rank: int) -> None:
        """PathUnusable when nothing can be written there."""
        if not RUN_NAME.fullmatch(run) or not RANK_NAME.fullmatch(f"rank{rank}"):
            raise ValueError(f"run {run!r} or rank {rank} cannot be part of a key")
        self.folder = f"{PREFIX}{run}/rank{rank}"
        self.url = f"{settings.url.rstrip('/')}/{self.folder}"
        self.owner = ObjectOwner.me(run, rank)
        self._client = client
        self._ended = threading.Event()
        self._renew()
        self._thread = threading.Thread(target=self._keep, name="tidegate-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        self._client.put(f"{self.folder}/{OWNER}", json.dumps(asdict(self.owner), indent=1).encode())

    def _keep(self) -> None:
        late = False
        while not self._ended.wait(LEASE_SECONDS):
            try:
                self._renew()
            except Refused as error:
                if not late:  # whoever moves state sees it too, and acts on it
                    log.warning("the lease of %s cannot be renewed, it is tried again and again: %s", self.url, error)
                late = True
            else:
                late = False

    def end(self) -> None:
        """The lease is not renewed any more. Idempotent."""
        self._ended.set()
        self._thread.join()

    def remove(self) -> None:
        """Removes the lease, after everything else. Refused when it stays behind."""
        self._client.delete([f"{self.folder}/{OWNER}"])


def find_object_leftovers(settings: ObjectSettings) -> list[ObjectLeftover]:
    """All scratch under a prefix, by run and rank, that of live runs too: look at `alive`.

    ConfigError, or PathUnusable when the prefix cannot be listed.
    """
    _, client = connect(settings)
    try:
        runs = [name for name in client.folders() if name.startswith(PREFIX)]
        ranks = [f"{run}/{rank}" for run in runs for rank in client.folders(run) if RANK_NAME.fullmatch(rank)]
        found = [_look_at(settings, client, rank) for rank in ranks]
    except Refused as error:
        raise unusable(settings, error) from error
    return sorted((one for one in found if one is not None), key=lambda leftover: (leftover.run, leftover.rank))


def remove_objects(leftover: ObjectLeftover) -> None:
    """Removes scratch that nobody uses. Nothing happens when it is gone.

    It is looked at again: ScratchTaken when it is not dead. PathUnusable when it cannot be removed.
    """
    _, client = connect(leftover.settings)
    folder = f"{PREFIX}{leftover.run}/rank{leftover.rank}"
    try:
        now = _look_at(leftover.settings, client, folder)
        if now is None:
            return
        if now.alive != "no" or now.owner != leftover.owner:
            raise ScratchTaken(f"{leftover.directory} is in use, may be, or is no longer what was found: look again.")
        keys = [one["path"] for one in client.objects(folder)]
        # The lease goes last: what is left after a crash can still be told apart.
        client.delete([key for key in keys if not key.endswith(f"/{OWNER}")])
        client.delete([f"{folder}/{OWNER}"])
    except Refused as error:
        raise unusable(leftover.settings, error) from error


def _look_at(settings: ObjectSettings, client: Client, folder: str) -> ObjectLeftover | None:
    """None when it is gone."""
    objects = client.objects(folder)
    if not objects:
        return None
    lease = next((one for one in objects if one["path"] == f"{folder}/{OWNER}"), None)
    owner = _read_owner(client, lease["path"]) if lease is not None else None
    oldest: datetime = min(one["last_modified"] for one in objects)
    created_at = owner.created_at if owner is not None else oldest.timestamp()
    run, _, rank = folder.partition("/")
    return ObjectLeftover(
        f"{settings.url.rstrip('/')}/{folder}", run.removeprefix(PREFIX), int(rank.removeprefix("rank")),
        sum(one["size"] for one in objects), max(0.0, time.time() - created_at), owner,
        _judge(owner, time.time() - lease["last_modified"].timestamp() if lease is not None else 0.0), settings,
    )  # fmt: skip


def _read_owner(client: Client, key: str) -> ObjectOwner | None:
    """None when it is damaged, or gone meanwhile."""
    with suppress(Refused):
        return _parse(bytes(client.get(key, OWNER_BYTES)))
    return None


def _parse(text: bytes) -> ObjectOwner | None:
    try:
        owner = ObjectOwner(**json.loads(text))
    except (ValueError, TypeError):
        return None
    numbers: tuple[Any, ...] = (owner.pid, owner.process_start_ticks, owner.rank, owner.created_at)
    texts: tuple[Any, ...] = (owner.host, owner.boot_id, owner.pid_namespace, owner.run)
    sound = all(isinstance(n, int | float) for n in numbers) and all(isinstance(text, str) for text in texts)
    return owner if sound and owner.pid > 0 else None


def _judge(owner: ObjectOwner | None, lease_age_seconds: float) -> Alive:
    if owner is None:
        return "unknown"
    if (owner.boot_id, owner.pid_namespace) == (_boot_id(), _pid_namespace()):
        return _judge_process(owner)
    if lease_age_seconds < ALIVE_SECONDS:
        return "yes"
    return "no" if lease_age_seconds > DEAD_SECONDS else "unknown"


def _judge_process(owner: ObjectOwner) -> Alive:
    """Of this kernel and this namespace of process ids."""
    try:
        return "yes" if _start_ticks(owner.pid) == owner.process_start_ticks else "no"
    except OSError:  # there is none, or /proc hides those of other users
        with suppress(PermissionError):
            try:
                os.kill(owner.pid, 0)
            except ProcessLookupError:
                return "no"
        return "unknown"


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _start_ticks(pid: int) -> int:
    """Field 22 of /proc/<pid>/stat; the second, the program's name, may contain anything but ends at the last ')'. -1
    for one that is dead, though its parent has not yet taken note. OSError when it cannot be seen."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return -1 if fields[0] in "ZX" else int(fields[19])

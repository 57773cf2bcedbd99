"""Scratch prefix of a run in an object store, `<prefix>/tidegate-<run>/rank<k>/`, and whether its run is alive.

There are no locks in an object store. Each rank has a lease: an object `owner.json`, which identifies the rank's
process and is rewritten every LEASE_SECONDS. Whether the rank is alive is decided in this order:

- On a machine where its process is visible (same boot of the same kernel, same namespace of process ids): by the
  process itself, identified by its id and its start time. That is certain, whatever the age of the lease.
- Anywhere else: by the age of the lease, measured with the clock of the store. Younger than ALIVE_SECONDS: alive. Older
  than DEAD_SECONDS: dead. Between these, or without a readable owner: unknown.

So a run that was stopped, or cut off from its store, for longer than DEAD_SECONDS can be taken for dead on another
machine, and its objects removed. That run then ends with an error, never with wrong results: its next fetch finds no
object and raises. The limits allow for clocks that differ by 15 minutes, the most that S3 accepts in a request.
"""

from __future__ import annotations

import errno
import logging
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from tidegate.agent.procfs import boot_id, observed_start, pid_namespace
from tidegate.agent.tiers.object_client import Client, RequestFailed, connect, path_unusable
from tidegate.agent.tiers.object_settings import ObjectSettings
from tidegate.agent.tiers.scratch import RANK_NAME, RUN_NAME, SCRATCH_PREFIX
from tidegate.agent.tiers.scratch_owner import OWNER_FILE, Alive, Owner, read_owner
from tidegate.errors import ScratchTaken

log = logging.getLogger("tidegate.tiers")

LEASE_SECONDS: Final = 60.0
ALIVE_SECONDS: Final = 1200.0
"""Age of a lease in seconds up to which its rank counts as alive. The lease is renewed every 60 s. The limit allows for
clocks that differ by 15 minutes, and for some minutes in which the store is unreachable."""
DEAD_SECONDS: Final = 6 * 3600.0
PROBE_BYTES: Final = 4096
OWNER_BYTES: Final = 1 << 16
"""Maximum number of bytes that are read from a lease, the object `owner.json`."""


@dataclass(frozen=True, slots=True)
class ObjectLeftover:
    """Scratch prefix of one rank that a search under a storage path has found. `alive`: whether the rank still runs."""

    directory: str
    """The scratch prefix as a URL."""
    run: str
    rank: int
    nbytes: int
    age_seconds: float
    owner: Owner | None
    """Process that the prefix belongs to; None when the lease is missing or damaged."""
    alive: Alive
    settings: ObjectSettings = field(repr=False)


class ObjectScratch:
    """Scratch prefix of one rank. While the process lives, a thread renews the lease: it writes the object `owner.json`
    again, whose age tells other machines whether the rank is alive."""

    def __init__(self, settings: ObjectSettings, client: Client, run: str, rank: int) -> None:
        """Writes the first lease and starts the thread that renews it. RequestFailed when the lease cannot be
        written."""
        if not RUN_NAME.fullmatch(run) or not RANK_NAME.fullmatch(f"rank{rank}"):
            raise ValueError(
                f"run is {run!r} and rank is {rank}: a run name must have 1 to 64 letters, digits, '.', '_' and '-', "
                "with a letter or digit first, and a rank must be from 0 to 999,999"
            )
        self.folder = f"{SCRATCH_PREFIX}{run}/rank{rank}"
        self.url = f"{settings.url.rstrip('/')}/{self.folder}"
        self.owner = Owner.of_this_process(run, rank)
        self._client = client
        self._ended = threading.Event()
        self._renew()
        self._thread = threading.Thread(target=self._renew_repeatedly, name="tidegate-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        """Writes the lease, which also resets its age to 0."""
        self._client.put(f"{self.folder}/{OWNER_FILE}", self.owner.to_json())

    def _renew_repeatedly(self) -> None:
        """Renews the lease every LEASE_SECONDS until `end`; failures are logged and tried again."""
        late = False
        while not self._ended.wait(LEASE_SECONDS):
            try:
                self._renew()
            except RequestFailed as error:
                if not late:  # transfers of state fail too, and handle the failure
                    log.warning("the lease of %s cannot be renewed, retrying: %s", self.url, error)
                late = True
            else:
                late = False

    def end(self) -> None:
        """Stops renewing the lease. Idempotent."""
        self._ended.set()
        self._thread.join()

    def remove(self) -> None:
        """Deletes the lease; call it after everything else is deleted. RequestFailed when the lease cannot be
        deleted."""
        self._client.delete([f"{self.folder}/{OWNER_FILE}"])


def find_object_leftovers(settings: ObjectSettings) -> list[ObjectLeftover]:
    """Lists the scratch prefixes of all runs under a storage path, sorted by run and rank. Prefixes of live runs are
    included: the field `alive` of each entry says whether its rank is alive.

    ConfigError when the settings cannot work, PathUnusable when the objects cannot be listed.
    """
    _, client = connect(settings)
    try:
        runs = [name for name in client.folders() if name.startswith(SCRATCH_PREFIX)]
        ranks = [f"{run}/{rank}" for run in runs for rank in client.folders(run) if RANK_NAME.fullmatch(rank)]
        leftovers = [_inspect(settings, client, rank) for rank in ranks]
    except RequestFailed as error:
        raise path_unusable(settings, error) from error
    return sorted((item for item in leftovers if item is not None), key=lambda leftover: (leftover.run, leftover.rank))


def remove_objects(leftover: ObjectLeftover) -> None:
    """Deletes the scratch prefix of a dead rank with all its objects. Does nothing when the prefix is already gone.

    The prefix is inspected again first. ScratchTaken when its rank is not certainly dead, or another process owns the
    prefix now. PathUnusable when the objects cannot be deleted.
    """
    _, client = connect(leftover.settings)
    folder = f"{SCRATCH_PREFIX}{leftover.run}/rank{leftover.rank}"
    try:
        current = _inspect(leftover.settings, client, folder)
        if current is None:
            return
        if current.alive != "no" or current.owner != leftover.owner:
            raise ScratchTaken(
                f"{leftover.directory} is in use, may be in use, or has changed since it was listed: it was not "
                "removed. List it again."
            )
        keys = [entry["path"] for entry in client.objects(folder)]
        # The lease is deleted last, so that scratch that is left after a crash can still be identified.
        client.delete([key for key in keys if not key.endswith(f"/{OWNER_FILE}")])
        client.delete([f"{folder}/{OWNER_FILE}"])
    except RequestFailed as error:
        raise path_unusable(leftover.settings, error) from error


def probe_objects(settings: ObjectSettings) -> None:
    """Puts a small object under a storage path, gets it and deletes it. PathUnusable when any of that fails."""
    _, client = connect(settings)
    key, content = f".tidegate-probe-{secrets.token_hex(8)}", secrets.token_bytes(PROBE_BYTES)
    try:
        client.put(key, content)
        found = client.get(key, PROBE_BYTES)
        client.delete([key])
        if found != content:
            raise RequestFailed("an object that was put there is read with another content", errno.EIO, False)
    except RequestFailed as error:
        raise path_unusable(settings, error) from error


def _inspect(settings: ObjectSettings, client: Client, folder: str) -> ObjectLeftover | None:
    """Reads owner, size, age and liveness of a rank's scratch; None when it is gone."""
    objects = client.objects(folder)
    if not objects:
        return None
    lease = next((entry for entry in objects if entry["path"] == f"{folder}/{OWNER_FILE}"), None)
    owner = _read_owner(client, lease["path"]) if lease is not None else None
    oldest: datetime = min(entry["last_modified"] for entry in objects)
    created_at = owner.created_at if owner is not None else oldest.timestamp()
    run, _, rank = folder.partition("/")
    return ObjectLeftover(
        f"{settings.url.rstrip('/')}/{folder}", run.removeprefix(SCRATCH_PREFIX), int(rank.removeprefix("rank")),
        sum(entry["size"] for entry in objects), max(0.0, time.time() - created_at), owner,
        _liveness(owner, time.time() - lease["last_modified"].timestamp() if lease is not None else 0.0), settings,
    )  # fmt: skip


def _read_owner(client: Client, key: str) -> Owner | None:
    """Reads the owner from a lease; None when the lease is damaged, unreadable or gone."""
    with suppress(RequestFailed):
        return read_owner(bytes(client.get(key, OWNER_BYTES)))
    return None


def _liveness(owner: Owner | None, lease_age_seconds: float) -> Alive:
    """Whether the owner is alive: "yes", "no" or "unknown". If the owner's process was started on this machine since
    its last boot, in this namespace of process ids, the process itself is checked. Otherwise the age of the lease
    decides: below ALIVE_SECONDS "yes", above DEAD_SECONDS "no", between them "unknown"."""
    if owner is None:
        return "unknown"
    if (owner.boot_id, owner.pid_namespace) == (boot_id(), pid_namespace()):
        started = observed_start(owner.pid)
        return "unknown" if started is None else "yes" if started == owner.process_start_ticks else "no"
    if lease_age_seconds < ALIVE_SECONDS:
        return "yes"
    return "no" if lease_age_seconds > DEAD_SECONDS else "unknown"

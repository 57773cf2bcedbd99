"""All exceptions that Tidegate raises, as one hierarchy.

TidegateError
├── ConfigError            a setting that cannot work; raised at start
│   ├── KnobError          a knob unknown, out of range or of the wrong type
│   ├── MemoryBudgetError  more memory is needed than is available; carries the figures
│   ├── CapacityError      subgroups that do not fit on the storage paths; carries the figures
│   └── ParameterError     parameters that cannot be optimized (none, sparse, owned by another optimizer)
├── PlanError              a plan that would not give the right result, or would deadlock
├── EngineError            the engine could not finish a step
│   ├── LaneStuckError     an op outlived the watchdog; names lane and op
│   └── DeviceAccessError  an op touched memory that is not where it must be
├── StorageError           a path cannot hold state, or its files are not the expected state
│   ├── PathFailed         a read or a write failed, also when repeated; names path, subgroup and step
│   ├── StateLost          the only copy of a subgroup's state cannot be read; names subgroup, path, step, checkpoint
│   ├── NoPathLeft         no path and no host memory for state; names subgroup, path, step; carries the figures
│   ├── PathUnusable       missing, not a directory, not writable, read-only, another user's
│   ├── PathFull           not enough free space; carries the figures
│   ├── LocksUnusable      the folder of lock files is not private, or cannot lock
│   ├── ScratchTaken       scratch files that another run uses, may use, or left behind
│   ├── NoCheckpoint       no complete checkpoint, or none of the given step
│   ├── CheckpointFailed   a checkpoint could not be written; the previous checkpoint is unchanged
│   │   └── CheckpointTaken  another run or optimizer writes to the directory
│   └── StateFileError     a file without the expected state; names what was found and what was expected
│       ├── NotAStateFile, NewerFormat, ForeignByteOrder, UnknownChecksum
│       ├── HeaderTruncated, HeaderDamaged, HeaderContradiction, DataTruncated
│       ├── ManifestDamaged, FileDamaged, StrangeEntry
│       ├── FileUnreadable  the operating system refuses to read it; its content may be sound
│       ├── BlockDamaged   the data differ from their checksum; names block and offset
│       └── ForeignRun, ForeignState, WrongStep, WeightsMismatch
├── DaemonError            the daemon answered with a problem (RFC 9457), or cannot be reached
│   ├── DaemonUnreachable
│   │   └── DaemonUnproven  the server does not prove to be the daemon to which the token belongs
│   ├── NotAuthorized
│   ├── NotFound
│   ├── StaleKnobs         If-Match did not match: another client has changed the knobs
│   └── RankTaken          another live agent already holds this run and rank
└── DataError              training text that cannot be read
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from tidegate.wire.agent import Holder


class TidegateError(Exception):
    """Base of all errors that Tidegate raises. The message names the problem, the bound and the remedy."""


class ConfigError(TidegateError, ValueError):
    """A setting that cannot work, found at construction or at start."""


class KnobError(ConfigError):
    """A knob that is unknown or out of range. `knob` names it."""

    def __init__(self, message: str, knob: str) -> None:
        super().__init__(message)
        self.knob = knob


class MemoryBudgetError(ConfigError):
    """More memory is needed than is available. `needed_bytes` and `available_bytes` are the figures of the message."""

    def __init__(self, message: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class CapacityError(ConfigError):
    """Subgroups that do not fit on the storage paths. `needed` and `available` count subgroups."""

    def __init__(self, message: str, needed: int, available: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class ParameterError(ConfigError):
    """Parameters that cannot be optimized."""


class PlanError(TidegateError):
    """A plan that is not correct. `rule` names the rule that it breaks."""

    def __init__(self, message: str, rule: str) -> None:
        super().__init__(message)
        self.rule = rule


class EngineError(TidegateError, RuntimeError):
    """The engine could not finish a step."""


class LaneStuckError(EngineError):
    """An op ran longer than the watchdog allows (`watchdog_seconds`). The message names lane and op."""


class DeviceAccessError(EngineError):
    """An op used memory in the wrong place: an address that is not on the device, or that is not on the host."""


class StorageError(TidegateError):
    """A path cannot hold state, or the files on it are not the expected state."""


class PathFailed(StorageError):
    """A read or a write of one subgroup's state failed, also when repeated.

    `path`: name of the path. `subgroup`: number of the subgroup. `errno`: error number of the system.
    """

    def __init__(self, message: str, path: str, subgroup: int, errno: int) -> None:
        super().__init__(message)
        self.path = path
        self.subgroup = subgroup
        self.errno = errno


class StateLost(StorageError):
    """The only copy of a subgroup's state cannot be read, or is damaged. The cause is chained.

    `why`: the reason; it is part of the message, and not an attribute. `path`: name of the path. `subgroup`: number of
    the subgroup. `step`: number of the update that made the state. `checkpoint`: the last good checkpoint, None if
    there is none.
    """

    def __init__(self, why: object, path: str, subgroup: int, step: int, checkpoint: str | None) -> None:
        remedy = f"load {checkpoint}, the last good checkpoint" if checkpoint else "there is no checkpoint of this run"
        super().__init__(
            f"The state of subgroup {subgroup} after step {step}, on path {path}, is lost: {why} "
            f"Training cannot go on from here: {remedy}."
        )
        self.path = path
        self.subgroup = subgroup
        self.step = step
        self.checkpoint = checkpoint


class NoPathLeft(StorageError):
    """State whose path failed, and which fits neither on another path nor in host memory.

    `why`: the reason; it is part of the message, and not an attribute. `path`: name of the path that failed.
    `subgroup`: number of the subgroup. `step`: number of the update. `needed_bytes`: size of the state. `free_bytes`:
    largest free space of a path that still works.
    """

    def __init__(self, why: object, path: str, subgroup: int, step: int, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"The state of subgroup {subgroup} after step {step} can be stored nowhere. Path {path}: {why} It needs "
            f"{needed_bytes:,} bytes; the other paths have {free_bytes:,} free, and host memory has no room for it. "
            "Free space or add a path, then load a checkpoint."
        )
        self.path = path
        self.subgroup = subgroup
        self.step = step
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class PathUnusable(StorageError):
    """A directory that cannot hold state: missing, not a directory, not writable, read-only, another user's."""


class PathFull(StorageError):
    """Not enough free space on a path. `needed_bytes` and `free_bytes` are the figures of the message."""

    def __init__(self, message: str, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class LocksUnusable(StorageError):
    """The folder of lock files is not private to this user, or its file system cannot lock."""


class ScratchTaken(StorageError):
    """Scratch files (state on a storage path) that another run uses, may use, or has left behind."""


class NoCheckpoint(StorageError):
    """There is no complete checkpoint in the given directory, or none of the given step."""


class CheckpointFailed(StorageError):
    """A checkpoint could not be written. The previous checkpoint is unchanged."""


class CheckpointTaken(CheckpointFailed):
    """Another run, or another optimizer of this run, writes to the directory of checkpoints."""


class StateFileError(StorageError):
    """A file does not contain the expected state; no part of it may be used.

    `file`: the file. `found`, `expected`: what it contains, and what it should contain. The message names them, the
    problem (`trouble`) and the remedy.
    """

    trouble: ClassVar[str] = "does not contain the expected state"
    remedy: ClassVar[str] = "Load a checkpoint; the content of this file cannot be used."

    def __init__(self, file: str | os.PathLike[str], found: object, expected: object) -> None:
        super().__init__(f"{os.fspath(file)} {self.trouble}: found {found}, expected {expected}. {self.remedy}")
        self.file = os.fspath(file)
        self.found = found
        self.expected = expected


class NotAStateFile(StateFileError):
    """The file does not begin with the magic bytes of a state file."""

    trouble = "is not a state file of Tidegate, or its first bytes are damaged"
    remedy = "Give the directory that Tidegate wrote, or load a checkpoint."


class NewerFormat(StateFileError):
    """A newer version of Tidegate wrote the file."""

    trouble = "has a format that this Tidegate does not know"
    remedy = "Read it with the Tidegate that wrote it, or a later one."


class ForeignByteOrder(StateFileError):
    """A machine with another byte order (big or little endian) wrote the file."""

    trouble = "was written on a machine of another byte order"
    remedy = "Load a checkpoint made with state_dict, which moves between machines."


class UnknownChecksum(StateFileError):
    """The blocks have checksums of a kind that this version does not know."""

    trouble = "carries checksums of an unknown kind"
    remedy = "Read it with the Tidegate that wrote it, or a later one."


class HeaderTruncated(StateFileError):
    """The file ends inside its header."""

    trouble = "ends inside its header"


class HeaderDamaged(StateFileError):
    """The header differs from its checksum."""

    trouble = "has a damaged header"


class HeaderContradiction(StateFileError):
    """Values in the header contradict each other."""

    trouble = "has a header that contradicts itself"


class DataTruncated(StateFileError):
    """The file is missing, or it ends before the end of its data."""

    trouble = "is missing, or too short for its data"


class ManifestDamaged(StateFileError):
    """The manifest (list of contents) of a checkpoint is damaged."""

    trouble = "is a damaged manifest"
    remedy = "Load another checkpoint; `tidegate doctor --checkpoints` lists and removes damaged ones."


class FileDamaged(StateFileError):
    """A file of a checkpoint differs from its checksum: a file that `save_also` wrote, or the optimizer's
    `optimizer.pt`."""

    trouble = "has changed since it was saved in the checkpoint"
    remedy = "Load weights and state of another checkpoint; `tidegate doctor --checkpoints` lists damaged ones."


class StrangeEntry(StateFileError):
    """There is a link, a FIFO, a socket or a device file at the place of a plain file or directory of Tidegate."""

    trouble = "is not the kind of file that Tidegate creates there"
    remedy = "Find out who created it, and remove it; Tidegate has not read or followed it."


class FileUnreadable(StateFileError):
    """A file or directory that the operating system refuses to read; its content may be sound.

    `file`: the file or directory. `errno`: number of the system's error. `error`: the system's error; an argument, and
    not an attribute.
    """

    trouble = "cannot be read"
    remedy = "Its content may be sound, so it is not removed: solve the problem that the system names, then try again."

    def __init__(self, file: str | os.PathLike[str], error: OSError) -> None:
        code = error.errno or errno.EIO
        super().__init__(file, f"{errno.errorcode.get(code, code)} ({os.strerror(code)})", "no error")
        self.errno = code


class BlockDamaged(StateFileError):
    """The data of block number `block`, at byte `offset` of the file, differ from their checksum.

    `file`: the file. `found_checksum`, `expected_checksum`: CRC of the data, and CRC that it should have; the
    attributes `found` and `expected` contain them as text.
    """

    trouble = "has a damaged block"
    remedy = "The storage device may be failing: check it, then load a checkpoint."

    def __init__(
        self, file: str | os.PathLike[str], block: int, offset: int, found_checksum: int, expected_checksum: int
    ) -> None:
        where = f"block {block} at byte {offset:,}"
        super().__init__(file, f"checksum {found_checksum:#010x} in {where}", f"{expected_checksum:#010x}")
        self.block = block
        self.offset = offset


class ForeignRun(StateFileError):
    """Another run wrote the file."""

    trouble = "belongs to another run"
    remedy = "Give each run its own directory or name."


class ForeignState(StateFileError):
    """The file contains state of another rank, subgroup, format or update rule."""

    trouble = "holds the state of another model, rank or optimizer"
    remedy = "Resume with the model, dtype, optimizer and number of ranks that wrote it."


class WrongStep(StateFileError):
    """The file contains state of another step."""

    trouble = "holds the state of another step"
    remedy = "A flush was lost, or checkpoints were mixed: load one checkpoint as a whole."


class WeightsMismatch(StateFileError):
    """The state belongs to other weights than the model has."""

    trouble = "belongs to other weights than the model has"
    remedy = "Load weights and state of the same checkpoint, or start the optimizer anew."


class DataError(TidegateError):
    """Training text that cannot be read."""


class DaemonError(TidegateError):
    """The daemon answered with a problem. `status` is the HTTP status, 0 when there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class DaemonUnreachable(DaemonError):
    """No daemon answers at the address."""


class DaemonUnproven(DaemonUnreachable):
    """The server does not prove to be the daemon to which the token belongs; the token was not sent."""


class NotAuthorized(DaemonError):
    """The request had no token, an invalid token, or a token without the required scope."""


class NotFound(DaemonError):
    """There is no such run, rank or generation."""


class StaleKnobs(DaemonError):
    """Another client has changed the knobs since this client read them: its If-Match header names an old generation."""


class RankTaken(DaemonError):
    """Another live agent already holds this run and rank.

    `status`: the HTTP status. `holder`: that agent; None from an older daemon, which does not name it. `lease_seconds`:
    the agent counts as live for so long after its last report.
    """

    def __init__(
        self, message: str, status: int = 409, holder: Holder | None = None, lease_seconds: float = 10.0
    ) -> None:
        super().__init__(message, status)
        self.holder = holder
        self.lease_seconds = lease_seconds

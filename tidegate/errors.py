"""Every error a user can meet, as one tree.

TidegateError
├── ConfigError            a setting that cannot work; said at start
│   ├── KnobError          a knob unknown, out of range or of the wrong type
│   ├── MemoryBudgetError  what was asked for does not fit; carries the figures
│   ├── CapacityError      subgroups that do not fit on the storage paths; carries the figures
│   └── ParameterError     parameters that cannot be optimized (none, sparse, owned by another optimizer)
├── PlanError              a plan that would not give the right result, or would deadlock
├── EngineError            the engine could not finish a step
│   ├── LaneStuckError     an op outlived the watchdog; names lane and op
│   └── DeviceAccessError  an op touched memory that is not where it must be
├── DaemonError            the daemon answered with a problem (RFC 9457), or cannot be reached
│   ├── DaemonUnreachable
│   ├── NotAuthorized
│   ├── NotFound
│   ├── StaleKnobs         If-Match did not match: someone else changed the knobs
│   └── RankTaken          another live agent already holds this run and rank
└── DataError              training text that cannot be read
"""

from __future__ import annotations


class TidegateError(Exception):
    """Base of all errors that Tidegate raises on purpose. The message says what, the bound and the remedy."""


class ConfigError(TidegateError, ValueError):
    """A setting that cannot work."""


class KnobError(ConfigError):
    """A knob that is unknown or out of range. `knob` names it."""

    def __init__(self, message: str, knob: str) -> None:
        super().__init__(message)
        self.knob = knob


class MemoryBudgetError(ConfigError):
    """What was asked for does not fit in memory.

    `needed_bytes` and `available_bytes` are the figures behind the message.
    """

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
    """An op outlived the watchdog."""


class DeviceAccessError(EngineError):
    """An op touched memory that is not where it must be."""


class DataError(TidegateError):
    """Training text that cannot be read."""


class DaemonError(TidegateError):
    """The daemon answered with a problem. `status` is the HTTP status, 0 when there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class DaemonUnreachable(DaemonError):
    """No daemon answers at the address."""


class NotAuthorized(DaemonError):
    """No token, a wrong one, or one without the scope."""


class NotFound(DaemonError):
    """No such run, rank or generation."""


class StaleKnobs(DaemonError):
    """The knobs changed since they were read."""


class RankTaken(DaemonError):
    """Another live agent already holds this run and rank."""

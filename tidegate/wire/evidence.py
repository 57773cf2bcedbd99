"""Message with what the model knows of a rank at one moment, besides its rates: the inputs of predictions."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, Field

from tidegate.wire.base import Count, Duration, Flag, Message, PathName, Share, Speed, Text

MAX_SUBGROUPS: Final = 100_000
"""Most subgroups of one rank; the daemon simulates each of them."""
MAX_RUNS: Final = 1024
"""Most entries of a list that is sent as runs of equal or consecutive values."""


class SubgroupSizes(Message):
    """Sizes of subgroups with consecutive ids: one entry for each run of `count` equal subgroups."""

    numel: Count
    count: Annotated[int, Field(strict=True, ge=0, le=MAX_SUBGROUPS)]
    weight_bytes: Count
    grad_bytes: Count
    state_bytes: Count


class PathSpeed(Message):
    """Speeds of a path, in bytes per second. `factors`: speed of reads while writes run, divided by their speed alone;
    then the same of writes."""

    read_bytes_per_second: Speed
    write_bytes_per_second: Speed
    factors: tuple[Share, Share]


def check_count(count: int) -> None:
    """Raises ValueError for more subgroups than the daemon simulates."""
    if count > MAX_SUBGROUPS:
        raise ValueError(
            f"there are {count:,} subgroups in all, at most {MAX_SUBGROUPS:,} are allowed: make subgroups larger"
        )


def _check_sizes(runs: tuple[SubgroupSizes, ...]) -> tuple[SubgroupSizes, ...]:
    check_count(sum(sizes.count for sizes in runs))
    return runs


def _check_ids(runs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    check_count(sum(abs(last - first) + 1 for first, last in runs))
    return runs


SizeRuns = Annotated[tuple[SubgroupSizes, ...], Field(max_length=MAX_RUNS), AfterValidator(_check_sizes)]
"""Sizes of all subgroups in the order of their ids."""
IdRuns = Annotated[tuple[tuple[Count, Count], ...], Field(max_length=MAX_RUNS), AfterValidator(_check_ids)]
"""Ids of subgroups, as runs (first, last) of ids that grow or shrink by 1: ((9, 7), (0, 1)) is 9, 8, 7, 0, 1."""


class ModelEvidence(Message):
    """What the model knows of a rank at one moment, besides its rates. All predictions for this rank start from it: of
    the tuner, of previews, of canaries and of advice."""

    subgroups: SizeRuns | None = None
    """Sizes of all subgroups; None if they are as in the registration of the rank."""
    gradient_order: IdRuns | None = None
    """Ids of all subgroups in the order in which their gradients arrived in the last step; None if that is unknown."""
    early_gradients: Flag = True
    """Whether gradients are final (reduced over the ranks) when autograd has accumulated them."""
    step_at: Duration | None = None
    """Seconds after the first gradient at which plans expect the call of `step()`; None to derive it from the length of
    the backward."""
    idle_seconds: Duration = 0.0
    """Typical seconds from the end of `step()` to the next gradient, in which deferred flushes run; 0 if none are
    deferred."""
    backward_seconds: Duration | None = None
    """Typical seconds of the backward; None if it is unknown."""
    path_speeds: Annotated[dict[PathName, PathSpeed], Field(max_length=64)] = {}
    """Speeds by which plans order the ops on paths."""
    capacity: Annotated[dict[PathName, Count], Field(max_length=64)] = {}
    """Most subgroups of each path; without limit where absent."""
    retired: Annotated[tuple[PathName, ...], Field(max_length=64)] = ()
    """Paths that have failed and are not used any more."""
    retired_reasons: Annotated[dict[PathName, Text], Field(max_length=64)] = {}
    """Why each retired path failed, as a sentence."""
    automatic_cache_bytes: Count | None = None
    """Bytes of the host cache that `host_cache=auto` would be now; None without storage paths."""
    gradient_budget_bytes: Count | None = None
    """Device memory for weights, state and released gradients; None where gradients are kept until `zero_grad()`."""
    most_gradient_bytes: Count = 0
    """Largest device memory of released gradients that wait; 0 for no limit of its own."""

"""Messages with predictions for knobs that are not set yet: previews and advice."""

from __future__ import annotations

from tidegate.wire.base import Count, KnobChanges, Label, Message, RunName, Seconds, Text
from tidegate.wire.stall_causes import StallCause


class PredictedUpdate(Message):
    """The simulator's prediction of an update under some knobs, in the steady state."""

    update_seconds: Seconds
    low_seconds: Seconds | None = None
    high_seconds: Seconds | None = None
    """Bounds of the 90 % prediction interval, from the errors of predictions for the present knobs; None after too few
    steps."""
    stalls: dict[StallCause, Seconds]
    """Seconds in which nothing computes, by cause."""
    lane_bytes: dict[Label, Count]
    """Bytes of one step on the link and on the paths, by lane."""
    host_memory_bytes: dict[Label, Count]
    """Host memory by kind: `state` (with paths, the host cache), `mirror`, `gradient`, `slot`."""
    device_memory_bytes: Count
    """Device memory in bytes for the state of resident subgroups and for staging slots."""
    bound_seconds: Seconds
    """Lower bound of the update's time under these knobs on this machine."""
    bound_by: Label
    """The lane, or the path, that sets the lower bound."""


class KnobPreview(Message):
    """Answer to a PATCH with `dry_run=true`. Predictions are None until the run has measured its rates."""

    run: RunName
    generation: Count
    before: KnobChanges
    after: KnobChanges
    changed: KnobChanges
    predicted_update_seconds_before: Seconds | None = None
    predicted_update_seconds_after: Seconds | None = None
    predicted_before: PredictedUpdate | None = None
    predicted_after: PredictedUpdate | None = None
    predicted_phase_seconds_after: dict[Label, Seconds] = {}
    """Predicted seconds of each phase; for phases that knobs do not change, the median of the last measured steps."""
    error_ratio: Seconds | None = None
    """Relative error of the prediction for the present knobs (divided by the measured time); the same error must be
    expected of this prediction."""
    no_prediction: Text = ""
    """The reason for which there is no prediction, as a sentence."""
    no_room: Text = ""
    """The path that lacks capacity for its share under these knobs, as a sentence; other paths take the rest, or the
    change is refused."""


class Advice(Message):
    """Recommended knobs for the lead rank, including knobs that are pinned; they are not applied automatically."""

    run: RunName
    changes: KnobChanges = {}
    """The recommended changes; empty when no change has enough predicted gain."""
    predicted_update_seconds_now: Seconds | None = None
    predicted_update_seconds_then: Seconds | None = None
    sentence: Text
    """The recommended change with its figures, or the reason for which there is none."""

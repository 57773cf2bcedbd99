"""Messages with predictions for knobs that are not set yet: previews and advice."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tidegate.wire.base import Count, KnobChanges, Label, Message, RunName, Seconds, Text
from tidegate.wire.stall_causes import StallCause


class PredictedUpdate(Message):
    """The simulator's prediction of an update under some knobs, in the steady state."""

    update_seconds: Seconds
    low_seconds: Seconds | None = None
    high_seconds: Seconds | None = None
    """Upper bound of the 90 % prediction interval of `update_seconds`; `low_seconds` is the lower bound. Both come from
    the errors of predictions for the present knobs, and are None while too few steps were measured."""
    stalls: dict[StallCause, Seconds]
    """Seconds of the update in which neither the CPU nor the device computes, by stall cause."""
    lane_bytes: dict[Label, Count]
    """Bytes of one step on the link and on the paths, by lane."""
    host_memory_bytes: dict[Label, Count]
    """Host memory by kind: `state` (with paths, the host cache), `mirror` (copies of weights, for updates on the CPU),
    `gradient`, and `slot` (buffers for state on its way from or to a path, and for weights in an update)."""
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
    """Relative error of the prediction for the present knobs: the difference of predicted and measured time, divided by
    the measured time. The prediction for the changed knobs probably has the same error."""
    no_prediction: Text = ""
    """The reason for which there is no prediction, as a sentence."""
    no_room: Text = ""
    """A sentence that names each path without enough capacity for its share of the subgroups under the changed knobs;
    empty if all paths have enough. Other paths take the excess; if they cannot, the change is refused."""
    notes: Annotated[tuple[Text, ...], Field(max_length=64)] = ()
    """What to know of the change besides the prediction, as sentences: a value of which not all is used, or a path
    whose speed rests on little."""


class Advice(Message):
    """Recommended knobs for the lead rank (the lowest rank that is present), including knobs that are pinned; they are
    not applied automatically."""

    run: RunName
    changes: KnobChanges = {}
    """The recommended changes; empty when no change has enough predicted gain."""
    predicted_update_seconds_now: Seconds | None = None
    predicted_update_seconds_then: Seconds | None = None
    sentence: Text
    """The recommended change with its figures, or the reason for which there is none."""

"""What the model expects of knobs before anybody sets them."""

from __future__ import annotations

from tidegate.wire.base import Count, KnobChanges, Label, Message, RunName, Seconds, Text


class PredictedUpdate(Message):
    """What the simulator expects of an update under some knobs, once they have settled."""

    update_seconds: Seconds
    low_seconds: Seconds | None = None
    high_seconds: Seconds | None = None
    """Where 9 of 10 updates will be, by how far predictions of the present knobs were off; None after too few steps."""
    stalls: dict[Label, Seconds]
    """Seconds in which nothing computes, by cause."""
    lane_bytes: dict[Label, Count]
    """Bytes of one step on the link and on the paths, by lane."""
    host_memory_bytes: dict[Label, Count]
    """By kind: `state` (with paths, the host cache), `mirror`, `gradient`, `slot`."""
    device_memory_bytes: Count
    """State of residents, and staging slots."""
    bound_seconds: Seconds
    """These knobs cannot go below that on this machine."""
    bound_by: Label
    """The lane, or the path, that decides the bound."""


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
    """Of all phases; those that knobs do not change are as they were measured, medians of the last steps."""
    error_ratio: Seconds | None = None
    """How far the prediction of the present knobs is off what was measured, as a share of that: the same must be
    expected of this one."""
    no_prediction: Text = ""
    """Why there is none, as a sentence."""
    no_room: Text = ""
    """Which path cannot hold what these knobs give it, as a sentence; others take the rest, or it is refused."""


class Advice(Message):
    """What the model would choose for the lead rank, whether its knobs are pinned or not; nobody applies it."""

    run: RunName
    changes: KnobChanges = {}
    """Empty when nothing is predicted to gain enough."""
    predicted_update_seconds_now: Seconds | None = None
    predicted_update_seconds_then: Seconds | None = None
    sentence: Text
    """The change with its figures, or why there is none."""

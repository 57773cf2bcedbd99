"""Alerts, as Alertmanager tells the daemon and the daemon the screens."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from tidegate.wire.base import Count, Label, Message, Text

AlertState = Literal["firing", "resolved"]
SEVERITIES: Final = ("critical", "warning", "info")
"""Worst first; alerts of others come after them."""


class AlertView(Message):
    """The newest word of Alertmanager on one alert. `run` is empty for those that concern none."""

    run: Label
    fingerprint: Label
    """Alertmanager's name for this set of labels."""
    alert: Label
    state: AlertState
    severity: Label = ""
    summary: Text = ""
    description: Text = ""
    knob: Label = ""
    """What to turn; `none` where no knob helps."""
    runbook_url: Annotated[str, Field(max_length=500)] = ""
    labels: Annotated[dict[Label, Text], Field(max_length=64)] = {}
    starts_at: float
    ends_at: float | None = None
    received_at: float
    """When the daemon was told of it last."""


class AlertReceipt(Message):
    """Answer to `POST /v1/alerts`: how many alerts of the message were news, and what the others were."""

    changed: Count
    repeated: Count
    late: Count
    unknown_run: Count
    over_quota: Count = 0

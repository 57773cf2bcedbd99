"""Messages about alerts, which Alertmanager sends to the daemon, and the daemon to the dashboard."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from tidegate.wire.base import Count, Label, Message, Text

AlertState = Literal["firing", "resolved"]
SEVERITIES: Final = ("critical", "warning", "info")
"""The known severities, worst first; alerts with any other severity come after them."""


class AlertView(Message):
    """The latest state of one alert, as sent by Alertmanager. `run` is empty for alerts that concern no run."""

    run: Label
    fingerprint: Label
    """Alertmanager's hash of this set of labels."""
    alert: Label
    state: AlertState
    severity: Label = ""
    summary: Text = ""
    description: Text = ""
    knob: Label = ""
    """The knob to change; `none` where no knob helps."""
    runbook_url: Annotated[str, Field(max_length=500)] = ""
    labels: Annotated[dict[Label, Text], Field(max_length=64)] = {}
    starts_at: float
    ends_at: float | None = None
    received_at: float
    """When the daemon last received the alert, in seconds since the epoch."""


class AlertReceipt(Message):
    """Answer to `POST /v1/alerts`: how many alerts of the message were stored (`changed`), were already known
    (`repeated`), are older than the stored state (`late`), or belong to an unknown run. `over_quota`: how many alerts,
    new or stored, were left out or removed because the caller's token has too many."""

    changed: Count
    repeated: Count
    late: Count
    unknown_run: Count
    over_quota: Count = 0

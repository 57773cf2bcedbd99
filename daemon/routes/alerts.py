"""/v1/alerts and /v1/runs/{run}/alerts: Alertmanager's webhook, and the alerts that it has sent."""

from __future__ import annotations

import math
import time
from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import AwareDatetime, BaseModel, Field

from tidegate.daemon.routes.dependencies import Alerts, Author, Plane, RequestCaller
from tidegate.daemon.security.scopes import ALERT, READ
from tidegate.wire.alert import AlertReceipt, AlertState, AlertView

router = APIRouter(tags=["alerts"])

MAX_ALERTS = 1_000
MAX_LABELS = 32
LABEL, VALUE, TEXT, URL = 64, 200, 2_000, 500
"""Maximum lengths of label names, label values, texts and URLs, in characters; longer ones are cut."""

Texts = Annotated[
    dict[Annotated[str, Field(max_length=1_024)], Annotated[str, Field(max_length=65_536)]], Field(max_length=200)
]


class WebhookAlert(BaseModel):
    """One alert of a webhook message. Unknown fields are ignored: later versions of Alertmanager may add some."""

    status: AlertState
    labels: Texts
    annotations: Texts = {}
    startsAt: AwareDatetime
    endsAt: AwareDatetime
    """End of the alert; a time in the year 1 while the alert is firing."""
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]


class Webhook(BaseModel):
    """The body of Alertmanager's webhook, version 4."""

    version: Literal["4"]
    alerts: Annotated[list[WebhookAlert], Field(max_length=MAX_ALERTS)]


@router.post("/v1/alerts", dependencies=[ALERT])
async def take(plane: Plane, book: Alerts, author: Author, who: RequestCaller, message: Webhook) -> AlertReceipt:
    """Stores the alerts that have changed. Alerts of unknown runs, and alerts over the token's quota (200 firing and 50
    resolved alerts in each run), are skipped and counted: to refuse the whole message would lose its other alerts."""
    now = time.time()
    views = [_view(alert, now) for alert in message.alerts]
    known = [view for view in views if not view.run or view.run in plane.registry.runs]
    result = await plane.turns.do(book.record, known, author, who.token)
    for alert in result.changed:
        if alert.run:
            plane.registry.publish(plane.registry.run(alert.run), "alert", alert.model_dump(mode="json"))
    return AlertReceipt(
        changed=len(result.changed),
        repeated=result.repeated,
        late=result.late,
        unknown_run=len(views) - len(known),
        over_quota=result.over_quota,
    )


@router.get("/v1/alerts", dependencies=[READ])
async def without_run(
    book: Alerts, state: AlertState | None = None, runs: Literal["none", "all"] = "none"
) -> list[AlertView]:
    """Alerts without a run, or with `runs=all` also the alerts of all runs: first the firing alerts by severity, then
    by start; after them the resolved alerts, newest first."""
    return book.everywhere(state) if runs == "all" else book.of("", state)


@router.get("/v1/runs/{run}/alerts", dependencies=[READ])
async def of_run(plane: Plane, book: Alerts, run: str, state: AlertState | None = None) -> list[AlertView]:
    """Alerts of a run: first the firing alerts by severity, then by start; after them the resolved alerts, newest
    first."""
    return book.of(plane.registry.run(run).name, state)


def _view(alert: WebhookAlert, now: float) -> AlertView:
    labels, notes = alert.labels, alert.annotations
    return AlertView(
        run=_cut(labels.get("run", ""), LABEL),
        fingerprint=alert.fingerprint,
        alert=_cut(labels.get("alertname", ""), LABEL),
        state=alert.status,
        severity=_cut(labels.get("severity", ""), LABEL),
        summary=_cut(notes.get("summary", ""), TEXT),
        description=_cut(notes.get("description", ""), TEXT),
        knob=_cut(notes.get("knob", ""), LABEL),
        runbook_url=_cut(notes.get("runbook_url", ""), URL),
        labels={_cut(name, LABEL): _cut(value, VALUE) for name, value in list(labels.items())[:MAX_LABELS]},
        starts_at=_seconds(alert.startsAt),
        ends_at=(_seconds(alert.endsAt) or now) if alert.status == "resolved" else None,
        received_at=now,
    )


def _cut(text: str, length: int) -> str:
    """The text without NUL characters, which some databases cannot store, cut to `length`."""
    return text.replace("\0", "")[:length]


def _seconds(at: datetime) -> float:
    """Seconds since the epoch, in whole milliseconds; 0 for times before the epoch."""
    return max(0.0, math.floor(at.timestamp() * 1000) / 1000) if at.year >= 1970 else 0.0

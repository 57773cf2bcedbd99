"""/v1/alerts and /v1/runs/{run}/alerts: what Alertmanager's webhook tells, and what it has told."""

from __future__ import annotations

import math
import time
from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import AwareDatetime, BaseModel, Field

from tidegate.daemon.routes.dependencies import Alerts, Author, Plane, Who
from tidegate.daemon.security.scopes import ALERT, READ
from tidegate.wire.alert import AlertReceipt, AlertState, AlertView

router = APIRouter(tags=["alerts"])

MAX_ALERTS = 1_000
MAX_LABELS = 32
LABEL, VALUE, TEXT, URL = 64, 200, 2_000, 500
"""Longer names, values, texts and addresses are cut."""

Texts = Annotated[
    dict[Annotated[str, Field(max_length=1_024)], Annotated[str, Field(max_length=65_536)]], Field(max_length=200)
]


class WebhookAlert(BaseModel):
    """One alert of a message. What Alertmanager may add later is left alone."""

    status: AlertState
    labels: Texts
    annotations: Texts = {}
    startsAt: AwareDatetime
    endsAt: AwareDatetime
    """While it fires: the year 1."""
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]


class Webhook(BaseModel):
    """The body of Alertmanager's webhook, version 4."""

    version: Literal["4"]
    alerts: Annotated[list[WebhookAlert], Field(max_length=MAX_ALERTS)]


@router.post("/v1/alerts", dependencies=[ALERT])
async def take(plane: Plane, book: Alerts, author: Author, who: Who, message: Webhook) -> AlertReceipt:
    """Writes down what is new. Alerts of a run that the daemon does not know are left out, and counted: to refuse the
    message would lose the others in it. So are those for which the token has no room: it has for 200 that fire and 50
    that were resolved in each run."""
    now = time.time()
    views = [_view(alert, now) for alert in message.alerts]
    known = [view for view in views if not view.run or view.run in plane.roster.runs]
    taken = await plane.turns.do(book.take, known, author, who.token)
    for alert in taken.changed:
        if alert.run:
            plane.roster.publish(plane.roster.run(alert.run), "alert", alert.model_dump(mode="json"))
    return AlertReceipt(
        changed=len(taken.changed),
        repeated=taken.repeated,
        late=taken.late,
        unknown_run=len(views) - len(known),
        over_quota=taken.over_quota,
    )


@router.get("/v1/alerts", dependencies=[READ])
async def without_run(
    book: Alerts, state: AlertState | None = None, runs: Literal["none", "all"] = "none"
) -> list[AlertView]:
    """Alerts that concern no run, or with `runs=all` those of all runs too: what fires first, by severity, then
    what fires longest; then what was resolved, newest first."""
    return book.everywhere(state) if runs == "all" else book.of("", state)


@router.get("/v1/runs/{run}/alerts", dependencies=[READ])
async def of_run(plane: Plane, book: Alerts, run: str, state: AlertState | None = None) -> list[AlertView]:
    """What fires in a run, by severity, then what fires longest; then what was resolved, newest first."""
    return book.of(plane.roster.run(run).name, state)


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
    """Without NUL, which not every database stores."""
    return text.replace("\0", "")[:length]


def _seconds(at: datetime) -> float:
    """Since the epoch; 0 for times before it."""
    return max(0.0, math.floor(at.timestamp() * 1000) / 1000) if at.year >= 1970 else 0.0

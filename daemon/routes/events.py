"""/v1/runs/{run}/events: the events of a run as server-sent events; Last-Event-ID resumes the stream.

The stream is written here, because sse-starlette takes ten times the processor time for each event.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header
from fastapi.responses import StreamingResponse

from tidegate.daemon.control.control_plane import ControlPlane
from tidegate.daemon.control.run import Run
from tidegate.daemon.routes.dependencies import OwnToken, Plane, RequestToken
from tidegate.daemon.security.scopes import READ

router = APIRouter(prefix="/v1/runs/{run}/events", tags=["events"], dependencies=[READ])
KEEP_ALIVE_SECONDS = 15.0


@router.get("", response_class=StreamingResponse, responses={200: {"content": {"text/event-stream": {}}}})
async def events(
    plane: Plane, token: OwnToken, run: str, last_event_id: Annotated[int | None, Header()] = None
) -> StreamingResponse:
    """The events of a run as they occur; with Last-Event-ID, first the stored events after that one. The stream ends
    when the token is no longer valid or the run is deleted."""
    found = plane.registry.run(run)
    newest = found.events[-1].id if found.events else 0
    last = newest if last_event_id is None else last_event_id
    headers = {"Cache-Control": "no-store", "Tidegate-Newest-Event": str(newest), "X-Accel-Buffering": "no"}
    return StreamingResponse(_stream(plane, token, found, last), media_type="text/event-stream", headers=headers)


async def _stream(plane: ControlPlane, token: RequestToken, run: Run, last: int) -> AsyncIterator[str]:
    stream = uuid.uuid4().hex
    yield ": welcome\n\n"  # sends the headers at once
    while not plane.closing and token.is_valid() and plane.registry.runs.get(run.name) is run:
        fresh = [event for event in run.events if event.id > last]
        for event in fresh:
            last = event.id
            yield f"id: {event.id}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n"
        if not fresh:
            seen = run.events[-1].id if run.events else last
            await token.wait(run.event_notifier, KEEP_ALIVE_SECONDS, stream)
            if not run.events or run.events[-1].id == seen:
                yield ": still here\n\n"

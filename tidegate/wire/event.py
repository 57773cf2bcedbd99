"""Messages of a run's event stream."""

from __future__ import annotations

from typing import Any

from tidegate.wire.base import Count, Label, Message, RunName


class Event(Message):
    """One server-sent event of a run. `kind` is `report`, `generation`, `agent` or `alert`."""

    id: Count
    kind: Label
    run: RunName
    timestamp: float
    data: dict[str, Any]

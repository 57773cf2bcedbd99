"""Alerts: what fires in a run."""

from __future__ import annotations

from tidegate.dashboard import feed
from tidegate.dashboard.digest import digest
from tidegate.dashboard.parts import alerts as parts
from tidegate.dashboard.parts import header
from tidegate.dashboard.place import Place, live


@live
def alerts(place: Place) -> None:
    look = feed.look(place.url, place.run, place.rank)
    if look.snapshot is None:
        header.unread(place, look)
        return
    header.brief(look, look.snapshot, digest(look.snapshot.steps))
    parts.alerts(look.snapshot)

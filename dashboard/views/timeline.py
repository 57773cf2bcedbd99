"""Timeline: one update, op by op, on its lanes."""

from __future__ import annotations

from tidegate.dashboard import feed
from tidegate.dashboard.digest import digest
from tidegate.dashboard.parts import header, update
from tidegate.dashboard.place import Place, live


@live
def timeline(place: Place) -> None:
    look = feed.look(place.url, place.run, place.rank)
    snapshot = look.snapshot
    if snapshot is None:
        header.unread(place, look)
        return
    header.brief(look, snapshot, digest(snapshot.steps))
    update.last_update(snapshot)
    update.lanes(snapshot)

"""What a change of knobs would do to the update, asked of the simulator with the run's own rates."""

from __future__ import annotations

from tidegate.daemon.control.run import Run
from tidegate.knobs import Knobs
from tidegate.wire import KnobPreview


def preview(run: Run, before: Knobs, after: Knobs) -> KnobPreview:
    """The difference, and the predicted update seconds of the lead rank; None until it has measured its rates."""
    old, new = before.as_dict(), after.as_dict()
    return KnobPreview(
        run=run.name,
        generation=run.control.newest,
        before=old,
        after=new,
        changed={name: value for name, value in new.items() if value != old[name]},
    )

"""/v1/runs/{run}/advice: knob recommendations of the model for a run, pinned knobs included."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from tidegate.daemon.control import serializers
from tidegate.daemon.control.preview import advise, prediction_inputs
from tidegate.daemon.routes.dependencies import Plane
from tidegate.daemon.security.scopes import READ
from tidegate.wire.prediction import Advice

router = APIRouter(prefix="/v1/runs/{run}", tags=["knobs"], dependencies=[READ])


@router.get("/advice")
async def advice(plane: Plane, run: str) -> Advice:
    """Knob changes that are predicted to shorten the update by 3 % or more, or the reason why there are none. Without a
    prediction, the sentence ends with the verdict on the last step, which names a remedy by a rule of thumb."""
    found = plane.registry.run(run)
    knobs = serializers.knobs_of(found.control.committed)
    made = await asyncio.to_thread(advise, found.name, knobs, prediction_inputs(found))
    verdict = found.lead[1].recent[-1].verdict if found.lead and found.lead[1].recent else ""
    if made.predicted_update_seconds_now is not None or not verdict:
        return made
    return made.model_copy(update={"sentence": f"{made.sentence} The last step: {verdict}."})

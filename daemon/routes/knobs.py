"""/knobs, /rollback, /generations and /advice of /v1/runs/{run}: read and change the knobs of a run while it trains,
and recommend changes. Every change is a new generation."""

from __future__ import annotations

import asyncio
import functools
import re
import time
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response

from tidegate import units
from tidegate.daemon.control import serializers
from tidegate.daemon.control.advice import advise
from tidegate.daemon.control.bounded_answer import bounded_generations, bounded_knobs
from tidegate.daemon.control.control_plane import ControlPlane
from tidegate.daemon.control.preview import prediction_inputs, preview
from tidegate.daemon.control.run import Run
from tidegate.daemon.control.trials import Predicted
from tidegate.daemon.decisions.generations import Generation
from tidegate.daemon.problems import ProblemError, problem_responses
from tidegate.daemon.routes.dependencies import Author, Plane, Wait
from tidegate.daemon.security.scopes import OPERATE, READ
from tidegate.daemon.storage.row_reader import REMEDY
from tidegate.errors import KnobError
from tidegate.knobs.knobs import AUTO, EQ1, Knobs, show, specs_for, weights_of
from tidegate.wire.base import KnobChanges
from tidegate.wire.canary import Rollback
from tidegate.wire.knobs import GenerationView, KnobPatch, KnobsView
from tidegate.wire.prediction import Advice, KnobPreview

router = APIRouter(prefix="/v1/runs/{run}", tags=["knobs"])


@router.get("/knobs", dependencies=[READ], response_model=KnobsView)
async def knobs(plane: Plane, run: str) -> Response:
    """The desired knobs, their bounds, and the knobs that each rank uses. A change of knobs sends the ETag as If-Match.
    The answer has at most 48 MiB. If it would be larger, `effective` of all ranks is left out. If that does not
    suffice, `refused` of each rank is cut to 40 characters, and then all ranks are left out."""
    found = plane.registry.run(run)
    answer = bounded_knobs(serializers.knobs_view(found, plane.registry.states(found)))
    return Response(answer, media_type="application/json", headers={"ETag": f'"{found.control.newest}"'})


@router.patch(
    "/knobs",
    dependencies=[OPERATE],
    response_model=GenerationView | KnobPreview,
    responses=problem_responses(409, 412, 428),
)
async def change(
    plane: Plane,
    author: Author,
    run: str,
    patch: KnobPatch,
    response: Response,
    if_match: Annotated[str | None, Header()] = None,
    dry_run: Annotated[bool, Query()] = False,
    wait: Wait = 0.0,
) -> GenerationView | KnobPreview:
    """Proposes changed knobs as a new generation; If-Match must name the newest generation. 202 while the ranks vote,
    200 when the generation is decided."""
    found = plane.registry.run(run)
    made = None
    while made is None:
        _check_match(found, if_match)
        before, after = _changed(found, patch.changes)
        prediction = await _predict(found, before, after) if dry_run or patch.canary else None
        if dry_run and prediction is not None:
            return prediction
        made = await plane.turns.do(functools.partial(_make, plane, found, patch, author, if_match, before, prediction))
    return await _outcome(plane, found, made.number, wait, response)


@router.post("/rollback", dependencies=[OPERATE], responses=problem_responses(409, 412))
async def roll_back(
    plane: Plane,
    author: Author,
    run: str,
    body: Rollback,
    response: Response,
    if_match: Annotated[str | None, Header()] = None,
    wait: Wait = 0.0,
) -> GenerationView:
    """Proposes the knobs of an earlier generation as a new generation. If-Match is optional, so that a rollback can be
    sent without reading the knobs before."""
    found = plane.registry.run(run)

    def make() -> Generation:
        if if_match is not None:
            _check_match(found, if_match)
        return plane.roll_back(found, body.to, author, body.reason)

    made = await plane.turns.do(make)
    return await _outcome(plane, found, made.number, wait, response)


@router.get("/generations", dependencies=[READ], response_model=list[GenerationView])
async def generations(plane: Plane, run: str) -> Response:
    """All generations, oldest first. The answer has at most 48 MiB: if not all generations fit, the oldest are left
    out."""
    name = plane.registry.run(run).name

    def read() -> bytes:
        views = [serializers.generation_view(run, generation) for generation in plane.store.generations(name)]
        return bounded_generations(views)

    return Response(await asyncio.to_thread(read), media_type="application/json")


@router.get("/advice", dependencies=[READ])
async def advice(plane: Plane, run: str) -> Advice:
    """Knob changes that are predicted to shorten the update by 3 % or more, or the reason why there are none. Without a
    prediction, the sentence ends with the verdict on the last step, which names a remedy by a rule of thumb."""
    found = plane.registry.run(run)
    now = serializers.knobs_of(found.control.committed)
    made = await asyncio.to_thread(advise, found.name, now, prediction_inputs(found))
    verdict = found.lead[1].recent[-1].verdict if found.lead and found.lead[1].recent else ""
    if made.predicted_update_seconds_now is not None or not verdict:
        return made
    return made.model_copy(update={"sentence": f"{made.sentence} The last step: {verdict}."})


def _make(
    plane: ControlPlane,
    run: Run,
    patch: KnobPatch,
    author: str,
    if_match: str | None,
    before: Knobs,
    prediction: KnobPreview | None,
) -> Generation | None:
    """Proposes a new generation with the changes of `patch`, and returns it.

    before: the committed knobs for which `prediction` was made. Returns None if a trial is requested and the committed
    knobs are no longer `before`: then the prediction must be made again.
    """
    _check_match(run, if_match)  # the knobs may have been changed meanwhile
    now, after = _changed(run, patch.changes)
    if now != before and patch.canary:
        return None
    changes = {name: after.as_dict(paths=True)[name] for name in patch.changes}
    trial = None
    if patch.canary and prediction is not None:
        predicted = Predicted(
            before=prediction.predicted_update_seconds_before, after=prediction.predicted_update_seconds_after
        )
        trial = (patch.canary, predicted)
    return plane.patch(run, after, changes, author, patch.reason, trial)


def _changed(run: Run, changes: KnobChanges) -> tuple[Knobs, Knobs]:
    """The committed knobs, and these knobs after the changes. Raises a 422 problem if a change is invalid."""
    before, specs = serializers.knobs_of(run.control.committed), specs_for(run.paths)
    try:
        return before, before.changed(changes, specs)
    except KnobError as error:
        bounds = {"bounds": specs[error.knob].bounds} if error.knob in specs else {"knobs": list(specs)}
        raise ProblemError(422, "invalid-knob", str(error), knob=error.knob, **bounds) from error


async def _predict(run: Run, before: Knobs, after: Knobs) -> KnobPreview:
    """The prediction of the change, made in a thread: the run's state may have changed when this returns."""
    inputs, newest, refusal = prediction_inputs(run), run.control.newest, _refusal(run, before, after)
    make = functools.partial(preview, run.name, newest, before, after, inputs, paths=bool(run.paths), refusal=refusal)
    return await asyncio.to_thread(make)


def _refusal(run: Run, before: Knobs, after: Knobs) -> str:
    """Why a rank will refuse the change, as a sentence: a new `tier_split` gives weight to a retired path. Empty if no
    such reason is known."""
    if after.tier_split in (before.tier_split, AUTO, EQ1):
        return ""
    retired, weights = serializers.retired_paths(run), weights_of(after.tier_split)
    named = next((path for path, weight in weights.items() if weight and path in retired), None)
    return "" if named is None else f"Will be refused: {named} is retired {retired[named]}"


async def _outcome(plane: ControlPlane, run: Run, number: int, wait: float, response: Response) -> GenerationView:
    """The generation, as soon as it is decided, at the latest after `wait` seconds. Sets the status of `response` (200
    if it is decided, else 202) and its ETag (number of the run's newest generation)."""
    deadline = time.monotonic() + wait
    while (left := deadline - time.monotonic()) > 0 and _undecided(run, number) and not plane.closing:
        await run.directive_notifier.wait(left)
    response.status_code = 202 if _undecided(run, number) else 200
    response.headers["ETag"] = f'"{run.control.newest}"'
    current: Generation | None = run.latest
    if run.latest.number != number:
        current = await asyncio.to_thread(plane.store.generation, run.name, number)
    if current is None:
        detail = f"What is stored of generation {number} of run {run.name!r} cannot be read: {REMEDY}."
        raise ProblemError(409, "generation-damaged", detail)
    return serializers.generation_view(run.name, current)


def _undecided(run: Run, number: int) -> bool:
    return run.control.pending is not None and run.control.pending.number == number


def _check_match(run: Run, header: str | None) -> None:
    newest = run.control.newest
    if header is None:
        detail = f'Say which generation you have seen: send If-Match with the ETag of GET, now "{newest}".'
        raise ProblemError(428, "if-match-required", detail, generation=newest)
    tags = [tag.strip() for tag in header.split(",")]
    if "*" in tags or any(re.fullmatch(rf'"?{newest}"?', tag) for tag in tags):
        return
    made = run.latest
    what = ", ".join(f"{name}={show(name, value)}" for name, value in made.changes.items()) or "all knobs"
    detail = (
        f"The knobs of run {run.name!r} are at generation {newest}, not {header}: "
        f"{made.author} changed {what} at {units.moment(made.created_at)} ({made.state}). "
        "Read them again, then decide again."
    )
    raise ProblemError(412, "stale-knobs", detail, generation=newest)

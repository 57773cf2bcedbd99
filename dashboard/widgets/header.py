"""Header of a page: the run's name, its liveness, a sentence on the use of its time, and the key figures."""

from __future__ import annotations

import time

import streamlit as st

from tidegate import units
from tidegate.client.step_stats import StepSummary, summarize, verdict
from tidegate.dashboard.data import queries
from tidegate.dashboard.data.queries import Snapshot
from tidegate.dashboard.data.read_cache import Reading
from tidegate.dashboard.session.page_context import PageContext, refreshed
from tidegate.dashboard.style import markup, palette

EMULATED = "Emulated device: rates are simulated, no performance claim"


def header(context: PageContext, *, key_figures: bool = False) -> Reading[Snapshot]:
    """Draws the run's name, its liveness, the age of the data, warnings (daemon unreachable, emulated device), the
    sentence of `step_stats.verdict`, and the key figures if `key_figures` is True. Returns the data; if none were read
    yet, the header says why."""
    reading, now = queries.snapshot_reading(context.url, context.run, context.rank), time.time()
    snapshot = reading.value
    if snapshot is None:
        reason = reading.problem or "Nothing was read yet."
        st.html(markup.head(context.run, "unknown", [context.url]) + markup.verdict(reason))
        return reading
    figures = summarize(snapshot.steps)
    st.html(
        markup.head(snapshot.run.run, "unknown" if reading.problem else snapshot.run.liveness, _details(snapshot, now))
    )
    if reading.problem:
        age = units.age(now - snapshot.read_at)
        st.html(markup.banner(f"{reading.problem} What follows is {age} old; this page reconnects by itself."))
    if snapshot.run.device_kind == "emulated":
        st.html(markup.banner(EMULATED, palette.PHASE["update"]))
    st.html(markup.verdict(verdict(snapshot.run, figures, now)))
    if key_figures:
        st.html(markup.kpis(_figures(snapshot, figures)))
    return reading


@refreshed
def live(context: PageContext) -> None:
    """Draws the header without key figures as a section that refreshes."""
    header(context)


def _details(snapshot: Snapshot, now: float) -> list[str]:
    run, rank = snapshot.run, snapshot.rank
    device = {"cuda": "CUDA", "emulated": "emulated device"}[rank.device_kind]
    details = [f"rank {rank.rank} of {run.world_size}", device, rank.host, f"step {units.integer(rank.step)}"]
    if run.liveness in ("failed", "finished"):
        lasted = units.age(max(0.0, rank.last_seen - rank.started_at))
        return [*details, f"{run.liveness} {units.age(now - rank.last_seen)} ago, after {lasted}"]
    details += [f"in {rank.phase}", f"last message {units.age(now - rank.last_seen)} ago"]
    if snapshot.steps:
        details.append(f"last step ended {units.age(now - snapshot.steps[-1].timestamp)} ago")
    return details


def _figures(snapshot: Snapshot, figures: StepSummary) -> list[tuple[str, str, str]]:
    update = figures.phase_seconds.get("update")
    exposed, total = figures.exposed_seconds, figures.step_seconds
    tokens = figures.tokens_per_second
    applied = snapshot.rank.applied_generation
    predicted = snapshot.rank.predicted_update_seconds
    return [
        (
            "pace",
            f"{units.seconds(figures.pace)}/step" if figures.pace else units.NONE,
            f"median of {figures.step_count_text}",
        ),
        ("update", units.seconds(update), f"{units.share(figures.update_share)} of the step"),
        ("exposed", units.seconds(exposed), _part(exposed, total, "of the step blocked")),
        (
            "tokens",
            f"{units.count(tokens)}/s" if tokens is not None else units.NONE,
            f"mean of {figures.step_count_text}",
        ),
        ("loss", units.significant(figures.loss, 4) if figures.loss is not None else units.NONE, "last step"),
        (
            "gradient norm",
            units.significant(figures.grad_norm) if figures.grad_norm is not None else units.NONE,
            f"{figures.skipped} skipped of {len(snapshot.steps)}",
        ),
        ("predicted update", units.seconds(predicted), prediction_error(predicted, update)),
        ("generation", str(applied), _generation_note(snapshot)),
    ]


def _generation_note(snapshot: Snapshot) -> str:
    """The desired generation of the run, compared with the generation that this rank has applied."""
    good = [view.generation for view in snapshot.generations if view.state in ("committed", "applied")]
    desired = max(good, default=0)
    if snapshot.knobs.pending is not None:
        return f"{snapshot.knobs.pending.generation} is proposed"
    return "applied, as desired" if snapshot.rank.applied_generation >= desired else f"applied; desired is {desired}"


def prediction(predicted: float | None, measured: float | None) -> str:
    """A prediction compared with the measurement: `predicted 1.40 s, measured 1.46 s, off by 4 %`."""
    error = prediction_error(predicted, measured)
    if predicted is None or not measured:
        return error
    return f"predicted {units.seconds(predicted)}, measured {units.seconds(measured)}, {error}"


def prediction_error(predicted: float | None, measured: float | None) -> str:
    """The error of the rank's prediction as text: |predicted - measured| / measured."""
    if predicted is None:
        return "no prediction yet"
    return f"off by {units.share(abs(predicted - measured) / measured)}" if measured else "not measured yet"


def _part(value: float | None, total: float, what: str) -> str:
    return f"{units.share(value / total)} {what}" if value is not None and total > 0 else "not reported"
